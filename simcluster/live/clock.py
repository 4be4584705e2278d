"""The simulated clock of a live process: wall-clock time, or a multiple of it."""

import asyncio
import math

from simcluster import _native
from simcluster.live.alarm import Alarm
from simcluster.units import PS_PER_NS, PS_PER_S, ns_from_seconds

__all__ = ["LiveClock"]

_EXACT_S = 0.01  # of a sleep, its end, is timed by an alarm, which takes a file descriptor


class LiveClock:
    """Picoseconds since it was made, `speed` times as fast as the wall clock.

    It follows the event loop's clock, which no change of the system's time moves.
    """

    def __init__(self, speed: float = 1.0, lead_s: float = 0.0) -> None:
        """Start at 0.

        Args:
            speed: simulated seconds per second of wall-clock time, above 0.
            lead_s: from now to the clock's 0 [s of wall-clock time].
        """
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time() + lead_s
        self.speed = speed

    @property
    def origin_ns(self) -> int:
        """The event loop's clock at 0 [ns]; on Linux that is CLOCK_MONOTONIC, as published snapshots have it."""
        return ns_from_seconds(self._start_s)

    def now_ps(self) -> int:
        """Return this instant [ps]."""
        return int((self._loop.time() - self._start_s) * self.speed * PS_PER_S)

    def ps_of_ns(self, at_ns: int) -> int:
        """Return an instant of the event loop's clock [ns] as one of this clock [ps]."""
        return round((at_ns - self.origin_ns) * PS_PER_NS * self.speed)

    def loop_time(self, at_ps: int) -> float:
        """Return when the event loop's clock [s] shows an instant [ps]; infinity for never."""
        if at_ps >= _native.NEVER:
            return math.inf
        return self._start_s + at_ps / (PS_PER_S * self.speed)

    async def sleep_until(self, at_ps: int) -> None:
        """Return at an instant [ps], or at once if that has passed."""
        due_s = self.loop_time(at_ps)
        await asyncio.sleep(max(due_s - self._loop.time() - _EXACT_S, 0))
        if self._loop.time() < due_s:
            woken = asyncio.Event()
            alarm = Alarm(woken.set)
            alarm.set(due_s)
            try:
                await woken.wait()
            finally:
                alarm.close()
