"""When requests are sent: at absolute instants of the trace, or when an earlier one has ended."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from simcluster.backends.followups import FollowUps
from simcluster.live.client.send import Outcome
from simcluster.world import World

__all__ = ["Driver", "Pace"]

Send = Callable[[int, int], Awaitable[Outcome]]


class Pace(Protocol):
    """The time by which requests are sent."""

    def now_ps(self) -> int:
        """Return this instant [ps]."""
        ...

    async def sleep_until(self, at_ps: int) -> None:
        """Return at an instant [ps], or at once if that has passed."""
        ...


class Driver:
    """Sends the requests of a world, each at its own instant, whatever becomes of the others.

    An instant is never computed from another sending, so that a late one does not shift those after it.

    Attributes:
        outcomes: of the requests that have ended, in the order of their ends.
        lag_ps: how late each was sent [ps], in the order of sending.
        stopped: somebody ended it before all was sent and answered.
    """

    def __init__(
        self,
        world: World,
        pace: Pace,
        send: Send,
        on_end: Callable[[Outcome], None] = lambda _: None,
        prepare: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            world: the requests.
            pace: the time.
            send: sends a request, given its number and when it is due [ps], and returns what became of it; being
                cancelled it returns an unfinished one.
            on_end: is told of every end.
            prepare: is told of a request before it is due, while there may be time to do something for it.
        """
        self.outcomes: list[Outcome] = []
        self.lag_ps: list[int] = []
        self._world, self._pace, self._send, self._on_end = world, pace, send, on_end
        self._prepare = prepare
        self._followups = FollowUps(world)
        self._open: set[asyncio.Task[None]] = set()
        self.stopped = False

    async def run(self) -> list[Outcome]:
        """Send everything and wait for all ends; return the outcomes by number.

        Being cancelled it ends as `stop` does, and returns what there is.
        """
        try:
            for index, at_ps in self._followups.by_clock():
                self._prepare(index)
                await self._pace.sleep_until(at_ps)
                self._launch(index, at_ps)
            while self._open:
                await asyncio.wait(self._open)
        except asyncio.CancelledError:
            await self.stop()
        return sorted(self.outcomes, key=lambda each: each.index)

    async def stop(self) -> None:
        """Send nothing more; what is open ends as unfinished."""
        self.stopped = True
        while self._open:
            for task in self._open:
                task.cancel()
            await asyncio.wait(self._open)

    def _launch(self, index: int, at_ps: int) -> None:
        self.lag_ps.append(max(self._pace.now_ps() - at_ps, 0))
        self._keep(self._one(index, at_ps))

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _one(self, index: int, at_ps: int) -> None:
        outcome = await self._send(index, at_ps)
        self.outcomes.append(outcome)
        self._on_end(outcome)
        if not self.stopped and self._followups:
            end_ps = self._pace.now_ps() if outcome.end_ps is None else outcome.end_ps
            for child, due_ps in self._followups.released(index, end_ps):
                self._keep(self._later(child, due_ps))

    async def _later(self, index: int, at_ps: int) -> None:
        self._prepare(index)
        try:
            await self._pace.sleep_until(at_ps)
        except asyncio.CancelledError:
            return  # it was never sent
        self._launch(index, at_ps)
