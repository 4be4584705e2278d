"""One attempt at a request: ask a server, wait for the first bytes of its answer, pass the rest on as it comes."""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from simcluster.live.router.connection import BrokenError, Connection
from simcluster.live.router.patience import Patience
from simcluster.scenario import Live

__all__ = ["Answer", "AttemptError", "Upstreams", "passed_on", "served_name"]

# Headers that belong to one connection, and those that each side writes anew.
_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers"),
        *("transfer-encoding", "upgrade", "host", "content-length", "expect", "accept-encoding"),
    }
)
_MOST_ERROR_BYTES: Final = 65_536
_NAME_S: Final = 2.0  # for the name of a model
_KEEP_S: Final = 3.0  # an idle connection; vLLM's server closes it after 5 s


class AttemptError(Exception):
    """A server did not answer; another one may.

    Attributes:
        reason: `refused`, `timeout`, `disconnected`, `busy` (429) or `status_5xx`.
        fault: the server is to blame, which counts against its health.
        gone: nobody was there at all.
        answer: what it said, to be passed on if nobody else answers; None if nothing.
    """

    def __init__(self, reason: str, *, fault: bool = True, gone: bool = False, answer: "Answer | None" = None) -> None:
        """Make one."""
        super().__init__(reason)
        self.reason, self.fault, self.gone, self.answer = reason, fault, gone, answer


@dataclass(slots=True)
class Answer:
    """An answer whose first bytes have come.

    Attributes:
        status: HTTP status.
        headers: those to pass on.
        first: the first piece of the body; all of it if `connection` is None.
        connection: where the rest comes from.
        server: which it is.
    """

    status: int
    headers: CIMultiDict[str]
    first: bytes
    connection: Connection | None = None
    server: "_Server | None" = None

    @property
    def streams(self) -> bool:
        """Whether it comes in events."""
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come and was given out."""
        return self.connection is None or self.connection.is_read

    async def piece(self) -> bytes:
        """Return what comes next, b"" at the end.

        Raises:
            AttemptError: the server broke off.
        """
        if self.connection is None:
            return b""
        try:
            return await self.connection.piece()
        except BrokenError as error:
            raise AttemptError("disconnected") from error

    def close(self) -> None:
        """Let go of the server, which ends the request there if it goes on."""
        connection, self.connection = self.connection, None
        if connection is not None and connection.release() and self.server is not None:
            self.server.keep(connection)


def passed_on(headers: CIMultiDictProxy[str] | Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that the other side gets too."""
    left_out = _HOP
    if (named := headers.get("Connection")) is not None:
        left_out = left_out | {each.strip().lower() for each in named.split(",")}
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in left_out])


class _StaleConnectionError(Exception):
    """A connection that had been used before was closed; the server need not even have seen the request."""


class _Server:
    """One server, and the connections to it that are idle."""

    def __init__(self, url: URL) -> None:
        self._host, self._port, self._prefix = url.host or "", url.port or 80, url.raw_path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        shown = f"[{self._host}]" if ":" in self._host else str(url.raw_host)
        self._fixed = f"Host: {shown}" if url.is_default_port() else f"Host: {shown}:{self._port}"
        self._loop = asyncio.get_running_loop()
        self._idle: deque[tuple[float, Connection]] = deque()  # since when, the oldest first

    def request(self, path: str, headers: CIMultiDict[str], body: bytes) -> bytes:
        """Return a request as it is sent."""
        lines = [f"POST {self._prefix}{path} HTTP/1.1", self._fixed, f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join((*lines, "\r\n")).encode("utf-8", "surrogateescape") + body

    async def connect(self) -> Connection:
        """Return a new connection.

        Raises:
            OSError: there is none to be had.
        """
        _, connection = await self._loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def kept(self) -> Connection | None:
        """Return a connection that was used before and is open."""
        self.sweep()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def keep(self, connection: Connection) -> None:
        """Keep a connection for a while."""
        self._idle.append((self._loop.time(), connection))

    def sweep(self) -> None:
        """Close what has been idle for too long."""
        oldest = self._loop.time() - _KEEP_S
        while self._idle and self._idle[0][0] < oldest:
            self._idle.popleft()[1].close()

    def close(self) -> None:
        """Close all that is idle."""
        while self._idle:
            self._idle.pop()[1].close()


class Upstreams:
    """Connections to all servers.

    Attributes:
        urls: (j,) their addresses.
        session: asks questions, `/metrics` and the like.
    """

    def __init__(self, urls: list[str], live: Live, patience: Patience) -> None:
        """Open the client; call it from the event loop."""
        self.urls = urls
        self._patience = patience
        self._live = live
        self._servers = [_Server(URL(url)) for url in urls]
        self._sweeper = asyncio.create_task(self._sweep())
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close all connections."""
        self._sweeper.cancel()
        for server in self._servers:
            server.close()
        await self.session.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_S / 2)
            for server in self._servers:
                server.sweep()

    async def ask(self, instance: int, path: str, body: bytes, headers: CIMultiDict[str], *, stream: bool) -> Answer:
        """Send a request and wait for the beginning of the answer.

        Args:
            instance: whom to ask.
            path: of the call.
            body: of the request.
            headers: of the request.
            stream: it begins with the first token, not when all of it is there.

        Raises:
            AttemptError: there was none.
        """
        live, server = self._live, self._servers[instance]
        request = server.request(path, headers, body)
        patience_s = live.first_byte_timeout_s if stream else live.whole_timeout_s
        connection = server.kept()
        try:
            async with self._patience.limit(patience_s) as limit:
                if connection is not None:
                    with suppress(_StaleConnectionError):
                        return await _ask(server, connection, request)
                    connection = None
                limit.set_anew(live.connect_timeout_s)
                connection = await _connected(server)
                limit.set_anew(patience_s)
                return await _ask(server, connection, request)
        except TimeoutError as error:
            raise AttemptError("timeout", gone=connection is None) from error

    async def get(self, instance: int, path: str, timeout_s: float) -> bytes | None:
        """Return what a server says at a path, None if it does not answer in time or with another status than 200."""
        try:
            async with self._patience.limit(timeout_s), self.session.get(self.urls[instance] + path) as response:
                return await response.read() if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


async def _connected(server: _Server) -> Connection:
    try:
        return await server.connect()
    except TimeoutError:  # of the system or of the router
        raise
    except OSError as error:
        raise AttemptError("refused", gone=True) from error


async def _ask(server: _Server, connection: Connection, request: bytes) -> Answer:
    """Send a request, and wait for the first piece of its answer.

    Raises:
        _StaleConnectionError: the connection had been used before, and was closed before anything came.
        AttemptError: nothing came, or what it is to be told another server.
    """
    answer = Answer(0, CIMultiDict(), b"", connection, server)
    try:
        connection.ask(request)
        await connection.head()
        answer.status, answer.headers = connection.status, passed_on(connection.headers)
        if answer.status == 429 or answer.status >= 500:
            raise await _refusal(answer)
        answer.first = await connection.piece()
        if not answer.first and answer.streams:
            raise BrokenError("an answer without an event")
    except BrokenError as error:
        stale = connection.is_used and not connection.has_begun
        answer.close()
        raise _StaleConnectionError if stale else AttemptError("disconnected") from error
    except BaseException:  # a client that leaves, too
        answer.close()
        raise
    return answer


async def _refusal(answer: Answer) -> AttemptError:
    said = b""
    while len(said) < _MOST_ERROR_BYTES and (piece := await answer.piece()):
        said += piece
    whole = Answer(answer.status, answer.headers, said[:_MOST_ERROR_BYTES])
    if answer.status == 429:
        return AttemptError("busy", fault=False, answer=whole)
    return AttemptError(f"status_{answer.status}", answer=whole)


async def served_name(upstreams: Upstreams, instance: int, model: str) -> str:
    """Return what a server calls its model; one that does not say so is taken to call it as the scenario does."""
    said = await upstreams.get(instance, "/v1/models", _NAME_S)
    with suppress(ValueError, TypeError, KeyError):
        names = [str(each["id"]) for each in json.loads(said or b"{}")["data"]]
        if names and model not in names:
            return names[0]
    return model
