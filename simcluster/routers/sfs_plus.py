"""sfs_plus: SFS estimates, a learned chance to be on time, and a price on the delay of those who come next."""

from typing import ClassVar

import numpy as np

from simcluster import _native
from simcluster.request import Request
from simcluster.routers.base import NONE_HEALTHY, SHED, ClusterView, Decision
from simcluster.routers.settings import RouterSettings
from simcluster.routers.sfs import NativeCluster
from simcluster.units import PS_PER_S

__all__ = ["SfsPlus"]

_HOPELESS = 0.02  # utility expected of a request that may be turned away


class SfsPlus:
    """Largest chance to be on time times utility, minus what the delay costs the next requests; estimates as in SFS.

    The chance comes from the last 200 residuals of each kind of instance. The cost of delay is `price` times what
    requests like the last 64 would lose by missing targets within about `horizon_s`, and `slack_price` times the
    delay that their targets still allow. `shed`: turn away what costs others more than it brings.

    Source: this project's; the paper's eq. 3 cuts at the target and takes delay of others for free.
    """

    needs_view: ClassVar[bool] = True

    def __init__(
        self,
        settings: RouterSettings,
        *,
        price: float = 1.5,
        slack_price: float = 2.0,
        horizon_s: float = 1.0,
        shed: bool = False,
    ) -> None:
        if settings.objective == "weighted":
            raise ValueError("it weighs delay by targets; set objective: slo")
        for name, value, least in (("price", price, 0.0), ("slack_price", slack_price, 0.0)):
            if not least <= value < np.inf:
                raise ValueError(f"{name} = {value:g}; must be 0 or more")
        if not 0 < horizon_s < np.inf:
            raise ValueError(f"horizon_s = {horizon_s:g}; must be above 0")
        self._settings, self._shed = settings, shed
        self._weights = {"price": price, "slack_price": slack_price, "horizon_s": horizon_s}
        self._cluster: NativeCluster | None = None
        self._plus: _native.SfsPlus | None = None

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose the instance that leaves most for everybody."""
        if self._cluster is None or self._plus is None or not self._cluster.is_of(view):
            self._cluster = NativeCluster(view)
            self._plus = _native.SfsPlus(
                self._cluster.views,
                self._cluster.kind_of_view,
                routers=self._settings.num_replicas,
                **self._weights,
            )
        cluster = self._cluster
        best, ttft_s, score, chance = self._plus.decide(
            request.index,
            request.predicted_utility,
            request.prompt_tokens,
            request.predicted_output_tokens,
            cluster.delays(request.prompt_tokens) + (view.now_ps + view.router_delay_ps),
            cluster.hop,
            now=view.now_ps,
            target_s=request.slo_ttft_ps / PS_PER_S if request.slo_ttft_ps >= 0 else np.inf,
            max_tokens=request.max_tokens,
            priority=request.priority,
            arrival_time=request.arrival_ps,
            healthy=view.healthy if 0 < sum(view.healthy) < len(view.healthy) else (),
        )
        j = best[0] if len(best) == 1 else self._settings.ties.pick(np.array(best))
        if self._shed and score[j] < 0 and chance[j] * request.predicted_utility[j] <= _HOPELESS:
            return Decision(SHED, "shed", ttft_s, score)
        return Decision(j, NONE_HEALTHY if view.none_healthy else "score", ttft_s, score, len(best))

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Note where the request of the last decision went."""
        if self._plus is not None:
            self._plus.sent(request.index, instance)

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        """Learn how far the estimate was off."""
        if self._plus is not None:
            self._plus.first_token(request_index, instance, ttft_s)

    def observe_end(self, request_index: int, instance: int) -> None:
        """Forget a request that had no first token."""
        if self._plus is not None:
            self._plus.forget(request_index)
