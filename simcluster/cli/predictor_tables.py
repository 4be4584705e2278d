"""What `simcluster predictors evaluate` found, as tables."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["comparison_table", "error_tables"]

_UNITS = {"accuracy": "quality", "length": "tokens"}
_DIGITS = {"accuracy": 4, "length": 1}


def _table(title: str, first: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def comparison_table(found: dict[str, Any], title: str) -> Table:
    """Return one row per head over all held-out rows."""
    table = _errors(title, "head")
    for kind, scores in found["heads"].items():
        table.add_row(f"{kind} [{_UNITS[kind]}]".replace("[", "\\["), *_cells(kind, scores["overall"]))
    return table


def error_tables(found: dict[str, Any]) -> Iterator[Table]:
    """Yield the errors by model and task and the calibration of each head."""
    for kind, scores in found["heads"].items():
        for part in ("by_model", "by_task"):
            if part in scores:
                table = _errors(f"{kind}, {part.replace('_', ' ')}", part.removeprefix("by_"))
                for name, item in scores[part].items():
                    unseen = " (unseen)" if part == "by_model" and name in found["unseen_models"] else ""
                    table.add_row(f"{name}{unseen}", *_cells(kind, item))
                yield table
        if "calibration" in scores:
            error = scores["calibration"]["expected_calibration_error"]
            table = _table(
                f"calibration, mean gap {error:.4f}", "predicted", ("rows", "mean predicted", "mean observed")
            )
            for each in scores["calibration"]["bins"]:
                table.add_row(
                    f"{each['from']:.1f} to {each['to']:.1f}",
                    f"{each['rows']:,}",
                    f"{each['predicted']:.3f}",
                    f"{each['observed']:.3f}",
                )
            yield table


def _errors(title: str, first: str) -> Table:
    headings = ("rows", "bias", "RMSE", "task\nmean", "global\nmean", "MAE", "task\nmean", "global\nmean")
    margins = ("margin over\ntask mean", "margin over\nglobal mean")
    return _table(title, first, (*headings, *margins))


def _cells(kind: str, item: dict[str, Any]) -> list[str]:
    digits = _DIGITS[kind]
    errors = [item[name][error] for error in ("rmse", "mae") for name in ("head", "task_mean", "global_mean")]
    cells = [f"{item['rows']:,}", f"{item['bias']:+.{digits}f}", *(f"{value:.{digits}f}" for value in errors)]
    for name in ("margin_over_task_mean", "margin_over_global_mean"):
        margin = item[name]
        cells.append("-" if margin is None else f"{margin['value']:+.1%} ({margin['low']:+.1%}, {margin['high']:+.1%})")
    return cells
