"""Deadlines that do not count time in which the router itself did not run.

A process that gets no core, or is stopped with its machine, finds all its deadlines passed when it goes on, though what
it waited for may have come long ago. So a deadline leaves out the time in which the event loop answered nobody.
"""

import asyncio
from types import TracebackType
from typing import Final, Self

__all__ = ["Limit", "Patience"]

_TICK_S: Final = 0.05  # between two looks at the clock, and at the limits


class Patience:
    """A clock that stands still while the event loop does not run, and the limits that go by it."""

    def __init__(self) -> None:
        """Start to count; call it from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._limits: set[Limit] = set()
        self._lost_s = 0.0
        self._due_s = self._loop.time() + _TICK_S
        self._handle = self._loop.call_at(self._due_s, self._tick)

    def close(self) -> None:
        """Count no more; nothing is limited any longer."""
        self._handle.cancel()

    def now_s(self) -> float:
        """Return the event loop's clock without the time in which it did not run [s].

        What is usual of a busy loop, a twentieth of a second at once, counts as running.
        """
        now = self._loop.time()
        return now - self._lost_s - self._late_s(now)

    def limit(self, seconds: float) -> "Limit":
        """Return what limits the time that a block may take [s], to a twentieth of a second."""
        return Limit(self, seconds)

    def add(self, limit: "Limit") -> None:
        """Watch a limit."""
        self._limits.add(limit)

    def remove(self, limit: "Limit") -> None:
        """Watch a limit no more."""
        self._limits.discard(limit)

    def _late_s(self, clock_s: float) -> float:
        late = clock_s - self._due_s
        return late if late > _TICK_S else 0.0

    def _tick(self) -> None:
        clock_s = self._loop.time()
        self._lost_s += self._late_s(clock_s)
        self._due_s = clock_s + _TICK_S
        for limit in [each for each in self._limits if each.due_s <= clock_s - self._lost_s]:
            limit.end()
        self._handle = self._loop.call_at(self._due_s, self._tick)


class Limit:
    """Limits the time that a block may take.

    Attributes:
        due_s: its end [s of `Patience.now_s`].
    """

    __slots__ = ("_patience", "_timeout", "due_s")

    def __init__(self, patience: Patience, seconds: float) -> None:
        self._patience = patience
        self._timeout = asyncio.timeout(None)
        self.due_s = patience.now_s() + seconds

    async def __aenter__(self) -> Self:
        """Start."""
        await self._timeout.__aenter__()
        self._patience.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End.

        Raises:
            TimeoutError: it took too long.
        """
        self._patience.remove(self)
        await self._timeout.__aexit__(kind, error, trace)

    def set_anew(self, seconds: float) -> None:
        """Allow so much time from now on [s]."""
        self.due_s = self._patience.now_s() + seconds

    def end(self) -> None:
        """Let the block end now."""
        self._patience.remove(self)
        self._timeout.reschedule(0)  # has passed
