"""Replay a recorded scenario through the native scheduler and compare every recorded field.

The engine loop is the one the recordings follow: per iteration, hand over arrivals and aborts, run one pass if the
scheduler has anything, push the batch on a queue of depth 1 (synchronous) or 2 (asynchronous), and process the oldest
batch unless there is room for another one. The file format is described in tests/golden/README.md.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from simcluster import _native

__all__ = ["OUTPUT_BASE", "Difference", "EngineLoop", "LoopScheduler", "compare", "scheduler_config"]

OUTPUT_BASE = 1_000_000
_PS_PER_UNIT = 1_000_000  # arrival_time in a file is a small float and only an ordering key
_POLICIES = {"fcfs": _native.Policy.fcfs, "priority": _native.Policy.priority}
_REASONS = {_native.EndReason.stop: "stop", _native.EndReason.length: "length"}

Json = dict[str, Any]


class LoopScheduler(Protocol):
    """What the engine loop needs of a scheduler: the native one, or vLLM's."""

    def add(
        self,
        id: int,  # noqa: A002
        prompt_tokens: int,
        max_tokens: int,
        eos_at: int = 0,
        priority: int = 0,
        arrival_time: int = 0,
        prompt: Sequence[tuple[int, int]] = ...,
        first_output: int = 0,
    ) -> None:
        """Add a request."""
        ...

    def abort(self, id: int) -> bool:  # noqa: A002
        """Drop a request; False if it is not here."""
        ...

    def has_requests(self) -> bool:
        """Whether anything is left to schedule or to flush."""
        ...

    def schedule(self) -> tuple[Any, list[int], list[int]]:
        """Run one pass: (batch, ids preempted, ids that can never fit)."""
        ...

    def update(self, batch: Any) -> list[tuple[int, _native.EndReason]]:
        """Process the results of a batch: (id, end reason) in order."""
        ...

    def cached_tokens(self, id: int) -> int:  # noqa: A002
        """Prefix hit [tokens] of a running request at its first admission."""
        ...

    def block_table(self, id: int) -> list[int]:  # noqa: A002
        """Block ids of a running request."""
        ...

    @property
    def running(self) -> list[int]:
        """Ids of the running, in their order."""
        ...

    @property
    def waiting(self) -> list[int]:
        """Ids of the waiting, in their order."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a replay departs from the recording."""

    where: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.where}: recorded {self.expected!r}, found {self.found!r}"


@dataclass(slots=True)
class _Summary:
    """What became of one request."""

    first_sched: int | None = None
    first_token: int | None = None
    finish: int | None = None
    reason: str | None = None
    cached: int | None = None
    preemptions: int = 0
    output: int = 0


@dataclass(slots=True)
class _Totals:
    iterations: int = 0
    preemptions: int = 0
    batches: int = 0
    tokens: int = 0


def scheduler_config(config: Json, vllm_version: str) -> _native.SchedulerConfig:
    """Build the native options from the `config` object of a recorded scenario.

    Raises:
        KeyError: an option is missing.
    """
    native = _native.SchedulerConfig()
    for name in (
        "max_num_batched_tokens",
        "max_num_seqs",
        "block_size",
        "num_gpu_blocks",
        "max_model_len",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "watermark",
        "prefill_schedule_interval",
        "async_scheduling",
    ):
        setattr(native, name, config[name])
    native.max_num_active_seqs = config["max_num_active_seqs"] or 0
    native.policy = _POLICIES[config["policy"]]
    old = vllm_version.startswith("0.32")
    native.vllm_version = _native.VllmVersion.v0_32 if old else _native.VllmVersion.v0_33
    native.track_blocks = True
    return native


@dataclass(slots=True)
class EngineLoop:
    """The engine loop around one scheduler, producing records like those of the file.

    Attributes:
        scenario: its `config` and `requests` are read.
        scheduler: an empty scheduler with the options of `config`.
        summary: per request, what became of it; complete when `records` has ended.
        totals: sums over the run; likewise.
    """

    scenario: Json
    scheduler: LoopScheduler
    arrivals: deque[int] = field(init=False)
    aborts: deque[tuple[int, int]] = field(init=False)
    in_flight: deque[tuple[int, Any]] = field(default_factory=deque)
    summary: list[_Summary] = field(init=False)
    totals: _Totals = field(default_factory=_Totals)

    def __post_init__(self) -> None:
        requests = self.scenario["requests"]
        order = sorted(range(len(requests)), key=lambda r: (requests[r]["arrival_iter"], r))
        self.arrivals = deque(order)
        aborts = [(q["abort_iter"], r) for r, q in enumerate(requests)]
        self.aborts = deque(sorted(a for a in aborts if a[0] is not None))
        self.summary = [_Summary() for _ in requests]

    def records(self) -> Iterator[Json]:
        """Yield one record per iteration in which something happens."""
        requests = self.scenario["requests"]
        depth = 2 if self.scenario["config"]["async_scheduling"] else 1
        iteration = 0
        while self.arrivals or self.in_flight or self.scheduler.has_requests():
            if not self.in_flight and not self.scheduler.has_requests():
                iteration = max(iteration, requests[self.arrivals[0]]["arrival_iter"])
            record: Json = {"i": iteration}
            self._take_inputs(iteration, record)
            has_room = False
            if self.scheduler.has_requests():
                entries = self._run_pass(iteration, record)
                has_room = len(self.in_flight) < depth and (bool(entries) or self.scheduler.has_requests())
            if not has_room:
                self._process_results(iteration, record)
            self.totals.iterations += 1
            yield record
            iteration += 1

    def _take_inputs(self, iteration: int, record: Json) -> None:
        requests = self.scenario["requests"]
        added, aborted = [], []
        while self.arrivals and requests[self.arrivals[0]]["arrival_iter"] <= iteration:
            r = self.arrivals.popleft()
            q = requests[r]
            self.scheduler.add(
                id=r,
                prompt_tokens=q["prompt_len"],
                max_tokens=q["max_tokens"],
                eos_at=q["eos_at"] or 0,
                priority=q["priority"],
                arrival_time=round(q["arrival_time"] * _PS_PER_UNIT),
                prompt=[(first, count) for first, count in q["prompt"]],
                first_output=OUTPUT_BASE * (r + 1),
            )
            added.append(r)
        while self.aborts and self.aborts[0][0] <= iteration:
            r = self.aborts.popleft()[1]
            if self.scheduler.abort(r):
                aborted.append(r)
                self.summary[r].finish = iteration
                self.summary[r].reason = "abort"
        if added:
            record["added"] = added
        if aborted:
            record["aborted"] = aborted

    def _run_pass(self, iteration: int, record: Json) -> list[tuple[int, int, int]]:
        batch, preempted, failed = self.scheduler.schedule()
        entries: list[tuple[int, int, int]] = batch.entries
        record["sched"] = [list(entry) for entry in entries]
        if preempted:
            record["preempted"] = preempted
        if failed:
            record["failed"] = failed
        record["free_sched"] = self.scheduler.num_free_blocks
        running, waiting = self.scheduler.running, self.scheduler.waiting
        record["running"], record["waiting"] = running, waiting
        record["nrun"], record["nwait"] = len(running), len(waiting)
        record["blocks"] = {str(r): self.scheduler.block_table(r) for r, _, _ in entries}
        self.in_flight.append((self.totals.batches, batch))
        self.totals.batches += 1
        self.totals.preemptions += len(preempted)
        for r in preempted:
            self.summary[r].preemptions += 1
        for r, _, _ in entries:
            if self.summary[r].first_sched is None:
                self.summary[r].first_sched = iteration
                self.summary[r].cached = self.scheduler.cached_tokens(r)
        return entries

    def _process_results(self, iteration: int, record: Json) -> None:
        number, batch = self.in_flight.popleft()
        results = self.scheduler.update(batch)
        record["update"] = number
        finished = []
        for r, reason in results:
            summary = self.summary[r]
            summary.output += 1
            if summary.first_token is None:
                summary.first_token = iteration
            if reason in _REASONS:
                summary.finish, summary.reason = iteration, _REASONS[reason]
                finished.append([r, summary.reason])
        self.totals.tokens += len(results)
        if results:
            record["tokens"] = [r for r, _ in results]
        if finished:
            record["finished"] = finished
        record["free_upd"] = self.scheduler.num_free_blocks


_OPTIONAL = ("added", "aborted", "preempted", "failed", "sched", "update", "tokens", "finished")


def _first_difference(expected: Json, found: Json) -> Difference | None:
    """Compare every field of the recorded iteration; an event that only one side has is a difference too."""
    for name in dict.fromkeys((*expected, *(n for n in _OPTIONAL if n in found))):
        if expected.get(name) != found.get(name):
            return Difference(f"iteration {expected['i']}, {name}", expected.get(name), found.get(name))
    return None


def compare(scenario: Json) -> Difference | None:
    """Replay one recorded scenario; the first difference, or None if every recorded field is equal.

    Args:
        scenario: one object of a recorded file.

    Raises:
        KeyError: a field of the format is missing.
    """
    scheduler = _native.Scheduler(scheduler_config(scenario["config"], scenario["vllm"]))
    replay = EngineLoop(scenario, scheduler)
    records = replay.records()
    for expected in scenario["iterations"]:
        found = next(records, None)
        if found is None:
            return Difference(f"iteration {expected['i']}", expected, "the replay has ended")
        difference = _first_difference(expected, found)
        if difference is not None:
            return difference
    surplus = next(records, None)
    if surplus is not None:
        return Difference(f"iteration {surplus['i']}", "the recording has ended", surplus)
    for r, (expected, summary) in enumerate(zip(scenario["summary"], replay.summary, strict=True)):
        for name, value in expected.items():
            if getattr(summary, name) != value:
                return Difference(f"summary of request {r}, {name}", value, getattr(summary, name))
    for name, value in scenario["totals"].items():
        if getattr(replay.totals, name) != value:
            return Difference(f"totals, {name}", value, getattr(replay.totals, name))
    return None
