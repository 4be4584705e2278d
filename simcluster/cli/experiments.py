"""What `simcluster compare` and `simcluster sweep` share: options, progress, output."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from simcluster.cli.building import built
from simcluster.errors import ConfigError
from simcluster.experiment.executors import EXECUTORS
from simcluster.experiment.fields import with_fields
from simcluster.experiment.plan import Runner
from simcluster.experiment.rates import BaseRate, base_rate, measure_extremes, parse_rates
from simcluster.experiment.store import CellStore, open_store
from simcluster.routers import check_policy, located
from simcluster.routers.names import split_list
from simcluster.scenario import Scenario, load_scenario
from simcluster.world import World

__all__ = [
    "Executor",
    "Json",
    "Loaded",
    "Out",
    "Policies",
    "Policy",
    "Quiet",
    "Rates",
    "Recipe",
    "ScenarioName",
    "Seed",
    "Trace",
    "Workers",
    "chosen_rates",
    "finish",
    "load",
    "open_runner",
    "print_all",
    "print_json",
    "quietly",
]

ScenarioName = Annotated[str, typer.Argument(help="Scenario file, or the name of a shipped one.")]
Policies = Annotated[
    str | None,
    typer.Option("--policies", help="Policies, separated by commas: sfs,power_of_two:load=tokens,d=3,random."),
]
Policy = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help="A policy; may be given several times; default: those of the scenario."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="First seed; default: the scenario's.")]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Mean arrival rates [req/s]: R1,R2,... or LOW:HIGH:POINTS or auto[:POINTS], "
        "from one request at a time to all at once."
    ),
]
Trace = Annotated[Path | None, typer.Option(help="Replay this trace instead of the scenario's workload.")]
Recipe = Annotated[str | None, typer.Option(help="Draw from this recipe, anew for every seed, instead.")]
Executor = Annotated[Literal["local"], typer.Option(help="Where cells run; local: processes of this machine.")]
Workers = Annotated[int | None, typer.Option(min=1, max=1024, help="Processes; default: one per processor.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results; the same command goes on from what is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks.")]

_WIDE = Console(width=400)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A scenario, ready for an experiment.

    Attributes:
        scenario: with the options of the command line.
        path: where it was read.
        policies: all different.
        world: of its first seed; so that what it names exists and fits.
        base: its mean rate at rate_scale 1.
    """

    scenario: Scenario
    path: Path
    policies: list[str]
    world: World
    base: BaseRate

    @property
    def is_one_trace(self) -> bool:
        """Whether every seed replays the same requests."""
        return self.scenario.workload.trace is not None


def load(
    name: str,
    policies: str | None,
    policy: list[str] | None,
    seed: int | None,
    trace: Path | None,
    recipe: str | None,
    *,
    show: bool = True,
) -> Loaded:
    """Read a scenario with the options of the command line and make sure that it can run.

    Raises:
        ConfigError: an option is not allowed, or the scenario is wrong.
    """
    scenario, path = load_scenario(name)
    given = [*(split_list(policies) if policies else []), *(policy or [])]
    chosen = list(dict.fromkeys(given or [located(each, path.parent) for each in scenario.routing.policies]))
    for each in chosen:
        check_policy(each)
    if trace is not None and recipe is not None:
        raise ConfigError("--trace and --recipe: both are given; give one")
    fields: dict[str, Any] = {}
    if trace is not None:
        fields["workload.trace"] = str(trace.absolute())
    if recipe is not None:
        fields["workload.recipe"] = str(Path(recipe).absolute()) if Path(recipe).is_file() else recipe
    scenario = with_fields(scenario, fields)
    scenario = scenario if seed is None else scenario.model_copy(update={"seed": seed})
    world = built(scenario, path, show=show)
    return Loaded(scenario, path, chosen, world, base_rate(scenario, path, world))


def chosen_rates(loaded: Loaded, rates: str | None) -> list[float] | None:
    """Return the rates that were asked for, ascending; None for the scenario's own."""
    if rates is None:
        return None
    scenario, path, first = loaded.scenario, loaded.path, loaded.policies[0]
    return parse_rates(rates, lambda: measure_extremes(scenario, path, loaded.base, first))


@contextmanager
def open_runner(
    executor: str, workers: int | None, out: Path | None, what: dict[str, Any], *, show: bool
) -> Iterator[Runner]:
    """Give a runner with a progress bar; Ctrl-C ends it with a line on how to go on.

    Args:
        executor: name of the executor.
        workers: number of processes, or None for one per processor.
        out: folder for results, or None.
        what: what is run, for the folder.
        show: whether to show progress.

    Raises:
        ConfigError: the folder cannot be used.
    """
    store: CellStore | None = None if out is None else open_store(out, what)
    console = Console(stderr=True)
    count = workers or os.cpu_count() or 1
    with _progress(console, show=show) as report:
        runner = Runner(EXECUTORS[executor](count), store, report)
        try:
            yield runner
            return
        except KeyboardInterrupt:
            pass
    kept = f"{runner.num_done} of {runner.num_total} cells are done"
    how = "give --out DIR to keep them" if out is None else f"the same command goes on from {out}"
    sys.stderr.write(f"interrupted: {kept}; {how}\n")
    raise typer.Exit(130)


@contextmanager
def _progress(console: Console, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    if not show:
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("cells", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def quietly(lines: Sequence[str], *, quiet: bool) -> None:
    """Print warnings to standard error unless nothing but results is wanted."""
    if not quiet:
        for line in lines:
            Console(stderr=True).print(line, style="yellow", highlight=False, markup=False)


def finish(result: dict[str, Any]) -> None:
    """End with exit code 1 and one line if cells have no result."""
    failed = result["failures"]
    if failed:
        total = len(failed) + len(result["cells"])
        sys.stderr.write(f"{len(failed)} of {total} cells have no result; the first says: {failed[0]['error']}\n")
        raise typer.Exit(1)


def print_json(content: Any) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def print_all(parts: Sequence[RenderableType]) -> None:
    """Print tables and text, wider than the terminal rather than with numbers cut off."""
    for part in parts:
        needed = Measurement.get(_WIDE, _WIDE.options, part).maximum if isinstance(part, Table) else 0
        Console(width=max(Console().width, needed)).print(part)
