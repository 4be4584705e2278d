"""Policies that predict the TTFT of each instance and choose by the paper's objectives."""

from simcluster.request import Request
from simcluster.routers.base import ClusterView, Decision, Router
from simcluster.routers.cut import Choice, Cut, forward_observations
from simcluster.routers.estimators import Estimator, LpsEstimator, SfsEstimator, ThroughputEstimator
from simcluster.routers.settings import RouterSettings
from simcluster.routers.sfs import Sfs

__all__ = ["Lps", "Predictive", "Throughput", "sfs"]


class Predictive:
    """Base: an estimator and a choice."""

    def __init__(self, settings: RouterSettings, estimator: Estimator, margin: float, cut: Cut) -> None:
        self._estimator = estimator
        self._choice = Choice(settings, margin, cut)
        parts = [estimator] if self._choice.chance is None else [estimator, self._choice.chance]
        forward_observations(self, parts)

    @property
    def needs_view(self) -> bool:
        """Whether the estimator does."""
        return self._estimator.needs_view

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Estimate, then choose."""
        return self._choice.choose(request, view, self._estimator.estimate(request, view))


def sfs(settings: RouterSettings, *, margin: float = 1.0, cut: Cut = "hard") -> Router:
    """The objective of eq. 3 or eq. 5 on TTFT estimates by forward simulation.

    Feasible is `L <= margin * target`; `cut=residual` learns the chance to be on time instead.

    Source: the paper, eqs. 3, 5, 7, 8.
    """
    if margin == 1 and cut == "hard":
        return Sfs(settings)
    return Predictive(settings, SfsEstimator(settings), margin, cut)


class Throughput(Predictive):
    """The objective of eq. 3 or eq. 5 on TTFT estimates from the prefill tokens left and the card's mean throughput.

    Source: the paper, eqs. 3, 5, 6.
    """

    def __init__(self, settings: RouterSettings, *, margin: float = 1.0, cut: Cut = "hard") -> None:
        super().__init__(settings, ThroughputEstimator(settings), margin, cut)


class Lps(Predictive):
    """The objective of eq. 3 or eq. 5 on mean TTFTs under limited processor sharing: rates only, nothing live.

    Rates are those of the router's own dispatches over `window_s`, or `arrival_rate` [req/s] for each instance.
    `ca2`, `cs2`: squared coefficients of variation of arrivals and service.

    Source: the paper, eqs. 3, 5, 10, 11, 13.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        margin: float = 1.0,
        cut: Cut = "hard",
        window_s: float = 60.0,
        arrival_rate: float = 0.0,
        ca2: float = 1.0,
        cs2: float = 1.0,
    ) -> None:
        estimator = LpsEstimator(settings, window_s=window_s, arrival_rate=arrival_rate, ca2=ca2, cs2=cs2)
        super().__init__(settings, estimator, margin, cut)
