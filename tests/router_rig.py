"""A live router in front of upstream servers that do as a test tells them, all in one event loop."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from mock_servers import COLUMNS
from simcluster.live.router.core import RouterSetup
from simcluster.live.router.dispatcher import LiveDecision
from simcluster.live.router.outcome import Outcome
from simcluster.live.router.server import RouterServer
from small_cluster import make_world, scenario_data

__all__ = ["EVENTS", "Behave", "Rig", "Upstream", "answer", "rig", "routed"]

COMPLETIONS = "/v1/completions"
EVENTS = [
    b'data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n',
    b'data: {"id":"a","choices":[{"index":0,"text":"y","finish_reason":null}]}\n\n',
    b'data: {"id":"a","choices":[{"index":0,"text":"z","finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]
Behave = Callable[["Upstream", web.Request], Awaitable[web.StreamResponse]]


async def answer(upstream: "Upstream", request: web.Request) -> web.StreamResponse:
    """Stream EVENTS, or answer in one piece."""
    if not json.loads(await request.read()).get("stream"):
        usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
        return web.json_response({"choices": [{"index": 0, "text": "xyz"}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "X-From": "upstream"})
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
        await asyncio.sleep(upstream.gap_s)
    return response


class Upstream:
    """One server.

    Attributes:
        behave: what it does with a completion.
        gap_s: between two events [s].
        requests: so many came.
        open: so many are being answered.
        left: so many clients left before their answer had ended.
        headers: of the last request.
        body: of the last request.
        gauges: text of /metrics; None: it has none.
    """

    def __init__(self) -> None:
        self.behave: Behave = answer
        self.gap_s = 0.0
        self.requests = self.open = self.left = 0
        self.headers: Any = {}
        self.body = b""
        self.gauges: str | None = None
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Leave, and cut whatever is open."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.open += 1
        self.headers, self.body = request.headers, await request.read()
        try:
            return await self.behave(self, request)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.gauges or "", status=404 if self.gauges is None else 200)


class Rig:
    """A router, its servers and a client."""

    def __init__(
        self,
        server: RouterServer,
        url: str,
        upstreams: list[Upstream],
        session: aiohttp.ClientSession,
        decisions: list[LiveDecision],
        outcomes: list[Outcome],
    ) -> None:
        self.server, self.url, self.upstreams, self.session = server, url, upstreams, session
        self.decisions, self.outcomes = decisions, outcomes

    @property
    def open_by_instance(self) -> list[int]:
        return [len(each) for each in self.server.core.dispatcher.own.open]

    async def post(
        self, body: Any = None, path: str = COMPLETIONS, **headers: str
    ) -> tuple[int, bytes, "aiohttp.typedefs.CIMultiDictProxy[str]"]:
        """Send a request and return status, body and headers; the default streams."""
        content = {"model": "auto", "prompt": "hi"} | (body if isinstance(body, dict) else {})
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(content).encode())
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, data=data, headers=named) as response:
            return response.status, await response.read(), response.headers

    async def stream(self, **headers: str) -> tuple[int, bytes, "aiohttp.typedefs.CIMultiDictProxy[str]"]:
        return await self.post({"stream": True}, **headers)

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def quiet(self) -> None:
        """Wait until nothing is open, and make sure that everything was counted back."""
        async with asyncio.timeout(20):
            while self.server.num_open or any(each.open for each in self.upstreams):
                await asyncio.sleep(0.005)
        assert self.open_by_instance == [0] * len(self.upstreams)
        assert all(each.probe is None for each in self.server.core.dispatcher.health)


@asynccontextmanager
async def routed(
    folder: Path, instances: int, policy: str, live: dict[str, Any], changes: Sequence[dict[str, Any]] = (), **more: Any
) -> AsyncIterator[Rig]:
    """Run a router in front of so many upstream servers."""
    async with AsyncExitStack() as stack:
        upstreams = [Upstream() for _ in range(instances)]
        for each in upstreams:
            await each.start()
            stack.push_async_callback(each.stop)
        entries = list(changes) or [{"snapshot": "none"} for _ in range(instances)]
        data = scenario_data([{"url": up.url} | entry for up, entry in zip(upstreams, entries, strict=True)], live=live)
        scenario, world = make_world(folder, COLUMNS, data | more)
        decisions: list[LiveDecision] = []
        outcomes: list[Outcome] = []
        setup = RouterSetup(
            scenario=scenario,
            path=folder / "small.yaml",
            world=world,
            policy=policy,
            on_decision=decisions.append,
            on_end=outcomes.append,
        )
        server = RouterServer(setup)
        url = await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Rig(server, url, upstreams, session, decisions, outcomes)


def rig(
    folder: Path,
    check: Callable[[Rig], Awaitable[None]],
    instances: int = 2,
    policy: str = "round_robin",
    live: dict[str, Any] | None = None,
    changes: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> None:
    """Run a check against a router; at the end nothing may be open."""

    async def main() -> None:
        async with asyncio.timeout(60):
            async with routed(folder, instances, policy, {"drain_s": 0.1} | (live or {}), changes, **more) as found:
                await check(found)
                await found.quiet()

    asyncio.run(main())
