"""The simulated cluster: the SimPy main loop around native engines.

SimPy carries only what is observable: arrivals, refreshes of the routers' views, samples and the stop; and ends of
requests where others wait for them. Engines advance by themselves, up to the instant at which somebody looks. What
happens at one instant has a fixed order: step ends, then refreshes, arrivals, samples, the stop; a step that starts
at this instant sees its arrivals.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import EventPriority

from simcluster import _native
from simcluster.backends.base import Engine, EngineFactory
from simcluster.backends.followups import FollowUps
from simcluster.backends.instances import SimulatedInstance, oracle_columns
from simcluster.backends.ledger import Ledger
from simcluster.backends.observations import Observations
from simcluster.backends.predictions import Predictions
from simcluster.errors import SimulationError
from simcluster.request import Request, RequestColumns
from simcluster.rng import Stream, generator
from simcluster.routers import base_policy, build_router, build_shadow
from simcluster.routers.base import SHED, ClusterView, OracleView, Router
from simcluster.routers.objective import TieBreaker
from simcluster.routers.settings import RouterSettings
from simcluster.routers.shadow import Shadow
from simcluster.scenario import Scenario
from simcluster.units import ps_from_seconds
from simcluster.world import World

__all__ = ["SimulatedCluster"]


class _Order(IntEnum):
    """Order of events at one instant."""

    END = 0
    CAPTURE = 1
    REFRESH = 2
    ARRIVAL = 3
    SAMPLE = 4
    STOP = 5


@dataclass(slots=True)
class _Replica:
    """One router with its own view of every instance, and the estimators beside it."""

    number: int
    router: Router
    shadow: Shadow
    views: list[_native.InstanceView]

    @property
    def needs_view(self) -> bool:
        return self.router.needs_view or self.shadow.needs_view


@dataclass(slots=True)
class SimulatedCluster:
    """One run of one policy.

    Attributes:
        world: what is fixed beforehand.
        scenario: staleness, measure and output settings.
        policy: name of the policy.
        on_progress: called now and then with the number of requests sent.
        build_engine: the native engine, or one that takes its place.
    """

    world: World
    scenario: Scenario
    policy: str
    on_progress: Callable[[int], None] = lambda _: None
    build_engine: EngineFactory = _native.Engine
    ledger: Ledger = field(init=False)
    predictions: Predictions = field(init=False)
    interrupted: bool = field(init=False, default=False)
    decision_time_ns: int = field(init=False, default=0)
    _is_oracle: bool = field(init=False)
    _known: RequestColumns = field(init=False)
    _instances: list[SimulatedInstance] = field(init=False)
    _replicas: list[_Replica] = field(init=False)
    _observations: Observations = field(init=False)
    _env: simpy.Environment = field(init=False)
    _stop: simpy.Event = field(init=False)
    _captured: deque[list[_native.Snapshot]] = field(init=False, default_factory=deque)
    _followups: FollowUps = field(init=False)
    _planned: list[int] = field(init=False, default_factory=list)  # heap: instants of arrivals to come [ps]
    _sent: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._is_oracle = base_policy(self.policy) == "oracle"
        self._known = oracle_columns(self.world) if self._is_oracle else self.world.known
        count = len(self.world.instances)
        self._instances = [SimulatedInstance(self.world, j, self.build_engine) for j in range(count)]
        self._replicas = list(self._build_replicas())
        self.ledger = Ledger(self.world, self.scenario.output.decisions)
        beside = self._replicas[0].shadow.names
        self.predictions = Predictions(self.policy, beside, len(self.world.known))
        self._observations = Observations(self.ledger, [each.shadow.listener(each.router) for each in self._replicas])
        self._followups = FollowUps(self.world, self.ledger)
        self._env = simpy.Environment(initial_time=0)
        self._stop = simpy.Event(self._env)

    @property
    def engines(self) -> list[Engine]:
        """The engines of the instances."""
        return [instance.engine for instance in self._instances]

    def reports(self) -> list[dict[str, Any]]:
        """What the routers tell about the run, one entry per router that tells something."""
        return [each.router.report() for each in self._replicas if hasattr(each.router, "report")]

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
        self._schedule_next_arrival()
        self._schedule_refresh()
        self._at(0, _Order.SAMPLE, self._sample)
        if measure.horizon_s is not None:
            self._at(ps_from_seconds(measure.horizon_s), _Order.STOP, self._stop_run)
        try:
            self._env.run(until=self._stop)
        except _native.LivelockError as error:
            raise SimulationError(f"policy {self.policy}: {error}") from None
        self._finish()

    def _at(self, at_ps: int, order: _Order, action: Callable[[], None]) -> None:
        event = simpy.Event(self._env)
        event._ok, event._value = True, None  # as simpy.Timeout does: it happens without being triggered
        event.callbacks.append(lambda _: action())
        self._env.schedule(event, priority=EventPriority(int(order)), delay=at_ps - int(self._env.now))

    @property
    def _now(self) -> int:
        return int(self._env.now)

    def _stop_run(self) -> None:
        if not self._stop.triggered:
            self._advance()
            self._stop.succeed()

    def _advance(self) -> None:
        for instance in self._instances:
            instance.engine.advance_to(self._now)

    def _finish(self) -> None:
        """Collect what has happened and what is left."""
        self._collect()
        for instance in self._instances:
            self.ledger.collect_unfinished(instance.spec.index, instance.engine)
        measure = self.scenario.measure
        cut = self.interrupted or measure.horizon_s is not None or not measure.drain
        self.ledger.close(self._now, cut=cut)
        self.on_progress(self._sent)

    # -- arrivals

    def _schedule_next_arrival(self) -> None:
        """Plan the next of the requests that come by the clock; those that wait for others come by their ends."""
        index = self._followups.next_by_clock()
        if index is not None:
            self._schedule_arrival(index, int(self.world.known.arrival_ps[index]))

    def _schedule_arrival(self, index: int, at_ps: int) -> None:
        heappush(self._planned, at_ps)
        self._at(at_ps, _Order.ARRIVAL, lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        if self.interrupted:
            self._stop_run()
            return
        heappop(self._planned)
        request = self._known.request(index, self._now)
        replica = self._replicas[self._sent % len(self._replicas)]
        router = replica.router
        if self._observations.wanted(replica.number):
            self._advance()
            self._collect()
            self._observations.deliver(replica.number, self._now)
        if replica.needs_view:
            self._refresh_before(replica)
        view = (OracleView if self._is_oracle else ClusterView)(
            self._now,
            ps_from_seconds(self.scenario.routing.router_delay_s),
            self.world.instances,
            replica.views,
        )
        before = time.perf_counter_ns()
        decision = router.route(request, view)
        self.decision_time_ns += time.perf_counter_ns() - before
        self.ledger.record_decision(request, decision, view, router.needs_view)
        self._sent += 1
        beside = replica.shadow.predict(request, view, decision.instance) if decision.instance != SHED else ()
        self.predictions.record(index, decision, beside)
        if decision.instance != SHED:
            self._dispatch(replica, decision.instance, request, self._now + view.router_delay_ps)
        else:
            self._release([request.index])
        if self._sent % 64 == 0:
            self.on_progress(self._sent)
        if not self._followups.waits(index):
            self._schedule_next_arrival()
        if (
            self._sent == len(self._known)
            and self.scenario.measure.horizon_s is None
            and not self.scenario.measure.drain
        ):
            self._at(self._now, _Order.STOP, self._stop_run)

    # -- requests that wait for others

    def _release(self, ended: list[int]) -> None:
        """Plan the requests that waited for these."""
        for index, at_ps in self._followups.released(ended):
            self._schedule_arrival(index, max(at_ps, self._now))

    def _watch(self, j: int) -> None:
        """Wake up at the next end at an instance, if somebody waits for one."""
        if not self._followups:
            return
        end = self._instances[j].engine.next_end()
        ticket = self._followups.new_ticket(j)
        if end < _native.NEVER:
            self._at(max(end, self._now), _Order.END, lambda: self._on_end(j, ticket))

    def _on_end(self, j: int, ticket: int) -> None:
        if self._followups.is_current(j, ticket):
            self._instances[j].engine.advance_to(self._now)
            self._collect_from(self._instances[j])
            self._watch(j)

    def _dispatch(self, replica: _Replica, j: int, request: Request, sent_ps: int) -> None:
        chosen = self._instances[j]
        chosen.engine.advance_to(self._now)
        chosen.submit(request, sent_ps)
        if replica.needs_view:
            self._record_dispatch(replica, j, request, sent_ps)
        self._observations.sent(replica.number, request, j)
        if self._followups:
            self._collect_from(chosen)  # it may have been rejected
            self._watch(j)

    def _record_dispatch(self, replica: _Replica, j: int, request: Request, sent_ps: int) -> None:
        prompt_tokens = int(request.prompt_tokens[j])
        replica.views[j].record_dispatch(
            request.index,
            prompt_tokens,
            int(request.predicted_output_tokens[j]),
            self.world.instances[j].engine_arrival_ps(sent_ps, prompt_tokens),
            request.max_tokens,
            self._is_oracle and bool(self.world.truth.ends_by_length[request.index]),
            request.priority,
            request.arrival_ps,
        )

    # -- what routers see

    def _build_replicas(self) -> Iterator[_Replica]:
        routing, world = self.scenario.routing, self.world
        oracle = self._is_oracle
        mean_output = np.maximum(np.rint(world.known.predicted_output_tokens.mean(axis=0)), 1)
        mean_output = mean_output[world.known.group_of_instance]
        shared: list[_native.InstanceView] | None = None
        for number in range(routing.replicas):
            rng = generator(self.scenario.seed, Stream.ROUTER, number)
            ties = TieBreaker(routing.tie, generator(self.scenario.seed, Stream.TIES, number))
            settings = RouterSettings(
                num_instances=len(world.instances),
                objective=routing.objective,
                latency_weight=routing.latency_weight,
                ties=ties,
                rng=rng,
                instances=world.instances,
                num_replicas=routing.replicas,
                replica=number,
                all_candidates=self.scenario.output.decisions == "full",
            )
            views = [
                _native.InstanceView(
                    spec.engine,
                    world.true_models[spec.index].step_time if oracle else spec.believed,
                    int(mean_output[spec.index]),
                    oracle or routing.overlay,
                )
                for spec in world.instances
            ]
            if oracle:  # all routers of the oracle know everything
                shared = shared or views
                views = shared
            beside = [] if oracle else [name for name in self.scenario.output.estimators if name != self.policy]
            yield _Replica(number, build_router(self.policy, settings), build_shadow(beside, settings), views)

    def _refresh_before(self, replica: _Replica) -> None:
        """Refresh a view at a decision, if it is refreshed at every decision."""
        routing = self.scenario.routing
        if self._is_oracle or (routing.refresh_interval_s == 0 == routing.publish_delay_s):
            self._advance()
            self._show([replica], [instance.snapshot() for instance in self._instances])
        elif routing.refresh_interval_s == 0 and self._captured:
            self._show([replica], self._captured.popleft())

    def _show(self, replicas: list[_Replica], snapshots: list[_native.Snapshot]) -> None:
        for replica in replicas:
            for view, snapshot in zip(replica.views, snapshots, strict=True):
                view.refresh(snapshot)

    def _schedule_refresh(self) -> None:
        """Plan the first capture of snapshots, unless views are always fresh or nobody looks at them."""
        routing = self.scenario.routing
        if self._is_oracle or not self._replicas[0].needs_view:
            return
        delay = ps_from_seconds(routing.publish_delay_s)
        interval = ps_from_seconds(routing.refresh_interval_s)
        if interval > 0:
            first = -(-delay // interval) * interval - delay  # the first refresh that sees a published state
            self._at(first, _Order.CAPTURE, lambda: self._capture_periodic(interval, delay))
        elif delay > 0:
            self._schedule_capture(0, delay)

    def _capture_periodic(self, interval: int, delay: int) -> None:
        self._advance()
        snapshots = [instance.snapshot() for instance in self._instances]
        self._at(self._now + delay, _Order.REFRESH, lambda: self._show(self._replicas, snapshots))
        if self._planned or self.ledger.num_open:
            at = self._now + self._idle_steps(interval, delay) * interval
            self._at(at, _Order.CAPTURE, lambda: self._capture_periodic(interval, delay))

    def _idle_steps(self, interval: int, lead: int) -> int:
        """Return how many intervals may pass before anything changes that is visible `lead` ps later.

        While nothing is resident nothing changes until the next arrival, so idle time costs nothing.
        """
        self._collect()
        if self.ledger.num_open or not self._planned:
            return 1
        return max((self._planned[0] - lead - self._now) // interval, 1)

    def _schedule_capture(self, index: int, delay: int) -> None:
        """Capture what a router will see at an arrival, one publish delay before it."""
        arrivals = self.world.known.arrival_ps
        if index < len(arrivals):
            at = max(int(arrivals[index]) - delay, 0)
            self._at(at, _Order.CAPTURE, lambda: self._capture_for(index, delay))

    def _capture_for(self, index: int, delay: int) -> None:
        self._advance()
        self._captured.append([instance.snapshot() for instance in self._instances])
        self._schedule_capture(index + 1, delay)

    # -- time series

    def _collect(self) -> None:
        for instance in self._instances:
            self._collect_from(instance)

    def _collect_from(self, instance: SimulatedInstance) -> None:
        events = self.ledger.collect(instance.spec.index, instance.engine)
        self._observations.add(events)
        if self._followups and len(events):
            self._release(events[events[:, 3] >= int(_native.EventKind.finished), 0].tolist())

    def _sample(self) -> None:
        self._advance()
        interval = ps_from_seconds(self.scenario.output.sample_interval_s)
        steps = self._idle_steps(interval, 0)
        for instance in self._instances:
            self.ledger.record_sample(self._now, instance.spec.index, instance.engine)
        done = not self._planned and self.ledger.num_open == 0
        if self.interrupted or (done and self.scenario.measure.horizon_s is None):
            self._stop_run()
            return
        self._at(self._now + steps * interval, _Order.SAMPLE, self._sample)
