"""Policies around a policy: turn hopeless requests away, explore."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from simcluster.request import Request
from simcluster.routers.base import SHED, ClusterView, Decision, Router, estimate_ttft
from simcluster.routers.baselines import draw
from simcluster.routers.settings import RouterSettings
from simcluster.units import PS_PER_S

__all__ = ["Admission", "Epsilon"]


class _Wrapper:
    """What both have in common: the inner policy observes whatever it wants to."""

    def __init__(self, inner: Router, settings: RouterSettings) -> None:
        self._inner = inner
        self._rng = settings.rng

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("observe_") and name != "report":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        method: Callable[..., None] = getattr(self._inner, name)
        return method


class Admission(_Wrapper):
    """The inner policy, but a request whose TTFT target no healthy instance is expected to meet is turned away.

    Estimates are the inner policy's, else SFS's. A request without a target is never turned away.
    Source: paper eq. 3 without its fallback; llm-d's `latency-slo-admitter`.
    """

    needs_view: ClassVar[bool] = True

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Ask the inner policy, then look whether anybody can be in time."""
        decision = self._inner.route(request, view)
        if request.slo_ttft_ps < 0 or decision.instance == SHED:
            return decision
        ttft_s = decision.predicted_ttft_s
        if ttft_s is None or np.isnan(ttft_s).any():
            ttft_s = estimate_ttft(request, view)
        if (ttft_s[view.candidates] <= request.slo_ttft_ps / PS_PER_S).any():
            return decision
        return Decision(SHED, "shed", ttft_s, decision.score, decision.num_tied)


class Epsilon(_Wrapper):
    """The inner policy, but with chance `p` any healthy instance.

    Source: epsilon-greedy exploration; llm-d's headroom filter explores 1 %.
    """

    def __init__(self, inner: Router, settings: RouterSettings, *, p: float = 0.05) -> None:
        super().__init__(inner, settings)
        if not 0 <= p <= 1:
            raise ValueError(f"p = {p:g}; must be from 0 to 1")
        self._p = p

    @property
    def needs_view(self) -> bool:
        """Whether the inner policy needs it."""
        return self._inner.needs_view

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Explore or ask the inner policy."""
        if self._rng.random() < self._p:
            return draw(self._rng, view, "explore")
        return self._inner.route(request, view)
