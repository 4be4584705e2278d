"""Errors of the fit on steps that it has not seen, and the intervals of its coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate.fit import (
    PLAIN_TERMS,
    ExtraTerm,
    checked_weights,
    design,
    fit_step_time,
    fit_terms,
    predict,
    terms_of,
)
from simcluster.calibrate.solve import solve
from simcluster.calibrate.step_errors import error_by_kind
from simcluster.card import StepKind, StepTimeFit, StepTimeForm, Term
from simcluster.errors import CalibrationError
from simcluster.rng import seeded

__all__ = [
    "GRID_BLOCKS",
    "SERVED_BLOCKS",
    "Blocks",
    "bootstrap_intervals",
    "calibrate",
    "held_out_mape",
    "held_out_prediction",
    "other_runs_prediction",
]

Array = NDArray[np.float64]
IntArray = NDArray[np.intp]

_RESAMPLES = 200
_BOOTSTRAP_SEED = 2607_18253  # the paper's arXiv number; any constant would do


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a table is cut into contiguous blocks, and these dealt in turn to folds.

    A block keeps neighbours together: of a grid it takes whole lines (all contexts of a few batch sizes), so the fit
    has to interpolate between lines, or at the ends to extrapolate, instead of between points measured beside each
    other; of a recording it takes steps that follow each other and are nearly the same.

    Attributes:
        folds: each fold is predicted by a fit to the others.
        number: how many blocks, or None.
        length: how long each is, or None [steps].
    """

    folds: int
    number: int | None = None
    length: int | None = None

    def cut(self, rows: int) -> list[IntArray]:
        """Return the rows of each block, in order.

        Raises:
            CalibrationError: too few rows.
        """
        least = 2 * self.folds if self.length is None else self.folds * self.length
        if rows < least:
            raise CalibrationError(
                f"steps: {rows} are too few for a held-out error or an interval; record at least {least}"
            )
        if self.length is not None:
            return [np.arange(at, min(at + self.length, rows)) for at in range(0, rows, self.length)]
        return np.array_split(np.arange(rows), min(self.number or rows, rows))

    def describe(self) -> str:
        """Say it in words."""
        blocks = f"{self.number} contiguous blocks" if self.length is None else f"blocks of {self.length} steps"
        return f"{blocks}, {'alternating' if self.folds == 2 else f'dealt to {self.folds} folds'}"


GRID_BLOCKS = Blocks(folds=5, number=40)
SERVED_BLOCKS = Blocks(folds=2, length=50)


def held_out_prediction(
    steps: pl.DataFrame,
    terms: Sequence[Term],
    weights: Array | None = None,
    blocks: Blocks = GRID_BLOCKS,
    *,
    allow_partial: bool = False,
) -> Array:
    """Predict each step (n,) [s] by a fit that has not seen its fold; the hinge is chosen there too.

    Raises:
        CalibrationError: as `fit_step_time`, or too few steps.
    """
    cut = blocks.cut(len(steps))
    weights = checked_weights(weights, len(steps))
    predicted = np.empty(len(steps))
    for fold in range(blocks.folds):
        held = np.concatenate(cut[fold :: blocks.folds])
        predicted[held] = _predicted_by_others(
            steps, terms, weights, held, f"held-out fold {fold + 1} of {blocks.folds}", allow_partial
        )
    return predicted


def other_runs_prediction(
    steps: pl.DataFrame,
    terms: Sequence[Term],
    run: IntArray,
    weights: Array | None = None,
    *,
    allow_partial: bool = False,
) -> Array:
    """Predict the steps of each run (n,) [s] by a fit to the other runs.

    Args:
        steps: as of `fit_step_time`.
        terms: the terms to fit.
        run: the run of each step (n,), at least two different ones.
        weights: how much each step counts (n,).
        allow_partial: as of `fit_step_time`.

    Raises:
        CalibrationError: as `fit_step_time`.
    """
    weights = checked_weights(weights, len(steps))
    predicted = np.empty(len(steps))
    for number in np.unique(run):
        held = np.flatnonzero(run == number)
        predicted[held] = _predicted_by_others(steps, terms, weights, held, f"run {number + 1}", allow_partial)
    return predicted


def _predicted_by_others(
    steps: pl.DataFrame, terms: Sequence[Term], weights: Array, held: IntArray, name: str, allow_partial: bool
) -> Array:
    rest = np.setdiff1d(np.arange(len(steps)), held)
    try:
        fit = fit_terms(steps[rest], terms, weights[rest], allow_partial=allow_partial)
    except CalibrationError as error:
        raise CalibrationError(f"without {name}: {error}") from None
    return predict(fit, steps[held])


def held_out_mape(
    steps: pl.DataFrame,
    form: StepTimeForm,
    weights: Array | None = None,
    *,
    extra_terms: Sequence[ExtraTerm] = (),
) -> dict[StepKind, float]:
    """Return the MAPE [fraction] by kind of step on steps that the fit has not seen.

    The table is cut into `GRID_BLOCKS`.

    Raises:
        CalibrationError: as `fit_step_time`, or too few steps.
    """
    predicted = held_out_prediction(steps, terms_of(form, extra_terms), weights)
    return error_by_kind(steps, predicted, checked_weights(weights, len(steps)))


def bootstrap_intervals(
    steps: pl.DataFrame,
    fit: StepTimeFit,
    terms: Sequence[Term],
    weights: Array | None = None,
    blocks: Blocks = GRID_BLOCKS,
) -> dict[Term, tuple[float, float]]:
    """Return the 95 % interval of each term of a fit, in its unit, by a block bootstrap.

    Contiguous blocks of the table are drawn with replacement, 200 times with a fixed seed, and the
    terms fitted again. The hinge stays where it is, so the intervals hold given the hinge.

    Raises:
        CalibrationError: too few steps.
    """
    weights = checked_weights(weights, len(steps))
    cut = blocks.cut(len(steps))
    random = seeded(_BOOTSTRAP_SEED)
    features = design(steps, terms, fit.hinge_tokens)
    actual: Array = steps["step_s"].cast(pl.Float64).to_numpy()
    draws = np.empty((_RESAMPLES, len(terms)))
    for draw in draws:
        chosen = random.integers(len(cut), size=len(cut))
        rows = np.concatenate([cut[block] for block in chosen])
        draw[:] = solve(features[rows], actual[rows], weights[rows])[0]
    low, high = np.percentile(draws, [2.5, 97.5], axis=0).tolist()
    return dict(zip(terms, zip(low, high, strict=True), strict=True))


def calibrate(
    steps: pl.DataFrame,
    form: StepTimeForm,
    weights: Array | None = None,
    *,
    extra_terms: Sequence[ExtraTerm] = (),
) -> StepTimeFit:
    """Fit the step-time model with its held-out and in-sample errors and its intervals.

    Arguments and errors are those of `fit_step_time` and `held_out_mape`.
    """
    fit = fit_step_time(steps, form, weights, extra_terms=extra_terms)
    terms = PLAIN_TERMS if form == "eq9" else (*PLAIN_TERMS, "b1x_s", *extra_terms)
    return fit.model_copy(
        update={
            "held_out_mape": held_out_mape(steps, form, weights, extra_terms=extra_terms),
            "in_sample_mape": error_by_kind(steps, predict(fit, steps), weights),
            "intervals": bootstrap_intervals(steps, fit, terms, weights),
        }
    )
