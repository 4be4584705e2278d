"""Deadlines that do not count time in which the router itself did not run.

A process that gets no core, or is stopped with its machine, finds all its deadlines passed when it goes on, though what
it waited for may have come long ago. So a deadline leaves out the time in which the event loop answered nobody.
"""

import asyncio
from types import TracebackType
from typing import Final, Self

__all__ = ["Limit", "Patience"]

_TICK_S: Final = 0.05  # between two looks at the clock


class Patience:
    """Counts the time in which an event loop did not run.

    Attributes:
        loop: the event loop.
    """

    def __init__(self) -> None:
        """Start to count; call it from the event loop."""
        self.loop = asyncio.get_running_loop()
        self._lost_s = 0.0
        self._due_s = self.loop.time() + _TICK_S
        self._handle = self.loop.call_at(self._due_s, self._tick)

    def close(self) -> None:
        """Count no more."""
        self._handle.cancel()

    def lost_s(self) -> float:
        """Return how long the event loop has not run so far [s]; what is usual of a busy one does not count."""
        return self._lost_s + self._late_s()

    def now_s(self) -> float:
        """Return the event loop's clock without the time in which it did not run [s]."""
        return self.loop.time() - self.lost_s()

    def limit(self, seconds: float) -> "Limit":
        """Return what limits the time that a block may take [s]; at its end it raises TimeoutError."""
        return Limit(self, seconds)

    def _late_s(self) -> float:
        late = self.loop.time() - self._due_s
        return late if late > _TICK_S else 0.0

    def _tick(self) -> None:
        self._lost_s += self._late_s()
        self._due_s = self.loop.time() + _TICK_S
        self._handle = self.loop.call_at(self._due_s, self._tick)


class Limit:
    """Limits the time that a block may take.

    Attributes:
        steps: how often it was set anew.
    """

    __slots__ = ("_handle", "_lost_s", "_patience", "_seconds", "_timeout", "steps")

    def __init__(self, patience: Patience, seconds: float) -> None:
        self._patience, self._seconds = patience, seconds
        self._timeout = asyncio.timeout(None)
        self.steps = 0

    async def __aenter__(self) -> Self:
        """Start."""
        await self._timeout.__aenter__()
        self._arm(self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End.

        Raises:
            TimeoutError: it took too long.
        """
        self._handle.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def set_anew(self, seconds: float) -> None:
        """Allow so much time from now on [s]."""
        self.steps += 1
        self._handle.cancel()
        self._arm(seconds)

    def _arm(self, seconds: float) -> None:
        self._lost_s = self._patience.lost_s()
        self._handle = self._patience.loop.call_later(seconds, self._fire)

    def _fire(self) -> None:
        lost_s = self._patience.lost_s() - self._lost_s
        if lost_s > 0:
            self._arm(lost_s)
        else:
            self._timeout.reschedule(self._patience.loop.time())
