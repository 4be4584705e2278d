"""Decisions of a live router: the same Router objects as in a simulation, on the same kind of view. No clock, no I/O.

It is told everything that happens, in order; so whoever tells it the same again gets the same decisions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from simcluster import _native
from simcluster.backends.observations import Observations
from simcluster.backends.replicas import build_replicas
from simcluster.errors import ConfigError
from simcluster.live.router.health import Health
from simcluster.live.router.own import OwnRequest, OwnRequests
from simcluster.live.router.sight import FRESH, OLD, Sight
from simcluster.request import Request
from simcluster.rng import Stream, generator
from simcluster.routers import base_policy, build_router
from simcluster.routers.base import NONE_HEALTHY, SHED, ClusterView, Decision, Router
from simcluster.routers.objective import TieBreaker
from simcluster.routers.settings import RouterSettings
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["IN_FLIGHT", "LPS", "STALE", "Dispatcher", "Journal", "LiveDecision", "NoInstanceError"]

STALE, IN_FLIGHT, LPS = "stale", "in_flight", "lps"  # what a decision fell back to
_FIRST_TOKEN = int(_native.EventKind.first_token)
_FINISHED = int(_native.EventKind.finished)
_LPS_REPLICA: Final = 1  # its random numbers are not those of the policy


class NoInstanceError(Exception):
    """No instance may be asked."""


@dataclass(slots=True)
class LiveDecision:
    """A decision and what it rests on.

    Attributes:
        number: of the decision, from 0.
        request: as the policy saw it.
        decided_ps: when [ps].
        decision: the policy's, or that of what it fell back to.
        tier: how far the view of the chosen instance could be trusted, of `sight.TIERS`; FRESH if nobody looked.
        source: what told its state.
        age_ps: since when nothing was heard of it [ps]; -1 if nobody looked or nothing ever was.
        fallback: STALE, IN_FLIGHT, LPS, none_healthy, or "".
        beside: TTFTs that estimators beside the policy predict [s].
    """

    number: int
    request: Request
    decided_ps: int
    decision: Decision
    tier: int = FRESH
    source: str = ""
    age_ps: int = -1
    fallback: str = ""
    beside: tuple[float, ...] = ()

    @property
    def instance(self) -> int:
        """The chosen instance, or SHED."""
        return self.decision.instance

    @property
    def predicted_ttft_s(self) -> float | None:
        """What is expected of it [s from the arrival], inf without bound; None if nothing is."""
        values = self.decision.predicted_ttft_s
        if values is None or self.instance == SHED:
            return None
        value = values.item(self.instance)
        return None if math.isnan(value) else value  # nan: it was not estimated


class Journal(Protocol):
    """Is told everything that decisions depend on, in order."""

    def decided(self, made: LiveDecision, allowed: tuple[bool, ...]) -> None:
        """A decision was made among the instances that were allowed."""
        ...

    def sent(self, request: Request, instance: int, now_ps: int) -> None:
        """A request left."""
        ...

    def first_token(self, request: int, instance: int, now_ps: int) -> None:
        """The client got the first token of a request."""
        ...

    def ended(self, request: int, instance: int, now_ps: int) -> None:
        """A request has ended, or this attempt at it."""
        ...

    def reconfigured(self, instance: int, options: _native.SchedulerConfig) -> None:
        """An instance has other options than the scenario says."""
        ...


class Dispatcher:
    """One live router without its clock and its sockets.

    Attributes:
        view: what the policy sees.
        own: the open requests.
        health: (j,) which servers may be asked.
        sight: brings the views up to date.
        looks: whether anything depends on them.
        estimators: names of the estimators beside the policy.
        num_decisions: so far.
        journal: told everything, or None.
    """

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        policy: str,
        build_sight: Callable[[ClusterView, OwnRequests], Sight],
        journal: Journal | None = None,
    ) -> None:
        """Build the router of a policy.

        Args:
            world: the instances.
            scenario: routing and live settings, seed.
            policy: as users write it.
            build_sight: makes what brings the views up to date.
            journal: told everything.

        Raises:
            ConfigError: the policy is unknown, or needs what only a simulation has.
        """
        if base_policy(policy) == "oracle":
            raise ConfigError("policy 'oracle' needs the simulator's truth; choose another policy for live use")
        self._scenario = scenario
        alone = scenario.routing.model_copy(update={"replicas": 1})
        (replica,) = build_replicas(world, scenario.model_copy(update={"routing": alone}), policy, oracle=False)
        self._router, self._shadow, self.looks = replica.router, replica.shadow, replica.looks
        self._decides_by_view = replica.decides_by_view
        self.view = replica.view
        self.estimators = replica.shadow.names
        self.own = OwnRequests(world.instances)
        self._marks: set[int] = set()
        self.health = [Health(number, self._marks) for number in range(len(world.instances))]
        self.sight = build_sight(self.view, self.own)
        self._observations = Observations([replica.shadow.listener(replica.router)])
        self._rates = self._build_rates(world) if scenario.live.when_old == "lps" else None
        self._mean_output = [int(each) for each in _mean_output(world)]
        self.num_decisions = 0
        self.journal = journal

    def _build_rates(self, world: World) -> Router:
        routing = self._scenario.routing
        settings = RouterSettings(
            num_instances=len(world.instances),
            objective=routing.objective,
            latency_weight=routing.latency_weight,
            ties=TieBreaker(routing.tie, generator(self._scenario.seed, Stream.TIES, _LPS_REPLICA)),
            rng=generator(self._scenario.seed, Stream.ROUTER, _LPS_REPLICA),
            instances=world.instances,
        )
        return build_router("lps", settings)

    def look(self, now_ps: int) -> None:
        """Bring the views up to an instant [ps], and go on with the options that publishers really have."""
        self.sight.look(now_ps)
        restarted = self.sight.restarted()
        if restarted:
            for j, options in restarted:
                self.reconfigure(j, options)
            self.sight.look(now_ps)

    def decide(self, request: Request, now_ps: int, allowed: tuple[bool, ...]) -> LiveDecision:
        """Choose an instance among those that are allowed, with the views as they were last shown.

        Args:
            request: what is known of the request.
            now_ps: this instant [ps].
            allowed: (j,) instances that serve the model and were not tried yet.

        Raises:
            NoInstanceError: none is allowed, or all of them are marked and the scenario refuses then.
        """
        well = allowed
        if self._marks:
            well = tuple(a and h.may_be_asked(now_ps) for a, h in zip(allowed, self.health, strict=True))
        none_healthy = True not in well
        if none_healthy and (True not in allowed or self._scenario.live.all_unhealthy == "refuse"):
            raise NoInstanceError
        return self.decide_among(request, now_ps, allowed if none_healthy else well, none_healthy=none_healthy)

    def decide_among(
        self, request: Request, now_ps: int, healthy: tuple[bool, ...], *, none_healthy: bool
    ) -> LiveDecision:
        """Choose one of some instances, at least one; `none_healthy`: they are only the least bad."""
        self._observations.deliver(0, now_ps)
        view = self.view
        view.now_ps, view.healthy = now_ps, healthy
        by_rates = self._rates if self._cannot_look(healthy) else None
        decision = (by_rates or self._router).route(request, view)
        if none_healthy:
            decision.reason = NONE_HEALTHY
        made = self._describe(request, now_ps, decision, by_rates=by_rates is not None)
        self.num_decisions += 1
        if self.journal is not None:
            self.journal.decided(made, healthy)
        return made

    def _cannot_look(self, healthy: tuple[bool, ...]) -> bool:
        """Whether some candidate's view must not be used, and rates are to take its place."""
        if self._rates is None or not self._decides_by_view:
            return False
        return any(ok and tier == OLD for ok, tier in zip(healthy, self.sight.tiers, strict=True))

    def _describe(self, request: Request, now_ps: int, decision: Decision, *, by_rates: bool) -> LiveDecision:
        chosen = decision.instance
        number = self.num_decisions
        if chosen == SHED:
            return LiveDecision(number, request, now_ps, decision)
        beside = tuple(self._shadow.predict(request, self.view, chosen)) if self._shadow.names else ()
        fallback = NONE_HEALTHY if decision.reason == NONE_HEALTHY else ""
        if not self._decides_by_view:
            return LiveDecision(number, request, now_ps, decision, fallback=fallback, beside=beside)
        sight = self.sight
        tier = sight.tiers[chosen]
        if by_rates:
            fallback = LPS
        elif tier != FRESH and not fallback:
            fallback = IN_FLIGHT if tier == OLD else STALE
        return LiveDecision(
            number, request, now_ps, decision, tier, sight.sources[chosen], sight.age_ps(chosen), fallback, beside
        )

    def sent(self, request: Request, instance: int, now_ps: int) -> OwnRequest:
        """Note that a request leaves for an instance."""
        own = self.own.sent(request, instance, now_ps + self.view.router_delay_ps, self.view.views[instance])
        self._observations.sent(0, request, instance)
        if self._rates is not None and (tell := getattr(self._rates, "observe_dispatch", None)) is not None:
            tell(request, instance)
        if self.journal is not None:
            self.journal.sent(request, instance, now_ps)
        return own

    def first_token(self, request: int, instance: int, now_ps: int) -> None:
        """Note that the client got the first token."""
        self.own.first_token(request, instance)
        self._observations.add(request, _FIRST_TOKEN, now_ps)
        if self.journal is not None:
            self.journal.first_token(request, instance, now_ps)

    def ended(self, request: int, instance: int, now_ps: int) -> None:
        """Note that a request has ended in any way, or this attempt at it."""
        if not self.own.ended(request, instance, self.view.views[instance]):
            return
        self._observations.add(request, _FINISHED, now_ps)
        if self.journal is not None:
            self.journal.ended(request, instance, now_ps)

    def reconfigure(self, instance: int, options: _native.SchedulerConfig) -> None:
        """Go on with the options that an instance really has."""
        view = self.view
        spec = replace(view.instances[instance], engine=options)
        view.instances = tuple(spec if j == instance else each for j, each in enumerate(view.instances))
        fresh = _native.InstanceView(
            options, spec.believed, self._mean_output[instance], self._scenario.routing.overlay
        )
        view.views[instance] = fresh
        self.sight.replace_view(instance, fresh)
        self.own.tell_again(instance, fresh)
        if self.journal is not None:
            self.journal.reconfigured(instance, options)


def _mean_output(world: World) -> list[int]:
    mean = np.maximum(np.rint(world.known.predicted_output_tokens.mean(axis=0)), 1)
    return [int(each) for each in mean[world.known.group_of_instance]]
