"""What happens during a run, as columns: one row per request, decision and sample."""

from dataclasses import dataclass, field

import numpy as np

from simcluster import _native
from simcluster.backends.base import Engine
from simcluster.request import FloatArray, IntArray, Request
from simcluster.routers.base import SHED, ClusterView, Decision
from simcluster.world import World

__all__ = ["Ledger", "Status"]

NEVER = -1  # an instant that did not come

_Kind = _native.EventKind
_REASONS = {
    int(_native.EndReason.stop): "stop",
    int(_native.EndReason.length): "length",
    int(_native.EndReason.abort): "cancelled",
    int(_native.EndReason.kv_capacity): "kv_capacity",
    int(_native.EndReason.exceeds_context): "exceeds_context",
}


class Status:
    """How a request ends; the codes of `Ledger.status`."""

    NAMES = ("unfinished", "finished", "rejected", "failed")
    UNFINISHED, FINISHED, REJECTED, FAILED = range(4)


_END_STATUS = {
    int(_Kind.finished): Status.FINISHED,
    int(_Kind.rejected): Status.REJECTED,
    int(_Kind.failed): Status.FAILED,
}


def _column(n: int, value: int = NEVER) -> IntArray:
    return np.full(n, value, dtype=np.int64)


@dataclass(slots=True)
class Ledger:
    """Records of one run; n requests. Instants are in picoseconds at the client's side.

    Attributes:
        arrival_ps: (n,) arrival at the router; -1 if it did not come to that.
        instance: (n,) where each request went; -1 if it was not sent or was turned away.
        scheduled_ps: (n,) start of its first step.
        first_token_ps: (n,) its first token reaches the client.
        end_ps: (n,) its last token, its rejection or its failure reaches the client.
        output_tokens: (n,) tokens delivered.
        cached_tokens: (n,) prompt tokens found in the prefix cache at its first admission.
        preemptions: (n,) how often it was preempted.
        status: (n,) code of `Status`.
        reason: (n,) why it ended, or where it was at the end of the run.
        num_open: requests sent and not ended.
        num_sent: requests sent.
        clock_ps: end of the run.
        decisions: rows of the decisions asked for.
        samples: rows of the instances' time series.
    """

    world: World
    decision_level: str
    arrival_ps: IntArray = field(init=False)
    instance: IntArray = field(init=False)
    scheduled_ps: IntArray = field(init=False)
    first_token_ps: IntArray = field(init=False)
    end_ps: IntArray = field(init=False)
    output_tokens: IntArray = field(init=False)
    cached_tokens: IntArray = field(init=False)
    preemptions: IntArray = field(init=False)
    status: IntArray = field(init=False)
    reason: list[str] = field(init=False)
    num_open: int = field(init=False, default=0)
    num_sent: int = field(init=False, default=0)
    clock_ps: int = field(init=False, default=0)
    decisions: list[tuple[int, Decision, int]] = field(init=False, default_factory=list)
    samples: list[tuple[int, ...]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.world.known)
        self.arrival_ps = _column(n)
        self.instance, self.scheduled_ps = _column(n), _column(n)
        self.first_token_ps, self.end_ps = _column(n), _column(n)
        self.output_tokens, self.preemptions = _column(n, 0), _column(n, 0)
        self.cached_tokens = _column(n, 0)
        self.status = _column(n, Status.UNFINISHED)
        self.reason = [""] * n

    def record_decision(self, request: Request, decision: Decision, view: ClusterView, used_view: bool) -> None:
        """Note where a request was sent and, if asked for, why; one turned away is rejected at once."""
        shed = decision.instance == SHED
        self.arrival_ps[request.index] = request.arrival_ps
        self.num_sent += 1
        if shed:
            self.status[request.index], self.reason[request.index] = Status.REJECTED, "shed"
            self.end_ps[request.index] = view.now_ps
        else:
            self.instance[request.index] = decision.instance
            self.num_open += 1
        if self.decision_level != "off":
            age = view.snapshot_age_ps(decision.instance) if used_view and not shed else NEVER
            self.decisions.append((request.index, decision, age))

    def collect(self, index: int, engine: Engine) -> IntArray:
        """Take what happened at one instance since the last call, and return it: (id, at, value, kind, reason)."""
        events: IntArray = engine.take_events()
        if not len(events):
            return events
        hop = self.world.instances[index].output_hop_ps
        ids, at, value, kind, reason = events.T
        rows = kind == int(_Kind.scheduled)
        self.scheduled_ps[ids[rows]] = at[rows]
        self.cached_tokens[ids[rows]] = value[rows]
        rows = kind == int(_Kind.first_token)
        self.first_token_ps[ids[rows]] = at[rows] + hop
        np.add.at(self.preemptions, ids[kind == int(_Kind.preempted)], 1)
        for end, status in _END_STATUS.items():
            rows = kind == end
            ended = ids[rows]
            left = reason[rows] == int(_native.EndReason.abort)  # the client itself; nothing has to reach it
            self.end_ps[ended] = at[rows] + np.where(left, 0, hop)
            self.output_tokens[ended] = value[rows]
            self.status[ended] = status
            for request, why in zip(ended.tolist(), reason[rows].tolist(), strict=True):
                self.reason[request] = _REASONS[why]
            self.num_open -= len(ended)
        return events

    def collect_unfinished(self, index: int, engine: Engine) -> None:
        """Note where the requests of one instance are at the end of the run."""
        snapshot = engine.snapshot()
        for row, (request, _, output, *_rest) in enumerate(snapshot.requests.tolist()):
            self.output_tokens[request] = output
            self.reason[request] = "running" if row < snapshot.num_running else "waiting"
        here = (self.instance == index) & (self.status == Status.UNFINISHED)
        for request in np.flatnonzero(here).tolist():
            self.reason[request] = self.reason[request] or "in_transit"

    def record_sample(self, now_ps: int, index: int, engine: Engine) -> None:
        """Note the load of one instance."""
        self.samples.append(
            (
                now_ps,
                index,
                engine.num_running,
                engine.num_waiting,
                engine.num_free_blocks,
                engine.num_preemptions,
                engine.num_steps,
                engine.busy_time,
                *engine.prefix_stats,
            )
        )

    def close(self, clock_ps: int, *, cut: bool) -> None:
        """Fix the end of the run; what has not reached a client before it left, or before a cut, did not happen."""
        self.clock_ps = clock_ps
        end = clock_ps if cut else np.iinfo(np.int64).max
        for request in np.flatnonzero(self.end_ps > end).tolist():
            self.status[request], self.reason[request] = Status.UNFINISHED, "in_transit"
            self.end_ps[request] = NEVER
        last = np.where(self.end_ps == NEVER, end, self.end_ps)
        self.scheduled_ps[self.scheduled_ps > last] = NEVER  # the asynchronous loop plans a step ahead
        unseen = self.first_token_ps > last
        self.first_token_ps[unseen] = NEVER
        self.output_tokens[unseen] = 0

    def utility(self) -> FloatArray:
        """Return quality - cost_weight * cost of each finished request, nan elsewhere, (n,).

        Source: paper eq. 2 with realised values.
        """
        return np.where(
            self.status == Status.FINISHED,
            self.quality() - self.world.cost_weight * self.cost(),
            np.nan,
        )

    def group(self) -> IntArray:
        """Return the column of the instance where each request went; any where it was not sent, (n,)."""
        group: IntArray = self.world.known.group_of_instance[self.instance]
        return group

    def quality(self) -> FloatArray:
        """Return the true quality of each answer, nan where the request was not sent, (n,)."""
        rows = np.arange(len(self.instance))
        quality: FloatArray = np.where(self.instance >= 0, self.world.truth.quality[rows, self.group()], np.nan)
        return quality

    def cost(self) -> FloatArray:
        """Return the cost of each request from the tokens delivered [micro-dollars], (n,).

        A rejected request costs nothing; others pay their prompt once it was scheduled.
        """
        rows = np.arange(len(self.instance))
        price_in = np.array([spec.price_in for spec in self.world.instances])[self.instance]
        price_out = np.array([spec.price_out for spec in self.world.instances])[self.instance]
        prompt = np.where(self.scheduled_ps != NEVER, self.world.known.prompt_tokens[rows, self.group()], 0)
        cost: FloatArray = prompt * price_in + self.output_tokens * price_out
        return cost
