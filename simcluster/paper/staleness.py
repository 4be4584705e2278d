"""SFS that takes an old snapshot for the present: what crediting the time since it is worth."""

import numpy as np

from simcluster import _native
from simcluster.paper.figure import FloatArray
from simcluster.request import Request
from simcluster.routers.base import ClusterView, Decision
from simcluster.routers.objective import choose_slo
from simcluster.routers.sfs import Sfs
from simcluster.units import PS_PER_S

__all__ = ["SfsWithoutCredit"]


class SfsWithoutCredit(Sfs):
    """SFS whose simulation starts as if each snapshot had been taken at the decision. For eq. 3 without overlay."""

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose by eq. 3."""
        ttft_s = self._estimate(request, view)
        target_s = request.slo_ttft_ps / PS_PER_S if request.slo_ttft_ps >= 0 else np.inf
        return choose_slo(request.predicted_utility, ttft_s, target_s, self._settings.ties, view.healthy)

    @staticmethod
    def _estimate(request: Request, view: ClusterView) -> FloatArray:
        now = view.now_ps
        starts = np.array([min(known.boundary, now) for known in view.views], dtype=np.int64)
        sent = [
            spec.engine_arrival_ps(int(start) + view.router_delay_ps, int(tokens))
            for spec, start, tokens in zip(view.instances, starts, request.prompt_tokens, strict=True)
        ]
        first = _native.estimate_first_token(
            view.views,
            request.index,
            request.prompt_tokens,
            request.predicted_output_tokens,
            np.array(sent, dtype=np.int64),
            request.max_tokens,
            False,
            request.priority,
            request.arrival_ps,
        )
        hop = np.array([spec.output_hop_ps for spec in view.instances], dtype=np.int64)
        return np.where(first == _native.NEVER, np.inf, (first + hop - starts) / PS_PER_S)
