"""Composes steps from the layer profiles of LLMServingSim: dense layers, attention of mixed batches, per sequence.

Each row of the attention profile is a batch: it becomes a step, as the sum of its attention and of the dense layers
over its tokens for every decoder layer, and of the layers that come once. The profiles have no all-reduce.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate.importing.models import ModelShape
from simcluster.calibrate.importing.tables import by_role
from simcluster.errors import CalibrationError

__all__ = ["compose_profile"]

Array = NDArray[np.float64]

_ROLES = {
    "attention": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "dense layers": ("layer", "tokens", "time_us"),
    "layers per sequence": ("layer", "sequences", "time_us"),
}
_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)  # before the attention and before the MLP


def compose_profile(files: Sequence[Path], shape: ModelShape, num_gpus: int) -> tuple[pl.DataFrame, list[str]]:
    """Return the steps of a profile in the columns of composed steps, and what is worth knowing about them.

    Args:
        files: the three profiles of one model, in any order.
        shape: the model; only its number of layers counts, the profiles know the rest.
        num_gpus: tensor parallel, as profiled.

    Raises:
        CalibrationError: a profile is missing, unreadable or of another kind.
    """
    tables = by_role(files, _ROLES)
    grid = tables["attention"].sort("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    chunk, before, number, context = (
        grid[name].cast(pl.Float64).to_numpy() for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    )
    tokens = chunk + number
    dense = tables["dense layers"]
    longest = float(dense["tokens"].max())  # type: ignore[arg-type]
    inside = (tokens <= longest) & (tokens > 0)
    if not inside.any():
        raise CalibrationError(f"{files[0]}: no batch of the attention profile has up to {longest:.0f} tokens")
    per_layer, once = np.zeros(len(grid)), np.zeros(len(grid))
    for layer in sorted(dense["layer"].unique().to_list()):
        times = _line(dense.filter(pl.col("layer") == layer), "tokens", tokens)
        if layer in _ONCE:
            once += times
        else:
            per_layer += times * (2 if layer in _TWICE else 1)
    sequences = number + (chunk > 0)
    last = tables["layers per sequence"]
    for layer in sorted(last["layer"].unique().to_list()):
        once += _line(last.filter(pl.col("layer") == layer), "sequences", sequences)
    attention = grid["time_us"].cast(pl.Float64).to_numpy()
    step_ms = (shape.layers * (per_layer + attention) + once) / 1e3
    steps = pl.DataFrame(
        {
            "model": shape.name,
            "tp": num_gpus,
            "kind": np.where(chunk == 0, "decode", np.where(number > 0, "mixed", "prefill")),
            "n_prefill_seqs": (chunk > 0).astype(np.int64),
            "prefill_tokens": chunk.astype(np.int64),
            "n_decode": number.astype(np.int64),
            "sum_decode_ctx": (number * context).astype(np.int64),
            "prefill_attn_pairs": chunk * before + chunk * (chunk + 1) / 2,
            "step_ms": step_ms,
        }
    ).filter(inside)
    notes = []
    if len(steps) < len(grid):
        notes.append(f"{len(grid) - len(steps):,} batches beyond {longest:.0f} tokens are left out")
    if num_gpus > 1:
        notes.append("the profiles have no all-reduce: steps of several GPUs are too short by it")
    return steps, notes


def _line(rows: pl.DataFrame, column: str, at: Array) -> Array:
    """Interpolate the time of one layer (n,) [us]."""
    line = rows.group_by(column).agg(pl.col("time_us").mean()).sort(column)
    times: Array = np.interp(at, line[column].cast(pl.Float64).to_numpy(), line["time_us"].cast(pl.Float64).to_numpy())
    return times
