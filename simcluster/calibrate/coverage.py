"""What batches a fit has seen."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.card import Coverage, CoverageMap

__all__ = ["coverage_of"]

_BATCHES = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257)  # decoding requests, from the power of two below them
_CONTEXTS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens


def coverage_of(steps: pl.DataFrame) -> Coverage:
    """Return the ranges of steps, and their map by batch and mean context.

    Args:
        steps: with `STEP_COLUMNS` and `n_decode`, null where unknown; such steps are in no map and no batch range.
    """

    def span(values: NDArray[np.float64]) -> tuple[int, int]:
        return (int(values.min()), int(values.max())) if values.size else (0, 0)

    columns = {name: steps[name].cast(pl.Float64).to_numpy() for name in _RANGES}
    known = steps.filter(pl.col("n_decode").is_not_null())
    batch = known["n_decode"].cast(pl.Float64).to_numpy()
    context = known["sum_decode_context"].cast(pl.Float64).to_numpy() / np.maximum(batch, 1)
    decoding = context[batch > 0]
    attention = columns.pop("prefill_attention")
    return Coverage(
        num_steps=len(steps),
        batch_size=span(batch),
        mean_decode_context=(float(decoding.min()), float(decoding.max())) if decoding.size else (0.0, 0.0),
        prefill_attention=(float(attention.min()), float(attention.max())),
        map=_map(batch, context, known["has_prefill"].to_numpy()) if len(known) else None,
        **{name: span(values) for name, values in columns.items()},
    )


_RANGES = ("n_tokens", "sum_decode_context", "num_prefill_requests", "prefill_attention")


def _map(batch: NDArray[np.float64], context: NDArray[np.float64], prefill: NDArray[np.bool_]) -> CoverageMap:
    row = np.searchsorted(_BATCHES, batch, side="right") - 1
    column = np.where(batch > 0, np.searchsorted(_CONTEXTS, context, side="right") - 1, 0)
    counts = np.zeros((len(_BATCHES), len(_CONTEXTS)), dtype=np.int64)
    beside = np.zeros_like(counts)
    np.add.at(counts, (row, column), 1)
    np.add.at(beside, (row, column), prefill.astype(np.int64))
    return CoverageMap(
        batch_size=_BATCHES,
        mean_decode_context=_CONTEXTS,
        steps=tuple(tuple(line) for line in counts.tolist()),
        with_prefill=tuple(tuple(line) for line in beside.tolist()),
    )
