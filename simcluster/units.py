"""Conversions between seconds, nanoseconds and the core's integer picoseconds.

The core and the SimPy clock count whole picoseconds as plain Python integers. Files carry whole nanoseconds
beside float seconds, since a float64 second cannot hold a picosecond beyond two hours.
"""

import math

__all__ = [
    "PS_PER_NS",
    "PS_PER_S",
    "ns_from_ps",
    "ns_from_seconds",
    "ps_from_seconds",
    "seconds_from_ps",
]

PS_PER_NS = 1_000
PS_PER_S = 1_000_000_000_000
_NS_PER_S = 1_000_000_000
_MAX_SECONDS = 9.0e6  # int64 picoseconds end at 9.2e6 s, about 106 days


def ps_from_seconds(seconds: float) -> int:
    """Round a duration [s] to whole picoseconds.

    Raises:
        ValueError: the value is not finite or beyond the clock's range (9.0e6 s).
    """
    if not math.isfinite(seconds) or abs(seconds) > _MAX_SECONDS:
        raise ValueError(f"{seconds!r} s is not a time the clock can hold; allowed is +-{_MAX_SECONDS:g} s")
    return round(seconds * PS_PER_S)


def ns_from_seconds(seconds: float) -> int:
    """Round a duration [s] to whole nanoseconds.

    Raises:
        ValueError: the value is not finite or beyond the clock's range (9.0e6 s).
    """
    if not math.isfinite(seconds) or abs(seconds) > _MAX_SECONDS:
        raise ValueError(f"{seconds!r} s is not a time the clock can hold; allowed is +-{_MAX_SECONDS:g} s")
    return round(seconds * _NS_PER_S)


def ns_from_ps(picoseconds: int) -> int:
    """Round picoseconds to the nearest nanosecond, halves up."""
    return (picoseconds + PS_PER_NS // 2) // PS_PER_NS


def seconds_from_ps(picoseconds: int) -> float:
    """Return picoseconds as float seconds."""
    return picoseconds / PS_PER_S
