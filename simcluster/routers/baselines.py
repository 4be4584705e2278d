"""Policies that do not estimate latency: by turn, by chance, by count, by fixed properties of the model."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from simcluster.instance import InstanceSpec
from simcluster.request import FloatArray, Request
from simcluster.routers.base import NONE_HEALTHY, ClusterView, Decision
from simcluster.routers.objective import choose_best
from simcluster.routers.settings import RouterSettings

__all__ = [
    "AlwaysBusiest",
    "Cheapest",
    "Largest",
    "LatencyAgnostic",
    "QueueDepth",
    "Random",
    "RoundRobin",
    "Scored",
    "ShortestQueue",
    "Smallest",
    "draw",
    "first_healthy",
    "model_sizes",
]


class Scored(ABC):
    """Base of policies that take the largest score among the healthy instances."""

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        self._ties = settings.ties

    @abstractmethod
    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return what to maximise, (j,)."""

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Take the largest score."""
        return choose_best(self.score(request, view), self._ties, view.healthy)


def first_healthy(order: Sequence[int], view: ClusterView, reason: str = "score") -> Decision:
    """Take the first healthy instance of an order; the first one if none is healthy."""
    if view.none_healthy:
        return Decision(order[0], NONE_HEALTHY)
    return Decision(next(j for j in order if view.healthy[j]), reason)


def draw(rng: np.random.Generator, view: ClusterView, reason: str = "score") -> Decision:
    """Draw one of the healthy instances; of all if none is healthy."""
    candidates = view.candidates
    return Decision(candidates[rng.integers(len(candidates))], NONE_HEALTHY if view.none_healthy else reason)


class RoundRobin:
    """Each healthy instance in turn.

    Source: baseline of the paper.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        self._count = settings.num_instances
        self._decisions = [Decision(j) for j in range(self._count)]  # nothing but the instance ever differs
        self._next = 0

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Take the next instance."""
        following = self._next
        if view.healthy[following]:
            decision = self._decisions[following]
        else:
            decision = first_healthy([(following + k) % self._count for k in range(self._count)], view)
        self._next = (decision.instance + 1) % self._count
        return decision


class Random:
    """Any healthy instance with equal chance.

    Source: common practice.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        self._rng = settings.rng

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Draw an instance."""
        return draw(self._rng, view)


class ShortestQueue(Scored):
    """The instance with the fewest resident requests, waiting and running.

    Source: baseline of the paper; AIBrix `least-request`, LiteLLM `least-busy`.
    """

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the number of resident requests."""
        return -view.num_resident().astype(np.float64)


class QueueDepth(Scored):
    """The instance with the fewest waiting requests; running ones do not count.

    Source: llm-d's queue scorer, alone.
    """

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the number of waiting requests."""
        return -view.num_waiting().astype(np.float64)


class LatencyAgnostic(Scored):
    """The instance with the largest predicted utility, however long its queue.

    Source: baseline of the paper; eq. 5 with delta = 0.
    """

    needs_view: ClassVar[bool] = False

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the predicted utility."""
        return request.predicted_utility


class Cheapest(Scored):
    """The instance whose answer is expected to cost least, by its prices and the predicted answer length.

    Source: LiteLLM `cost-based-routing`.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._price_in = np.array([spec.price_in for spec in settings.instances])
        self._price_out = np.array([spec.price_out for spec in settings.instances])

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the expected cost [micro-dollars]."""
        cost: FloatArray = request.prompt_tokens * self._price_in + request.predicted_output_tokens * self._price_out
        return -cost


_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")


def model_sizes(instances: Sequence[InstanceSpec]) -> FloatArray:
    """Return the parameters that the models' names tell [10^9], (j,); output prices if one tells none."""
    found = [_BILLIONS.findall(spec.model) for spec in instances]
    if all(found):
        return np.array([max(int(experts or 1) * float(size) for experts, size in sizes) for sizes in found])
    return np.array([spec.price_out for spec in instances])


class Largest(Scored):
    """The largest model, by the parameters in the models' names (else by output price), whatever the load.

    Source: LLMRouter `largest_llm`.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._sizes = model_sizes(settings.instances)

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the model's size."""
        return self._sizes


class Smallest(Largest):
    """The smallest model, by the parameters in the models' names (else by output price), whatever the load.

    Source: LLMRouter `smallest_llm`.
    """

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the model's size."""
        return -self._sizes


class AlwaysBusiest(Scored):
    """The instance with the most resident requests: a metric that does not punish it is broken.

    Source: a control, not a policy to use.
    """

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the number of resident requests."""
        return view.num_resident().astype(np.float64)
