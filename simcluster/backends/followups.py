"""Closed loops: requests that are sent when an earlier one has ended, after a time to think."""

from collections.abc import Iterator

import numpy as np

from simcluster.world import World

__all__ = ["FollowUps"]

_BLOCK = 4096


class FollowUps:
    """Who waits for whom. False where nobody waits: then ends of requests need not be watched.

    A request whose predecessor was rejected, failed or shed is sent all the same, as its client goes on.

    Attributes:
        waits: (n,) 1 for a request that is sent at the end of another one instead of by the clock; empty: nobody waits.
        awaited: (n,) 1 for a request whose end somebody waits for; likewise.
    """

    def __init__(self, world: World) -> None:
        self._after = world.after
        self._arrival_ps = world.known.arrival_ps
        self.waits = self.awaited = b""  # bytes give plain integers, and faster than an array does
        if self._after is not None and world.think_ps is not None:
            self._think = world.think_ps.data
            children = np.argsort(self._after, kind="stable")  # by the request that they wait for
            first = np.searchsorted(self._after, np.arange(len(world.known) + 1), sorter=children)
            self._children, self._first_child = children.data, first.data
            self.waits, self.awaited = (self._after >= 0).tobytes(), (np.diff(first) > 0).tobytes()

    def __bool__(self) -> bool:
        return self._after is not None

    def by_clock(self) -> Iterator[tuple[int, int]]:
        """Yield the requests that are sent by the clock, each with its arrival [ps]."""
        for start in range(0, len(self._arrival_ps), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(self._arrival_ps)))
            if self._after is not None:
                rows = rows[self._after[rows] < 0]
            yield from zip(rows.tolist(), self._arrival_ps[rows].tolist(), strict=True)

    def released(self, parent: int, end_ps: int) -> list[tuple[int, int]]:
        """Return the requests that waited for one that has ended, each with the instant at which it is sent [ps]."""
        if self._after is None:
            return []
        found = range(self._first_child[parent], self._first_child[parent + 1])
        return [(child, end_ps + self._think[child]) for child in map(self._children.__getitem__, found)]
