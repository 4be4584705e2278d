"""Server-sent events, cut out of the pieces in which a connection brings them."""

__all__ = ["EventReader"]

_MOST_BYTES = 16 * 2**20


class EventReader:
    """Collects the lines of a stream and returns the data of every event that is complete.

    Lines end with LF, CR LF or CR; comments and fields other than `data` are passed over, as the standard has it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of the events that this piece completes, in order.

        Raises:
            ValueError: a line is endless, or not UTF-8.
        """
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r") or (self._after_cr and not piece)
        *lines, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise ValueError(f"a line of over {_MOST_BYTES} bytes")
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> str | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8"))
            return None
        event = "\n".join(self._data) if self._data else None
        self._data = []
        return event
