"""Long answers flow through the router byte for byte, at the pace of whoever reads them."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from router_rig import EVENTS, Rig, Upstream, rig
from simcluster import _native
from simcluster.live.router.connection import Connection
from simcluster.live.router.relay import Relay

_ANSWER = [
    *EVENTS[:2],
    *(b"data: %s\n\n" % random.Random(k).randbytes(k * 997 % 40_000).hex().encode() for k in range(400)),
    EVENTS[3],
]  # 16 MB
_WHOLE = b"".join(_ANSWER)
_ROUNDS = 4  # of it for a client that pauses: far more than the system's buffers on the way hold


class _Writer:
    """A server that sends the long answer, in pieces that do not heed where events end."""

    def __init__(self, piece: int, rounds: int = 1) -> None:
        self.piece, self.rounds, self.sent = piece, rounds, 0

    async def __call__(self, _: Upstream, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(self.rounds):
            for begin in range(0, len(_WHOLE), self.piece):
                await response.write(_WHOLE[begin : begin + self.piece])
                self.sent += self.piece
        return response


async def _ask(rig: Rig, version: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    body = b'{"model": "auto", "prompt": "x", "stream": true}'
    writer.write(
        b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (version, len(body), body)
    )
    return reader, writer


@pytest.mark.parametrize("piece", [1_000, 33_333, 3_000_000])
def test_a_long_answer_arrives_as_it_was_sent(tmp_path: Path, piece: int) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = _Writer(piece)
        status, got, _ = await rig.stream()
        assert (status, got) == (200, _WHOLE)
        await rig.quiet()
        (outcome,) = rig.outcomes
        assert (outcome.status, outcome.output_tokens) == ("finished", len(_ANSWER) - 1)

    rig(tmp_path, check, instances=1)


def test_a_client_that_pauses_holds_its_server_up_and_then_gets_all(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = server = _Writer(20_000, _ROUNDS)
        reader, writer = await _ask(rig, b"1.0")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Transfer-Encoding" not in head  # which HTTP/1.0 does not know
        before = -1
        while server.sent != before:  # until all buffers are full
            before = server.sent
            await asyncio.sleep(0.1)
        assert server.sent < (_ROUNDS - 1) * len(_WHOLE)
        got = await reader.read()
        writer.close()
        assert got == _ROUNDS * _WHOLE
        await rig.quiet()
        assert [each.status for each in rig.outcomes] == ["finished"]

    rig(tmp_path, check, instances=1)


def test_a_connection_is_used_again_after_an_answer_has_flowed(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        peers: list[object] = []

        async def note(upstream: Upstream, request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            peers.append(request.transport.get_extra_info("peername"))
            return await _Writer(50_000)(upstream, request)

        rig.upstreams[0].behave = note
        for _ in range(3):
            assert (await rig.stream())[1] == _WHOLE
        assert len(peers) == 3
        assert len(set(peers)) == 1

    rig(tmp_path, check, instances=1)


class _Busy(asyncio.Transport):
    """The way to a client who has yet to take something."""

    def __init__(self, waiting: int, *, closing: bool = False) -> None:
        super().__init__()
        self.waiting, self.closing = waiting, closing

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing


class _Asked(Connection):
    asked = 0

    def lent(self) -> int | None:
        self.asked += 1
        return None


def test_nothing_flows_past_what_a_client_has_yet_to_take(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        server = _Asked()
        for client, asked in ((_Busy(1), 0), (_Busy(0, closing=True), 0), (_Busy(0), 1)):
            relay = rig.server.core.relay
            assert relay.open(server, client, _native.EventCounter(), lambda: None, in_chunks=True) is None
            assert server.asked == asked

    rig(tmp_path, check, instances=1)


class _Stuck:
    """A relay that has the last event of an answer for a client who does not take it."""

    def __init__(self, relay: Relay, *, leaves: bool) -> None:
        self.relay, self.leaves, self.waits = relay, leaves, not leaves

    def add(self, _: int, __: int, counter: _native.EventCounter, ___: bool) -> int:
        counter.feed(EVENTS[3])
        if self.leaves:
            asyncio.get_running_loop().call_soon(self.relay._pump)
        return 1

    def pump(self) -> tuple[list[int], list[tuple[int, _native.FlowEnd, bytes, bool]]]:
        return [1], [(1, _native.FlowEnd.client_left, b"", True)]

    def waits_for_client(self, _: int) -> bool:
        return self.waits

    def remove(self, _: int) -> None:
        pass


@pytest.mark.parametrize("leaves", [True, False], ids=["the relay finds out", "the server finds out"])
def test_a_client_that_leaves_without_the_last_event_has_not_got_it(tmp_path: Path, leaves: bool) -> None:
    async def check(rig: Rig) -> None:
        relay = rig.server.core.relay
        native, relay.native = relay.native, _Stuck(relay, leaves=leaves)  # type: ignore[assignment]
        rig.upstreams[0].gap_s = 0.05
        reader, writer = await _ask(rig, b"1.1")
        await reader.readuntil(EVENTS[0])
        await asyncio.sleep(0.02)
        writer.close()
        await rig.quiet()
        relay.native = native
        assert [(each.status, each.reason) for each in rig.outcomes] == [("cancelled", "client_left")]

    rig(tmp_path, check, instances=1)


def _own_answer(number: int) -> bytes:
    """Return what only one request gets: events of many sizes."""
    rng = random.Random(number)
    events = [EVENTS[0], *(b"data: %d %b\n\n" % (number, b"x" * rng.randrange(3000)) for _ in range(60)), EVENTS[3]]
    return b"".join(events)


async def _answer_in_own_time(_: Upstream, request: web.Request) -> web.StreamResponse:
    number = int(request.headers["X-Request-Id"])
    rng, whole = random.Random(-number), _own_answer(number)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    begin = 0
    while begin < len(whole):
        size = rng.choice((1, 70, 700, 7000))
        await response.write(whole[begin : begin + size])
        begin += size
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.01)))
    return response


@pytest.mark.parametrize("seed", range(3))
def test_many_streams_at_once_do_not_mix(tmp_path: Path, seed: int) -> None:
    async def check(rig: Rig) -> None:
        for each in rig.upstreams:
            each.behave = _answer_in_own_time

        async def client(first: int) -> None:
            rng = random.Random(first)
            for number in range(first, first + 4):
                body = {"model": "auto", "prompt": "x", "stream": True}
                headers = {"X-Request-Id": str(number)}
                async with rig.session.post(rig.url + "/v1/completions", json=body, headers=headers) as response:
                    got = b""
                    stays = rng.random() < 0.8
                    async for piece in response.content.iter_any():
                        got += piece
                        if not stays and len(got) > 20_000:
                            break
                        await asyncio.sleep(rng.choice((0, 0, 0, 0.005)))
                assert _own_answer(number).startswith(got)
                assert (got == _own_answer(number)) or not stays

        await asyncio.gather(*(client(1000 * seed + 10 * k) for k in range(40)))
        await rig.quiet()
        assert set(rig.server.core.ended) == {"finished", "cancelled"}
        assert sum(rig.server.core.ended.values()) == 160
        assert rig.server.core.relay.native.num_streams == 0

    rig(tmp_path, check, instances=3)


class _NoFiles:
    """A relay in a process that may open no more files."""

    def __init__(self) -> None:
        self.asked = 0

    def add(self, *_: object) -> int:
        self.asked += 1
        raise RuntimeError("a socket's descriptor cannot be copied: Too many open files")


def test_without_descriptors_to_spare_an_answer_flows_all_the_same(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        relay = rig.server.core.relay
        rig.upstreams[0].behave = _Writer(33_333)
        native, none = relay.native, _NoFiles()
        relay.native = none  # type: ignore[assignment]
        assert (await rig.stream())[1] == _WHOLE
        relay.native = native
        assert none.asked > 0
        assert (await rig.stream())[1] == _WHOLE
        await rig.quiet()
        assert [(each.status, each.output_tokens) for each in rig.outcomes] == [("finished", len(_ANSWER) - 1)] * 2
        assert native.num_streams == 0

    rig(tmp_path, check, instances=1)


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    code = (
        "import resource; from simcluster.live.open_files import allow_many_files;"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (64, most));"
        "allow_many_files(); assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
