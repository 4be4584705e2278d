"""One attempt at a request: ask a server, wait for the first bytes of its answer, pass the rest on as it comes."""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Final
from weakref import WeakSet

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from simcluster.live.router.patience import Limit, Patience
from simcluster.live.router.tap import Tap
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
_BUFFER: Final = 65_536
_LARGE: Final = 2**19  # bytes
_NAME_S: Final = 2.0  # for the name of a model
# Of the attempt that a task makes, and how long it may take from when it is connected [s].
_LIMIT: Final[ContextVar[tuple[Limit, float] | None]] = ContextVar("_LIMIT", default=None)
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
        first: the first piece of the body; all of it if `response` is None.
        response: where the rest comes from.
    """

    status: int
    headers: CIMultiDict[str]
    first: bytes
    response: aiohttp.ClientResponse | None = None

    @property
    def streams(self) -> bool:
        """Whether it comes in events."""
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    async def flow(self, take: Callable[[bytes], bool]) -> bool:
        """Give away what comes after the first piece.

        Args:
            take: is given the pieces as they come, and says whether it wants more.

        Returns:
            Whether that was all; else `take` wanted no more, and the rest can still be asked for.

        Raises:
            AttemptError: the server broke off.
        """
        if self.response is None:
            return True
        content = self.response.content
        try:
            while piece := content.read_nowait():
                if not take(piece):
                    return content.at_eof()
            if content.is_eof():
                return True
            connection = self.response.connection
            if connection is None or connection.transport is None:
                raise AttemptError("disconnected")
            tap = Tap(connection.transport, content, take)
            try:
                return await tap.ended
            finally:
                tap.close()
        except (aiohttp.ClientError, OSError) as error:
            raise AttemptError("disconnected") from error

    def close(self) -> None:
        """Let go of the server, which ends the request there if it goes on."""
        if self.response is not None:
            self.response.close()


def passed_on(headers: CIMultiDictProxy[str] | Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that the other side gets too."""
    named = {each.strip().lower() for each in headers.get("Connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP | named)


class _StaleConnectionError(aiohttp.ServerDisconnectedError):
    """A connection that had been used before was closed; the server need not even have seen the request."""


class _Response(aiohttp.ClientResponse):
    """An answer that knows whether its connection had been used before, and says when there is one."""

    _used: ClassVar[WeakSet[object]] = WeakSet()  # connections

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        """Read the answer's head.

        Raises:
            _StaleConnectionError: there was none, and the connection is to blame.
        """
        limit = _LIMIT.get()
        if limit is not None:
            limit[0].set_anew(limit[1])
        ours = connection.protocol
        assert ours is not None  # it is open
        if ours not in self._used:
            self._used.add(ours)
            return await super().start(connection)
        try:
            return await super().start(connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _StaleConnectionError from error


class Upstreams:
    """Connections to all servers.

    Attributes:
        urls: (j,) their addresses.
        session: the client.
    """

    def __init__(self, urls: list[str], live: Live, patience: Patience) -> None:
        """Open the client; call it from the event loop."""
        self.urls = urls
        self._patience = patience
        self._targets: dict[tuple[int, str], URL] = {}  # parsed once
        self._live = live
        self.session = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S))
        self._anew = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            read_bufsize=_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=_Response,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self.session.close()
        await self._anew.close()

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
        live = self._live
        limit = self._patience.limit(live.connect_timeout_s)
        token = _LIMIT.set((limit, live.first_byte_timeout_s if stream else live.whole_timeout_s))
        try:
            async with limit:
                target = self._targets.get((instance, path))
                if target is None:
                    target = self._targets[instance, path] = URL(self.urls[instance] + path)
                return await self._ask(target, body, headers)
        except TimeoutError as error:
            raise AttemptError("timeout", gone=limit.times == 0) from error
        except aiohttp.ClientConnectorError as error:
            raise AttemptError("refused", gone=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise AttemptError("disconnected") from error
        finally:
            _LIMIT.reset(token)

    async def _ask(self, url: URL, body: bytes, headers: CIMultiDict[str]) -> Answer:
        response = await self._post(url, body, headers)
        try:
            status, kept = response.status, passed_on(response.headers)
            if status == 429 or status >= 500:
                said = Answer(status, kept, await response.content.read(_MOST_ERROR_BYTES))
                response.close()
                if status == 429:
                    raise AttemptError("busy", fault=False, answer=said)
                raise AttemptError(f"status_{status}", answer=said)
            first = await response.content.readany()
            if not first and kept.get("Content-Type", "").startswith("text/event-stream"):
                raise AttemptError("disconnected")
        except BaseException:  # a client that leaves, too
            response.close()
            raise
        return Answer(status, kept, first, response)

    async def _post(self, url: URL, body: bytes, headers: CIMultiDict[str]) -> aiohttp.ClientResponse:
        """Send a request; once more if a server closed an idle connection at that moment, which is nobody's fault."""
        try:
            return await self.session.post(url, data=_payload(body), headers=headers, allow_redirects=False)
        except _StaleConnectionError:
            return await self._anew.post(url, data=_payload(body), headers=headers, allow_redirects=False)

    async def get(self, instance: int, path: str, timeout_s: float) -> bytes | None:
        """Return what a server says at a path, None if it does not answer in time or with another status than 200."""
        try:
            async with self._patience.limit(timeout_s), self.session.get(self.urls[instance] + path) as response:
                return await response.read() if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


def _payload(body: bytes) -> bytes | io.BytesIO:
    """Return a body as aiohttp wants it, so that a large one is sent piece by piece."""
    return body if len(body) < _LARGE else io.BytesIO(body)


async def served_name(upstreams: Upstreams, instance: int, model: str) -> str:
    """Return what a server calls its model; one that does not say so is taken to call it as the scenario does."""
    said = await upstreams.get(instance, "/v1/models", _NAME_S)
    with suppress(ValueError, TypeError, KeyError):
        names = [str(each["id"]) for each in json.loads(said or b"{}")["data"]]
        if names and model not in names:
            return names[0]
    return model
