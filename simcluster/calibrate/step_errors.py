"""Errors of predicted step times, over all steps and by their kind."""

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.card import StepKind

__all__ = ["ErrorSummary", "error_by_kind", "error_summary", "step_kinds"]

Array = NDArray[np.float64]


class ErrorSummary(NamedTuple):
    """Errors of predictions: MAPE [fraction], mean absolute error, rows left out of the MAPE."""

    mape: float
    mean_absolute: float
    skipped: int


def error_summary(actual: Array, predicted: Array, weights: Array | None = None) -> ErrorSummary:
    """Compare predictions (n,) with actual values (n,) of the same unit.

    A relative error needs an actual value other than 0; such rows are left out of the MAPE, and
    counted, but not out of the mean absolute error. The MAPE is NaN if no row is left.
    """
    weights = np.ones_like(actual, dtype=np.float64) if weights is None else weights
    errors = np.abs(predicted - actual)
    nonzero = (actual != 0) & (weights > 0)
    mape = float("nan")
    if nonzero.any():
        relative = errors[nonzero] / np.abs(actual[nonzero])
        mape = float(np.average(relative, weights=weights[nonzero]))
    return ErrorSummary(mape, float(np.average(errors, weights=weights)), int((actual == 0).sum()))


def step_kinds(steps: pl.DataFrame) -> NDArray[np.str_]:
    """Return the kind of each step (n,): decode, prefill (nothing decodes) or mixed."""
    prefills = steps["has_prefill"].cast(pl.Boolean).to_numpy()
    decodes = steps["sum_decode_context"].to_numpy() > 0
    return np.where(~prefills, "decode", np.where(decodes, "mixed", "prefill"))


def error_by_kind(steps: pl.DataFrame, predicted: Array, weights: Array | None = None) -> dict[StepKind, float]:
    """Return the MAPE [fraction] of predicted step times (n,) [s] over all steps and by kind.

    Kinds without a step are left out. Weights (n,) count within each kind.
    """
    actual = steps["step_s"].cast(pl.Float64).to_numpy()
    weights = np.ones(len(actual)) if weights is None else weights
    kinds = step_kinds(steps)
    errors: dict[StepKind, float] = {}
    names: tuple[StepKind, ...] = ("all", "decode", "prefill", "mixed")
    for name in names:
        rows = np.ones(len(actual), dtype=bool) if name == "all" else kinds == name
        if (weights[rows] > 0).any():
            errors[name] = error_summary(actual[rows], predicted[rows], weights[rows]).mape
    return errors
