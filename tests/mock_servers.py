"""Mock clusters for tests: a small world behind HTTP, and a client that talks to its first instance."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from simcluster.live.mock.run import MockCluster
from simcluster.predict.tokens import EstimatedTokens
from simcluster.world import World
from small_cluster import make_world, scenario_data

__all__ = ["COLUMNS", "FAST", "Client", "against", "prompt", "running", "small_world"]

COLUMNS = {
    "request_id": ["r0", "r1", "r2"],
    "arrival_s": [0.0, 0.1, 0.2],
    "prompt_tokens": [10, 20, 30],
    "output_tokens": [5, 9, 4],
    "finish": ["eos", "eos", "length"],
}
FAST = 50.0  # simulated seconds per second: a step of 20 ms takes 0.4 ms


def small_world(folder: Path, instances: int | list[dict[str, Any]] = 1, **sections: Any) -> World:
    """Return the world of COLUMNS."""
    return make_world(folder, COLUMNS, scenario_data(instances, **sections))[1]


class Client:
    """Talks to one instance of a mock cluster."""

    def __init__(self, cluster: MockCluster, session: aiohttp.ClientSession) -> None:
        self.cluster, self.session, self.url = cluster, session, cluster.urls[0]

    async def post(self, path: str, body: Any, request_id: str | None = None) -> tuple[int, Any]:
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any], request_id: str | None = None) -> list[Any]:
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        async with self.session.post(self.url + path, json=body | {"stream": True}, headers=headers) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = await response.text()
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(each.removeprefix("data: ")) for each in events[:-2]]

    async def metrics(self) -> dict[str, float]:
        """Return what /metrics shows, by name; of ends, by name and reason."""
        found = {}
        async with self.session.get(self.url + "/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                for each in family.samples:
                    reason = each.labels.get("finished_reason")
                    found[f"{each.name} {reason}" if reason else each.name] = each.value
        return found


@asynccontextmanager
async def running(world: World, speed: float = FAST, channels: Sequence[str] = ()) -> AsyncIterator[Client]:
    """Run the mock servers of a world."""
    cluster = MockCluster(world=world, tokens=EstimatedTokens(), speed=speed, channels=channels)
    await cluster.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(cluster, session)
    finally:
        await cluster.stop()


def against(
    world: World, check: Callable[[Client], Awaitable[None]], speed: float = FAST, channels: Sequence[str] = ()
) -> None:
    """Run a check against a cluster."""

    async def main() -> None:
        async with running(world, speed, channels) as client:
            await asyncio.wait_for(check(client), 60)

    asyncio.run(main())


def prompt(count: int, **more: Any) -> dict[str, Any]:
    """Return the body of a completion whose prompt has so many tokens."""
    return {"model": "M", "prompt": list(range(count)), **more}
