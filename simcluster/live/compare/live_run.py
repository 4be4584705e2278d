"""One policy in front of live servers: the router in this process, driven by the client."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from simcluster.live.client.drive import Driver
from simcluster.live.client.send import Outcome, Sender
from simcluster.live.clock import LiveClock
from simcluster.live.compare.lookup import TraceAnswers, TraceRequests
from simcluster.live.compare.mock_process import mock_process
from simcluster.live.compare.samples import Sampler
from simcluster.live.endpoints import endpoints, require_urls
from simcluster.live.record import LiveRun
from simcluster.live.router.core import AUTO, RouterSetup
from simcluster.live.router.dispatcher import LiveDecision
from simcluster.live.router.server import RouterServer
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S, ns_from_seconds, ps_from_seconds
from simcluster.world import World

__all__ = ["LiveSetup", "replay_clock", "run_live"]

_LEAD_S = 0.2  # from the start of the client's clock to the first request


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSetup:
    """What all policies of a comparison share.

    Attributes:
        scenario: as it is run.
        path: where it was read.
        world: what it fixes.
        speed: simulated seconds per second; 1 with real servers.
        mock_arguments: of `simcluster mock`; None: the scenario's servers are used.
    """

    scenario: Scenario
    path: Path
    world: World
    speed: float = 1.0
    mock_arguments: Sequence[str] | None = None

    @property
    def is_mock(self) -> bool:
        """Whether the servers are mock ones."""
        return self.mock_arguments is not None

    @property
    def end_ps(self) -> int | None:
        """When a run ends whether or not all is done [ps]; None: when all is done."""
        measure, arrivals = self.scenario.measure, self.world.known.arrival_ps
        if measure.horizon_s is not None:
            return ps_from_seconds(measure.horizon_s)
        return None if measure.drain else int(arrivals[-1])

    def patient(self) -> Scenario:
        """Return the scenario with time-outs as long as they are in simulated time, which wall-clock time is not."""
        live, slowness = self.scenario.live, max(1.0, 1.0 / self.speed)
        names = ("first_byte_timeout_s", "stall_timeout_s")
        longer = {name: getattr(live, name) * slowness for name in names}
        return self.scenario.model_copy(update={"live": live.model_copy(update=longer)})


async def run_live(
    setup: LiveSetup, policy: str, on_end: Callable[[Outcome], None] = lambda _: None
) -> tuple[LiveRun, dict[str, Any]]:
    """Run one policy; being cancelled it returns what there is.

    Args:
        setup: what is run.
        policy: who decides.
        on_end: is told of every end.

    Returns:
        The run, and what mock servers reported, else nothing.

    Raises:
        ConfigError: an instance has no url, or the policy cannot run live.
        MockServersError: the mock servers do not start.
    """
    async with AsyncExitStack() as stack:
        if setup.mock_arguments is None:
            servers = None
            urls = require_urls(endpoints(setup.scenario, setup.path), setup.path)
        else:
            servers = await stack.enter_async_context(mock_process(setup.mock_arguments))
            urls = servers.urls
        run = await _drive(setup, policy, urls, on_end)
    return run, {} if servers is None else servers.report


def replay_clock(world: World, speed: float) -> LiveClock:
    """Return a clock on which the first request is due in a moment, and all others as long after it as in the trace."""
    first_s = int(world.known.arrival_ps[0]) / PS_PER_S
    return LiveClock(speed, lead_s=_LEAD_S - first_s / speed)


async def _drive(setup: LiveSetup, policy: str, urls: list[str], on_end: Callable[[Outcome], None]) -> LiveRun:
    world = setup.world
    requests = TraceRequests(world)
    answers = TraceAnswers(world, requests, mock=setup.is_mock)
    way_ps = ps_from_seconds(setup.scenario.routing.router_delay_s)
    made: list[LiveDecision] = []
    router = RouterServer(
        RouterSetup(
            scenario=setup.patient(),
            path=setup.path,
            world=world,
            policy=policy,
            speed=setup.speed,
            requests=requests,
            rewrite=answers,
            on_decision=made.append,
            urls=urls,
        )
    )
    url = await router.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clock = replay_clock(world, setup.speed)
            sender = Sender(world, clock, session, url, AUTO, timeout_s=600.0 * max(1.0, 1.0 / setup.speed))

            async def send(index: int, due_ps: int) -> Outcome:
                if setup.is_mock:
                    answers.reach_ns[index] = ns_from_seconds(clock.loop_time(due_ps + way_ps))
                return await sender.send(index, due_ps)

            driver = Driver(world, clock, send, on_end, sender.prepare)
            names = [spec.name for spec in world.instances]
            interval_s = setup.scenario.output.sample_interval_s
            sampler = Sampler(names, router.core.upstreams.get, clock, interval_s)
            looking = asyncio.create_task(sampler.run())
            end_ps = setup.end_ps
            async with asyncio.timeout_at(None if end_ps is None else clock.loop_time(end_ps)) as horizon:
                outcomes = await driver.run()  # cut short it returns what there is
            clock_ps = clock.now_ps()
            looking.cancel()
    finally:
        await router.stop()
    return LiveRun(
        policy=policy,
        outcomes=outcomes,
        lag_ps=driver.lag_ps,
        decisions=[(requests.index_of[each.request.index], each.decision, each.age_ps, each.beside) for each in made],
        estimators=router.core.dispatcher.estimators,
        clock_ps=clock_ps,
        samples=sampler.table(),
        interrupted=driver.stopped and not horizon.expired(),
        how=_how(setup, urls),
    )


def _how(setup: LiveSetup, urls: list[str]) -> dict[str, Any]:
    """Return what a manifest says about the servers and about what was assumed."""
    lengths = (
        "mock servers know the answer lengths of the trace by the ids of requests; routers do not"
        if setup.is_mock
        else "servers were made to answer at the trace's lengths by max_tokens and ignore_eos; their snapshots show it"
    )
    return {
        "servers": "mock" if setup.is_mock else "real servers",
        "urls": urls,
        "speed": setup.speed,
        "assumptions": [
            lengths,
            "prompts are token ids that mean nothing, as many as the trace has",
            "times are the client's, from the sending of a request; what HTTP and the router take is in them",
        ],
    }
