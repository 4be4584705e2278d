"""The contract of a router: it gets a request and what is known of the cluster, and decides. No clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from simcluster import _native
from simcluster.instance import InstanceSpec
from simcluster.request import FloatArray, IntArray, Request
from simcluster.units import PS_PER_S

__all__ = [
    "NONE_HEALTHY",
    "SHED",
    "ClusterView",
    "Decision",
    "Observer",
    "OracleView",
    "Reporter",
    "Router",
    "estimate_ttft",
]

SHED: Final = -1  # as a decision's instance: turn the request away
NONE_HEALTHY: Final = "none_healthy"  # as a decision's reason: no instance is healthy, this one is the least bad


@dataclass(slots=True)
class ClusterView:
    """What one router knows when it decides.

    Attributes:
        now_ps: this instant [ps].
        router_delay_ps: from the decision to the instance [ps].
        instances: (j,) what is fixed about each instance.
        views: (j,) last snapshot of each instance and the router's own dispatches since.
        healthy: (j,) which instances may be chosen; left out: all.
    """

    now_ps: int
    router_delay_ps: int
    instances: tuple[InstanceSpec, ...]
    views: list[_native.InstanceView]
    healthy: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.healthy:
            self.healthy = (True,) * len(self.views)

    @property
    def candidates(self) -> list[int]:
        """Indices of the healthy instances; of all if none is healthy."""
        if False not in self.healthy:
            return list(range(len(self.healthy)))
        return [j for j, ok in enumerate(self.healthy) if ok] or list(range(len(self.healthy)))

    @property
    def none_healthy(self) -> bool:
        """Whether no instance is healthy."""
        return True not in self.healthy

    def num_waiting(self) -> IntArray:
        """Waiting requests of each instance, own dispatches since the snapshot included, (j,)."""
        out = np.empty(len(self.views), dtype=np.int64)
        _native.num_waiting(self.views, out)
        return out

    def num_running(self) -> IntArray:
        """Running requests of each instance at the snapshot, (j,)."""
        out = np.empty(len(self.views), dtype=np.int64)
        _native.num_running(self.views, out)
        return out

    def num_resident(self) -> IntArray:
        """Waiting and running requests of each instance, own dispatches since the snapshot included, (j,)."""
        out = np.empty(len(self.views), dtype=np.int64)
        _native.num_resident(self.views, out)
        return out

    def tokens_left(self) -> IntArray:
        """Tokens that each instance has still to compute, (j,).

        Prompt tokens without those already computed or cached, and the output tokens predicted by this router;
        requests of other routers count with the mean prediction.
        """
        out = np.empty(len(self.views), dtype=np.int64)
        _native.tokens_left(self.views, out)
        return out

    def kv_usage(self) -> FloatArray:
        """Share of each instance's KV blocks in use at the snapshot, (j,)."""
        out = np.empty(len(self.views))
        _native.kv_usage(self.views, out)
        return out

    def snapshot_age_ps(self, index: int) -> int:
        """Return how long ago the snapshot's step boundary was [ps]."""
        return self.now_ps - self.views[index].boundary


class OracleView(ClusterView):
    """The oracle's view: made from the truth, by the simulated backend alone."""


@dataclass(slots=True)
class Decision:
    """A choice and why it was made.

    Attributes:
        instance: index of the chosen instance, or SHED.
        reason: `feasible` (eq. 3 with a feasible instance), `infeasible` (eq. 3 without), `score` (another
            rule), `none_healthy`, `shed`, `explore`, `warmup`, or a fallback's name.
        predicted_ttft_s: (j,) estimated TTFT [s], inf where the request cannot be served, nan where none was
            estimated; None: nowhere.
        score: (j,) what was maximised, -inf where an instance could not be chosen or was skipped because it could
            neither win nor come second; None where nothing was compared.
        num_tied: how many instances were equally good.
    """

    instance: int
    reason: str = "score"
    predicted_ttft_s: FloatArray | None = None
    score: FloatArray | None = None
    num_tied: int = 1


class Router(Protocol):
    """Decides where a request goes; it may also have methods of `Observer` and `Reporter`."""

    @property
    def needs_view(self) -> bool:
        """Whether decisions depend on what instances publish."""
        ...

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose an instance for a request."""
        ...


class Reporter(Protocol):
    """What a router can tell about its run; optional."""

    def report(self) -> dict[str, Any]:
        """Return plain data for the summary of the run, as JSON can hold it."""


class Observer(Protocol):
    """What a router can be told about the requests that it sent itself; each method is optional.

    Dispatches are told at once. The rest is told before the router's next decision, in order of the instants at
    which the client saw it.
    """

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """A request was sent to an instance."""

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        """The first token reached the client; TTFT [s] from the arrival at the router."""

    def observe_end(self, request_index: int, instance: int) -> None:
        """The request has ended: finished, rejected or failed."""


def estimate_ttft(request: Request, view: ClusterView, only: Sequence[int] | None = None) -> FloatArray:
    """Estimate the TTFT by simulating each engine forward from the view (SFS).

    The request reaches an engine after the router delay and the front end; the way of the first token back to
    the client comes at the end.

    Args:
        request: the request.
        view: what is known.
        only: instances to estimate; None: all.

    Returns:
        (j,) [s]; inf where the instance cannot serve the request, nan where it was left out.

    Source: paper eqs. 7, 8.
    """
    chosen = range(len(view.instances)) if only is None else only
    rows = slice(None) if only is None else list(only)
    sent = view.now_ps + view.router_delay_ps
    prompt = request.prompt_tokens[rows]
    at = [view.instances[j].engine_arrival_ps(sent, int(request.prompt_tokens[j])) for j in chosen]
    first = _native.estimate_first_token(
        [view.views[j] for j in chosen],
        request.index,
        prompt,
        request.predicted_output_tokens[rows],
        np.array(at, dtype=np.int64),
        request.max_tokens,
        False,
        request.priority,
        request.arrival_ps,
    )
    hop = np.array([view.instances[j].output_hop_ps for j in chosen], dtype=np.int64)
    estimate = np.where(first == _native.NEVER, np.inf, (first + hop - request.arrival_ps) / PS_PER_S)
    if only is None:
        return estimate
    ttft_s = np.full(len(view.instances), np.nan)
    ttft_s[rows] = estimate
    return ttft_s
