"""Run the scheduler free on a recording's arrivals, with the recorded steps as its clock.

Given are the arrivals at the engine, the true ends and when each recorded step was scheduled and ended. Everything
else is the scheduler's: whom it admits, how it cuts prompts, whom it preempts. A pass sees the requests that were
added before schedule() began; those that came during a step lie in the engine's input queue and are added right after
it. The n-th batch that computes something stands beside the n-th recorded step.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simcluster import _native
from simcluster.calibrate.recording import EngineInfo, Recording
from simcluster.errors import CalibrationError
from simcluster.request import IntArray
from simcluster.units import PS_PER_NS

__all__ = ["Clock", "Miss", "Replay", "replay_scheduling", "scheduler_config"]

_CLOSE_NS = 1_000_000  # an arrival this close to the beginning of a pass may have been seen or not
_POLICIES = {"fcfs": _native.Policy.fcfs, "priority": _native.Policy.priority}

Entry = tuple[int, int, int]  # number of the request, tokens computed before, tokens of the step


class Miss(NamedTuple):
    """A step whose batch is not the recorded one."""

    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class Clock:
    """The recorded steps as the clock of an engine that starts a pass as soon as it can; all from the first arrival.

    Attributes:
        origin_ns: the recording's instant 0.
        arrival_ps: (n,) when each request reaches the engine [ps]: as recorded where that is known, but inside of the
            step during which it came, so that the same pass sees it.
        duration_ps: (k,) of each step, host time included [ps].
        end_ps: (k,) when the results of each step are processed [ps].
    """

    origin_ns: int
    arrival_ps: IntArray
    duration_ps: IntArray
    end_ps: IntArray


@dataclass(slots=True)
class Replay:
    """What a free run made of a recording.

    Attributes:
        num_steps: recorded steps.
        num_requests: recorded requests that got a token.
        misses: steps with another batch than the recorded one.
        late: requests whose first token comes in another step, with the cause.
        state_differences: steps after whose pass the running, waiting or free blocks differ, though the batch agrees.
        preemptions: (recorded, replayed).
        clock: the recording as an engine's clock; None where a batch differs.
        first_token_step: by request number, place of the step with its first token.
        last_token_step: by request number, place of the step with its last token.
    """

    num_steps: int
    num_requests: int = 0
    misses: list[Miss] = field(default_factory=list)
    late: list[tuple[str, str]] = field(default_factory=list)
    state_differences: int = 0
    preemptions: tuple[int, int] = (0, 0)
    clock: Clock | None = None
    first_token_step: dict[int, int] = field(default_factory=dict)
    last_token_step: dict[int, int] = field(default_factory=dict)

    @property
    def step_share(self) -> float:
        """Share of the steps that have the recorded batch."""
        return 1 - len(self.misses) / self.num_steps

    @property
    def first_token_share(self) -> float:
        """Share of the requests whose first token comes in the recorded step."""
        return 1 - len(self.late) / max(self.num_requests, 1)

    def summary(self) -> dict[str, Any]:
        """Return the shares and the causes as plain data."""
        return {
            "steps": self.num_steps,
            "same_composition": self.step_share,
            "requests": self.num_requests,
            "first_token_in_recorded_step": self.first_token_share,
            "misses_by_cause": dict(Counter(miss.cause for miss in self.misses)),
            "late_by_cause": dict(Counter(cause for _, cause in self.late)),
            "other_state_differs": self.state_differences,
            "preemptions": {"recorded": self.preemptions[0], "replayed": self.preemptions[1]},
        }


def scheduler_config(engine: EngineInfo, vllm_version: str, *, asynchronous: bool) -> _native.SchedulerConfig:
    """Return the native options of a recorded engine.

    Raises:
        CalibrationError: an option is out of the scheduler's range.
    """
    native = _native.SchedulerConfig()
    for name in (
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "block_size",
        "num_gpu_blocks",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "watermark",
        "prefill_schedule_interval",
    ):
        setattr(native, name, getattr(engine, name))
    native.max_num_active_seqs = engine.max_num_active_seqs or 0
    native.policy = _POLICIES[engine.policy]
    old = vllm_version.startswith(("0.32", "0.31", "0.30", "0.2", "0.1"))
    native.vllm_version = _native.VllmVersion.v0_32 if old else _native.VllmVersion.v0_33
    native.async_scheduling = asynchronous
    native.shared_prefixes = False  # prompts are not recorded; what they share is not known
    fault = native.validate()
    if fault:
        raise CalibrationError(f"engine options of the recording: {fault}")
    return native


def replay_scheduling(recording: Recording) -> Replay:
    """Let the scheduler run free on a recording and compare every batch and every first token.

    Raises:
        CalibrationError: the recorded engine options are out of range.
    """
    return _Loop(recording).run()


class _Loop:
    """The engine loop with the recorded steps as clock."""

    def __init__(self, recording: Recording) -> None:
        self.asynchronous = recording.info.loop == "async"
        config = scheduler_config(recording.info.engine, recording.info.vllm_version, asynchronous=self.asynchronous)
        self.scheduler = _native.Scheduler(config)
        requests, steps = recording.requests, recording.steps
        self.ids: list[str] = requests["request_id"].to_list()
        number = {name: index for index, name in enumerate(self.ids)}
        self.expected = [[(number[name], before, n) for name, before, n in row] for row in recording.compositions()]
        self.begin: list[int]
        self.passed: list[int]
        self.begin, self.end = steps["t_sched0"].to_list(), steps["t_upd1"].to_list()
        self.results, self.passed = steps["t_upd0"].to_list(), steps["t_sched1"].to_list()
        self.state = list(zip(steps["n_running"], steps["n_waiting"], steps["free_blocks"], strict=True))
        self.added: list[int] = requests["t_add_ns"].to_list()
        sent = requests["t_sent_ns"].to_list()
        self.came = [added if at is None else min(at, added) for at, added in zip(sent, self.added, strict=True)]
        self.prompt, self.output = requests["prompt_tokens"].to_list(), requests["output_tokens"].to_list()
        reasons, limits = requests["finish_reason"].to_list(), requests["max_tokens"].to_list()
        self.by_length = [reason != "stop" for reason in reasons]
        self.limit = limits
        self.leaves = _leaving(reasons, self.expected)
        self.arrivals = deque(range(len(self.ids)))
        self.in_flight: deque[tuple[int, _native.Batch]] = deque()
        self.at = 0  # place of the next recorded step
        self.replay = Replay(len(self.expected))
        self.first: dict[int, int] = {}
        # The clock of an engine that starts its passes at once.
        self.clock = self.added[0]
        self.previous = self.added[0]  # clock of the last pass before this one that another clock value had
        self.arrival_ns = np.array(self.added, dtype=np.int64)
        self.starts: list[int] = []
        self.resyncing = False
        self.preempted = 0

    def run(self) -> Replay:
        while self.at < len(self.expected):
            self._iterate()
        self._compare_first_tokens()
        self.replay.preemptions = (self._recorded_preemptions(), self.preempted)
        if not self.replay.misses:
            self.replay.clock = self._clock()
        return self.replay

    def _recorded_preemptions(self) -> int:
        """Count requests that compute from 0 again."""
        seen: set[int] = set()
        count = 0
        for entries in self.expected:
            for request, before, _ in entries:
                count += before == 0 and request in seen
                seen.add(request)
        return count

    # -- the loop

    def _iterate(self) -> None:
        idle = not self.in_flight and not self.scheduler.running and not self.scheduler.waiting
        if idle:
            if self.scheduler.has_requests():  # an empty pass tells the workers who has ended
                self.scheduler.update(self.scheduler.schedule()[0])
            self._skip_to_next_arrival()
            if self.at >= len(self.expected):
                return
        self._take_inputs(self._now(idle), idle)
        room = False
        if self.scheduler.has_requests():
            batch, preempted, _ = self.scheduler.schedule()
            self.preempted += len(preempted)
            entries = batch.entries
            if entries:
                self._compare(entries)
                self.in_flight.append((self.at, batch))
                self.at += 1
            else:
                self.in_flight.append((self.in_flight[-1][0] if self.in_flight else self.at - 1, batch))
                if len(self.in_flight) == 1 and not self.asynchronous:
                    self._skip_step("nothing fits")
            room = len(self.in_flight) < (2 if self.asynchronous else 1) and (
                bool(entries) or self.scheduler.has_requests()
            )
        if not room and self.in_flight:
            self._process()

    def _now(self, idle: bool) -> int:
        """Return when the next pass begins: as recorded, or, if it computes nothing and was not recorded, at once."""
        begin = self.begin[self.at]
        if idle or not self.in_flight or begin < self.results[self.in_flight[0][0]]:
            return begin
        return self.passed[self.at - 1]

    def _skip_to_next_arrival(self) -> None:
        """Idle: steps that were recorded before the next arrival are not ours to make."""
        next_at = self.added[self.arrivals[0]] if self.arrivals else None
        while self.at < len(self.expected) and (next_at is None or self.begin[self.at] < next_at):
            self._skip_step("already done")
        self.resyncing = False
        if next_at is not None:
            self.clock = max(self.clock, next_at)

    def _skip_step(self, cause: str) -> None:
        self.replay.misses.append(Miss(self.at, cause))
        self.starts.append(self.clock)
        self.at += 1

    def _take_inputs(self, now: int, idle: bool) -> None:
        floor = self.previous + 1
        while self.arrivals and self.added[self.arrivals[0]] <= now:
            request = self.arrivals.popleft()
            self.arrival_ns[request] = self.clock if idle else min(max(self.came[request], floor), self.clock)
            self.scheduler.add(
                id=request,
                prompt_tokens=self.prompt[request],
                max_tokens=max(self.output[request], 1) if self.by_length[request] else self.limit[request],
                eos_at=0 if self.by_length[request] else self.output[request],
                arrival_time=self.added[request],
            )

    def _process(self) -> None:
        place, batch = self.in_flight.popleft()
        for request in self.leaves.get(place, ()):
            self.scheduler.abort(request)
        for request, _ in self.scheduler.update(batch):
            self.first.setdefault(request, place)
        if self.end[place] > self.clock:
            self.previous, self.clock = self.clock, self.end[place]

    # -- the comparison

    def _compare(self, entries: Sequence[Entry]) -> None:
        expected = self.expected[self.at]
        self.starts.append(self.clock)
        if list(entries) == expected:
            self.resyncing = False
            running, waiting, free = self.state[self.at]
            found = (len(self.scheduler.running), len(self.scheduler.waiting), self.scheduler.num_free_blocks)
            self.replay.state_differences += found != (running, waiting, free)
            return
        self.replay.misses.append(Miss(self.at, self._cause(entries, expected)))
        self.resyncing = True

    def _cause(self, entries: Sequence[Entry], expected: Sequence[Entry]) -> str:
        """Say why a batch differs, as far as it can be told."""
        if self.resyncing:
            return "follows an earlier difference"
        ours, theirs = {r for r, _, _ in entries}, {r for r, _, _ in expected}
        begin = self.begin[self.at]
        if any(abs(self.added[request] - begin) <= _CLOSE_NS for request in ours ^ theirs):
            return "an arrival within 1 ms of the pass"
        if ours != theirs:
            return "another choice of requests"
        return "other tokens" if {*entries} != {*expected} else "another order"

    def _compare_first_tokens(self) -> None:
        causes = dict(self.replay.misses)
        seen: dict[int, int] = {}
        remaining = dict(enumerate(self.prompt))
        for place, entries in enumerate(self.expected):
            for request, before, tokens in entries:
                if before + tokens >= remaining[request]:
                    seen.setdefault(request, place)
                    self.replay.last_token_step[request] = place
        self.replay.first_token_step = seen
        self.replay.num_requests = len(seen)
        for request, place in seen.items():
            if self.first.get(request, place) != place or (
                request not in self.first and place < len(self.expected) - 2
            ):
                cause = causes.get(place) or causes.get(self.first.get(request, -1)) or "follows an earlier difference"
                self.replay.late.append((self.ids[request], cause))

    def _clock(self) -> Clock:
        end, start = np.array(self.end), np.array(self.starts)
        start = np.maximum(start, np.concatenate([start[:1], end[:-1]]))
        arrival = np.maximum.accumulate(self.arrival_ns)  # in the order in which the engine took them
        origin = int(arrival[0])
        return Clock(
            origin,
            (arrival - origin) * PS_PER_NS,
            np.maximum(end - start, 1) * PS_PER_NS,
            (end - origin) * PS_PER_NS,
        )


def _leaving(reasons: list[str | None], expected: list[list[Entry]]) -> dict[int, list[int]]:
    """Return whom the client took away, by the last step that computes them."""
    last = {request: place for place, entries in enumerate(expected) for request, _, _ in entries}
    leaving: dict[int, list[int]] = {}
    for request, reason in enumerate(reasons):
        if reason == "abort" and request in last:
            leaving.setdefault(last[request], []).append(request)
    return leaving
