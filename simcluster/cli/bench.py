"""`simcluster bench`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from simcluster.bench import cost, figures
from simcluster.bench.instructions import find_valgrind
from simcluster.errors import ConfigError

__all__ = ["bench"]

_Row = tuple[str, ...]
_WIDE = Console(width=400)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Figures to measure, all without any; or `cost`: how cost grows.")
    ] = None,
    instructions: Annotated[bool, typer.Option("--instructions", help="Count instructions too; valgrind.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes; each figure says its own.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a document.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure how fast the simulator is, beside its goals.

    Figures are medians over repetitions of this process's own CPU time, which other load disturbs little.
    The workload is the scenario bench/poisson-8b. All of them take two to three minutes of CPU time.

    Examples:
    * `simcluster bench`

    * `simcluster bench core-16 sfs-snapshot --json`

    * `simcluster bench --instructions --markdown`

    * `simcluster bench cost`
    """
    names = names or []
    if as_json and markdown:
        raise ConfigError("options --json and --markdown: choose one of them")
    if instructions:
        find_valgrind()
    if "cost" in names:
        if len(names) > 1:
            raise ConfigError(f"bench {' '.join(names)}: cost is measured alone; leave out the other names")
        with _progress(show=not quiet) as progress:
            growths = cost.measure_growth(quick=quick, count_instructions=instructions, on_start=progress)
        _show(cost.report(growths), "how cost grows", _COST_HEAD, _cost_rows(growths), as_json, markdown)
        return
    wanted = figures.chosen(names, count_instructions=instructions)
    with _progress(show=not quiet) as progress:
        measured = figures.measure_figures(wanted, quick=quick, on_start=progress)
    size = "\n[dim]{}[/]" if not markdown else " ({})" if quick else ""
    _show(figures.report(measured), "how fast", _FIGURE_HEAD, _figure_rows(measured, size), as_json, markdown)


_FIGURE_HEAD = ("figure", "what", "value", "lowest to highest", "unit", "goal", "met")
_COST_HEAD = ("what grows", "size", "cost", "lowest to highest", "unit", "instructions", "exponent")


def _figure_rows(measured: list[figures.Figure], size: str) -> list[_Row]:
    return [
        (
            each.name,
            each.benchmark.what + size.format(each.measured.size),
            _number(each.measured.value),
            _spread(each.measured.low, each.measured.high),
            each.benchmark.unit,
            str(each.benchmark.goal),
            {True: "yes", False: "NO", None: "-"}[each.met],
        )
        for each in measured
    ]


def _cost_rows(growths: list[cost.Growth]) -> list[_Row]:
    rows: list[_Row] = []
    for growth in growths:
        axis = cost.AXES[growth.name]
        for place, (size, spent) in enumerate(zip(growth.sizes, growth.costs, strict=True)):
            count = _number(growth.instructions[place]) if growth.instructions else ""
            first = place == 0
            spread = _spread(spent.low, spent.high)
            power = f"{growth.exponent:.2f}" if first else ""
            rows.append(
                (axis.what if first else "", f"{size:,}", _number(spent.value), spread, axis.unit, count, power)
            )
    return rows


def _number(value: float) -> str:
    """Write three or more digits of a number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _spread(low: float, high: float) -> str:
    return "" if low == high else f"{_number(low)} to {_number(high)}"


def _show(report: dict[str, Any], title: str, head: _Row, rows: list[_Row], as_json: bool, markdown: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2, allow_nan=False) + "\n")
        return
    machine = report["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['compiler']}, Python {machine['python']}"
    if markdown:
        used = [k for k in range(len(head)) if any(row[k] for row in rows)]
        lines = [[head[k] for k in used], ["---"] * len(used), *([row[k] for k in used] for row in rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        sys.stdout.write(f"Measured on {report['date']}: {where}.\n\n{table}\n")
        return
    grid = Table(title=f"{title}, {report['date']}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head:
        right = name in {"value", "cost", "size", "instructions", "exponent"}
        grid.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(f"[bold red]{cell}[/]" if cell == "NO" else cell for cell in row))
    needed = Measurement.get(_WIDE, _WIDE.options, grid).maximum  # wider than the terminal rather than folded
    Console(width=max(Console().width, needed)).print(grid)
    Console().print(where, style="dim", highlight=False, markup=False)


@contextmanager
def _progress(*, show: bool) -> Iterator[Callable[[str], None]]:
    """Tell on standard error what is being measured."""
    if not show:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("measuring {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda name: bar.update(task, description=name)
