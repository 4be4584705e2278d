"""What a run leaves behind, in chunks of columns: requests that have ended, decisions, samples of the instances."""

from array import array
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from simcluster.request import FloatArray, IntArray
from simcluster.routers.base import SHED, Decision

__all__ = [
    "CHUNK_ROWS",
    "NEVER",
    "REASONS",
    "STATUSES",
    "DecisionLog",
    "DecisionRows",
    "Recorder",
    "RequestRows",
    "SampleLog",
]

NEVER: Final = -1  # an instant that did not come
CHUNK_ROWS: Final = 65_536
# By the codes of _native.Cluster; where a request was at the end of the run comes after why others ended.
STATUSES: Final = ("unfinished", "finished", "rejected", "failed")
REASONS: Final = (
    *("", "stop", "length", "cancelled", "kv_capacity", "exceeds_context"),
    *("shed", "running", "waiting", "in_transit"),
)


@dataclass(frozen=True, slots=True)
class RequestRows:
    """What happened to k requests. Instants are in picoseconds at the client's side, -1 if they did not come.

    Attributes:
        request: (k,) number of the request.
        arrival_ps: (k,) arrival at the router.
        instance: (k,) where it went; -1 if it was turned away.
        scheduled_ps: (k,) start of its first step.
        first_token_ps: (k,) its first token reaches the client.
        end_ps: (k,) its last token, its rejection or its failure reaches the client.
        output_tokens: (k,) tokens delivered.
        cached_tokens: (k,) prompt tokens found in the prefix cache at its first admission.
        preemptions: (k,) how often it was preempted.
        status: (k,) place in `STATUSES`.
        reason: (k,) place in `reasons`: why it ended, or where it was at the end of the run.
        prompt_tokens: (k,) as the servers count; None: as the trace has them.
        reasons: in words.
    """

    request: IntArray
    arrival_ps: IntArray
    instance: IntArray
    scheduled_ps: IntArray
    first_token_ps: IntArray
    end_ps: IntArray
    output_tokens: IntArray
    cached_tokens: IntArray
    preemptions: IntArray
    status: IntArray
    reason: IntArray
    prompt_tokens: IntArray | None = None
    reasons: tuple[str, ...] = REASONS

    @classmethod
    def by_arrival(cls, table: IntArray) -> "RequestRows":
        """Return the rows of `_native.Cluster.take_rows` by arrival, those of one instant by number."""
        if len(table) and (np.diff(table[:, 0]) < 0).any():
            table = table[np.lexsort((table[:, 0], table[:, 1]))]
        return cls(*table.T)


@dataclass(frozen=True, slots=True)
class DecisionRows:
    """k decisions; numbers that do not exist are nan.

    Attributes:
        request: (k,) number of the request.
        instance: (k,) where it went, or SHED.
        reason: (k,) place in `reasons`.
        reasons: why, in words.
        num_tied: (k,) how many instances were equally good.
        snapshot_age_ps: (k,) age of the chosen instance's snapshot [ps]; -1 if nobody looked.
        predicted_ttft_s: (k,) of the chosen instance [s].
        score: (k,) of the chosen instance.
        runner_up: (k,) the best of the others; -1 if none could have been chosen.
        margin: (k,) score of the chosen instance over that of the runner-up.
        candidate_ttft_s: per row (j,) or None; empty unless every candidate is kept.
        candidate_score: likewise.
    """

    request: IntArray
    instance: IntArray
    reason: IntArray
    reasons: tuple[str, ...]
    num_tied: IntArray
    snapshot_age_ps: IntArray
    predicted_ttft_s: FloatArray
    score: FloatArray
    runner_up: IntArray
    margin: FloatArray
    candidate_ttft_s: list[FloatArray | None]
    candidate_score: list[FloatArray | None]


class Recorder(Protocol):
    """Takes what a run leaves behind, in order."""

    def requests(self, rows: RequestRows) -> None:
        """Take requests, by arrival."""
        ...

    def decisions(self, rows: DecisionRows) -> None:
        """Take decisions, in the order in which they were made."""
        ...

    def samples(self, rows: IntArray) -> None:
        """Take samples (at [ps], instance, and the columns of `_native.Cluster.loads`), (k, 12)."""
        ...


class DecisionLog:
    """Keeps decisions as columns until there are enough of them to leave.

    The runner-up is found for many decisions at once, so scores wait until a block of them is full.
    """

    def __init__(self, num_instances: int, *, full: bool) -> None:
        self._full = full
        self._block = max(16, min(1024, 2**17 // num_instances))
        self._reasons: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self._numbers = {name: array("q") for name in ("request", "instance", "reason", "num_tied", "age_ps")}
        self._ttft_s, self._score = array("d"), array("d")
        self._runner_up: list[IntArray] = []
        self._margin: list[FloatArray] = []
        self._scores: list[FloatArray | None] = []
        self._candidates: tuple[list[FloatArray | None], list[FloatArray | None]] = ([], [])

    def __len__(self) -> int:
        return len(self._ttft_s)

    def add(self, request: int, decision: Decision, age_ps: int) -> None:
        """Note a decision and how old the snapshot was on which it rests [ps]; -1 if on none."""
        chosen, ttft_s, score = decision.instance, decision.predicted_ttft_s, decision.score
        numbers = self._numbers
        numbers["request"].append(request)
        numbers["instance"].append(chosen)
        numbers["reason"].append(self._reasons.setdefault(decision.reason, len(self._reasons)))
        numbers["num_tied"].append(decision.num_tied)
        numbers["age_ps"].append(age_ps)
        self._ttft_s.append(np.nan if ttft_s is None or chosen == SHED else ttft_s[chosen])
        self._score.append(np.nan if score is None or chosen == SHED else score[chosen])
        self._scores.append(score)
        if self._full:
            self._candidates[0].append(ttft_s)
            self._candidates[1].append(score)
        if len(self._scores) == self._block:
            self._compare()

    def _compare(self) -> None:
        """Find the runners-up of the scores that wait."""
        count = len(self._scores)
        runner_up, margin = np.full(count, -1, dtype=np.int64), np.full(count, np.nan)
        chosen = np.array(self._numbers["instance"][len(self) - count :], dtype=np.int64)
        compared = [k for k, score in enumerate(self._scores) if score is not None and len(score) > 1]
        rows = np.array(compared, dtype=np.int64)[chosen[compared] != SHED] if compared else np.empty(0, dtype=np.int64)
        if len(rows):
            scores = np.stack([score for k in rows.tolist() if (score := self._scores[k]) is not None])
            place = np.arange(len(rows))
            own = scores[place, chosen[rows]]
            scores[place, chosen[rows]] = -np.inf
            second = scores.argmax(axis=1)
            others = scores[place, second]
            possible = np.isfinite(others)
            runner_up[rows[possible]] = second[possible]
            margin[rows[possible]] = own[possible] - others[possible]
        self._runner_up.append(runner_up)
        self._margin.append(margin)
        self._scores = []

    def take(self) -> DecisionRows:
        """Return what was noted since the last call."""
        if self._scores:
            self._compare()
        numbers = {name: np.array(values, dtype=np.int64) for name, values in self._numbers.items()}
        rows = DecisionRows(
            numbers["request"],
            numbers["instance"],
            numbers["reason"],
            tuple(self._reasons),
            numbers["num_tied"],
            numbers["age_ps"],
            np.array(self._ttft_s),
            np.array(self._score),
            _joined(self._runner_up, np.int64),
            _joined(self._margin, np.float64),
            *self._candidates,
        )
        self._clear()
        return rows


def _joined(parts: list[Any], kind: type) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=kind)


class SampleLog:
    """Keeps samples of the instances until there are enough of them to leave."""

    def __init__(self) -> None:
        self._parts: list[IntArray] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, now_ps: int, loads: IntArray) -> None:
        """Note the load of every instance (j, 10) at an instant [ps]."""
        index = np.arange(len(loads), dtype=np.int64)
        self._parts.append(np.column_stack([np.full_like(index, now_ps), index, loads]))
        self._count += len(loads)

    def take(self) -> IntArray:
        """Return what was noted since the last call, (k, 12)."""
        rows = np.concatenate(self._parts) if self._parts else np.empty((0, 12), dtype=np.int64)
        self._parts, self._count = [], 0
        return rows
