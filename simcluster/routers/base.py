"""The contract of a router: it gets a request and what is known of the cluster, and decides. No clock, no I/O."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from simcluster import _native
from simcluster.instance import InstanceSpec
from simcluster.request import FloatArray, IntArray, Request
from simcluster.units import PS_PER_S

__all__ = ["ClusterView", "Decision", "OracleView", "Router", "estimate_ttft"]


@dataclass(slots=True)
class ClusterView:
    """What one router knows when it decides.

    Attributes:
        now_ps: this instant [ps].
        router_delay_ps: from the decision to the instance [ps].
        instances: (j,) what is fixed about each instance.
        views: (j,) last snapshot of each instance and the router's own dispatches since.
    """

    now_ps: int
    router_delay_ps: int
    instances: tuple[InstanceSpec, ...]
    views: list[_native.InstanceView]

    def num_resident(self) -> IntArray:
        """Waiting and running requests of each instance, own dispatches since the snapshot included, (j,)."""
        return np.array([view.num_resident for view in self.views], dtype=np.int64)

    def snapshot_age_ps(self, index: int) -> int:
        """Return how long ago the snapshot's step boundary was [ps]."""
        return self.now_ps - self.views[index].boundary


class OracleView(ClusterView):
    """The oracle's view: made from the truth, by the simulated backend alone."""


@dataclass(slots=True)
class Decision:
    """A choice and why it was made.

    Attributes:
        instance: index of the chosen instance.
        reason: `feasible` (eq. 3 with a feasible instance), `infeasible` (eq. 3 without), `score` (another
            rule) or a fallback's name.
        predicted_ttft_s: (j,) estimated TTFT [s], inf where the request cannot be served; None: not estimated.
        score: (j,) what was maximised; None where nothing was compared.
        num_tied: how many instances were equally good.
    """

    instance: int
    reason: str = "score"
    predicted_ttft_s: FloatArray | None = None
    score: FloatArray | None = None
    num_tied: int = 1


class Router(Protocol):
    """Decides where a request goes."""

    needs_view: ClassVar[bool]

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose an instance for a request."""
        ...


def estimate_ttft(request: Request, view: ClusterView) -> FloatArray:
    """Estimate the TTFT on every instance by simulating its engine forward from the view (SFS).

    The request reaches an engine after the router delay and the front end; the way of the first token back to
    the client comes at the end.

    Returns:
        (j,) [s]; inf where the instance cannot serve the request.

    Source: paper eqs. 7, 8.
    """
    sent = view.now_ps + view.router_delay_ps
    at = np.array(
        [
            spec.engine_arrival_ps(sent, int(tokens))
            for spec, tokens in zip(view.instances, request.prompt_tokens, strict=True)
        ],
        dtype=np.int64,
    )
    first = _native.estimate_first_token(
        view.views,
        request.index,
        request.prompt_tokens,
        request.predicted_output_tokens,
        at,
        request.max_tokens,
        False,
        request.priority,
        request.arrival_ps,
    )
    hop = np.array([spec.output_hop_ps for spec in view.instances], dtype=np.int64)
    ttft = (first + hop - request.arrival_ps) / PS_PER_S
    return np.where(first == _native.NEVER, np.inf, ttft)
