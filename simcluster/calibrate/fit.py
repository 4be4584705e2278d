"""The fit of the step-time model to a table of steps, and how far to trust it.

A table of steps has one row per engine step, in the order in which they were recorded, and the
columns `STEP_COLUMNS`. The fit minimises the relative error, since a millisecond matters more to a
decode step than to a long prefill; robustly, since recorded steps have outliers; and without
negative coefficients, since no kernel gives time back.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from simcluster.card import StepKind, StepTimeFit, StepTimeForm, Term
from simcluster.errors import CalibrationError
from simcluster.rng import seeded

__all__ = [
    "HINGE_GRID",
    "STEP_COLUMNS",
    "ErrorSummary",
    "bootstrap_intervals",
    "calibrate",
    "error_by_kind",
    "error_summary",
    "fit_step_time",
    "held_out_mape",
    "outlying_rows",
    "predict",
    "step_kinds",
]

Array = NDArray[np.float64]
ExtraTerm = Literal["b4_s", "b5_s"]

STEP_COLUMNS = (
    "n_tokens",  # prefill and decode tokens of the step
    "sum_decode_context",  # sum of the decode contexts [tokens]
    "prefill_attention",  # sum of p*c + p*(p+1)/2 [tokens^2]
    "has_prefill",  # whether a request prefills
    "num_prefill_requests",
    "step_s",  # duration [s]
)
HINGE_GRID = (64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)  # tokens

_PLAIN_TERMS: tuple[Term, ...] = ("b0_s", "b1_s", "b2_s", "b3_s")
_ROBUST_SCALE = 0.02  # relative errors beyond 2 % count linearly, not squared
_RANK_TOLERANCE = 1e-8  # share of a column that the columns before it cannot explain
_FOLDS = 5
_BLOCKS = 40  # contiguous blocks of the table, for the folds and for the bootstrap
_RESAMPLES = 200
_BOOTSTRAP_SEED = 2607_18253  # the paper's arXiv number; any constant would do


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
    actual = _column(steps, "step_s")
    weights = np.ones(len(actual)) if weights is None else weights
    kinds = step_kinds(steps)
    errors: dict[StepKind, float] = {}
    names: tuple[StepKind, ...] = ("all", "decode", "prefill", "mixed")
    for name in names:
        rows = np.ones(len(actual), dtype=bool) if name == "all" else kinds == name
        if (weights[rows] > 0).any():
            errors[name] = error_summary(actual[rows], predicted[rows], weights[rows]).mape
    return errors


def predict(fit: StepTimeFit, steps: pl.DataFrame) -> Array:
    """Return the step times (n,) [s] that a fit predicts. Source: paper eq. 9."""
    terms: tuple[Term, ...] = (*_PLAIN_TERMS, "b1x_s", "b4_s", "b5_s")
    coefficients = np.array([getattr(fit, term) for term in terms])
    times: Array = _design(steps, terms, fit.hinge_tokens) @ coefficients
    return times


def fit_step_time(
    steps: pl.DataFrame,
    form: StepTimeForm,
    weights: Array | None = None,
    *,
    extra_terms: Sequence[ExtraTerm] = (),
    allow_partial: bool = False,
) -> StepTimeFit:
    """Fit the step-time model to steps.

    The hinge is the value of `HINGE_GRID` with the least weighted loss on these steps.

    Args:
        steps: n steps with `STEP_COLUMNS`.
        form: "eq9" is the paper's four coefficients, "hinge" adds b1x and the extra terms.
        weights: how much each step counts (n,), >= 0; equal if None.
        extra_terms: b4_s, b5_s to fit as well; only in the form "hinge".
        allow_partial: fit what the steps can tell, hold the rest at 0 and name it in
            `not_identified`, instead of raising.

    Raises:
        CalibrationError: a column is missing or not finite, a step time is not above 0, or the
            steps cannot tell a coefficient from the others.

    Source: paper eq. 9.
    """
    _check_steps(steps)
    weights = _checked_weights(weights, len(steps))
    if form == "eq9" and extra_terms:
        raise ValueError("extra_terms belong to the form 'hinge'")
    if form == "eq9":
        return _fit_terms(steps, _PLAIN_TERMS, 0, weights, allow_partial)[0]
    terms: tuple[Term, ...] = (*_PLAIN_TERMS, "b1x_s", *extra_terms)
    # A hinge outside the fitted steps is either plain eq. 9 or the same as no hinge at all.
    tokens = _column(steps, "n_tokens")
    inside = [hinge for hinge in HINGE_GRID if tokens.min() < hinge < tokens.max()]
    fits = [_fit_terms(steps, terms, hinge, weights, allow_partial) for hinge in inside or HINGE_GRID[:1]]
    return min(fits, key=lambda fitted: fitted[1])[0]


def held_out_mape(
    steps: pl.DataFrame,
    form: StepTimeForm,
    weights: Array | None = None,
    *,
    extra_terms: Sequence[ExtraTerm] = (),
) -> dict[StepKind, float]:
    """Return the MAPE [fraction] by kind of step on steps that the fit has not seen.

    The table is cut into contiguous blocks, dealt in turn to five folds; each fold is predicted by
    a fit to the other four, its hinge chosen there too. A block keeps neighbours together: of a
    grid it takes whole lines (all contexts of a few batch sizes), so the fit has to interpolate
    between lines, or at the ends to extrapolate, instead of between points measured beside each
    other; of a recording it takes steps that follow each other and are nearly the same.

    Raises:
        CalibrationError: as `fit_step_time`, or too few steps.
    """
    blocks = _blocks(len(steps))
    weights = _checked_weights(weights, len(steps))
    predicted = np.empty(len(steps))
    for fold in range(_FOLDS):
        held = np.concatenate(blocks[fold::_FOLDS])
        rest = np.setdiff1d(np.arange(len(steps)), held)
        try:
            fit = fit_step_time(steps[rest], form, weights[rest], extra_terms=extra_terms)
        except CalibrationError as error:
            raise CalibrationError(f"without held-out fold {fold + 1} of {_FOLDS}: {error}") from None
        predicted[held] = predict(fit, steps[held])
    return error_by_kind(steps, predicted, weights)


def bootstrap_intervals(
    steps: pl.DataFrame, fit: StepTimeFit, terms: Sequence[Term], weights: Array | None = None
) -> dict[Term, tuple[float, float]]:
    """Return the 95 % interval of each term of a fit, in its unit, by a block bootstrap.

    Contiguous blocks of the table are drawn with replacement, 200 times with a fixed seed, and the
    terms fitted again. The hinge stays where it is, so the intervals hold given the hinge.

    Raises:
        CalibrationError: too few steps.
    """
    weights = _checked_weights(weights, len(steps))
    blocks = _blocks(len(steps))
    random = seeded(_BOOTSTRAP_SEED)
    design = _design(steps, terms, fit.hinge_tokens)
    actual = _column(steps, "step_s")
    draws = np.empty((_RESAMPLES, len(terms)))
    for draw in draws:
        chosen = random.integers(len(blocks), size=len(blocks))
        rows = np.concatenate([blocks[block] for block in chosen])
        draw[:] = _solve(design[rows], actual[rows], weights[rows])[0]
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
    terms = _PLAIN_TERMS if form == "eq9" else (*_PLAIN_TERMS, "b1x_s", *extra_terms)
    return fit.model_copy(
        update={
            "held_out_mape": held_out_mape(steps, form, weights, extra_terms=extra_terms),
            "in_sample_mape": error_by_kind(steps, predict(fit, steps), weights),
            "intervals": bootstrap_intervals(steps, fit, terms, weights),
        }
    )


def outlying_rows(steps: pl.DataFrame, fit: StepTimeFit, factor: float = 100.0) -> list[int]:
    """Return the rows whose relative error is above `factor` times the median relative error.

    A cold first step is the usual one; leave it out and fit again.
    """
    errors = np.abs(predict(fit, steps) / _column(steps, "step_s") - 1)
    # An exact fit has a median of rounding errors, which no row should be measured by.
    limit = factor * max(float(np.median(errors)), 1e-9)
    return [int(row) for row in np.flatnonzero(errors > limit)]


def _column(steps: pl.DataFrame, name: str) -> Array:
    values: Array = steps[name].cast(pl.Float64).to_numpy()
    return values


def _check_steps(steps: pl.DataFrame) -> None:
    missing = [name for name in STEP_COLUMNS if name not in steps.columns]
    if missing:
        raise CalibrationError(f"steps: no column {', '.join(missing)}; a table of steps has {', '.join(STEP_COLUMNS)}")
    if steps.is_empty():
        raise CalibrationError("steps: the table is empty; record some steps")
    for name in STEP_COLUMNS:
        values = steps[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
        if name == "step_s":
            bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            allowed = "> 0" if name == "step_s" else ">= 0"
            raise CalibrationError(
                f"steps: row {bad[0]}: {name} = {values[bad[0]]}; must be finite and {allowed}; leave the row out"
            )


def _checked_weights(weights: Array | None, rows: int) -> Array:
    """Return weights with mean 1."""
    if weights is None:
        return np.ones(rows)
    good = weights.shape == (rows,) and bool(np.isfinite(weights).all()) and weights.min() >= 0
    if not good or weights.sum() == 0:
        raise CalibrationError(f"weights: must be {rows} finite numbers >= 0, not all 0")
    return np.asarray(weights / weights.mean(), dtype=np.float64)


def _design(steps: pl.DataFrame, terms: Sequence[Term], hinge_tokens: int) -> Array:
    """Return the features (n, len(terms)) that the coefficients multiply. Source: paper eq. 9."""
    tokens = _column(steps, "n_tokens")
    context = _column(steps, "sum_decode_context")
    features: dict[Term, Array] = {
        "b0_s": np.ones(len(steps)),
        "b1_s": tokens,
        "b2_s": context,
        "b3_s": _column(steps, "prefill_attention"),
        "b1x_s": np.maximum(tokens - hinge_tokens, 0),
        "b4_s": context * _column(steps, "has_prefill"),
        "b5_s": _column(steps, "num_prefill_requests"),
    }
    return np.stack([features[term] for term in terms], axis=1)


def _fit_terms(
    steps: pl.DataFrame, terms: Sequence[Term], hinge: int, weights: Array, allow_partial: bool
) -> tuple[StepTimeFit, float]:
    """Fit some terms at one hinge; return the fit and its loss."""
    design = _design(steps, terms, hinge)
    unknown = _not_identified(design[weights > 0], terms)
    if unknown and not allow_partial:
        reasons = "; ".join(f"{term}: {reason}" for term, reason in unknown.items())
        raise CalibrationError(
            f"steps: they tell {len(terms) - len(unknown)} of {len(terms)} coefficients apart; "
            f"not identified are {reasons}; record steps that vary more, or allow a partial fit"
        )
    known = [term for term in terms if term not in unknown]
    columns = [terms.index(term) for term in known]
    solution, loss = _solve(design[:, columns], _column(steps, "step_s"), weights)
    values = dict.fromkeys(_PLAIN_TERMS, 0.0) | dict(zip(known, solution.tolist(), strict=True))
    rest = {"hinge_tokens": hinge if "b1x_s" in terms else 0, "not_identified": tuple(unknown)}
    return StepTimeFit.model_validate({**values, **rest}), loss


def _not_identified(design: Array, terms: Sequence[Term]) -> dict[Term, str]:
    """Name the terms that the terms before them already explain, and why (Gram-Schmidt)."""
    basis: list[Array] = []
    named: list[Term] = []
    unknown: dict[Term, str] = {}
    for term, column in zip(terms, design.T, strict=True):
        norm = float(np.linalg.norm(column))
        if norm == 0:
            unknown[term] = "its feature is 0 in every step"
            continue
        rest = column / norm
        for _ in range(2):  # the second pass removes what rounding left of the first
            for direction in basis:
                rest = rest - (direction @ rest) * direction
        size = float(np.linalg.norm(rest))
        if size <= _RANK_TOLERANCE:
            unknown[term] = f"it cannot be told apart from {' and '.join(named)}"
        else:
            basis.append(rest / size)
            named.append(term)
    return unknown


def _solve(design: Array, actual: Array, weights: Array) -> tuple[Array, float]:
    """Return the coefficients >= 0 with the least weighted soft-L1 loss, and that loss.

    The start is the least-squares solution. Columns are scaled to mean square 1, so that tolerances
    mean the same for a constant and for squared tokens.
    """
    relative: Array = design / actual[:, None]
    scale = np.sqrt(np.mean(relative**2, axis=0))
    scale[scale == 0] = 1.0
    relative /= scale
    root = np.sqrt(weights)
    start, _ = nnls(relative * root[:, None], root)

    def residuals(coefficients: Array) -> Array:
        errors: Array = relative @ coefficients - 1
        return errors

    def jacobian(_: Array) -> Array:
        return relative

    def loss(squares: Array) -> Array:
        # scipy's soft_l1 times the weight of the row; weighting the residuals would shift the
        # point from which an error counts linearly.
        grown = 1 + squares
        rho: Array = np.stack([2 * (np.sqrt(grown) - 1), grown**-0.5, -0.5 * grown**-1.5])
        return rho * weights

    result = least_squares(
        residuals,
        start,
        jac=jacobian,
        bounds=(0, np.inf),
        loss=loss,  # type: ignore[arg-type]  # the stubs want an argument that scipy never gives
        f_scale=_ROBUST_SCALE,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    # The solver stays strictly inside its bounds: what it leaves at a bound is 0.
    solution = np.where(result.x < 1e-9, 0.0, result.x)
    return solution / scale, float(result.cost)


def _blocks(rows: int) -> list[NDArray[np.intp]]:
    """Cut rows into contiguous blocks of nearly equal length, in order."""
    if rows < 2 * _FOLDS:
        raise CalibrationError(
            f"steps: {rows} are too few for a held-out error or an interval; record at least {2 * _FOLDS}"
        )
    return np.array_split(np.arange(rows), min(_BLOCKS, rows))
