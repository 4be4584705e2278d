"""Passes answers on without the event loop's looking at every piece.

Once its first token has come, an answer in chunks flows from socket to socket in native code, which says what moved.
"""

import asyncio
from collections.abc import Callable

from simcluster import _native
from simcluster.live.router.connection import Connection

__all__ = ["Passage", "Relay"]


class Passage:
    """One answer that flows.

    Attributes:
        came: called when something has moved.
        ended: why it flows no more, and what is left to be written to the client.
    """

    __slots__ = ("_connection", "_id", "_relay", "came", "ended")

    def __init__(self, relay: "Relay", id: int, connection: Connection, came: Callable[[], None]) -> None:  # noqa: A002
        self._relay, self._id, self._connection, self.came = relay, id, connection, came
        self.ended: asyncio.Future[tuple[_native.FlowEnd, bytes]] = asyncio.get_running_loop().create_future()

    @property
    def waits_for_client(self) -> bool:
        """Whether the client has yet to take what came."""
        return self._relay.native.waits_for_client(self._id)

    def end(self, why: _native.FlowEnd, last: bytes, *, is_clean: bool) -> None:
        """Note the end; `is_clean`: nothing came behind it."""
        self._connection.returned(is_whole=why == _native.FlowEnd.whole, is_clean=is_clean)
        self._let_go()
        if not self.ended.done():
            self.ended.set_result((why, last))

    def close(self) -> None:
        """Let nothing flow any more; the connection is to be closed."""
        if self._relay.passages.get(self._id) is self:
            self._let_go()

    def _let_go(self) -> None:
        del self._relay.passages[self._id]
        self._relay.native.remove(self._id)


class Relay:
    """All answers that flow.

    Attributes:
        native: does the work.
        passages: by number.
    """

    def __init__(self) -> None:
        """Start; call it from the event loop."""
        self.native = _native.StreamRelay()
        self.passages: dict[int, Passage] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.native.file, self._pump)

    def close(self) -> None:
        """Stop."""
        self._loop.remove_reader(self.native.file)

    def open(
        self,
        connection: Connection,
        client: asyncio.Transport,
        counter: _native.EventCounter,
        came: Callable[[], None],
        *,
        in_chunks: bool,
    ) -> Passage | None:
        """Let the rest of an answer flow, or return None if that cannot be for now.

        Args:
            connection: the server's.
            client: gets the rest of the body; all before it was written to it.
            counter: counts its events.
            came: called when something has moved.
            in_chunks: the client gets chunks, too; the last one, and what came with the end, is left to the caller.
        """
        if client.is_closing() or client.get_write_buffer_size():
            return None
        server = connection.lent()
        if server is None:
            return None
        try:
            number = self.native.add(server, client.get_extra_info("socket").fileno(), counter, in_chunks)
        except RuntimeError:  # too many open files: it flows without
            connection.returned(is_whole=False, is_clean=True)
            return None
        passage = self.passages[number] = Passage(self, number, connection, came)
        return passage

    def _pump(self) -> None:
        moved, ended = self.native.pump()
        for number in moved:
            self.passages[number].came()
        for number, why, last, is_clean in ended:
            self.passages[number].end(why, last, is_clean=is_clean)
