"""`simcluster conformance`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from simcluster.conformance.files import check_file, scenario_files

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
