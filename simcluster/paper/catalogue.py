"""All figures by name, and what a command writes of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simcluster.errors import ConfigError
from simcluster.experiment.store import write_table
from simcluster.paper import assumptions, beyond, estimates, gains, mix, routing
from simcluster.paper.draw import can_draw, draw
from simcluster.paper.figure import Figure
from simcluster.paper.lab import Lab, Planned, Sizes
from simcluster.records import write_json
from simcluster.routers.names import suggestion
from simcluster.scenario import load_scenario

__all__ = [
    "BEYOND",
    "FIGURES",
    "FULL",
    "QUICK",
    "as_data",
    "chosen_figures",
    "make_figures",
    "write_figure",
    "write_summary",
]

FULL = Sizes(seeds=8, requests=2000)
QUICK = Sizes(seeds=4, requests=1000, dense=False)

Make = Callable[[Lab], Figure]

_WITHOUT_CELLS = ("8", "9", "10")

FIGURES: dict[str, Make] = {
    "2": estimates.figure_2,
    "3": estimates.figure_3,
    "4": estimates.figure_4,
    "5": routing.figure_5,
    "6": routing.figure_6,
    "7": routing.figure_7,
    "8": estimates.figure_8,
    "9": mix.figure_9,
    "10": mix.figure_10,
    "12": routing.figure_12,
    "13": routing.figure_13,
    "14": routing.figure_14,
    "assumptions": assumptions.figure_assumptions,
}
BEYOND: dict[str, Make] = {
    "staleness": beyond.figure_staleness,
    "routers": beyond.figure_routers,
    "errors": beyond.figure_errors,
    "bound": beyond.figure_bound,
    "gains": gains.figure_gains,
}


def chosen_figures(names: Sequence[str]) -> dict[str, Make]:
    """Return the figures that names ask for: numbers, `assumptions`, `beyond` or its parts; none: the paper's.

    Raises:
        ConfigError: a name is unknown.
    """
    if not names:
        return dict(FIGURES)
    known = FIGURES | BEYOND
    chosen: dict[str, Make] = {}
    for name in names:
        if name == "beyond":
            chosen |= BEYOND
        elif name in known:
            chosen[name] = known[name]
        else:
            raise ConfigError(f"figure {name!r} is unknown; {suggestion(name, [*known, 'beyond'])}")
    return chosen


def _planned_cells(lab: Lab, chosen: dict[str, Make]) -> int:
    """Return how many cells figures will ask for first; a figure that asks again does so for few."""
    planning = replace(lab, sizes=replace(lab.sizes, seeds=1), is_planning=True)
    keys: set[str] = set()
    for key, make in chosen.items():
        if key in _WITHOUT_CELLS:
            continue
        try:
            make(planning)
        except Planned as planned:
            keys |= planned.keys
    return len(keys) * lab.sizes.seeds


def make_figures(lab: Lab, chosen: dict[str, Make]) -> Iterator[Figure]:
    """Measure figures one after the other.

    Raises:
        SimulationError: a run fails.
    """
    lab.runner.num_expected = _planned_cells(lab, chosen)
    for make in chosen.values():
        yield make(lab)


def write_figure(figure: Figure, folder: Path) -> None:
    """Write the table of a figure as Parquet and, with matplotlib, the figure as PNG.

    Raises:
        ConfigError: the folder cannot be written.
    """
    stem = folder / f"figure-{figure.key}"
    try:
        write_table(stem.with_suffix(".parquet"), figure.table.to_arrow())
        if can_draw():
            draw(figure, stem.with_suffix(".png"))
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror})") from None


def as_data(figures: Sequence[Figure], sizes: Sizes) -> dict[str, Any]:
    """Return all figures as plain data."""
    scenario, _ = load_scenario("paper")
    return {
        "schema_version": 1,
        "paper": "arXiv 2607.18253",
        "scenario": scenario.name,
        "assumptions": list(scenario.assumptions),
        "seeds": sizes.seeds,
        "requests": sizes.requests,
        "figures": {figure.key: figure.as_data() for figure in figures},
    }


def write_summary(data: dict[str, Any], folder: Path) -> None:
    """Write all figures as JSON."""
    write_json(folder / "figures.json", data)
