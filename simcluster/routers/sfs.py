"""SFS: simulate every engine forward to the request's first token, then choose by the objective."""

from typing import ClassVar

import numpy as np

from simcluster.errors import ConfigError
from simcluster.request import Request
from simcluster.routers.base import ClusterView, Decision, OracleView, estimate_ttft
from simcluster.routers.objective import choose_slo, choose_weighted
from simcluster.routers.settings import RouterSettings
from simcluster.units import PS_PER_S

__all__ = ["Oracle", "Sfs"]


class Sfs:
    """The objective of eq. 3 or eq. 5 on TTFT estimates by forward simulation.

    Source: the paper, eqs. 3, 5, 7, 8.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose by predicted utility and estimated TTFT."""
        ttft_s = estimate_ttft(request, view)
        settings = self._settings
        utility, healthy = request.predicted_utility, view.healthy
        if settings.objective == "weighted":
            return choose_weighted(utility, ttft_s, settings.latency_weight, settings.ties, healthy)
        target_s = request.slo_ttft_ps / PS_PER_S if request.slo_ttft_ps >= 0 else np.inf
        return choose_slo(utility, ttft_s, target_s, settings.ties, healthy)


class Oracle(Sfs):
    """SFS with true answer lengths, true step times and an always fresh view: a bound, not a policy to use.

    Only the simulated backend can build its view. Quality stays predicted, step noise stays unknown.
    Source: upper bound; needs what no router can have.
    """

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose as SFS does, from the truth.

        Raises:
            ConfigError: the view is not the oracle's, as with real backends.
        """
        if not isinstance(view, OracleView):
            raise ConfigError("policy 'oracle' needs the simulator's truth; choose another policy for live use")
        return super().route(request, view)
