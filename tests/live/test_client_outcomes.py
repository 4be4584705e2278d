"""What becomes of a request that the client sends: whatever a server does, it is one outcome with a reason."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mock_servers import COLUMNS, running
from simcluster.live.client.answer import CHUNKS, SERVER, TRACE
from simcluster.live.client.drive import Driver
from simcluster.live.client.send import Outcome, Sender
from simcluster.live.clock import LiveClock
from simcluster.live.openai_api import DONE, Reply, Usage, sse
from simcluster.world import World
from small_cluster import make_world, scenario_data

Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]
REPLY = Reply("completion", "cmpl-1", "M", 0)


def world_of(folder: Path, **columns: Any) -> World:
    return make_world(folder, COLUMNS | columns, scenario_data())[1]


def outcome_of(world: World, serve: Serve, timeout_s: float = 30.0, speed: float = 1.0) -> Outcome:
    """Send the first request of a world to a server."""

    async def main() -> Outcome:
        app = web.Application()
        app.router.add_post("/v1/completions", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                return await Sender(world, LiveClock(speed), session, url, "M", timeout_s=timeout_s).send(0, 0)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def streaming(*pieces: bytes, hang: bool = False) -> Serve:
    """Return a handler that sends these pieces, and then nothing more for ever, or ends in good order."""

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if hang:
            await asyncio.sleep(3600)
        return response

    return serve


def refusing(status: int) -> Serve:
    async def serve(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status)

    return serve


async def cutting(request: web.Request) -> web.StreamResponse:
    response = await streaming(REPLY.chunk(" a", None))(request)
    assert request.transport is not None
    request.transport.abort()
    return response


TOKENS = [REPLY.chunk(" a", None)] * 4


@pytest.mark.parametrize(
    ("serve", "status", "reason"),
    [
        (streaming(*TOKENS, REPLY.chunk(" a", "stop"), DONE), "finished", "stop"),
        (streaming(*TOKENS, REPLY.chunk(" a", "length")), "finished", "length"),
        (streaming(*TOKENS, REPLY.chunk("", "abort"), DONE), "failed", "abort"),
        (streaming(*TOKENS), "failed", "cut"),
        (cutting, "failed", "cut"),
        (streaming(TOKENS[0], sse({"error": {"message": "gone"}}), DONE), "failed", "error_event"),
        (streaming(b"data: {\n\n"), "failed", "not_the_api"),
        (streaming(b"data: \xff\n\n"), "failed", "not_the_api"),
        (refusing(400), "rejected", "http_400"),
        (refusing(429), "rejected", "http_429"),
        (refusing(500), "failed", "http_500"),
        (refusing(503), "failed", "http_503"),
    ],
)
def test_every_way_to_end_is_an_outcome_with_a_reason(tmp_path: Path, serve: Serve, status: str, reason: str) -> None:
    outcome = outcome_of(world_of(tmp_path), serve)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.end_ps is not None


def test_a_server_that_falls_silent_is_a_timeout(tmp_path: Path) -> None:
    outcome = outcome_of(world_of(tmp_path), streaming(*TOKENS, hang=True), timeout_s=0.2)
    assert (outcome.status, outcome.reason, outcome.output_tokens) == ("failed", "timeout", 4)


def test_nobody_listening_is_a_failed_connection(tmp_path: Path) -> None:
    async def main() -> Outcome:
        async with aiohttp.ClientSession() as session:
            return await Sender(world_of(tmp_path), LiveClock(), session, "http://127.0.0.1:9", "M").send(0, 0)

    outcome = asyncio.run(main())
    assert (outcome.status, outcome.reason) == ("failed", "connection")


def test_a_client_of_the_trace_leaves_when_the_trace_says_so(tmp_path: Path) -> None:
    world = world_of(tmp_path, cancel_s=[0.3, None, None])
    outcome = outcome_of(world, streaming(*TOKENS, hang=True))
    assert (outcome.status, outcome.reason, outcome.output_tokens) == ("failed", "cancelled", 4)


def test_c027_without_usage_tokens_count_by_chunks_and_the_prompt_by_the_trace(tmp_path: Path) -> None:
    world = world_of(tmp_path, prompt_tokens=[100, 20, 30], output_tokens=[9, 9, 4])
    outcome = outcome_of(world, streaming(*[TOKENS[0]] * 6, REPLY.chunk(" a", "stop"), DONE))
    assert (outcome.output_tokens, outcome.token_source) == (7, CHUNKS)
    assert (outcome.prompt_tokens, outcome.prompt_token_source) == (100, TRACE)


def test_c028_the_servers_count_of_the_prompt_holds(tmp_path: Path) -> None:
    world = world_of(tmp_path, prompt_tokens=[512, 20, 30])
    ended = (REPLY.chunk(" a", "stop"), REPLY.usage(Usage(530, 1)), DONE)
    outcome = outcome_of(world, streaming(*ended))
    assert (outcome.prompt_tokens, outcome.prompt_token_source) == (530, SERVER)


def test_requests_have_the_traces_ids_lengths_limits_and_priorities(tmp_path: Path) -> None:
    seen: list[tuple[str | None, Any]] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers.get("X-Request-Id"), json.loads(await request.read())))
        return await streaming(REPLY.chunk(" a", "stop"), DONE)(request)

    outcome_of(world_of(tmp_path, max_tokens=[77, None, None], priority=[3, 0, 0]), serve)
    ((request_id, body),) = seen
    assert request_id == "r0"
    assert len(body.pop("prompt")) == 10
    assert body == {
        "model": "M",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 77,
        "priority": 3,
    }


def test_a_whole_trace_against_a_mock_ends_as_the_trace_says(tmp_path: Path) -> None:
    world = world_of(tmp_path)

    async def main() -> list[Outcome]:
        async with running(world) as client:
            clock = LiveClock(50.0)
            sender = Sender(world, clock, client.session, client.url, "M", body=lambda _: {"max_tokens": 50})
            return await Driver(world, clock, sender.send).run()

    outcomes = asyncio.run(main())
    assert [each.output_tokens for each in outcomes] == [5, 9, 4]
    assert {each.token_source for each in outcomes} == {SERVER}
    assert [each.reason for each in outcomes] == ["stop", "stop", "length"]
    assert [each.prompt_tokens for each in outcomes] == [10, 20, 30]
