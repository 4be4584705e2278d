"""Composes the steps of a model from measured kernels: GEMM, attention, all-reduce.

The tables are those that NVIDIA's aiconfigurator and aisimulate ship, for head width 128: one row per kernel call with
its latency. A step is the sum of its calls: per layer four GEMMs over all tokens, the attention of its decodes, that of
its prefills and, with several GPUs, two all-reduces; and the output projection over the sequences. Norms, activation
and rotary embedding are in no table: they are estimated, a start of 2 us each and the bytes that they move at 80 % of
the memory's bandwidth. Left out are gaps between kernels, padding, sampling and power throttling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate.importing.models import ModelShape
from simcluster.calibrate.importing.tables import by_role, grid
from simcluster.errors import CalibrationError
from simcluster.rng import seeded

__all__ = ["Kernels", "compose", "read_kernels", "step_grid"]

Array = NDArray[np.float64]

_ROLES = {
    "gemm": ("m", "n", "k", "latency_ms"),
    "prefill attention": ("batch_size", "new_tokens", "num_heads", "num_kv_heads", "latency_ms"),
    "decode attention": ("batch_size", "context_tokens", "num_heads", "num_kv_heads", "latency_ms"),
    "all-reduce": ("num_gpus", "message_elements", "mode", "latency_ms"),
}
_HEAD_DIM = 128
_START_MS = 2e-3  # of a kernel that only moves bytes (estimated)
_MOVED = 0.8  # share of the memory's bandwidth that it reaches (estimated)
_BYTES = 2  # bf16
_MIXED, _SEED = 400, 2607_18253
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
_CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CHUNKS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 3072, 4096, 6144, 8192)
_BEFORE = (0, 512, 2048, 4096, 8192)
_MOST_DECODE_CONTEXT = 300_000  # tokens; about a full KV cache


@dataclass(frozen=True, slots=True)
class Kernels:
    """Measured kernels by role; see `read_kernels`."""

    tables: dict[str, pl.DataFrame]


def read_kernels(files: Sequence[Path]) -> Kernels:
    """Read tables of GEMM, prefill attention, decode attention and, for several GPUs, all-reduce.

    Raises:
        CalibrationError: a table is missing, unreadable or of another kind.
    """
    return Kernels(by_role(files, _ROLES, optional=("all-reduce",)))


def step_grid(max_tokens: int = 8192) -> pl.DataFrame:
    """Return the batches that a card is fitted to: a grid of decodes, one of lone chunks, and random mixed ones.

    Args:
        max_tokens: largest number of tokens of a step.

    Returns:
        kind, n_prefill_seqs, prefill_tokens, n_decode, sum_decode_ctx, prefill_attn_pairs.
    """
    rows: list[tuple[str, int, int, int, int, float]] = []
    for batch in _BATCHES:
        rows += [("decode", 0, 0, batch, batch * c, 0.0) for c in _CONTEXTS if batch * c <= _MOST_DECODE_CONTEXT]
    for chunk in _CHUNKS:
        if chunk <= max_tokens:
            rows += [("prefill", 1, chunk, 0, 0, chunk * c + chunk * (chunk + 1) / 2) for c in _BEFORE]
    random = seeded(_SEED)
    for _ in range(_MIXED):
        budget = min(max_tokens, 2 ** int(random.integers(9, 14)))
        decodes = int(random.integers(1, min(129, budget // 4)))
        prefills = int(random.integers(1, 9))
        tokens = max(prefills, budget - decodes)
        each, before = tokens / prefills, float(random.integers(0, 4097)) if random.random() < 0.5 else 0.0
        pairs = tokens * before + tokens * (each + 1) / 2
        context = int(decodes * random.integers(128, 2049))
        rows.append(("mixed", prefills, tokens, decodes, context, pairs))
    names = ("kind", "n_prefill_seqs", "prefill_tokens", "n_decode", "sum_decode_ctx", "prefill_attn_pairs")
    return pl.DataFrame(rows, schema=list(names), orient="row")


def compose(
    kernels: Kernels, shape: ModelShape, num_gpus: int, batches: pl.DataFrame, bandwidth_gbs: float = 3350.0
) -> pl.DataFrame:
    """Compose the time of each batch; prefills of one batch are taken as equally long, decodes too.

    Args:
        kernels: the measured calls.
        shape: the model.
        num_gpus: tensor parallel.
        batches: the columns of `step_grid`.
        bandwidth_gbs: of the memory of a GPU [10^9 bytes/s]; an H100 SXM's by default.

    Returns:
        `batches` with model, tp and step_ms, as `read_composed` reads them.

    Raises:
        CalibrationError: the heads cannot be shared out, or a table has no such kernel.
    """
    if shape.head_dim != _HEAD_DIM:
        raise CalibrationError(f"{shape.name}: heads of width {shape.head_dim}; the tables are for {_HEAD_DIM}")
    if shape.heads % num_gpus or (shape.kv_heads % num_gpus and num_gpus % shape.kv_heads):
        raise CalibrationError(f"{shape.name}: {shape.heads} heads cannot be shared out over {num_gpus} GPUs")
    columns = {name: batches[name].cast(pl.Float64).to_numpy() for name in batches.columns if name != "kind"}
    tokens = columns["prefill_tokens"] + columns["n_decode"]
    sequences = columns["n_prefill_seqs"] + columns["n_decode"]
    heads, kv_heads = shape.heads // num_gpus, max(shape.kv_heads // num_gpus, 1)
    width = shape.head_dim
    inner = shape.intermediate // num_gpus
    layer = (
        _gemm(kernels, tokens, (heads + 2 * kv_heads) * width, shape.hidden)
        + _gemm(kernels, tokens, shape.hidden, heads * width)
        + _gemm(kernels, tokens, 2 * inner, shape.hidden)
        + _gemm(kernels, tokens, shape.hidden, inner)
        + _decode(kernels, columns["n_decode"], columns["sum_decode_ctx"], heads, kv_heads)
        + _prefill(kernels, columns, heads, kv_heads)
        + _moved(shape, tokens, num_gpus, bandwidth_gbs)
    )
    if num_gpus > 1:
        layer = layer + 2 * _all_reduce(kernels, tokens * shape.hidden, num_gpus)
    step = shape.layers * layer + _gemm(kernels, sequences, shape.vocab // num_gpus, shape.hidden)
    return batches.with_columns(model=pl.lit(shape.name), tp=pl.lit(num_gpus), step_ms=pl.Series(step)).select(
        "model", "tp", *batches.columns, "step_ms"
    )


def _gemm(kernels: Kernels, m: Array, n: int, k: int) -> Array:
    """Return the time of a product m x k by k x n (len(m),) [ms].

    Between measured n, and between measured k, times are interpolated; beyond the largest they grow in proportion.
    """
    table = kernels.tables["gemm"]
    below, above, share = _bracket(table["k"], k, f"gemm k = {k}")
    low = _gemm_at(table.filter(pl.col("k") == below), m, n)
    if below == above:
        return np.asarray(low * (k / below))
    high = _gemm_at(table.filter(pl.col("k") == above), m, n)
    return np.asarray(low * (1 - share) + high * share)


def _gemm_at(table: pl.DataFrame, m: Array, n: int) -> Array:
    below, above, share = _bracket(table["n"], n, f"gemm n = {n}")
    lines = []
    for each in (below, above):
        line = table.filter(pl.col("n") == each).group_by("m").agg(pl.col("latency_ms").mean()).sort("m")
        at, ms = line["m"].cast(pl.Float64).to_numpy(), line["latency_ms"].cast(pl.Float64).to_numpy()
        lines.append(np.where(m > at[-1], ms[-1] * m / at[-1], np.interp(m, at, ms)))
    if below == above:
        return np.asarray(lines[0] * (n / below))
    return np.asarray(lines[0] * (1 - share) + lines[1] * share)


def _bracket(measured: pl.Series, wanted: int, what: str) -> tuple[int, int, float]:
    """Return the measured values around one, and how far it is between them; beyond the ends twice the end."""
    values = np.unique(measured.to_numpy())
    if not values.size or wanted < values[0]:
        raise CalibrationError(f"{what}: below what was measured ({values[0] if values.size else 'nothing'})")
    place = int(np.searchsorted(values, wanted, side="right")) - 1
    if place == len(values) - 1:
        return int(values[-1]), int(values[-1]), 0.0
    below, above = int(values[place]), int(values[place + 1])
    return (below, below, 0.0) if below == wanted else (below, above, (wanted - below) / (above - below))


def _attention(table: pl.DataFrame, column: str, heads: int, kv_heads: int, what: str) -> tuple[Array, Array, Array]:
    """Return batch sizes, lengths and the grid of times of one kind of attention [ms]."""
    rows = table.filter((pl.col("num_heads") == heads) & (pl.col("num_kv_heads") == kv_heads))
    if rows.is_empty():
        raise CalibrationError(f"{what} attention: nothing measured for {heads} query and {kv_heads} KV heads of a GPU")
    batches, lengths = (np.unique(rows[name].to_numpy()).astype(np.float64) for name in ("batch_size", column))
    values = np.full((len(batches), len(lengths)), np.nan)
    row = np.searchsorted(batches, rows["batch_size"].to_numpy())
    values[row, np.searchsorted(lengths, rows[column].to_numpy())] = rows["latency_ms"].to_numpy()
    return batches, lengths, values


def _decode(kernels: Kernels, number: Array, context: Array, heads: int, kv_heads: int) -> Array:
    table = kernels.tables["decode attention"]
    batches, lengths, values = _attention(table, "context_tokens", heads, kv_heads, "decode")
    mean = context / np.maximum(number, 1)
    times = grid(np.maximum(number, 1), batches, mean, lengths, values)
    return np.where(number > 0, np.maximum(times, 0), 0.0)


def _prefill(kernels: Kernels, columns: dict[str, Array], heads: int, kv_heads: int) -> Array:
    """Return the attention of the prefills of each batch [ms].

    The table knows prompts from their first token on. A chunk of p tokens with c before it is the share of the whole
    prompt's token pairs that is its own, p*c + p*(p+1)/2 of s*(s+1)/2 with s = c + p; and no less than the first p
    tokens alone, or than one decode that reads c tokens. Longer prompts than measured grow with the square.
    """
    table = kernels.tables["prefill attention"]
    batches, lengths, values = _attention(table, "new_tokens", heads, kv_heads, "prefill")
    number = np.maximum(columns["n_prefill_seqs"], 1)
    each = np.maximum(columns["prefill_tokens"] / number, 1)
    before = np.maximum(columns["prefill_attn_pairs"] / np.maximum(columns["prefill_tokens"], 1) - (each + 1) / 2, 0)
    whole = before + each

    def prompt(length: Array) -> Array:
        inside = np.minimum(length, lengths[-1])
        return np.asarray(grid(number, batches, inside, lengths, values) * (length / inside) ** 2)

    share = (each * before + each * (each + 1) / 2) / (whole * (whole + 1) / 2)
    floor = _decode(kernels, number, number * before, heads, kv_heads)
    times = np.maximum(np.maximum(prompt(whole) * share, prompt(each)), np.where(before > 0, floor, 0))
    return np.where(columns["n_prefill_seqs"] > 0, times, 0.0)


def _moved(shape: ModelShape, tokens: Array, num_gpus: int, bandwidth_gbs: float) -> Array:
    """Estimate a layer's kernels that only move bytes: norms, also of heads, activation, rotary embedding [ms].

    Each norm reads and writes the stream and the residual, the activation reads two parts and writes one, the others
    read and write queries and keys.
    """
    heads = (shape.heads + shape.kv_heads) / num_gpus * shape.head_dim
    passes = 2 if shape.normed_heads else 1
    values = 2 * 4 * shape.hidden + 3 * shape.intermediate / num_gpus + 2 * passes * heads
    per_token_ms = values * _BYTES / (_MOVED * bandwidth_gbs * 1e9) * 1e3
    return np.asarray((3 + passes) * _START_MS + tokens * per_token_ms)


def _all_reduce(kernels: Kernels, elements: Array, num_gpus: int) -> Array:
    table = kernels.tables.get("all-reduce")
    if table is None:
        raise CalibrationError(f"no table of all-reduce, which {num_gpus} GPUs need; give one")
    rows = table.filter(pl.col("num_gpus") == num_gpus)
    if rows.is_empty():
        raise CalibrationError(f"all-reduce: nothing measured for {num_gpus} GPUs")
    modes = rows["mode"].unique().to_list()
    rows = rows.filter(pl.col("mode") == ("vllm_graph" if "vllm_graph" in modes else sorted(modes)[0]))
    rows = rows.group_by("message_elements").agg(pl.col("latency_ms").mean()).sort("message_elements")
    at, ms = (rows[name].cast(pl.Float64).to_numpy() for name in ("message_elements", "latency_ms"))
    return np.asarray(np.interp(elements, at, ms))
