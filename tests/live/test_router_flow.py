"""Long answers flow through the router byte for byte, at the pace of whoever reads them."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from router_rig import EVENTS, Rig, Upstream, rig

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
