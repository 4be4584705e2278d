"""CPU time of this process, medians over repetitions, and goals."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Goal", "Measured", "cpu_s", "ratio"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the repetitions of one measurement gave.

    Attributes:
        values: one per repetition, in the figure's unit.
        size: what was measured: how many requests, instances or states.
        judged: whether the size is the one that the goal is about.
    """

    values: tuple[float, ...]
    size: str
    judged: bool = True

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit that a figure should keep, inclusive."""

    limit: float
    at_least: bool

    def met(self, value: float) -> bool:
        """Tell whether a value keeps the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:,.15g}"


def cpu_s(action: Callable[[], object]) -> float:
    """Return the CPU time that an action takes in this process [s], all threads together."""
    before = time.process_time_ns()
    action()
    return (time.process_time_ns() - before) / 1e9


def ratio(above: list[float], below: list[float]) -> tuple[float, ...]:
    """Return one quotient per repetition of two things measured in turn, so that both met the same machine."""
    return tuple(a / b for a, b in zip(above, below, strict=True))
