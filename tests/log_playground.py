"""A router with a decision log in front of mock servers."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from mock_servers import COLUMNS, FAST, prompt
from simcluster.live.mock.run import MockCluster
from simcluster.live.router.core import RouterSetup
from simcluster.live.router.log.journal import DecisionLog
from simcluster.live.router.server import RouterServer
from simcluster.predict.tokens import EstimatedTokens
from simcluster.scenario import Scenario
from simcluster.world import World
from small_cluster import make_world, scenario_data

__all__ = ["DEAD", "Playground"]

DEAD = "http://127.0.0.1:9"


class Playground:
    """A router with a log in front of mock servers, of which the last one is dead if `dead`."""

    def __init__(self, folder: Path, source: str = "shm", *, dead: bool = True, **sections: Any) -> None:
        channel = f"log-{os.getpid()}-{folder.name[-40:]}"
        entries: list[dict[str, Any]] = [
            {"url": f"http://127.0.0.1:{9000 + j}", "snapshot": f"shm:{channel}-{j}" if source == "shm" else source}
            for j in range(3)
        ]
        self.channels = [f"{channel}-{j}" if source == "shm" else "" for j in range(3)]
        sections.setdefault("live", {"retries": 2, "scrape_interval_s": 0.01, "mark_s": 0.2})
        self.scenario: Scenario
        self.world: World
        self.scenario, self.world = make_world(folder, COLUMNS, scenario_data(entries, **sections))
        self.folder, self.log = folder, folder / "log"
        self.warnings: list[str] = []
        self.dead = dead
        self.server: RouterServer
        self.session: aiohttp.ClientSession
        self.url = ""

    def servers(self, world: World) -> MockCluster:
        return MockCluster(world=world, tokens=EstimatedTokens(), speed=FAST, channels=self.channels)

    @asynccontextmanager
    async def running(self, policy: str, rows: int = 100_000, files: int = 20) -> AsyncIterator[None]:
        self.cluster = self.servers(self.world)
        await self.cluster.start("127.0.0.1", 0)
        urls = [DEAD if self.dead and j == 2 else url for j, url in enumerate(self.cluster.urls)]
        log = DecisionLog(
            *(self.log, self.world, self.scenario, policy),
            speed=FAST,
            rows=rows,
            files=files,
            warn=self.warnings.append,
        )
        setup = RouterSetup(
            scenario=self.scenario,
            path=self.folder / "small.yaml",
            world=self.world,
            policy=policy,
            speed=FAST,
            journal=log,
            urls=urls,
        )
        self.server = RouterServer(setup)
        self.url = await self.server.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as self.session:
                yield
        finally:
            await self.server.stop()
            log.close()
            await self.cluster.stop()

    async def ask(self, number: int, **more: Any) -> int:
        body = prompt(5 + 13 * (number % 7), max_tokens=3 + number % 9, **more)
        if number % 2 == 0:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"X-Request-Id": f"q{number}", "x-session-id": f"s{number % 5}", "x-slo-ttft-ms": "250"}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def burst(self, first: int, count: int) -> None:
        """Ask a few at a time, so that views are busy and change between decisions."""
        gate = asyncio.Semaphore(8)

        async def one(number: int) -> None:
            async with gate:
                assert await self.ask(number) == 200

        await asyncio.gather(*(one(first + k) for k in range(count)))

    def play(self, policy: str, script: Callable[["Playground"], Awaitable[None]], **limits: int) -> None:
        async def main() -> None:
            async with self.running(policy, **limits):
                await asyncio.wait_for(script(self), 60)

        asyncio.run(main())
