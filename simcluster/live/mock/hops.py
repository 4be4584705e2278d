"""How long requests are on their way from a router to an engine, as far as the router says when they left."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from simcluster.live.clock import LiveClock
from simcluster.live.mock.tally import Tally
from simcluster.units import PS_PER_NS, PS_PER_S

__all__ = ["SENT", "Hops", "with_fields"]

SENT: Final = "x_sent_ns"  # the last field of a body: CLOCK_MONOTONIC when the request left [ns]
_FIELD: Final = re.compile(rb'"x_sent_ns":(\d{1,19})}\Z')
_LONGEST: Final = 40  # bytes


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the body of a request, which ends with a brace, with more fields; of equal ones the last holds."""
    return body[:-1] + b"," + json.dumps(fields, separators=(",", ":")).encode()[1:]


@dataclass(slots=True)
class Hops:
    """Counts them.

    Attributes:
        clock: the engines' time.
    """

    clock: LiveClock
    _seconds: Tally = field(default_factory=Tally)

    def note(self, body: bytes, at_ps: int) -> None:
        """Note that a request has reached its engine at an instant [ps]; it counts if it says when it left."""
        found = _FIELD.search(body, max(0, len(body) - _LONGEST))
        if found is not None:
            sent_ps = (int(found.group(1)) - self.clock.origin_ns) * self.clock.speed * PS_PER_NS
            self._seconds.add(max(at_ps - sent_ps, 0.0) / PS_PER_S)

    def median_s(self) -> float | None:
        """Return the middle one [s of the engines' time]; None before any."""
        return self._seconds.median()
