"""The least robust relative error without negative coefficients, and which coefficients a design can tell."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from simcluster.card import Term

__all__ = ["not_identified", "solve"]

Array = NDArray[np.float64]

_ROBUST_SCALE = 0.02  # relative errors beyond 2 % count linearly, not squared
_RANK_TOLERANCE = 1e-8  # share of a column that the columns before it cannot explain

# What a table of steps lacks if it cannot tell a term.
_MISSING: dict[Term, str] = {
    "b0_s": "steps with few tokens",
    "b1_s": "steps with other numbers of tokens (decode batches of several sizes, prompts of several lengths)",
    "b2_s": "decode steps at several context lengths",
    "b3_s": "steps that prefill, of several lengths and with tokens before them",
    "b1x_s": "steps with fewer and with more tokens than the hinge",
    "b4_s": "steps that decode beside a prefill, and steps that only decode, at several context lengths",
    "b5_s": "steps that prefill several requests at once, and one alone",
}


def not_identified(design: Array, terms: Sequence[Term]) -> dict[Term, str]:
    """Name the terms that the terms before them already explain, and why (Gram-Schmidt)."""
    basis: list[Array] = []
    named: list[Term] = []
    unknown: dict[Term, str] = {}
    for term, column in zip(terms, design.T, strict=True):
        norm = float(np.linalg.norm(column))
        if norm == 0:
            unknown[term] = f"its feature is 0 in every step, missing are {_MISSING[term]}"
            continue
        rest = column / norm
        for _ in range(2):  # the second pass removes what rounding left of the first
            for direction in basis:
                rest = rest - (direction @ rest) * direction
        size = float(np.linalg.norm(rest))
        if size <= _RANK_TOLERANCE:
            unknown[term] = f"it cannot be told apart from {' and '.join(named)}, missing are {_MISSING[term]}"
        else:
            basis.append(rest / size)
            named.append(term)
    return unknown


def solve(design: Array, actual: Array, weights: Array) -> tuple[Array, float]:
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
