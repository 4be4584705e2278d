"""The fit of the step-time model to a table of steps, and how far to trust it.

A table of steps has one row per engine step, in the order in which they were recorded, and the
columns `STEP_COLUMNS`. The fit minimises the relative error, since a millisecond matters more to a
decode step than to a long prefill; robustly, since recorded steps have outliers; and without
negative coefficients, since no kernel gives time back.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import nnls

from simcluster.calibrate.solve import not_identified, solve
from simcluster.calibrate.step_errors import error_by_kind, error_summary, step_kinds
from simcluster.card import StepTimeFit, StepTimeForm, Term
from simcluster.errors import CalibrationError

__all__ = [
    "HINGE_GRID",
    "PLAIN_TERMS",
    "STEP_COLUMNS",
    "ExtraTerm",
    "check_steps",
    "checked_weights",
    "design",
    "error_by_kind",
    "error_summary",
    "fit_step_time",
    "fit_terms",
    "outlying_rows",
    "predict",
    "step_kinds",
    "terms_of",
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

_MANY_STEPS, _HINGES_KEPT = 2000, 3  # of more steps, only the hinges that are best without robustness are tried
PLAIN_TERMS: tuple[Term, ...] = ("b0_s", "b1_s", "b2_s", "b3_s")


def predict(fit: StepTimeFit, steps: pl.DataFrame) -> Array:
    """Return the step times (n,) [s] that a fit predicts. Source: paper eq. 9."""
    terms: tuple[Term, ...] = (*PLAIN_TERMS, "b1x_s", "b4_s", "b5_s")
    coefficients = np.array([getattr(fit, term) for term in terms])
    times: Array = design(steps, terms, fit.hinge_tokens) @ coefficients
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
    if form == "eq9" and extra_terms:
        raise ValueError("extra_terms belong to the form 'hinge'")
    return fit_terms(steps, terms_of(form, extra_terms), weights, allow_partial=allow_partial)


def terms_of(form: StepTimeForm, extra_terms: Sequence[ExtraTerm] = ()) -> tuple[Term, ...]:
    """Return the terms of a form: "eq9" has the paper's four, "hinge" one more, and the extra ones."""
    return PLAIN_TERMS if form == "eq9" else (*PLAIN_TERMS, "b1x_s", *extra_terms)


def fit_terms(
    steps: pl.DataFrame, terms: Sequence[Term], weights: Array | None = None, *, allow_partial: bool = False
) -> StepTimeFit:
    """Fit any terms of the step-time model; the rest is that of `fit_step_time`."""
    check_steps(steps)
    weights = checked_weights(weights, len(steps))
    if "b1x_s" not in terms:
        return _fit_at(steps, terms, 0, weights, allow_partial)[0]
    # A hinge outside the fitted steps is either plain eq. 9 or the same as no hinge at all.
    tokens = _column(steps, "n_tokens")
    inside = [hinge for hinge in HINGE_GRID if tokens.min() < hinge < tokens.max()]
    if len(steps) > _MANY_STEPS and len(inside) > _HINGES_KEPT:
        inside = _likely_hinges(steps, terms, inside, weights)
    fits = [_fit_at(steps, terms, hinge, weights, allow_partial) for hinge in inside or HINGE_GRID[:1]]
    return min(fits, key=lambda fitted: fitted[1])[0]


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


def check_steps(steps: pl.DataFrame, where: str = "steps") -> None:
    """Check that a table has `STEP_COLUMNS` with values that can be true.

    Args:
        steps: the table.
        where: its name, for messages.

    Raises:
        CalibrationError: a column is missing or not a number, the table is empty, or a value is not allowed.
    """
    missing = [name for name in STEP_COLUMNS if name not in steps.columns]
    if missing:
        raise CalibrationError(
            f"{where}: no column {', '.join(missing)}; a table of steps has {', '.join(STEP_COLUMNS)}"
        )
    if steps.is_empty():
        raise CalibrationError(f"{where}: the table is empty; record some steps")
    for name in STEP_COLUMNS:
        try:
            values = steps[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        except pl.exceptions.PolarsError:
            raise CalibrationError(f"{where}: column {name} is {steps[name].dtype}; must be a number") from None
        bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
        if name == "step_s":
            bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            allowed = "> 0" if name == "step_s" else ">= 0"
            raise CalibrationError(
                f"{where}: row {bad[0]}: {name} = {values[bad[0]]}; must be finite and {allowed}; leave the row out"
            )


def checked_weights(weights: Array | None, rows: int) -> Array:
    """Return weights (rows,) with mean 1; None gives equal ones.

    Raises:
        CalibrationError: they are not finite, negative, all 0, or of another number.
    """
    if weights is None:
        return np.ones(rows)
    good = weights.shape == (rows,) and bool(np.isfinite(weights).all()) and weights.min() >= 0
    if not good or weights.sum() == 0:
        raise CalibrationError(f"weights: must be {rows} finite numbers >= 0, not all 0")
    return np.asarray(weights / weights.mean(), dtype=np.float64)


def design(steps: pl.DataFrame, terms: Sequence[Term], hinge_tokens: int) -> Array:
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


def _likely_hinges(steps: pl.DataFrame, terms: Sequence[Term], hinges: list[int], weights: Array) -> list[int]:
    """Return the hinges with the least squared relative error, which costs far less than the robust one."""
    actual, root = _column(steps, "step_s"), np.sqrt(weights)
    losses = {hinge: nnls(design(steps, terms, hinge) / actual[:, None] * root[:, None], root)[1] for hinge in hinges}
    return sorted(sorted(hinges, key=losses.__getitem__)[:_HINGES_KEPT])


def _fit_at(
    steps: pl.DataFrame, terms: Sequence[Term], hinge: int, weights: Array, allow_partial: bool
) -> tuple[StepTimeFit, float]:
    """Fit some terms at one hinge; return the fit and its loss."""
    features = design(steps, terms, hinge)
    unknown = not_identified(features[weights > 0], terms)
    if unknown and not allow_partial:
        reasons = "; ".join(f"{term}: {reason}" for term, reason in unknown.items())
        raise CalibrationError(
            f"steps: they tell {len(terms) - len(unknown)} of {len(terms)} coefficients apart; "
            f"not identified are {reasons}; record them, or allow a partial fit (--allow-partial)"
        )
    known = [term for term in terms if term not in unknown]
    columns = [terms.index(term) for term in known]
    solution, loss = solve(features[:, columns], _column(steps, "step_s"), weights)
    values = dict.fromkeys(PLAIN_TERMS, 0.0) | dict(zip(known, solution.tolist(), strict=True))
    rest = {"hinge_tokens": hinge if "b1x_s" in terms else 0, "not_identified": tuple(unknown)}
    return StepTimeFit.model_validate({**values, **rest}), loss
