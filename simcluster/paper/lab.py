"""The laboratory: what all figures are measured with, so that equal runs happen once and all meet the same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simcluster.errors import SimulationError
from simcluster.experiment.cells import Cell, CellResult, make_cell, run_cell
from simcluster.experiment.executors import Work
from simcluster.experiment.fields import with_fields
from simcluster.experiment.plan import Place, Runner
from simcluster.paper.figure import FloatArray
from simcluster.scenario import Scenario, load_scenario

__all__ = ["Ask", "Fields", "Lab", "Planned", "Runs", "Sizes"]

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        seeds: number of seeds; the requests of seed k are the same for every policy and setting.
        requests: requests per run.
        dense: whether all settings of a figure are run, or only those that its claims need.
    """

    seeds: int
    requests: int
    dense: bool = True


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one policy under one setting, one per seed."""

    summaries: Sequence[Mapping[str, Any]]

    def of(self, *path: str) -> FloatArray:
        """Return a metric of each seed, (n,); NaN where a run has none."""
        values = []
        for summary in self.summaries:
            value: Any = summary
            for name in path:
                value = value[name]
            values.append(np.nan if value is None else float(value))
        return np.array(values)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question: policies under settings of a scenario.

    Attributes:
        scenario: a shipped scenario.
        policies: who routes.
        settings: fields of the scenario by dotted path, one mapping per setting.
    """

    scenario: str
    policies: Sequence[str]
    settings: Sequence[Fields]


class Planned(Exception):  # noqa: N818  (no error)
    """Says which cells were asked for, by one seed, instead of running them."""

    def __init__(self, keys: set[str]) -> None:
        super().__init__()
        self.keys = keys


@dataclass(slots=True)
class Lab:
    """Runs scenarios and remembers their results.

    Attributes:
        sizes: how much is run.
        folder: where recipes that differ from the shipped one are written.
        runner: runs cells and remembers them.
        is_planning: whether to raise `Planned` instead of running cells.
    """

    sizes: Sizes
    folder: Path
    runner: Runner
    is_planning: bool = False

    def scenario(self, name: str, fields: Fields) -> tuple[Scenario, Path]:
        """Return a shipped scenario with as many requests as are run and some fields replaced."""
        scenario, path = load_scenario(name)
        limited = {"workload.limit": self.sizes.requests, "output.decisions": "off"}
        return with_fields(scenario, {**limited, **fields}), path

    def compare(self, name: str, policies: Sequence[str], settings: Sequence[Fields]) -> list[dict[str, Runs]]:
        """Run policies under settings of a scenario.

        Args:
            name: a shipped scenario.
            policies: who routes.
            settings: fields of the scenario by dotted path, one mapping per setting.

        Returns:
            For each setting the runs of each policy.

        Raises:
            SimulationError: a run fails.
        """
        return self.measure([Ask(name, policies, settings)])[0]

    def measure(self, asks: Sequence["Ask"], work: Work = run_cell, kind: str = "") -> list[list[dict[str, Runs]]]:
        """Answer several questions at once, by plain runs or by other work, which `kind` then names.

        Returns:
            For each question and setting the runs of each policy.

        Raises:
            SimulationError: a run fails.
        """
        wanted = [[self._cells(ask, fields, kind) for fields in ask.settings] for ask in asks]
        cells = [cell for ask in wanted for group in ask for row in group.values() for cell in row]
        if self.is_planning:
            raise Planned({cell.key for cell in cells})
        self.runner.work = work
        outcomes = self.runner.run({Place(k, each.scenario.seed, each.policy): each for k, each in enumerate(cells)})
        summaries: dict[str, Mapping[str, Any]] = {}
        for cell, outcome in zip(cells, outcomes.values(), strict=True):
            if not isinstance(outcome, CellResult):
                raise SimulationError(f"{cell.scenario.name}, {cell.name}: {outcome.message}")
            summaries[cell.key] = outcome.summary
        return [
            [{policy: Runs([summaries[cell.key] for cell in row]) for policy, row in group.items()} for group in ask]
            for ask in wanted
        ]

    def _cells(self, ask: "Ask", fields: Fields, kind: str) -> dict[str, list[Cell]]:
        scenario, path = self.scenario(ask.scenario, fields)
        first = scenario.seed
        seeded = [with_fields(scenario, {"seed": first + number}) for number in range(self.sizes.seeds)]
        return {policy: [self._cell(each, path, policy, kind) for each in seeded] for policy in ask.policies}

    def _cell(self, scenario: Scenario, path: Path, policy: str, kind: str) -> Cell:
        cell = make_cell(scenario, path, policy)
        return replace(cell, key=f"{cell.key}-{kind}") if kind else cell
