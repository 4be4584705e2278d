"""The command line: parse, call, print."""

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

import simcluster
from simcluster.cli import (
    bench,
    calibrate,
    compare,
    conformance,
    live_compare,
    mock,
    paper,
    policy,
    predictors,
    router,
    run,
    scenario,
    sweep,
    trace,
    validate,
)
from simcluster.errors import SimclusterError
from simcluster.validation import one_line

__all__ = ["app", "main"]

# What the parser raises for bad arguments. Typer exports only subclasses of it, and newer versions carry their own
# copy of click, so it is reached through one of them.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Simulate a cluster of LLM serving instances and compare router policies.\n\n"
    "Start with: `simcluster run quickstart`",
)
app.command("run", no_args_is_help=True)(run.run)
app.command("paper")(paper.paper)
app.command("compare", no_args_is_help=True)(compare.compare_policies)
app.command("sweep", no_args_is_help=True)(sweep.sweep_fields)
app.command("validate", no_args_is_help=True)(validate.validate)
app.add_typer(scenario.app, name="scenario")
app.add_typer(policy.app, name="policy")
app.add_typer(conformance.app, name="conformance")
app.add_typer(trace.app, name="trace")
app.command("bench")(bench.bench)
app.command("live-compare", no_args_is_help=True)(live_compare.live_compare)
app.command("mock", no_args_is_help=True)(mock.mock)
app.add_typer(router.app, name="router")
app.add_typer(predictors.app, name="predictors")
app.add_typer(calibrate.app, name="calibrate")


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
        code = app(standalone_mode=False)
        sys.stdout.flush()  # a full disk or a reader that has left shows here at the latest
    except SimclusterError as error:
        _fail(str(error), 2)
    except _USAGE_ERROR as error:
        _fail(error.format_message(), error.exit_code)
    except OSError as error:
        if error.filename is None:  # standard output: let nobody try once more to write what is still buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has left
            sys.exit(1)
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    if message:  # without arguments there is only the help
        sys.stderr.write(f"error: {one_line(message)}\n")
    sys.exit(code)
