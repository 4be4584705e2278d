"""An HTTP/1.1 connection to a server, for one request at a time."""

import asyncio
from typing import Final, cast

import httptools
from multidict import CIMultiDict

__all__ = ["BrokenError", "Connection"]

_MOST_HEAD: Final = 65_536  # bytes of header names and values, and of what has no end yet
_MOST_WAITING: Final = 65_536  # bytes that were not asked for yet, before the server has to wait


class BrokenError(Exception):
    """The server left before its answer had ended, or what it says is not HTTP."""


class Connection(asyncio.Protocol):
    """A connection; `ask` comes first, then `head`, then `piece` until it has nothing more.

    Attributes:
        is_used: a request was sent before the current one.
        is_whole: the answer's body has ended.
        has_begun: something of an answer has come.
        status: of the answer, once `head` has returned.
        headers: of the answer, likewise.
    """

    def __init__(self) -> None:
        """Make one that is not connected yet."""
        self.is_used = self.is_whole = self.has_begun = False
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._num_waiting = self._num_head = self._num_unread = 0  # bytes
        self._is_paused = False
        self._has_head = self._is_interim = self._stays_open = False
        self._in_chunks = self._in_chunk = self._to_the_end = self._at_line_end = False
        self._broken: str | None = None

    # -- the request

    def ask(self, request: bytes) -> None:
        """Send a request, head and body; the answer to the last one must have ended.

        Raises:
            BrokenError: the connection is closed.
        """
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, CIMultiDict()
        self._num_head = self._num_unread = 0
        self.is_whole = self.has_begun = self._has_head = self._is_interim = self._in_chunk = False
        if self._transport is None or self._broken is not None:
            raise BrokenError(self._broken)
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for the head of the answer.

        Raises:
            BrokenError: it does not come.
        """
        while not self._has_head:
            await self._more()

    async def piece(self) -> bytes:
        """Return what has come of the body, and wait for something if nothing has; b"" at its end.

        Raises:
            BrokenError: it does not come.
        """
        while not self._pieces:
            if self.is_whole:
                return b""
            await self._more()
        pieces, self._pieces = self._pieces, []
        self._num_waiting = 0
        if self._is_paused:
            self._pause(False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _more(self) -> None:
        if self._broken is not None:
            raise BrokenError(self._broken)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # -- between requests, and the end

    @property
    def is_read(self) -> bool:
        """Whether the answer's body has ended and `piece` has nothing more."""
        return self.is_whole and not self._pieces

    @property
    def is_open(self) -> bool:
        """Whether it can be asked something."""
        return self._broken is None and self._transport is not None and not self._transport.is_closing()

    def release(self) -> bool:
        """Let go of the answer; False if the connection cannot be used again, which closes it."""
        transport = self._transport
        may_stay = self.is_read and self._stays_open and self.is_open
        if not may_stay or transport is None or transport.get_write_buffer_size():
            self.close()
            return False
        self._parser = None
        self.is_used = True
        return True

    def close(self) -> None:
        """Leave the server, which ends the request there if it goes on."""
        self._break("closed")
        if self._transport is not None:
            self._transport.abort()

    # -- lending the socket

    def lent(self) -> int | None:
        """Lend the socket to somebody who reads the rest of the answer from it, and return its descriptor.

        None if that cannot be: the body is not in chunks, does not stand between two of them, or is encrypted.
        """
        transport = self._transport
        if transport is None or self.is_whole or self._broken is not None or self._pieces or self._is_paused:
            return None
        if not self._in_chunks or self._in_chunk or not self._at_line_end:
            return None
        if transport.get_extra_info("ssl_object") is not None or transport.is_closing():
            return None
        self._pause(True)
        return int(transport.get_extra_info("socket").fileno())

    def returned(self, *, is_whole: bool, is_clean: bool) -> None:
        """Take the socket back.

        Args:
            is_whole: the body has ended.
            is_clean: nothing came behind it.
        """
        self.is_whole, self._stays_open = is_whole, self._stays_open and is_clean
        self._pause(False)

    def _pause(self, on: bool) -> None:
        self._is_paused = on
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if on else self._transport.resume_reading)()

    # -- what asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the way out."""
        self._transport = cast("asyncio.Transport", transport)  # of a stream

    def data_received(self, data: bytes) -> None:
        """Take the answer apart."""
        if self._parser is None:  # nobody has asked
            self.close()
            return
        self.has_begun = True
        self._at_line_end = data.endswith(b"\r\n")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.is_whole:
                self._break(f"not HTTP: {error}")
            self._stays_open = False
        if not self._has_head:
            self._num_unread += len(data)
            if self._num_unread > _MOST_HEAD:
                self._break("a head of over 64 KiB")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the server has left, which ends an answer whose length nothing else tells."""
        if exc is None and self._has_head and self._to_the_end:
            self.is_whole = True
        self._break("the server left" if exc is None else str(exc))

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
        self._parser = None  # which knows this object
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the parser tells

    def on_message_begin(self) -> None:
        """Note that something follows an answer that was whole."""
        if self.is_whole:
            self._stays_open = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._num_head += len(name) + len(value)
        if self._num_head > _MOST_HEAD:
            raise BrokenError("a head of over 64 KiB")
        if not self._has_head:  # else a trailer
            self.headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        """Note the status; what only announces an answer is left out."""
        parser = self._parser
        assert parser is not None  # it is calling
        status = parser.get_status_code()
        if self.is_whole:
            return
        if 100 <= status < 200:
            self._is_interim = True
            self.headers = CIMultiDict()
            return
        self.status, self._has_head = status, True
        self._stays_open = parser.should_keep_alive()
        encoding = self.headers.get("Transfer-Encoding")
        self._in_chunks = encoding is not None and encoding.lower() == "chunked"
        self._to_the_end = encoding is None and "Content-Length" not in self.headers

    def on_body(self, body: bytes) -> None:
        """Keep a piece, and let a server wait that is faster than whoever reads."""
        if self.is_whole:
            return
        self._pieces.append(body)
        self._num_waiting += len(body)
        if self._num_waiting > _MOST_WAITING and not self._is_paused:
            self._pause(True)

    def on_chunk_header(self) -> None:
        """Note where the body stands."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """Note where the body stands."""
        self._in_chunk = False

    def on_message_complete(self) -> None:
        """Note the end."""
        if self._is_interim:
            self._is_interim = False
        else:
            self.is_whole = True
