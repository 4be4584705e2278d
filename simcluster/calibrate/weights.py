"""How much each step counts: as often as a server meets its like."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate.step_errors import step_kinds

__all__ = ["served_step_weights"]

Array = NDArray[np.float64]

_UNSERVED = 0.1  # of the mean weight of its class, for a step whose like was never served
_EQUAL = "no served phase was recorded: every step counts alike (assumed)"


def served_step_weights(steps: pl.DataFrame, *, equal: bool = False) -> tuple[Array, str]:
    """Return weights (n,) with mean 1, and in words where they come from.

    Half of the weight is on steps that only decode, half on steps with a prefill: of served steps nearly all only
    decode, but a time to the first token is made of the others. Within each half, a cell of steps alike (their number
    of tokens and sum of decode contexts within a factor of two) weighs as often as the phase `served` met it; what it
    never met counts a tenth of the mean, so that a fit still knows what lies beyond.

    Args:
        steps: with `STEP_COLUMNS` and `phase`.
        equal: let every step count alike, as asked for.
    """
    served = (steps["phase"].fill_null("") == "served").to_numpy()
    if equal:
        return np.ones(len(steps)), "every step counts alike, as asked for"
    if not served.any():
        return np.ones(len(steps)), _EQUAL
    tokens, context = (_octave(steps[name]) for name in ("n_tokens", "sum_decode_context"))
    decodes = step_kinds(steps) == "decode"
    cell = (decodes * 64 + tokens) * 64 + context
    _, cell = np.unique(cell, return_inverse=True)
    all_of = np.bincount(cell)
    served_of = np.bincount(cell, weights=served, minlength=len(all_of))
    weights: Array = (served_of / all_of)[cell]
    for rows in (decodes, ~decodes):
        if rows.any():
            weights[rows] = np.maximum(weights[rows], _UNSERVED * weights[rows].mean()) if weights[rows].any() else 1.0
            weights[rows] /= weights[rows].sum()
    return weights / weights.mean(), (
        f"as the {int(served.sum()):,} steps of the served phase: half on steps that only decode, half on steps with a "
        "prefill, steps alike as often as they were served, others a tenth"
    )


def _octave(values: pl.Series) -> NDArray[np.int64]:
    octave: NDArray[np.int64] = np.log2(values.cast(pl.Float64).to_numpy() + 1).astype(np.int64)
    return octave
