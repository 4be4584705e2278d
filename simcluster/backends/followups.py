"""Closed loops: requests that are sent when an earlier one has ended, after a time to think."""

from simcluster.backends.ledger import Ledger
from simcluster.world import World

__all__ = ["FollowUps"]


class FollowUps:
    """Who waits for whom. False where nobody waits: then ends of requests need not be watched.

    A request whose predecessor was rejected, failed or shed is sent all the same, as its client goes on.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._ledger = ledger
        self._think_ps = world.think_ps
        self._after = None if world.after is None else world.after.tolist()
        self._children: dict[int, list[int]] = {}
        for child, parent in enumerate(self._after or []):
            if parent >= 0:
                self._children.setdefault(parent, []).append(child)
        self._count = len(world.known)
        self._next = 0
        self._tickets: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._children)

    def waits(self, index: int) -> bool:
        """Whether a request is sent at the end of another one instead of by the clock."""
        return self._after is not None and self._after[index] >= 0

    def next_by_clock(self) -> int | None:
        """Return the next request that is sent by the clock, or None after the last one."""
        while self._next < self._count:
            index = self._next
            self._next += 1
            if not self.waits(index):
                return index
        return None

    def released(self, ended: list[int]) -> list[tuple[int, int]]:
        """Return the requests that waited for these, each with the instant at which it is sent [ps]."""
        found: list[tuple[int, int]] = []
        for parent in ended:
            end_ps = int(self._ledger.end_ps[parent])
            for child in self._children.pop(parent, ()):
                assert self._think_ps is not None  # it comes with `after`
                found.append((child, end_ps + int(self._think_ps[child])))
        return found

    def new_ticket(self, instance: int) -> int:
        """Return a number that makes earlier plans for an instance void."""
        self._tickets[instance] = self._tickets.get(instance, 0) + 1
        return self._tickets[instance]

    def is_current(self, instance: int, ticket: int) -> bool:
        """Whether a plan still holds."""
        return self._tickets.get(instance) == ticket
