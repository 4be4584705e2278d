"""What an experiment runs: points of a scenario, policies, seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simcluster.errors import ConfigError
from simcluster.experiment.cells import Cell, CellResult, make_cell, run_cell
from simcluster.experiment.executors import Executor, Outcome, Work, run_cells
from simcluster.experiment.fields import with_fields
from simcluster.experiment.rates import BaseRate
from simcluster.experiment.store import CellStore
from simcluster.rng import seeded
from simcluster.scenario import Scenario

__all__ = [
    "Place",
    "Plan",
    "Point",
    "Runner",
    "first_error",
    "make_points",
    "measure_text",
    "new_generator",
    "seed_text",
]

Progress = Callable[[int, int], None]
_RESAMPLING_SEED = 20_260_718


@dataclass(frozen=True, slots=True)
class Point:
    """A scenario with some fields set.

    Attributes:
        scenario: the scenario, at any seed.
        fields: what was set, by path.
        rate_rps: its mean arrival rate [1/s]; None where arrivals have none.
    """

    scenario: Scenario
    fields: Mapping[str, Any]
    rate_rps: float | None


class Place(NamedTuple):
    """Where a cell belongs: number of its point, seed, policy."""

    point: int
    seed: int
    policy: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Points and policies of an experiment; seeds may be added while it runs.

    Attributes:
        path: where the scenario was read.
        points: the points.
        policies: as users write them, all different.
        keep_requests: whether results hold values of single requests.
    """

    path: Path
    points: Sequence[Point]
    policies: Sequence[str]
    keep_requests: bool = False

    def cells(self, seeds: Sequence[int]) -> dict[Place, Cell]:
        """Return the cells of some seeds; those of one world follow each other."""
        return {
            Place(number, seed, policy): make_cell(
                point.scenario.model_copy(update={"seed": seed}), self.path, policy, keep_requests=self.keep_requests
            )
            for number, point in enumerate(self.points)
            for seed in seeds
            for policy in self.policies
        }


def make_points(
    scenario: Scenario, fields: Sequence[Mapping[str, Any]], rates: Sequence[float] | None, base: BaseRate
) -> list[Point]:
    """Return every point at every rate; without rates, each at the rate that it has.

    Args:
        scenario: the scenario.
        fields: fields to set at each point.
        rates: rates [1/s], or None.
        base: rate of the scenario at rate_scale 1.

    Raises:
        ConfigError: a field cannot be set so, or the scenario has no rate.
    """
    points = []
    chosen: Sequence[float | None] = rates or [None]
    for each in fields:
        for rate in chosen:
            changed = with_fields(scenario, each)
            if rate is not None:
                changed = with_fields(changed, base.fields_for(rate, changed.workload))
            points.append(Point(changed, each, _own_rate(changed, each, base) if rate is None else rate))
    return points


def _own_rate(changed: Scenario, fields: Mapping[str, Any], base: BaseRate) -> float | None:
    """Return the rate of a point that none was asked for; None where other requests arrive than at the base."""
    workload = changed.workload
    if workload.rate_rps is not None:
        return workload.rate_rps * workload.rate_scale
    if base.rate_rps is None or any(f"workload.{name}" in fields for name in ("trace", "recipe", "limit", "rate_rps")):
        return None
    return base.rate_rps * workload.rate_scale


@dataclass(slots=True)
class Runner:
    """Runs cells and remembers their outcomes.

    Attributes:
        executor: where cells run.
        store: where results are kept, or None.
        on_progress: called with the number of cells done and of all.
        work: what runs one cell.
        outcomes: outcome of each cell by its key.
        num_expected: cells that will be asked for in the end, if that is known before they are.
    """

    executor: Executor
    store: CellStore | None = None
    on_progress: Progress = lambda _done, _total: None
    work: Work = run_cell
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    num_done: int = 0
    num_stored: int = 0
    num_total: int = 0
    num_expected: int = 0

    def run(self, cells: Mapping[Place, Cell]) -> dict[Place, Outcome]:
        """Return the outcome of every cell; those that are known are not run again."""
        new = {cell.key: cell for cell in cells.values() if cell.key not in self.outcomes}
        self.num_total += len(new)
        self.on_progress(self.num_done, max(self.num_total, self.num_expected))
        self.outcomes |= run_cells(list(new.values()), self.executor, self.work, self.store, self._note)
        return {place: self.outcomes[cell.key] for place, cell in cells.items()}

    def _note(self, _cell: Cell, outcome: Outcome, was_stored: bool) -> None:
        self.num_done += 1
        self.num_stored += was_stored or (self.store is not None and isinstance(outcome, CellResult))
        self.on_progress(self.num_done, max(self.num_total, self.num_expected))


def new_generator() -> np.random.Generator:
    """Return the generator of a bootstrap, always the same: intervals repeat."""
    return seeded(_RESAMPLING_SEED)


def seed_text(seeds: Sequence[int]) -> str:
    """Write consecutive seeds down."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def measure_text(scenario: Scenario) -> str:
    """Say what of a run is measured: warm-up, horizon, drain."""
    measure = scenario.measure
    warmup = f"after a warm-up of {measure.warmup_s:g} s" if measure.warmup_s > 0 else "without warm-up"
    if measure.horizon_s is not None:
        return f"measured {warmup} until {measure.horizon_s:g} s; what is then open is unfinished and counts 0"
    if measure.drain:
        return f"measured {warmup}; runs go on after the last arrival until every request has ended (drain)"
    return f"measured {warmup}; runs stop at the last arrival (no drain); what is then open is unfinished and counts 0"


def first_error(outcomes: Mapping[Place, Outcome]) -> ConfigError | None:
    """Return an error if no cell has a result."""
    failures = [each for each in outcomes.values() if not isinstance(each, CellResult)]
    if failures and len(failures) == len(outcomes):
        return ConfigError(f"no cell has a result; the first says: {failures[0].message}")
    return None
