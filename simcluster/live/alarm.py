"""Wake-ups of an event loop to the microsecond; the loop's own timers come up to a millisecond late."""

import asyncio
import ctypes
import os
from collections.abc import Callable

__all__ = ["Alarm"]

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: interval and value, each seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """One wake-up that can be moved: a timer of Linux (timerfd) that the event loop watches.

    The loop waits in whole milliseconds for its own timers, rounded up; for a file descriptor it does not.

    Args:
        ring: called when the instant has come.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._loop.add_reader(self._fd, self._rang)

    def set(self, at_s: float | None) -> None:
        """Ring at an instant of the event loop's clock [s], at once if that has passed; None: not at all."""
        ns = 0 if at_s is None else max(round(at_s * 1e9), 1)  # 0 turns the timer off
        spec = _TimerSpec(0, 0, *divmod(ns, 1_000_000_000))
        _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        """Never ring again."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _rang(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was moved after it had rung
            return
        self._ring()
