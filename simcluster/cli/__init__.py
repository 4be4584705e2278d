"""The command line: parse, call, print."""

import os
import sys
from typing import Annotated

import typer

import simcluster
from simcluster.cli import conformance, run, scenario
from simcluster.errors import SimclusterError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Simulate a cluster of LLM serving instances and compare router policies.\n\n"
    "Start with: `simcluster run quickstart`",
)
app.command("run", no_args_is_help=True)(run.run)
app.add_typer(scenario.app, name="scenario")
app.add_typer(conformance.app, name="conformance")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"simcluster {simcluster.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options that come before a command."""


def main() -> None:
    """Run the command line; a known error is one line and exit code 2."""
    try:
        app()
    except SimclusterError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
