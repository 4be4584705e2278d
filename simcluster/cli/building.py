"""Build a world with progress: predicting a big workload takes longer than a second."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from simcluster.experiment.build import build_world
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["built"]


def built(scenario: Scenario, path: Path, *, show: bool = True) -> World:
    """Build a world, with a bar on standard error while a predictor is at work, if that is a terminal.

    Raises:
        SimclusterError: as `build_world`.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"))
    shown = show and console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown) as bar:
        tasks: list[TaskID] = []

        def report(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task("predicting", total=total))
            bar.update(tasks[0], completed=done)

        return build_world(scenario, path, report)
