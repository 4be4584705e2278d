"""A figure: its numbers, what the paper says about them, and how to draw it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl

from simcluster.report.statistics import Interval, mean_interval
from simcluster.rng import seeded

__all__ = ["Claim", "Figure", "Grid", "Plot", "gain", "mean_of", "spread"]

FloatArray = np.typing.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Claim:
    """A number of the paper beside ours.

    Attributes:
        what: what is claimed.
        paper: the paper's number as text; None where the paper has none.
        ours: our number; None where it cannot be computed.
        interval: 95 % over seeds; None where there is none.
        unit: unit of our number.
        is_main: whether it is one of the few for a document.
    """

    what: str
    paper: str | None
    ours: float | None
    interval: Interval | None
    unit: str
    is_main: bool = False

    def as_data(self) -> dict[str, Any]:
        """Return plain data; what is no number is None."""
        ours = self.ours if self.ours is not None and math.isfinite(self.ours) else None
        known = self.interval is not None and all(map(math.isfinite, self.interval))
        interval = list(self.interval) if self.interval is not None and known else None
        return {"what": self.what, "paper": self.paper, "ours": ours, "interval": interval, "unit": self.unit}


@dataclass(frozen=True, slots=True)
class Plot:
    """How to draw a figure: one line, cloud of points or row of bars per value of `series`.

    Attributes:
        x: column of the abscissa.
        y: column of the ordinate.
        series: column that tells lines apart.
        panel: column that tells panels apart, or None.
        kind: how to draw.
        log: axes with a logarithmic scale: `x`, `y`, `xy` or nothing.
        diagonal: whether to draw the line y = x.
    """

    x: str
    y: str
    series: str
    panel: str | None = None
    kind: Literal["line", "points", "bars"] = "line"
    log: str = ""
    diagonal: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """How to write a figure's table with a row per setting and a column per value of one of its columns.

    Attributes:
        rows: columns that tell rows apart.
        column: column that tells columns apart.
        value: column with the numbers; NAME_low and NAME_high, where there are any, make them intervals.
        unit: unit of the numbers.
    """

    rows: Sequence[str]
    column: str
    value: str
    unit: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        key: its number in the paper, or a name.
        title: what it shows.
        table: the numbers; a column NAME_low and NAME_high hold the 95 % interval of NAME.
        claims: the paper's numbers beside ours.
        moved_by: which assumption moves the result, in words.
        plot: how to draw it.
        shown: columns of the table for the terminal; empty: all.
        points: what is drawn, where that is not the table.
        moved_by_short: the same in a few words.
        grid: how to write the table in a document, where its claims are not all of it.
    """

    key: str
    title: str
    table: pl.DataFrame
    claims: Sequence[Claim]
    moved_by: str
    plot: Plot
    shown: Sequence[str] = ()
    points: pl.DataFrame | None = None
    moved_by_short: str = ""
    grid: Grid | None = None

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON; NaN becomes null."""
        rows = self.table.with_columns(pl.col(pl.Float64).replace([math.inf, -math.inf, math.nan], None)).to_dicts()
        claims = [claim.as_data() for claim in self.claims]
        return {"title": self.title, "claims": claims, "moved_by": self.moved_by, "rows": rows}


def mean_of(values: FloatArray) -> tuple[float, Interval | None]:
    """Return the mean over seeds with its interval; the same values give the same interval."""
    return float(values.mean()), mean_interval(values, seeded(0))


def spread(name: str, values: FloatArray) -> dict[str, float | None]:
    """Return a mean over seeds and its interval as columns of a table: NAME, NAME_low, NAME_high."""
    mean, interval = mean_of(values)
    low, high = (None, None) if interval is None else interval
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def gain(ours: FloatArray, other: FloatArray) -> tuple[float, Interval | None]:
    """Return by how many percent the mean of ours is above the other's, paired by seed, with its interval.

    Args:
        ours: (n,) one value per seed.
        other: (n,) the same seeds.
    """
    scale = 100 / abs(float(other.mean()))
    mean, interval = mean_of((ours - other) * scale)
    return mean, interval
