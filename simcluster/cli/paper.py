"""`simcluster paper`."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from simcluster.cli import experiments as common
from simcluster.cli.paper_markdown import markdown
from simcluster.errors import ConfigError
from simcluster.paper.catalogue import FULL, QUICK, as_data, chosen_figures, make_figures, write_figure, write_summary
from simcluster.paper.draw import NO_MATPLOTLIB, can_draw
from simcluster.paper.figure import Claim, Figure
from simcluster.paper.lab import Lab

__all__ = ["paper"]

_LONGEST_TABLE = 60  # rows in the terminal; the file has all


def paper(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="2 to 10, 12 to 14, assumptions; beyond, or of it staleness, routers, errors, bound, gains; "
            "default: all but beyond."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds, requests and settings.")] = False,
    out: common.Out = None,
    executor: common.Executor = "local",
    workers: common.Workers = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the main numbers as tables for a document.")
    ] = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Reproduce the paper's figures on the simulated cluster, its numbers beside ours.

    Scenario `paper` and its variants; every policy meets the same requests; intervals are over seeds. `--out` gets each
    figure as Parquet and PNG, and `figures.json`. `beyond` is what the paper does not show: old views, several
    routers, wrong beliefs, the distance to the best possible, and what sfs_plus gains. With `--out DIR` the same
    command goes on where it was interrupted.

    Examples:
    * `simcluster paper --quick`

    * `simcluster paper 5 13 --out figures`

    * `simcluster paper beyond --json`

    * `simcluster paper --markdown --out figures`
    """
    if as_json and as_markdown:
        raise ConfigError("options --json and --markdown: choose one of them")
    chosen = chosen_figures(figures or [])
    sizes = QUICK if quick else FULL
    what = {"kind": "paper", "quick": quick}
    made: list[Figure] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        common.open_runner(executor, workers, out, what, show=not quiet) as runner,
    ):
        lab = Lab(sizes, Path(folder) if out is None else out / "recipes", runner)
        for figure in make_figures(lab, chosen):
            made.append(figure)
            if out is not None:
                write_figure(figure, out)
    data = as_data(made, sizes)
    if out is not None:
        write_summary(data, out)
    if as_json:
        common.print_json(data)
    elif as_markdown:
        sys.stdout.write(markdown(made, sizes.seeds, sizes.requests, _ours, _short))
    else:
        common.print_all([part for figure in made for part in _parts(figure, quiet=quiet)])
        if not quiet:
            common.print_all([_remarks(data)])
    if out is not None and not quiet:
        console = Console(stderr=True)
        console.print(f"written to {out}", style="dim", highlight=False, markup=False)
        if not can_draw():
            console.print(NO_MATPLOTLIB, style="yellow", highlight=False, markup=False)


def _parts(figure: Figure, *, quiet: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_claims(figure)]
    if not quiet:
        parts += [_numbers(figure), Text(f"moved by: {figure.moved_by}\n", style="dim")]
    return parts


def _new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _claims(figure: Figure) -> Table:
    name = f"Figure {figure.key}" if figure.key.isdecimal() else figure.key.capitalize()
    table = _new_table(f"{name}: {figure.title}")
    table.add_column("what", max_width=84)
    for heading in ("paper", "ours", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for claim in figure.claims:
        table.add_row(claim.what, claim.paper or "-", _ours(claim), _interval(claim))
    return table


def _ours(claim: Claim) -> str:
    return "-" if claim.ours is None else f"{_short(claim.ours)} {claim.unit}".rstrip()


def _interval(claim: Claim) -> str:
    return "-" if claim.interval is None else f"{_short(claim.interval.low)} to {_short(claim.interval.high)}"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.4g}"
    return str(value)


def _numbers(figure: Figure) -> Table:
    shown: Sequence[str] = figure.shown or [
        name for name in figure.table.columns if not name.endswith(("_low", "_high"))
    ]
    rows: pl.DataFrame = figure.table
    cut = f" (first {_LONGEST_TABLE} of {len(rows)} rows)" if len(rows) > _LONGEST_TABLE else ""
    table = _new_table(f"numbers{cut}" if cut else "")
    for name in shown:
        table.add_column(name, justify="right" if rows[name].dtype.is_numeric() else "left", no_wrap=True)
    for row in rows.head(_LONGEST_TABLE).iter_rows(named=True):
        table.add_row(*[_short(row[name]) + _half_width(row, name) for name in shown])
    return table


def _half_width(row: dict[str, Any], name: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "" if low is None or high is None or low == high else f" ±{_short((high - low) / 2)}"


def _remarks(data: dict[str, Any]) -> Text:
    lines = [
        f"{data['seeds']} seeds of {data['requests']} requests; intervals: 95 % over seeds, of paired differences "
        "where two policies are compared",
        *data["assumptions"],
    ]
    return Text("this rests on:\n" + "\n".join(f"  {line}" for line in lines), style="dim")
