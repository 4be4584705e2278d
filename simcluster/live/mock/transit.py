"""When requests reach an engine: at once, or at the instant that whoever sent them has set.

HTTP takes milliseconds of wall-clock time, and never the same. A comparison with a simulation, whose requests travel
for a fixed time, lets them reach the engine when that has passed, as long as HTTP was faster.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from simcluster.live.clock import LiveClock
from simcluster.units import PS_PER_S

__all__ = ["REACH", "Transit", "with_fields"]

REACH: Final = "x_reach_ns"  # the last field of a body: CLOCK_MONOTONIC when the engine is to get it [ns]
_FIELD: Final = re.compile(rb'"x_reach_ns":(\d{1,18})}\Z')
_LONGEST: Final = 40  # bytes
_MOST_PS: Final = 3600 * PS_PER_S  # from now: whoever sets a later instant has another clock


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the body of a request, which ends with a brace, with more fields; of equal ones the last holds."""
    return body[:-1] + b"," + json.dumps(fields, separators=(",", ":")).encode()[1:]


@dataclass(slots=True)
class Transit:
    """Says when requests reach an engine, and counts those that came too late for that.

    Attributes:
        clock: the engines' time.
        timed: requests that said when they are to reach the engine.
        late: those of them that came later.
    """

    clock: LiveClock
    timed: int = 0
    late: int = 0

    def reach_ps(self, body: bytes) -> int:
        """Return when a request that is here reaches its engine [ps]: now, or at the later instant that it says."""
        now = self.clock.now_ps()
        found = _FIELD.search(body, max(0, len(body) - _LONGEST))
        if found is None:
            return now
        self.timed += 1
        at = self.clock.ps_of_ns(int(found.group(1)))
        if now < at <= now + _MOST_PS:
            return at
        self.late += 1
        return now

    @property
    def late_share(self) -> float | None:
        """Share of the requests with an instant that came after it; None before any."""
        return self.late / self.timed if self.timed else None
