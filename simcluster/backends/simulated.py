"""The simulated cluster: the SimPy main loop around native engines.

SimPy carries only what is observable: the next arrival, refreshes of the routers' views, samples and the stop; and
the next end of a request where others wait for it. Engines advance by themselves, up to the instant at which somebody
looks. What happens at one instant has a fixed order: step ends, then refreshes, arrivals, samples, the stop; a step
that starts at this instant sees its arrivals.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter_ns
from typing import Any

import simpy

from simcluster import _native
from simcluster.backends.alarms import Alarm, Order, at_once
from simcluster.backends.base import EngineFactory
from simcluster.backends.followups import FollowUps
from simcluster.backends.instances import build_cluster, oracle_columns
from simcluster.backends.ledger import CHUNK_ROWS, NEVER, DecisionLog, Recorder, RequestRows, SampleLog
from simcluster.backends.observations import Observations
from simcluster.backends.predictions import Predictions
from simcluster.backends.replicas import Replica, build_replicas
from simcluster.errors import SimulationError
from simcluster.request import IntArray, Request, RequestColumns
from simcluster.routers import base_policy
from simcluster.routers.base import SHED
from simcluster.scenario import Scenario
from simcluster.units import ps_from_seconds
from simcluster.world import World

__all__ = ["SimulatedCluster"]

_FINISHED = int(_native.EventKind.finished)
_ROUND = 64  # arrivals between two looks at progress and at what may leave


@dataclass(slots=True)
class SimulatedCluster:
    """One run of one policy.

    Attributes:
        world: what is fixed beforehand.
        scenario: staleness, measure and output settings.
        policy: name of the policy.
        on_progress: called now and then with the number of requests sent.
        build_engine: the native engine, or one that takes its place.
        recorder: takes what the run leaves behind; None: it is dropped.
        predictions: what was expected of the instances that requests were sent to.
        interrupted: the run was ended by `interrupt`.
        decision_time_ns: time spent in the routers' decisions [ns].
        num_sent: requests that have arrived.
    """

    world: World
    scenario: Scenario
    policy: str
    on_progress: Callable[[int], None] = lambda _: None
    build_engine: EngineFactory = _native.Engine
    recorder: Recorder | None = None
    predictions: Predictions = field(init=False)
    interrupted: bool = field(init=False, default=False)
    decision_time_ns: int = field(init=False, default=0)
    num_sent: int = field(init=False, default=0)
    _known: RequestColumns = field(init=False)
    _cluster: _native.Cluster = field(init=False)
    _replicas: list[Replica] = field(init=False)
    _always_fresh: bool = field(init=False)
    _observations: Observations = field(init=False)
    _followups: FollowUps = field(init=False)
    _is_closed: bool = field(init=False)  # requests wait for others
    _listening: bool = field(init=False)  # some router wants to be told
    _by_clock: Iterator[tuple[int, int]] = field(init=False)
    _decisions: DecisionLog | None = field(init=False, default=None)
    _samples: SampleLog = field(init=False, default_factory=SampleLog)
    _env: simpy.Environment = field(init=False)
    _stop: simpy.Event = field(init=False)
    _next_arrival: Alarm = field(init=False)
    _next_end: Alarm = field(init=False)
    _captured: deque[_native.Captured] = field(init=False, default_factory=deque)
    _planned: list[tuple[int, int, int]] = field(init=False, default_factory=list)  # heap: (at [ps], number, request)
    _num_planned: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        world, routing = self.world, self.scenario.routing
        oracle = base_policy(self.policy) == "oracle"
        self._known = oracle_columns(world) if oracle else world.known
        self._replicas = build_replicas(world, self.scenario, self.policy, oracle=oracle)
        self._always_fresh = oracle or routing.refresh_interval_s == 0 == routing.publish_delay_s
        self._observations = Observations([each.shadow.listener(each.router) for each in self._replicas])
        self.predictions = Predictions(self.policy, self._replicas[0].shadow.names, len(world.known))
        self._followups = FollowUps(world)
        self._is_closed, self._by_clock = bool(self._followups), self._followups.by_clock()
        watch = _native.Watch.ends if self._is_closed else _native.Watch.nothing
        for replica in self._replicas:
            replica.listens = self._observations.wanted(replica.number)
            replica.told = self._observations.tells_dispatches(replica.number)
            watch = _native.Watch.first_tokens_and_ends if replica.listens else watch
        self._listening = any(replica.listens for replica in self._replicas)
        self._cluster = build_cluster(world, self._known, self.build_engine, watch, oracle=oracle)
        for replica in self._replicas:
            replica.join(self._cluster)
        if self.recorder is not None and self.scenario.output.decisions != "off":
            full = self.scenario.output.decisions == "full"
            self._decisions = DecisionLog(len(world.instances), full=full)
        self._env = simpy.Environment(initial_time=0)
        self._stop = simpy.Event(self._env)
        self._next_arrival = Alarm(self._env, Order.ARRIVAL, self._arrive)
        self._next_end = Alarm(self._env, Order.END, self._wake)

    # -- the main loop

    def interrupt(self) -> None:
        """End the run at its next event; what has happened until then stays."""
        self.interrupted = True

    def run(self) -> None:
        """Run until the horizon, until every request has ended, or until `interrupt` was called.

        Raises:
            SimulationError: an engine makes no progress.
        """
        measure = self.scenario.measure
        self._plan_next_by_clock()
        self._wait_for_arrival()
        self._schedule_refresh()
        self._at(0, Order.SAMPLE, self._sample)
        if measure.horizon_s is not None:
            self._at(ps_from_seconds(measure.horizon_s), Order.STOP, self._stop_run)
        try:
            self._env.run(until=self._stop)
        except _native.LivelockError as error:
            raise SimulationError(f"policy {self.policy}: {error}") from None
        self._cluster.finish(self._now, self.interrupted or measure.horizon_s is not None or not measure.drain)
        self._record(least=0)
        self.on_progress(self.num_sent)

    def _arrive(self, now: int) -> None:
        """Let a router decide about the next request, and send it."""
        if self.interrupted:
            self._stop_run()
            return
        index = heappop(self._planned)[2]
        replica = self._replicas[self.num_sent % len(self._replicas)]
        self.num_sent += 1
        request = self._known.request(index, now)
        chosen = self._decide(replica, request, now)
        if chosen == SHED:
            self._cluster.turn_away(index, now)
            self._release(index, now, now)
        else:
            self._cluster.dispatch(index, chosen, now, now + replica.view.router_delay_ps, replica.notes)
            if replica.told:
                self._observations.sent(replica.number, request, chosen)
        if not self._is_closed or not self._followups.waits[index]:
            self._plan_next_by_clock()
        self._wait_for_arrival()
        if self._is_closed:
            self._wake(now)  # it may have been rejected, and it moves the ends of others
        if self.num_sent % _ROUND == 0:
            self.on_progress(self.num_sent)
            self._record(least=CHUNK_ROWS)

    def _decide(self, replica: Replica, request: Request, now: int) -> int:
        """Tell a router what it may know by now, and ask it where a request goes."""
        view = replica.view
        if replica.listens:
            self._cluster.advance(now)
            self._hear(self._cluster.take_notices(), now)
            self._observations.deliver(replica.number, now)
        if replica.looks:
            self._refresh_before(replica)
        view.now_ps = now
        before = perf_counter_ns()
        decision = replica.router.route(request, view)
        self.decision_time_ns += perf_counter_ns() - before
        chosen = decision.instance
        if self._decisions is not None:
            looked = replica.decides_by_view and chosen != SHED
            self._decisions.add(request.index, decision, view.snapshot_age_ps(chosen) if looked else NEVER)
        if chosen != SHED and (replica.estimates or decision.predicted_ttft_s is not None):
            self.predictions.record(request.index, decision, replica.shadow.predict(request, view, chosen))
        return chosen

    def reports(self) -> list[dict[str, Any]]:
        """Return what the routers tell about the run, one entry per router that tells something."""
        return [each.router.report() for each in self._replicas if hasattr(each.router, "report")]

    def _stop_run(self) -> None:
        if not self._stop.triggered:
            self._cluster.advance(self._now)
            self._stop.succeed()

    def _at(self, at_ps: int, order: Order, action: Callable[[], None]) -> None:
        at_once(self._env, order, action, at_ps - self._now)

    @property
    def num_open(self) -> int:
        """Requests that were sent and have not ended."""
        return self._cluster.num_open

    @property
    def _now(self) -> int:
        return int(self._env.now)

    # -- requests to come, by the clock or when another one has ended

    def _plan_next_by_clock(self) -> None:
        for index, at_ps in self._by_clock:
            self._num_planned += 1
            heappush(self._planned, (at_ps, self._num_planned, index))
            return

    def _wait_for_arrival(self) -> None:
        if self._planned:
            self._next_arrival.set(self._planned[0][0])
        elif self._ends_with_last_arrival and self.num_sent == len(self._known):
            self._at(self._now, Order.STOP, self._stop_run)

    @property
    def _ends_with_last_arrival(self) -> bool:
        return self.scenario.measure.horizon_s is None and not self.scenario.measure.drain

    def _wake(self, now: int) -> None:
        """Hear of the ends up to now, and wake up again at the next one; an arrival before it wakes up anyway.

        An end that has moved away is not worth a new plan: the wake-up finds nothing and plans itself anew.
        """
        told = self._cluster.take_ends(now)
        if told:
            self._hear(told, now)
        end = self._cluster.next_end(int(self._env.peek()))  # a sample or the stop is always to come
        if end < self._next_end.at_ps and end <= self._next_arrival.at_ps:
            self._next_end.set(end if end > now else now)

    def _hear(self, told: list[tuple[int, int, int]], now: int) -> None:
        """Pass on what clients were told."""
        for request, kind, seen_ps in told:
            if self._listening:
                self._observations.add(request, kind, seen_ps)
            if self._is_closed and kind >= _FINISHED and self._followups.awaited[request]:
                self._release(request, seen_ps, now)

    def _release(self, ended: int, end_ps: int, now: int) -> None:
        """Plan the requests that waited for this one."""
        for index, at_ps in self._followups.released(ended, end_ps):
            self._num_planned += 1
            heappush(self._planned, (at_ps if at_ps > now else now, self._num_planned, index))
        self._wait_for_arrival()

    # -- what routers see

    def _refresh_before(self, replica: Replica) -> None:
        """Refresh a view at a decision, if it is refreshed at every decision."""
        if self._always_fresh:
            self._cluster.refresh(replica.native, self._now)
        elif self.scenario.routing.refresh_interval_s == 0 and self._captured:
            self._cluster.show(replica.native, self._captured.popleft())

    def _schedule_refresh(self) -> None:
        """Plan the first capture of snapshots, unless views are always fresh or nobody looks at them."""
        routing = self.scenario.routing
        if self._always_fresh or not self._replicas[0].looks:
            return
        delay = ps_from_seconds(routing.publish_delay_s)
        interval = ps_from_seconds(routing.refresh_interval_s)
        if interval > 0:
            first = -(-delay // interval) * interval - delay  # the first refresh that sees a published state
            self._at(first, Order.CAPTURE, lambda: self._capture_periodic(interval, delay))
        else:
            self._schedule_capture(0, delay)

    def _capture_periodic(self, interval: int, delay: int) -> None:
        captured = self._cluster.capture(self._now)
        self._at(self._now + delay, Order.REFRESH, lambda: self._show_all(captured))
        if self._planned or self._cluster.num_open:
            at = self._now + self._idle_steps(interval, delay) * interval
            self._at(at, Order.CAPTURE, lambda: self._capture_periodic(interval, delay))

    def _show_all(self, captured: _native.Captured) -> None:
        for replica in self._replicas:
            self._cluster.show(replica.native, captured)

    def _idle_steps(self, interval: int, lead: int) -> int:
        """Return how many intervals may pass before anything changes that is visible `lead` ps later.

        While nothing is resident nothing changes until the next arrival, so idle time costs nothing.
        """
        if self._cluster.num_open or not self._planned:
            return 1
        return max((self._planned[0][0] - lead - self._now) // interval, 1)

    def _schedule_capture(self, index: int, delay: int) -> None:
        """Capture what a router will see at an arrival, one publish delay before it."""
        arrivals = self.world.known.arrival_ps
        if index < len(arrivals):
            at = max(int(arrivals[index]) - delay, 0)
            self._at(at, Order.CAPTURE, lambda: self._capture_for(index, delay))

    def _capture_for(self, index: int, delay: int) -> None:
        self._captured.append(self._cluster.capture(self._now))
        self._schedule_capture(index + 1, delay)

    # -- records

    def _sample(self) -> None:
        self._cluster.advance(self._now)
        interval = ps_from_seconds(self.scenario.output.sample_interval_s)
        steps = self._idle_steps(interval, 0)
        if self.recorder is not None:
            self._samples.add(self._now, self._cluster.loads())
        done = not self._planned and self._cluster.num_open == 0
        if self.interrupted or (done and self.scenario.measure.horizon_s is None):
            self._stop_run()
            return
        self._at(self._now + steps * interval, Order.SAMPLE, self._sample)

    @property
    def clock_ps(self) -> int:
        """This instant, after the run its end [ps]."""
        return self._now

    def loads(self) -> IntArray:
        """Return the load of every instance now, as `_native.Cluster.loads` does, (j, 10)."""
        return self._cluster.loads()

    def _record(self, least: int) -> None:
        """Let finished requests, decisions and samples leave if there are so many of them."""
        count = self._cluster.num_ready(least) if least else self.num_sent
        if count:
            rows = self._cluster.take_rows(count)
            if self.recorder is not None:
                self.recorder.requests(RequestRows.by_arrival(rows))
        if self.recorder is None:
            return
        if self._decisions is not None and len(self._decisions) > least:
            self.recorder.decisions(self._decisions.take())
        if len(self._samples) > least:
            self.recorder.samples(self._samples.take())
