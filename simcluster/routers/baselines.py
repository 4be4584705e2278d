"""Policies that do not estimate latency."""

from typing import ClassVar

import numpy as np

from simcluster.request import Request
from simcluster.routers.base import ClusterView, Decision
from simcluster.routers.objective import choose_best
from simcluster.routers.settings import RouterSettings

__all__ = ["AlwaysBusiest", "LatencyAgnostic", "Random", "RoundRobin", "ShortestQueue"]


class RoundRobin:
    """Each instance in turn.

    Source: baseline of the paper.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        self._count = settings.num_instances
        self._next = 0

    def route(self, request: Request, view: ClusterView) -> Decision:  # noqa: ARG002
        """Take the next instance."""
        chosen = self._next
        self._next = (chosen + 1) % self._count
        return Decision(chosen)


class Random:
    """Any instance with equal chance.

    Source: common practice.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        self._count = settings.num_instances
        self._rng = settings.rng

    def route(self, request: Request, view: ClusterView) -> Decision:  # noqa: ARG002
        """Draw an instance."""
        return Decision(int(self._rng.integers(self._count)))


class ShortestQueue:
    """The instance with the fewest resident requests, waiting and running.

    Source: baseline of the paper.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        self._ties = settings.ties

    def route(self, request: Request, view: ClusterView) -> Decision:  # noqa: ARG002
        """Take the shortest queue."""
        return choose_best(-view.num_resident().astype(np.float64), self._ties)


class LatencyAgnostic:
    """The instance with the largest predicted utility, however long its queue.

    Source: baseline of the paper; eq. 5 with delta = 0.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        self._ties = settings.ties

    def route(self, request: Request, view: ClusterView) -> Decision:  # noqa: ARG002
        """Take the largest predicted utility."""
        return choose_best(request.predicted_utility, self._ties)


class AlwaysBusiest:
    """The instance with the most resident requests: a metric that does not punish it is broken.

    Source: a control, not a policy to use.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        self._ties = settings.ties

    def route(self, request: Request, view: ClusterView) -> Decision:  # noqa: ARG002
        """Take the longest queue."""
        return choose_best(view.num_resident().astype(np.float64), self._ties)
