"""Estimators that are asked at every decision and never decide."""

from collections.abc import Sequence
from types import SimpleNamespace

from simcluster.request import Request
from simcluster.routers.base import ClusterView, Router
from simcluster.routers.cut import forward_observations
from simcluster.routers.estimators import Estimator

__all__ = ["Shadow"]


class Shadow:
    """Estimators beside a router: they see what it sees and hear what it hears.

    Attributes:
        names: as users write them.
    """

    def __init__(self, names: Sequence[str], estimators: Sequence[Estimator]) -> None:
        self.names = tuple(names)
        self._estimators = tuple(estimators)

    @property
    def needs_view(self) -> bool:
        """Whether one of them does."""
        return any(estimator.needs_view for estimator in self._estimators)

    def predict(self, request: Request, view: ClusterView, instance: int) -> list[float]:
        """Return what each of them expects of the chosen instance [s]; inf: without bound, nan: unknown."""
        return [float(estimator.estimate(request, view)[instance]) for estimator in self._estimators]

    def listener(self, router: Router) -> object:
        """Return who is to be told about requests: the router and all that listen beside it."""
        if not self._estimators:
            return router
        everybody = SimpleNamespace()
        forward_observations(everybody, [router, *self._estimators])
        return everybody
