"""How values spread, in a memory that does not grow with their number."""

import math
from collections import Counter

__all__ = ["Tally"]

_WIDTH = math.log(1.005)  # of a bucket: values in it differ by half a per cent at most
_NOTHING = -(10**9)  # the bucket of 0 and of less


class Tally:
    """Counts values in buckets of half a per cent; what it tells is as exact as that.

    Attributes:
        count: values so far.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.count = 0
        self._buckets: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self._buckets[_bucket(value)] += 1

    def median(self) -> float | None:
        """Return the middle value, the upper one of two; None before any."""
        left = self.count // 2
        for bucket, count in sorted(self._buckets.items()):
            if left < count:
                return 0.0 if bucket == _NOTHING else math.exp((bucket + 0.5) * _WIDTH)
            left -= count
        return None

    def share_above(self, limit: float) -> float | None:
        """Return the share of values above a limit; None before any."""
        if not self.count:
            return None
        last = _bucket(limit)
        return sum(count for bucket, count in self._buckets.items() if bucket > last) / self.count


def _bucket(value: float) -> int:
    return math.floor(math.log(value) / _WIDTH) if value > 0 else _NOTHING
