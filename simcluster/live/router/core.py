"""What the parts of a live router share: it decides, knows the servers, and counts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np

from simcluster.live.clock import LiveClock
from simcluster.live.endpoints import Endpoint
from simcluster.live.openai_api import ApiError, Asked, renamed
from simcluster.live.router.dispatcher import Dispatcher, Journal, LiveDecision
from simcluster.live.router.metrics import RouterMetrics
from simcluster.live.router.outcome import FINISHED, Outcome
from simcluster.live.router.own import OwnRequests
from simcluster.live.router.patience import Patience
from simcluster.live.router.relay import Relay
from simcluster.live.router.requests import RequestBuilder
from simcluster.live.router.sight import LiveSight, SightLog
from simcluster.live.router.upstream import Upstreams, served_name
from simcluster.request import Request
from simcluster.routers.base import ClusterView
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["AUTO", "LiveJournal", "RouterCore", "RouterSetup", "build_core"]

AUTO = "auto"  # as a model: the router chooses


class LiveJournal(Journal, SightLog, Protocol):
    """Is told what happens, what is seen, and how it ends."""

    def begun(self, dispatcher: Dispatcher) -> None:
        """Note who decides, before anything else."""
        ...

    def timed(self, made: LiveDecision, seconds: float) -> None:
        """Note how long a decision took [s]."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """Note how a request ended."""
        ...

    @property
    def num_lost(self) -> int:
        """Events that could not be kept."""
        ...


@dataclass(slots=True, kw_only=True)
class RouterSetup:
    """What a router is made of.

    Attributes:
        scenario: instances, routing and live settings.
        path: where it was read.
        world: its instances and means.
        policy: who decides.
        speed: seconds of the router's clock per second; 1 but in front of mock servers.
        requests: makes requests; None: from prompts, as anybody sends them.
        rewrite: changes the body for the chosen instance; None: only the model's name, where it must.
        on_decision: told every decision.
        on_end: told every outcome.
        journal: told everything that decisions depend on, or None.
        urls: where the instances are, instead of the scenario's.
    """

    scenario: Scenario
    path: Path
    world: World
    policy: str
    speed: float = 1.0
    requests: RequestBuilder | None = None
    rewrite: Callable[[bytes, Request, int], bytes] | None = None
    on_decision: Callable[[LiveDecision], None] = lambda _: None
    on_end: Callable[[Outcome], None] = lambda _: None
    journal: LiveJournal | None = None
    urls: Sequence[str] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class RouterCore:
    """A router without its HTTP server.

    Attributes:
        setup: what it is made of.
        clock: its time.
        patience: leaves time out in which this process did not run.
        dispatcher: decides.
        upstreams: the servers.
        relay: passes on what they say.
        served: (j,) what each server calls its model.
        metrics: what it tells about itself.
        requests: makes requests.
        ended: how many requests ended, by status.
    """

    setup: RouterSetup
    clock: LiveClock
    patience: Patience
    dispatcher: Dispatcher
    upstreams: Upstreams
    relay: Relay
    served: list[str]
    metrics: RouterMetrics
    requests: RequestBuilder
    ended: dict[str, int] = field(default_factory=dict)
    _candidates: dict[str, tuple[bool, ...]] = field(init=False, default_factory=dict)

    @property
    def sight(self) -> LiveSight:
        """What it sees."""
        sight = self.dispatcher.sight
        assert isinstance(sight, LiveSight)  # as it was built
        return sight

    def model_names(self) -> list[str]:
        """Return what clients may call a model."""
        return [AUTO, *dict.fromkeys(spec.model for spec in self.dispatcher.view.instances)]

    def candidates(self, model: str) -> tuple[bool, ...]:
        """Return which instances serve what a client calls a model, (j,).

        Raises:
            ApiError: 404, none does.
        """
        found = self._candidates.get(model)
        if found is None:
            specs = self.dispatcher.view.instances
            names = ((AUTO, spec.model, spec.name, served) for spec, served in zip(specs, self.served, strict=True))
            found = tuple(model in each for each in names)
            if True not in found:
                known = ", ".join(self.model_names())
                raise ApiError(404, f"The model `{model[:100]}` does not exist; must be one of {known}", "model")
            self._candidates[model] = found
        return found

    def decide(self, request: Request, allowed: tuple[bool, ...]) -> LiveDecision:
        """Look at all instances and choose one.

        Raises:
            NoInstanceError: none may be asked.
        """
        before = perf_counter()
        if self.dispatcher.looks:
            self.dispatcher.look(self.clock.now_ps())
        made = self.dispatcher.decide(request, self.clock.now_ps(), allowed)
        seconds = perf_counter() - before
        self.metrics.decided(made, seconds)
        if self.setup.journal is not None:
            self.setup.journal.timed(made, seconds)
        self.setup.on_decision(made)
        return made

    def rewrite(self, body: bytes, asked: Asked, request: Request, instance: int) -> bytes:
        """Return the body that an instance gets: the client's, unless the model has another name there."""
        if asked.model != self.served[instance]:
            body = renamed(body, self.served[instance])
        return body if self.setup.rewrite is None else self.setup.rewrite(body, request, instance)

    def count(self, instance: int, status: str) -> None:
        """Count a request that went to an instance, -1 for none, and how it ended."""
        self.ended[status] = self.ended.get(status, 0) + 1
        self.metrics.ended(instance, status)

    def account(self, outcome: Outcome, tpot_s: float | None) -> None:
        """Account for a request that has ended.

        Args:
            outcome: how.
            tpot_s: its target for the time per token [s], or None.
        """
        outcome.end_ps = self.clock.now_ps()
        made = outcome.made
        instance = -1 if made is None else made.instance
        self.count(instance, outcome.status)
        if outcome.status == FINISHED and made is not None:
            e2e_s = (outcome.end_ps - outcome.arrival_ps) / PS_PER_S
            ttft_s = itl_s = None
            if outcome.first_token_ps >= 0:
                ttft_s = (outcome.first_token_ps - outcome.arrival_ps) / PS_PER_S
                if outcome.output_tokens > 1:
                    itl_s = (e2e_s - ttft_s) / (outcome.output_tokens - 1)
            self.metrics.timed(instance, ttft_s, made.predicted_ttft_s, itl_s, e2e_s)
            target_ps = made.request.slo_ttft_ps
            if ttft_s is not None and 0 <= target_ps < ttft_s * PS_PER_S:
                self.metrics.violated("ttft")
            if itl_s is not None and tpot_s is not None and itl_s > tpot_s:
                self.metrics.violated("tpot")
        if self.setup.journal is not None:
            self.setup.journal.finished(outcome)
        self.setup.on_end(outcome)


async def build_core(
    setup: RouterSetup, found: Sequence[Endpoint], urls: list[str], requests: RequestBuilder
) -> RouterCore:
    """Make a router and ask the servers what they call their models.

    Args:
        setup: what it is made of.
        found: (j,) where the states of the instances come from.
        urls: (j,) where they listen.
        requests: makes requests.

    Raises:
        ConfigError: the policy is unknown.
    """
    world, live = setup.world, setup.scenario.live
    clock = LiveClock(setup.speed)

    def build_sight(view: ClusterView, own: OwnRequests) -> LiveSight:
        return LiveSight(
            view.instances,
            view.views,
            own,
            found,
            live,
            _mean_tokens(world),
            clock.origin_ns,
            setup.speed,
            setup.journal,
        )

    dispatcher = Dispatcher(world, setup.scenario, setup.policy, build_sight, setup.journal)
    if setup.journal is not None:
        setup.journal.begun(dispatcher)
    patience = Patience()
    upstreams = Upstreams(urls, live, patience)
    models = enumerate(spec.model for spec in world.instances)
    return RouterCore(
        setup=setup,
        clock=clock,
        patience=patience,
        dispatcher=dispatcher,
        upstreams=upstreams,
        relay=Relay(),
        served=await asyncio.gather(*(served_name(upstreams, j, model) for j, model in models)),
        metrics=RouterMetrics(setup.policy, [spec.name for spec in world.instances]),
        requests=requests,
    )


def _mean_tokens(world: World) -> list[tuple[int, int]]:
    """Return prompt and answer lengths that stand for requests nobody knows, (j,)."""
    known, group = world.known, world.known.group_of_instance
    prompt = np.rint(known.prompt_tokens.mean(axis=0))[group].astype(int).tolist()
    output = np.rint(known.predicted_output_tokens.mean(axis=0))[group].astype(int).tolist()
    return list(zip(prompt, output, strict=True))
