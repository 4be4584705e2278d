"""The log of a live router: takes note in the event loop, writes in a thread, and never stops the router."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from simcluster import _native
from simcluster.live.router.dispatcher import Dispatcher, LiveDecision
from simcluster.live.router.log.columns import (
    DECIDED,
    ENDED,
    FIRST_TOKEN,
    RECONFIGURED,
    SENT,
    SHOWN,
    Event,
    EventRows,
    Row,
)
from simcluster.live.router.log.files import LogFiles, prepare_folder, remove_folder
from simcluster.live.router.log.keyframe import InstanceState
from simcluster.live.router.log.manifest import make_manifest, options_to_json
from simcluster.live.router.log.rows import Noted, decision_row
from simcluster.live.router.outcome import Outcome
from simcluster.request import Request
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["DecisionLog"]

_GROUP: Final = 1000  # events that are written together
_MOST_BEHIND: Final = 32  # groups that wait for the disk; then the log ends
# What the thread may meet that is no fault of the disk is reported in the same way: a log is worth no router.
_REFUSALS: Final = (OSError, ValueError, TypeError, OverflowError, MemoryError)


class DecisionLog:
    """Everything that a router decides and is told, in files from which it can be replayed.

    A failure ends the log, not the router: one warning, and what is not in whole files counts as lost.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        scenario: Scenario,
        policy: str,
        *,
        speed: float = 1.0,
        rows: int = 100_000,
        files: int = 20,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Write the manifest.

        Args:
            folder: a new one.
            world: what the router is built from.
            scenario: its settings.
            policy: who decides.
            speed: seconds of its clock per second.
            rows: events per file, about.
            files: so many of the newest files stay.
            warn: told in one line if the log ends early; by another thread.

        Raises:
            ConfigError: the folder is not empty or cannot be written.
        """
        digest = prepare_folder(folder, make_manifest(world, scenario, policy, speed))
        self._folder, self._policy, self._rows_per_file, self._warn = folder, policy, rows, warn
        self._instances = world.instances
        self._files = LogFiles(folder, digest, EventRows(world.known.group_of_instance), files)
        self._thread = ThreadPoolExecutor(1, "log")
        self._waiting: deque[Future[None]] = deque()
        self._events: list[Event] = []
        self._rows: list[Row] = []
        self._noted: dict[int, list[Noted]] = {}  # by number of the request
        self._states = [InstanceState(j) for j in range(len(world.instances))]
        self._in_file = self._told = 0
        self._has_failed = self._is_closed = False
        self._dispatcher: Dispatcher | None = None

    @property
    def num_lost(self) -> int:
        """Events that are in no file and will be in none."""
        return self._told - self._files.written if self._has_failed else 0

    def begun(self, dispatcher: Dispatcher) -> None:
        """Note who decides."""
        self._dispatcher = dispatcher

    # -- events

    def shown(self, instance: int, source: str, snapshot: _native.Snapshot) -> None:
        """Note a snapshot that a view got."""
        self._states[instance].shown(source, snapshot)
        self._add((SHOWN, False, instance, source, snapshot))

    def decided(self, made: LiveDecision, allowed: tuple[bool, ...]) -> None:
        """Note a decision."""
        assert self._dispatcher is not None  # it has begun
        if self._in_file >= self._rows_per_file and not self._has_failed:
            self._turn_over()
        sight = self._dispatcher.sight
        self._add((DECIDED, False, made, allowed, tuple(sight.tiers), tuple(sight.ages_ps)))
        noted = self._noted.setdefault(made.request.index, [])
        noted.append(Noted(made, len(noted) + 1, time.time_ns()))

    def sent(self, request: Request, instance: int, now_ps: int) -> None:
        """Note that a request left."""
        assert self._dispatcher is not None  # it has begun
        self._states[instance].sent(self._dispatcher.own.open[instance][request.index])
        self._add((SENT, False, request.index, instance, now_ps))

    def first_token(self, request: int, instance: int, now_ps: int) -> None:
        """Note that the client got the first token of a request."""
        self._add((FIRST_TOKEN, False, request, instance, now_ps))

    def ended(self, request: int, instance: int, now_ps: int) -> None:
        """Note that a request has ended, or this attempt at it."""
        self._states[instance].ended(request)
        self._add((ENDED, False, request, instance, now_ps))

    def reconfigured(self, instance: int, options: _native.SchedulerConfig) -> None:
        """Note that an instance has other options than the scenario says; its view knows nothing any more."""
        text = options_to_json(options)
        self._states[instance].reconfigured(text)
        self._add((RECONFIGURED, False, instance, text))

    # -- for the table of decisions

    def timed(self, made: LiveDecision, seconds: float) -> None:
        """Note how long the last decision of a request took [s]."""
        self._noted[made.request.index][-1].route_s = seconds

    def finished(self, outcome: Outcome) -> None:
        """Note how a request ended."""
        if outcome.made is not None:
            for noted in self._noted.pop(outcome.made.request.index, ()):
                self._put(noted, outcome)

    def _put(self, noted: Noted, outcome: Outcome | None) -> None:
        if not self._has_failed and self._dispatcher is not None:
            estimators = self._dispatcher.estimators
            self._rows.append(decision_row(noted, outcome, self._policy, self._instances, estimators))

    # -- files

    def _add(self, event: Event) -> None:
        self._told += 1
        if self._has_failed:
            return
        self._in_file += 1
        self._events.append(event)
        if len(self._events) >= _GROUP:
            self._flush()

    def _flush(self) -> None:
        events, self._events = self._events, []
        rows, self._rows = self._rows, []
        self._hand_over(lambda: self._files.write(events, rows))

    def _turn_over(self) -> None:
        """Begin a new file with all that a replay from there on needs to know."""
        self._flush()
        self._hand_over(self._files.finish)
        self._in_file = 0
        for state in self._states:
            for event in state.events():
                self._told += 1
                self._events.append(event)

    def _hand_over(self, work: Callable[[], None]) -> None:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if len(self._waiting) >= _MOST_BEHIND:
            self._fail("the disk does not keep up")
        elif not self._has_failed:
            self._waiting.append(self._thread.submit(self._try, work))

    def _try(self, work: Callable[[], None]) -> None:
        if self._has_failed:
            self._files.abandon()
            return
        try:
            work()
        except _REFUSALS as error:
            self._fail(getattr(error, "strerror", None) or str(error))
            self._files.abandon()

    def _fail(self, reason: Any) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._events, self._rows = [], []
            self._warn(f"--log {self._folder}: cannot be written ({reason}); the router goes on without a log")

    def close(self) -> None:
        """Write what is left and wait for it; of a router that was never asked nothing stays."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._told:
            self._thread.shutdown()
            remove_folder(self._folder)
            return
        for each in self._noted.values():
            for noted in each:
                self._put(noted, None)
        self._flush()
        self._hand_over(self._files.finish)
        self._thread.shutdown()
