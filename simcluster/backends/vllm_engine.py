"""One serving instance on the simulated clock that schedules with the installed vLLM's own classes.

It takes the native engine's place: the same calls, events and snapshots, the same step times to the picosecond.
Decisions come from vLLM, so a run under both engines tells whether the simulator still schedules as vLLM does. Much
slower than the native engine. The loop is that of native/core/engine.cpp; what is said there is not repeated here.
"""

from bisect import insort_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from simcluster import _native
from simcluster.backends.base import EngineFactory
from simcluster.backends.vllm_scheduler import VllmBatch, VllmScheduler
from simcluster.backends.vllm_setup import scheduler_options, vllm_version
from simcluster.errors import ConfigError
from simcluster.request import IntArray
from simcluster.world import World

__all__ = ["VllmEngine", "vllm_engine_factory"]

_Kind = _native.EventKind
_End = _native.EndReason
_FIRST_LIMIT = 1000  # iterations without a token before somebody counts how many there may be


def vllm_engine_factory(world: World) -> EngineFactory:
    """Return what builds the engines of a world, after a look at whether vLLM can run them.

    Raises:
        ConfigError: vLLM is missing, another version than an instance asks for, or refuses an instance's options.
    """
    version = vllm_version()
    for spec in world.instances:
        config, where = spec.engine, f"instance {spec.name}: engine"
        wanted = config.vllm_version.name.removeprefix("v").replace("_", ".")
        if not version.startswith(f"{wanted}."):
            raise ConfigError(
                f"{where}.vllm_version = {wanted}, but vLLM {version} is installed; set vllm_version to "
                f'"{".".join(version.split(".")[:2])}", or install vLLM {wanted}, or run the native engine'
            )
        needed, usable = -(-config.max_model_len // config.block_size), config.num_gpu_blocks - 1
        if needed > usable:
            raise ConfigError(
                f"{where}: one request of max_model_len = {config.max_model_len} tokens needs {needed} KV blocks, the "
                f"pool has {usable}: vLLM does not start so; lower max_model_len or raise num_gpu_blocks_override"
            )
        try:
            VllmScheduler(scheduler_options(config))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return VllmEngine


@dataclass(frozen=True, slots=True)
class _Submission:
    id: int
    at: int
    prompt_tokens: int
    max_tokens: int
    eos_at: int
    visible_max_tokens: int
    priority: int
    arrival_time: int
    prompt: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: int
    at: int


@dataclass(slots=True)
class _InFlight:
    """A batch handed to the device."""

    batch: VllmBatch
    start: int
    end: int
    prefills: list[tuple[int, int]] = field(init=False)
    decodes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prefills = [(row.num_tokens, row.start) for row in self.batch.rows if not row.decode]
        self.decodes = [row.start for row in self.batch.rows if row.decode]


class VllmEngine:
    """One serving instance on the simulated clock, scheduled by vLLM.

    Args:
        config: resolved options; one request of max_model_len tokens must fit into the pool.
        step_time: true step times.
        noise: multiplicative noise per step, or None.
        derive: returns the scheduler's class, given the one of vLLM.

    Raises:
        ConfigError: vLLM is missing or refuses the options.
    """

    def __init__(
        self,
        config: _native.SchedulerConfig,
        step_time: _native.StepTimeModel,
        noise: _native.StepNoise | None = None,
        derive: Callable[[Any], Any] | None = None,
    ) -> None:
        self._config = config
        self._step_time, self._noise = step_time, noise
        self._clock = 0
        self._scheduler = VllmScheduler(scheduler_options(config), derive)
        self._async = config.async_scheduling
        self._inbox: list[_Submission] = []
        self._cancels: list[_Cancel] = []
        self._in_flight: deque[_InFlight] = deque()
        self._visible: dict[int, int] = {}  # of the residents, by id
        self._delivered: dict[int, int] = {}  # likewise
        self._intake = -1
        self._device_free = 0
        self._waiting_for_batch = False
        self._without_token = 0
        self._livelock_limit = _FIRST_LIMIT
        self._events: list[tuple[int, int, int, int, int]] = []
        self.now = 0
        self.num_steps = 0
        self.busy_time = 0

    # -- inputs

    def submit(
        self,
        id: int,  # noqa: A002  (as in the native engine)
        prompt_tokens: int,
        output_tokens: int,
        at: int,
        max_tokens: int = -1,
        ends_by_length: bool = False,
        priority: int = 0,
        arrival_time: int = 0,
        prompt: list[tuple[int, int]] | tuple[tuple[int, int], ...] = (),
    ) -> bool:
        """Hand over a request that reaches the engine at `at` [ps]; False if it is rejected.

        Raises:
            ValueError: a time in the past, or a length below 1.
        """
        if at < self.now or prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request is submitted in the past or without tokens")
        config = self._config
        room = config.max_model_len - prompt_tokens
        if room <= 0 or max_tokens > config.max_model_len:
            self._emit(_Kind.rejected, id, at, 0, _End.exceeds_context)
            return False
        visible = min(max_tokens, room) if max_tokens > 0 else room
        end, eos_at = visible, 0
        if not ends_by_length:
            eos_at = output_tokens
        elif max_tokens <= 0:
            end = min(output_tokens, room)
        item = _Submission(id, at, prompt_tokens, end, eos_at, visible, priority, arrival_time, tuple(prompt))
        insort_right(self._inbox, item, key=attrgetter("at"))
        return True

    def cancel(self, id: int, at: int) -> None:  # noqa: A002
        """Note that the client leaves at `at` [ps].

        Raises:
            ValueError: a time in the past.
        """
        if at < self.now:
            raise ValueError("a request is cancelled in the past")
        insort_right(self._cancels, _Cancel(id, at), key=attrgetter("at"))

    def _take_inputs(self) -> None:
        while self._inbox and self._inbox[0].at <= self._clock:
            item = self._inbox.pop(0)
            self._visible[item.id], self._delivered[item.id] = item.visible_max_tokens, 0
            self._scheduler.add(
                item.id,
                item.prompt_tokens,
                item.max_tokens,
                item.eos_at,
                item.priority,
                item.arrival_time,
                item.prompt,
            )
        self._apply_cancels(self._clock + 1)
        self._intake = self._clock

    def _apply_cancels(self, before: int) -> None:
        while self._cancels and self._cancels[0].at < before:
            left = self._cancels.pop(0)
            pending = next((k for k, item in enumerate(self._inbox) if item.id == left.id), None)
            delivered = 0
            if pending is not None:
                del self._inbox[pending]
            elif self._scheduler.abort(left.id):
                delivered = self._forget(left.id)
            else:
                continue  # it has already ended
            self._emit(_Kind.failed, left.id, left.at, delivered, _End.abort)
            self._without_token = 0

    def _forget(self, request: int) -> int:
        """Drop what is kept about a request that has ended and return how many tokens it had."""
        del self._visible[request]
        return self._delivered.pop(request)

    # -- the loop

    def advance_to(self, t: int) -> None:
        """Process every step that ends at or before t [ps].

        Raises:
            LivelockError: no request makes progress.
        """
        while self._advance_once(t):
            pass
        if t < _native.NEVER:
            self.now = max(self.now, t)

    def drain(self) -> None:
        """Run until nothing is left to do.

        Raises:
            LivelockError: no request makes progress.
        """
        self.advance_to(_native.NEVER)

    def _advance_once(self, limit: int) -> bool:
        if self._waiting_for_batch:
            if self._in_flight[0].end > limit:
                return False
            self._process_results()
            return True
        at = self._next_pass()
        if at >= limit:
            return False
        self._clock = at
        self._iterate()
        return True

    def _next_pass(self) -> int:
        """Return when the loop goes round next, unless it waits for a batch; NEVER without anything to do."""
        if self._in_flight or self._scheduler.has_requests():
            return self._clock
        due = [queue[0].at for queue in (self._inbox, self._cancels) if queue]
        return max(self._clock, min(due)) if due else _native.NEVER

    def _iterate(self) -> None:
        self._take_inputs()
        if self._scheduler.has_requests():
            batch, preempted, _ = self._scheduler.schedule()
            self._launch(batch)
            for request in preempted:
                self._emit(_Kind.preempted, request, self._clock, self._delivered[request])
            room = len(self._in_flight) < (2 if self._async else 1)
            if room and (batch.rows or self._scheduler.has_requests()):
                return
        self._waiting_for_batch = bool(self._in_flight)

    def _launch(self, batch: VllmBatch) -> None:
        start = max(self._clock, self._device_free)
        flight = _InFlight(batch, start, start)
        if batch.rows:
            device = self._step_time.device_time(flight.prefills, flight.decodes)
            if self._noise is not None:
                device = self._noise.apply(device, self.num_steps)
            period = self._step_time.period(device, self._async)
            flight.end += period
            self.busy_time += period
            self.num_steps += 1
        self._device_free = flight.end
        self._in_flight.append(flight)
        for row in batch.rows:
            if row.first:
                self._emit(_Kind.scheduled, row.id, start, row.start)

    def _process_results(self) -> None:
        flight = self._in_flight[0]
        self._clock = max(self._clock, flight.end)
        self._apply_cancels(flight.end)
        results = self._scheduler.update(flight.batch)
        self._in_flight.popleft()
        self._waiting_for_batch = False
        for request, reason in results:
            self._delivered[request] += 1
            if self._delivered[request] == 1:
                self._emit(_Kind.first_token, request, self._clock, 1)
            if reason != _End.none:
                self._emit(_Kind.finished, request, self._clock, self._forget(request), reason)
        self._watch_progress(bool(results))

    def _watch_progress(self, delivered: bool) -> None:
        self._without_token = 0 if delivered else self._without_token + 1
        if delivered:
            self._livelock_limit = _FIRST_LIMIT
        elif self._without_token > self._livelock_limit:
            tokens = sum(row[1] + row[2] for row in self._scheduler.request_rows(self._visible))
            self._livelock_limit = _FIRST_LIMIT + 2 * tokens
            if self._without_token > self._livelock_limit:
                self._fail_livelock()

    def _fail_livelock(self) -> NoReturn:
        ids = [*self._scheduler.running, *self._scheduler.waiting]
        more = f", and {len(ids) - 8} more" if len(ids) > 8 else ""
        raise _native.LivelockError(
            f"no token was produced in {self._without_token} iterations; requests without progress: "
            f"{', '.join(map(str, ids[:8]))}{more}"
        )

    # -- what can be seen

    def next_end(self) -> int:
        """Return when to look for the end of a request: after every step, since vLLM's state cannot be copied [ps]."""
        if self._waiting_for_batch:
            return self._in_flight[0].end
        at = self._next_pass()
        return at if at == _native.NEVER else at + 1  # a pass at an instant waits for arrivals at it

    def _emit(
        self, kind: _native.EventKind, request: int, at: int, value: int, reason: _native.EndReason = _End.none
    ) -> None:
        self._events.append((request, at, value, int(kind), int(reason)))

    def take_events(self) -> IntArray:
        """Rows (id, at [ps], value, kind, reason) since the last call, (n, 5)."""
        rows = np.array(self._events, dtype=np.int64).reshape(-1, 5)
        self._events = []
        return rows

    def snapshot(self) -> _native.Snapshot:
        """Return the state at the newest step boundary, as the native engine would publish it."""
        requests = self._scheduler.request_rows(self._visible)
        place = {row[0]: k for k, row in enumerate(requests)}
        return _native.Snapshot.from_state(
            taken_at=self.now,
            boundary=self._clock,
            intake=self._intake,
            waiting_for_batch=self._waiting_for_batch,
            requests=requests,
            in_flight=[
                (
                    flight.start,
                    flight.prefills,
                    flight.decodes,
                    [(place.get(row.id, -1), row.num_tokens, row.sample_index) for row in flight.batch.rows],
                )
                for flight in self._in_flight
            ],
            **self._scheduler.pass_state(),
        )

    @property
    def clock(self) -> int:
        """The loop's own time: its last pass or result [ps]."""
        return self._clock

    @property
    def num_running(self) -> int:
        """Running requests."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Waiting requests that the loop has taken in."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""
        return self._scheduler.num_free_blocks

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._scheduler.num_preemptions

    @property
    def prefix_stats(self) -> list[int]:
        """[queries, hits, preempted queries, preempted hits] in tokens."""
        return list(self._scheduler.prefix_stats)
