"""How cost grows with the number of requests and instances, the batch and the queue."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simcluster.bench import engine_figures, instructions, run_figures
from simcluster.bench.machine import machine_class, today
from simcluster.bench.measure import Measured

__all__ = ["AXES", "Axis", "Growth", "exponent", "measure_growth", "report"]

_PER_INSTANCE = 2000  # requests


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that grows.

    Attributes:
        what: what costs time, and what grows.
        unit: of the values.
        sizes: how large it is made.
        quick_sizes: the same in a hurry.
        measure: CPU time at a size in the unit, and whether to be quick.
        count: instructions at a size, or None where they are not counted.
    """

    what: str
    unit: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    measure: Callable[[int, bool], Measured]
    count: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """The costs along one axis.

    Attributes:
        name: key of AXES.
        sizes: (k,) sizes.
        costs: (k,) CPU times.
        instructions: (k,) instructions, or None where they were not counted.
    """

    name: str
    sizes: tuple[int, ...]
    costs: tuple[Measured, ...]
    instructions: tuple[float, ...] | None

    @property
    def exponent(self) -> float:
        """Cost grows as size to this power."""
        return exponent(self.sizes, tuple(cost.value for cost in self.costs))

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        rows: list[dict[str, Any]] = [
            {"size": size, "value": cost.value, "low": cost.low, "high": cost.high}
            for size, cost in zip(self.sizes, self.costs, strict=True)
        ]
        for row, count in zip(rows, self.instructions or (), strict=False):
            row["instructions"] = count
        axis = AXES[self.name]
        return {"name": self.name, "what": axis.what, "unit": axis.unit, "exponent": self.exponent, "rows": rows}


def exponent(sizes: tuple[int, ...], costs: tuple[float, ...]) -> float:
    """Fit cost = c * size**x by least squares of the logarithms and return x; a size of 0 is left out."""
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True) if size > 0]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _core_requests(count: int, quick: bool) -> Measured:
    repetitions = 1 if quick else 3
    seconds = engine_figures.core_seconds(1, 1000, count, repetitions)
    return Measured(tuple(each * count * 1e3 for each in seconds), f"{count:,} requests")


def _run_requests(count: int, quick: bool) -> Measured:
    seconds = run_figures.loop_seconds("round_robin", 16, count, 1 if quick or count > 100_000 else 3)
    return Measured(tuple(each * 1e3 for each in seconds), f"{count:,} requests")


def _core_instances(instances: int, quick: bool) -> Measured:
    count, warm = _PER_INSTANCE * instances, (100 if quick else 1000) * instances
    seconds = engine_figures.core_seconds(instances, warm, count, 1 if instances > 100 else 3)
    return Measured(tuple(each * count * 1e3 for each in seconds), f"{instances:,} instances")


def _batch(batch: int, quick: bool) -> Measured:
    values = [engine_figures.step_seconds(batch) * 1e9 for _ in range(2 if quick else 7)]
    return Measured(tuple(values), f"batch {batch}")


def _queue(waiting: int, quick: bool) -> Measured:
    repeats = 3 if quick else 20
    values = [engine_figures.estimate_seconds(128, waiting, repeats, anew=True) * 1e6 for _ in range(3)]
    return Measured(tuple(values), f"{waiting:,} waiting")


AXES: dict[str, Axis] = {
    "requests": Axis(
        "core, 1 instance: requests",
        "CPU ms",
        (10_000, 100_000, 1_000_000),
        (1000, 10_000),
        _core_requests,
        lambda count: instructions.core_instructions(1, 0, count) * count,
    ),
    "run-requests": Axis(
        "SimPy loop, 16 instances, round robin: requests",
        "CPU ms",
        (10_000, 100_000, 1_000_000),
        (500, 1000),
        _run_requests,
    ),
    "instances": Axis(
        f"core, {_PER_INSTANCE:,} requests each: instances",
        "CPU ms",
        (1, 10, 100, 1000),
        (1, 10),
        _core_instances,
        lambda instances: instructions.core_instructions(instances, 0, 20 * instances) / 20 * _PER_INSTANCE,
    ),
    "batch": Axis(
        "one step: decoding requests",
        "CPU ns",
        (1, 4, 16, 64, 256, 512),
        (1, 512),
        _batch,
        instructions.step_instructions,
    ),
    "queue": Axis(
        "one SFS estimate from a snapshot, 128 running: waiting requests",
        "CPU us",
        (0, 10, 50, 200, 1000),
        (0, 10, 50),
        _queue,
        instructions.estimate_instructions,
    ),
}


def measure_growth(
    *, quick: bool = False, count_instructions: bool = False, on_start: Callable[[str], None] = lambda _: None
) -> list[Growth]:
    """Measure the cost along every axis.

    Args:
        quick: fewer and smaller sizes.
        count_instructions: count them too, under valgrind.
        on_start: called before each measurement with what it is.

    Raises:
        ConfigError: valgrind is needed and missing.
        SimulationError: a run under callgrind failed.
    """
    found = []
    for name, axis in AXES.items():
        sizes = axis.quick_sizes if quick else axis.sizes
        costs, counts = [], []
        for size in sizes:
            on_start(f"{name} {size:,}")
            costs.append(axis.measure(size, quick))
            if count_instructions and axis.count is not None:
                counts.append(axis.count(size))
        found.append(Growth(name, sizes, tuple(costs), tuple(counts) or None))
    return found


def report(growths: list[Growth]) -> dict[str, Any]:
    """Return costs with the date and the class of machine, as plain data."""
    return {"date": today(), "machine": machine_class(), "growth": [growth.as_dict() for growth in growths]}
