"""Gives away what a server sends in the moment it comes, without a task that wakes for every piece."""

import asyncio
from collections.abc import Callable

from aiohttp import StreamReader

__all__ = ["Tap"]


class Tap(asyncio.Protocol):
    """Stands between a connection and the HTTP client that reads it, for as long as an answer flows.

    The client goes on parsing. What it has parsed is given away at once, where it would otherwise wake the task that
    reads: that costs a second round of the event loop for each token of each stream.

    Attributes:
        ended: True at the answer's end, False if no more is wanted for now, or why the server broke off.
    """

    def __init__(self, transport: asyncio.Transport, content: StreamReader, take: Callable[[bytes], bool]) -> None:
        """Start at once.

        Args:
            transport: of the connection.
            content: the body as the client parses it.
            take: is given the pieces, and says whether it wants more.
        """
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        inner = transport.get_protocol()
        assert isinstance(inner, asyncio.Protocol)  # the HTTP client's
        self._transport, self._inner, self._content, self._take = transport, inner, content, take
        transport.set_protocol(self)

    def close(self) -> None:
        """Leave the connection to the client again."""
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._inner)

    def data_received(self, data: bytes) -> None:
        """Parse, and give away."""
        self._inner.data_received(data)
        content = self._content
        wants_more = True
        # reading makes the client go on with what it held back, so that there may be more
        while wants_more and content.exception() is None and (piece := content.read_nowait()):
            wants_more = self._take(piece)
        if not wants_more or content.is_eof() or content.exception() is not None:
            self._end()

    def _end(self) -> None:
        self.close()
        if not self.ended.done():
            error = self._content.exception()
            if error is not None:
                self.ended.set_exception(error)
            else:
                self.ended.set_result(self._content.at_eof())

    def eof_received(self) -> bool | None:
        """Tell the client."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the client, who knows whether the answer was whole."""
        self._inner.connection_lost(exc)
        self._end()

    def pause_writing(self) -> None:
        """Tell the client."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Tell the client."""
        self._inner.resume_writing()
