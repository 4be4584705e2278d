"""Reads the files of an importer and tells them apart by their columns; interpolates in their grids."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.errors import CalibrationError

__all__ = ["by_role", "grid"]

Array = NDArray[np.float64]


def by_role(
    files: Sequence[Path], roles: Mapping[str, Sequence[str]], optional: Sequence[str] = ()
) -> dict[str, pl.DataFrame]:
    """Read Parquet files and name each by the columns that it has.

    Args:
        files: the files, in any order.
        roles: columns that tell a file of each role.
        optional: roles that may be missing.

    Raises:
        CalibrationError: a file is unreadable, of no role or of one that is there already, or a role is missing.
    """
    found: dict[str, pl.DataFrame] = {}
    for file in files:
        try:
            table = pl.read_parquet(file)
        except FileNotFoundError:
            raise CalibrationError(f"{file}: no such file; give a Parquet file") from None
        except (OSError, pl.exceptions.PolarsError) as error:
            raise CalibrationError(
                f"{file}: cannot be read ({str(error).splitlines()[0]}); it is truncated or not Parquet"
            ) from None
        names = [role for role, columns in roles.items() if set(columns) <= set(table.columns)]
        if not names:
            wanted = "; ".join(f"{role}: {', '.join(columns)}" for role, columns in roles.items())
            raise CalibrationError(f"{file}: its columns are {', '.join(table.columns)}; must be one of {wanted}")
        if names[0] in found:
            raise CalibrationError(f"{file}: a second table of {names[0]}; give one of each")
        if table.is_empty():
            raise CalibrationError(f"{file}: no rows")
        found[names[0]] = table
    missing = [role for role in roles if role not in found and role not in optional]
    if missing:
        raise CalibrationError(f"{files[0]}: no table of {', '.join(missing)} beside it; give one of each")
    return found


def grid(x: Array, xs: Array, y: Array, ys: Array, values: Array) -> Array:
    """Interpolate bilinearly in a grid values (len(xs), len(ys)) at points (n,); beyond it the edge's line goes on.

    A point of the grid may be NaN where nothing was measured; the row's nearest measured values stand in.
    """
    filled = np.stack([_filled(ys, row) for row in values])
    i = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, max(len(xs) - 2, 0))
    j = np.clip(np.searchsorted(ys, y, side="right") - 1, 0, max(len(ys) - 2, 0))
    if len(xs) == 1:
        return np.asarray(np.interp(y, ys, filled[0]))
    u = (x - xs[i]) / (xs[i + 1] - xs[i])
    if len(ys) == 1:
        return np.asarray(filled[i, 0] * (1 - u) + filled[i + 1, 0] * u)
    v = (y - ys[j]) / (ys[j + 1] - ys[j])
    low = filled[i, j] * (1 - v) + filled[i, j + 1] * v
    high = filled[i + 1, j] * (1 - v) + filled[i + 1, j + 1] * v
    return np.asarray(low * (1 - u) + high * u)


def _filled(at: Array, row: Array) -> Array:
    """Fill what was not measured: between two values by the line, beyond them by the line of the nearest two."""
    good = np.flatnonzero(np.isfinite(row))
    out: Array = np.interp(at, at[good], row[good])
    if len(good) > 1:
        for edge, beyond in (((good[0], good[1]), at < at[good[0]]), ((good[-2], good[-1]), at > at[good[-1]])):
            a, b = edge
            out[beyond] = row[a] + (row[b] - row[a]) * (at[beyond] - at[a]) / (at[b] - at[a])
    return out
