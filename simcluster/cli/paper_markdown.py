"""The paper's figures as Markdown, for a document that nobody types numbers into."""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simcluster.paper.figure import Claim, Figure, Grid

__all__ = ["markdown"]


def markdown(
    figures: Sequence[Figure], seeds: int, requests: int, ours: Callable[[Claim], str], number: Callable[[Any], str]
) -> str:
    """Return a table of the main claims of all figures, then the grid of each figure that has one.

    Args:
        figures: what was measured.
        seeds: seeds per setting.
        requests: requests per run.
        ours: writes our number with its unit.
        number: writes a number.
    """
    today = dt.datetime.now(tz=dt.UTC).date()
    parts = [f"Measured on {today}: {seeds} seeds of {requests:,} requests; intervals of 95 % over seeds."]
    rows = [
        (figure.key, claim.what, claim.paper or "", _with_interval(claim, ours, number), figure.moved_by_short)
        for figure in figures
        for claim in figure.claims
        if claim.is_main
    ]
    if rows:
        parts.append(_table(("figure", "what", "paper", "ours, 95 % interval", "what moves it"), rows))
    for figure in figures:
        if figure.grid is not None:
            parts += [f"{figure.title}: {figure.grid.unit}, half of the 95 % interval behind ±."]
            parts += [_table(*_grid(figure, figure.grid))]
    return "\n\n".join(parts) + "\n"


def _with_interval(claim: Claim, ours: Callable[[Claim], str], number: Callable[[Any], str]) -> str:
    text, ends = ours(claim), claim.interval
    return text if ends is None else f"{text} ({number(ends.low)} to {number(ends.high)})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _grid(figure: Figure, grid: Grid) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows of a grid; what is not in the table is empty."""
    cells: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in figure.table.iter_rows(named=True):
        if row[grid.value] is not None:
            key = tuple(str(row[name]) for name in grid.rows)
            cells.setdefault(key, {})[row[grid.column]] = _cell(row, grid.value)
    columns = figure.table[grid.column].unique().sort().to_list()
    head = [*grid.rows, *(f"{each:g}" if isinstance(each, float) else str(each) for each in columns)]
    return head, [[*key, *(found.get(each, "") for each in columns)] for key, found in cells.items()]


def _cell(row: Mapping[str, Any], name: str) -> str:
    """Write a value and half of its interval with as many places as the half needs."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return f"{row[name]:.3g}"
    half = (high - low) / 2
    places = 0 if half >= 2 else 1 if half >= 0.195 else 2
    return f"{row[name]:.{places}f}±{half:.{places}f}"
