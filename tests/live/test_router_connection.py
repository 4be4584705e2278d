"""What servers may say by HTTP/1.1, byte by byte, and what the router makes of it."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from router_rig import EVENTS, Rig, routed
from simcluster.live.router import upstream

_PEM = Path(__file__).parents[1] / "data" / "localhost.pem"  # of nobody, for tests alone
_LIVE = {"drain_s": 0.1, "trip_after": 1000}
_WHOLE = b"".join(EVENTS)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def _chunk(content: bytes, extension: bytes = b"") -> bytes:
    return b"%X%b\r\n%b\r\n" % (len(content), extension, content)


_IN_CHUNKS = _CHUNKED + b"".join(map(_chunk, EVENTS)) + b"0\r\n\r\n"
_DECORATED = (
    b"HTTP/1.1 100 Continue\r\nX-Not: this\r\n\r\n"
    + _CHUNKED
    + _chunk(EVENTS[0], b';a="b c"')
    + _chunk(_WHOLE[len(EVENTS[0]) :])
    + b"0\r\nX-Trailer: t\r\n\r\n"
)
_COUNTED = _HEAD + b"Content-Length: %d\r\n\r\n" % len(_WHOLE) + _WHOLE
_TO_THE_END = _HEAD + b"\r\n" + _WHOLE


class _Says:
    """A server that says the same to everybody, cut as a test wants it."""

    def __init__(self, pieces: Sequence[bytes], *, leaves: bool = False, later: bytes = b"") -> None:
        self.pieces, self.leaves, self.later = pieces, leaves, later
        self.requests: list[bytes] = []
        self.connections = 0  # that were asked for a completion

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
                    break
                self.connections += not asked
                asked = True
                (line,) = [each for each in head.split(b"\r\n") if each.lower().startswith(b"content-length:")]
                await reader.readexactly(int(line.partition(b":")[2]))
                self.requests.append(head)
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01 if len(self.pieces) < 10 else 0)  # so that few ones come one by one
                if self.leaves:
                    break
                if self.later:
                    await asyncio.sleep(0.05)
                    writer.write(self.later)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _with(
    folder: Path, says: _Says, check: Callable[[Rig], Awaitable[None]], url: str = "http://127.0.0.1:{}", pem: str = ""
) -> None:
    """Check a router in front of such a server."""

    async def main() -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if pem else None
        if tls is not None:
            tls.load_cert_chain(pem)
        server = await asyncio.start_server(says, "127.0.0.1", 0, ssl=tls)
        changes = [{"snapshot": "none", "url": url.format(server.sockets[0].getsockname()[1])}]
        async with server, asyncio.timeout(60), routed(folder, 1, "round_robin", _LIVE, changes) as found:
            await check(found)
            await found.quiet()

    asyncio.run(main())


async def _gets_it(rig: Rig) -> None:
    status, body, _ = await rig.stream()
    assert (status, body) == (200, _WHOLE)


@pytest.mark.parametrize("answer", [_IN_CHUNKS, _DECORATED, _COUNTED], ids=["chunks", "decorated", "counted"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_an_answer_may_be_framed_and_cut_in_any_way(tmp_path: Path, answer: bytes, size: int) -> None:
    says = _Says([answer[at : at + size] for at in range(0, len(answer), size)])

    async def check(rig: Rig) -> None:
        for _ in range(3):
            await _gets_it(rig)
        assert [(each.status, each.output_tokens) for each in rig.outcomes] == [("finished", 3)] * 3
        assert says.connections == 1

    _with(tmp_path, says, check)


def test_chunks_may_be_cut_anywhere_when_the_stream_begins_to_flow(tmp_path: Path) -> None:
    """The first token is there, and a part of what follows it: only between two chunks may others read on."""
    begin = len(_DECORATED) - len(_DECORATED.partition(EVENTS[0])[2])
    cuts = iter(range(begin, len(_DECORATED) - 1))
    says = _Says([])

    async def check(rig: Rig) -> None:
        for cut in cuts:
            says.pieces = [_DECORATED[:cut], _DECORATED[cut : cut + 1], _DECORATED[cut + 1 :]]
            await _gets_it(rig)
        assert says.connections == 1

    _with(tmp_path, says, check)


def test_an_answer_may_end_with_its_connection(tmp_path: Path) -> None:
    says = _Says([_TO_THE_END[:90], _TO_THE_END[90:]], leaves=True)

    async def check(rig: Rig) -> None:
        for _ in range(3):
            await _gets_it(rig)
        assert says.connections == 3
        assert [each.attempts for each in rig.outcomes] == [1, 1, 1]

    _with(tmp_path, says, check)


@pytest.mark.parametrize(
    ("pieces", "later"),
    [
        ([_IN_CHUNKS + b"HTTP/1.1 200 OK\r\n"], b""),  # of an answer that nobody asked for
        ([_CHUNKED + _chunk(_WHOLE), b"0\r\n\r\nHTTP/1.1 200 OK\r\n"], b""),  # likewise while it flows
        ([_COUNTED + b"rubbish"], b""),
        ([_IN_CHUNKS], b"HTTP/1.1 408 Request Timeout\r\n\r\n"),  # before the server closes
        ([_IN_CHUNKS.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)], b""),
        ([_COUNTED.replace(b"HTTP/1.1", b"HTTP/1.0", 1)], b""),
    ],
)
def test_a_connection_that_is_not_clean_is_not_used_again(tmp_path: Path, pieces: list[bytes], later: bytes) -> None:
    says = _Says(pieces, later=later)

    async def check(rig: Rig) -> None:
        for k in range(3):
            await _gets_it(rig)
            await asyncio.sleep(0.1 if later else 0)
            assert says.connections == k + 1
        assert [(each.status, each.attempts) for each in rig.outcomes] == [("finished", 1)] * 3

    _with(tmp_path, says, check)


def test_a_client_that_is_gone_when_the_last_event_leaves_has_not_got_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: web.StreamResponse, last: bytes = b"") -> None:
        assert b"[DONE]" in last
        raise ConnectionResetError

    async def check(rig: Rig) -> None:
        monkeypatch.setattr("simcluster.live.router.exchange._Passed.write_eof", gone)
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await rig.stream()
        monkeypatch.undo()
        await rig.quiet()
        assert [(each.status, each.reason) for each in rig.outcomes] == [("cancelled", "client_left")]

    _with(tmp_path, _Says([_IN_CHUNKS]), check)


@pytest.mark.parametrize(
    "answer",
    [
        b"HELLO\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header: x\r\n\r\n",
        _HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
        _HEAD + b"X: " + b"x" * 600_000,
        _HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\n",
        _HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        _CHUNKED + b"rubbish\r\n",
        _CHUNKED + b"0\r\n\r\n",  # a stream without an event
        _HEAD[:30],
        b"",
    ],
)
def test_an_answer_that_is_none_is_an_attempt_that_failed(tmp_path: Path, answer: bytes) -> None:
    says = _Says([answer], leaves=True)

    async def check(rig: Rig) -> None:
        assert (await rig.stream())[0] == 502
        assert [(each.status, each.reason) for each in rig.outcomes] == [("failed", "disconnected")]

    _with(tmp_path, says, check)


@pytest.mark.parametrize(
    "pieces",
    [
        [_CHUNKED + _chunk(EVENTS[0]), b"rubbish\r\n"],
        [_CHUNKED + _chunk(EVENTS[0]), _chunk(EVENTS[1])[:-5]],
        [_CHUNKED + _chunk(EVENTS[0]) + b"5"],
        [_COUNTED[:-3]],
    ],
)
def test_an_answer_that_breaks_off_breaks_the_clients_off(tmp_path: Path, pieces: list[bytes]) -> None:
    async def check(rig: Rig) -> None:
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await rig.stream()
        await rig.quiet()
        (outcome,) = rig.outcomes
        assert (outcome.status, outcome.reason, outcome.attempts) == ("failed", "upstream_disconnected", 1)
        assert outcome.output_tokens >= 1

    _with(tmp_path, _Says(pieces, leaves=True), check)


def test_the_address_of_a_server_may_have_a_path(tmp_path: Path) -> None:
    says = _Says([_IN_CHUNKS])

    async def check(rig: Rig) -> None:
        await rig.stream(Authorization="Bearer the-clients", X_Other="ü")
        (head,) = says.requests
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /models/a/v1/completions HTTP/1.1"
        host = rig.server.core.upstreams.urls[0].removeprefix("http://").partition("/")[0]
        assert f"Host: {host}".encode() in lines
        assert {b"Authorization: Bearer the-clients", "X-Other: ü".encode()} < set(lines)
        assert head.lower().count(b"\r\nhost:") == head.lower().count(b"\r\ncontent-length:") == 1

    _with(tmp_path, says, check, "http://127.0.0.1:{}/models/a/")


def test_an_address_of_version_6_is_named_as_such() -> None:
    async def request(url: str) -> bytes:
        return upstream._Server(URL(url)).request("/v1", CIMultiDict({"A": "b"}), b"{}")

    assert asyncio.run(request("http://[::1]:81")).startswith(b"POST /v1 HTTP/1.1\r\nHost: [::1]:81\r\n")
    assert asyncio.run(request("http://[::1]/p")) == (
        b"POST /p/v1 HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\nA: b\r\n\r\n{}"
    )


def test_a_server_may_be_asked_by_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(_PEM))
    says = _Says([_IN_CHUNKS[:150], _IN_CHUNKS[150:]])

    async def check(rig: Rig) -> None:
        for _ in range(2):
            await _gets_it(rig)
        assert says.connections == 1

    _with(tmp_path, says, check, "https://localhost:{}", str(_PEM))


def test_a_server_whose_certificate_nobody_vouches_for_is_not_asked(tmp_path: Path) -> None:
    says = _Says([_IN_CHUNKS])

    async def check(rig: Rig) -> None:
        assert (await rig.stream())[0] == 502
        assert not says.requests
        assert [each.reason for each in rig.outcomes] == ["refused"]

    _with(tmp_path, says, check, "https://localhost:{}", str(_PEM))


def test_an_idle_connection_is_closed_before_the_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simcluster.live.router.upstream._KEEP_S", 0.05)
    says = _Says([_IN_CHUNKS])

    async def check(rig: Rig) -> None:
        for k in range(3):
            await _gets_it(rig)
            assert says.connections == k + 1
            await asyncio.sleep(0.2)
        (server,) = rig.server.core.upstreams._servers
        assert not server._idle

    _with(tmp_path, says, check)
