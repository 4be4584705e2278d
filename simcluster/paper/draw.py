"""Figures as PNG files, where matplotlib is installed."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from simcluster.paper.figure import Figure, Plot

__all__ = ["NO_MATPLOTLIB", "can_draw", "draw"]

NO_MATPLOTLIB = "no PNG files: matplotlib is missing; pip install 'simcluster[plots]'"
_DPI = 120
_PANEL_INCHES = (5.0, 4.0)
_PER_ROW = 3


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (an extra)
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    plot, table = figure.plot, figure.table if figure.points is None else figure.points
    panels = [None] if plot.panel is None else table[plot.panel].unique(maintain_order=True).to_list()
    columns = min(len(panels), _PER_ROW)
    rows = -(-len(panels) // columns)
    lying = plot.kind == "bars" and table[plot.x].dtype.is_numeric()  # names stand at the left and need room
    width = 2 if lying else columns
    canvas = Canvas(figsize=(_PANEL_INCHES[0] * width, _PANEL_INCHES[1] * rows), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        chosen = table if plot.panel is None else table.filter(pl.col(plot.panel).eq_missing(pl.lit(panel)))
        _panel(axis, plot, chosen)
        if plot.panel is not None:
            axis.set_title(f"{plot.panel} = {panel}", fontsize=9)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=7)
    canvas.suptitle(f"Figure {figure.key}: {figure.title}", fontsize=10)
    canvas.savefig(path, dpi=_DPI, metadata={"Software": None})


def _panel(axis: Any, plot: Plot, table: pl.DataFrame) -> None:
    names = table[plot.series].unique(maintain_order=True).to_list()
    for number, name in enumerate(reversed(names)) if plot.kind == "points" else enumerate(names):
        rows = table.filter(pl.col(plot.series).eq_missing(pl.lit(name))).drop_nulls([plot.x, plot.y])
        if plot.kind == "bars":
            _bars(axis, plot, rows, number, len(names), str(name))
        elif plot.kind == "points" or len(rows) == 1:
            axis.plot(rows[plot.x], rows[plot.y], ".", markersize=4 if len(rows) > 20 else 8, label=str(name))
        else:
            _line(axis, plot, rows, str(name))
    if plot.diagonal:
        low = float(np.min(table.select(plot.x, plot.y).to_numpy()))
        axis.axline((low, low), (10 * low, 10 * low), color="black", linewidth=0.8, linestyle=":")
    if "x" in plot.log:
        axis.set_xscale("log")
    if "y" in plot.log:
        axis.set_yscale("log")
    axis.set_xlabel(plot.x)
    axis.set_ylabel(plot.y)
    axis.grid(visible=True, alpha=0.3)


def _line(axis: Any, plot: Plot, rows: pl.DataFrame, name: str) -> None:
    if rows[plot.x].dtype.is_numeric():
        rows = rows.sort(plot.x)
    (line,) = axis.plot(rows[plot.x].to_list(), rows[plot.y].to_list(), marker=".", linewidth=1.2, label=name)
    low, high = f"{plot.y}_low", f"{plot.y}_high"
    if low in rows.columns and rows[low].null_count() == 0:
        axis.fill_between(rows[plot.x].to_list(), rows[low], rows[high], color=line.get_color(), alpha=0.2)


def _bars(axis: Any, plot: Plot, rows: pl.DataFrame, number: int, count: int, name: str) -> None:
    if rows[plot.x].dtype.is_numeric():  # lying bars: names at the left
        axis.barh(rows[plot.y].to_list(), rows[plot.x].to_list(), label=name)
        return
    width = 0.8 / count
    places = [k + number * width for k in range(len(rows))]
    axis.bar(places, rows[plot.y].to_list(), width, label=name)
    axis.set_xticks(range(len(rows)), rows[plot.x].to_list(), fontsize=7)
