"""The Parquet file of a trace, schema v1.

`traces/README.md` describes the columns, their units and what is an error.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import TraceError
from simcluster.workload.trace import Trace, row_names
from simcluster.workload.trace_columns import IntArray, TraceColumns, counted, listed
from simcluster.workload.trace_schema import COLUMNS, KEY, MAPS, MAX_SPAN_NS, MAX_TOKENS, OWN_KEYS, SCHEMA_VERSION
from simcluster.workload.turns import read_turns

__all__ = ["read_trace"]

_BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)  # what a damaged file can raise


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file.

    Unsorted rows are sorted (equal instants keep the file's order), a negative first arrival moves
    the trace to start at 0, rows without output or prompt tokens are left out, and unknown columns
    are ignored. Each leaves a line in `notes`.

    Raises:
        TraceError: the file is missing, unreadable, empty, or breaks the schema; one line that says
            where, what was found, what is allowed.
    """
    where = os.fspath(path)
    file, names, digest = _open(Path(path), where)
    metadata, block_size = _read_metadata(file, where)
    table = _read_table(file, names, where)
    columns = TraceColumns(where, table, np.arange(table.num_rows, dtype=np.int64))
    arrival = "arrival_ns" if columns.has("arrival_ns") else "arrival_s"
    arrival_ns = columns.instants_ns(arrival, MAX_SPAN_NS)
    prompt_tokens = columns.integers("prompt_tokens", 0, MAX_TOKENS)
    output_tokens = columns.integers("output_tokens", 0, MAX_TOKENS)

    kept, skipped = _kept_rows(where, prompt_tokens, output_tokens)
    arrivals = _taken(arrival_ns, kept)
    early = int((np.diff(arrivals) < 0).sum())
    rows = kept[np.argsort(arrivals, kind="stable")] if early else kept
    shift = min(int(arrival_ns[rows[0]]), 0)
    span_ns = int(arrival_ns[rows[-1]]) - shift
    if span_ns > MAX_SPAN_NS:
        raise TraceError(
            f"{where}: {arrival}: found a trace of {span_ns / 1e9:g} s; allowed is 10 years; check"
            " the unit of the column"
        )
    taken = columns.take(rows)
    turns, orphans = read_turns(columns, taken)
    unknown = [name for name in names if name not in COLUMNS]
    notes = [f"skipped {counted(count)} ({reason})" for reason, count in skipped.items()]
    if early:
        notes.append(f"sorted: {counted(early)} arrived before the row above")
    if shift < 0:
        notes.append(f"rebased: the first arrival was at {shift / 1e9:g} s and is now at 0 s")
    if orphans:
        notes.append(f"{counted(orphans)} waited for a skipped row: now sent at their own arrival")
    if unknown:
        notes.append(f"ignored columns: {listed(unknown)}")
    prompt_tokens = _taken(prompt_tokens, rows)
    return Trace.from_columns(
        _taken(arrival_ns, rows) - shift if shift else _taken(arrival_ns, rows),
        prompt_tokens,
        _taken(output_tokens, rows),
        **_optional_columns(taken, prompt_tokens, block_size),
        **turns,
        metadata=metadata,
        notes=tuple(notes),
        skipped=skipped,
        sha256=digest,
    )


def _taken(values: IntArray, rows: IntArray) -> IntArray:
    """Return the values of these ascending or reordered rows, without a copy if these are all of them in order."""
    return values if len(rows) == len(values) and bool(np.all(np.diff(rows) == 1)) else values[rows]


def _kept_rows(where: str, prompt_tokens: IntArray, output_tokens: IntArray) -> tuple[IntArray, dict[str, int]]:
    """Return the rows with tokens in and out, and how many others there are by reason."""
    no_output = output_tokens == 0
    no_prompt = ~no_output & (prompt_tokens == 0)
    counts = {"zero_output": int(no_output.sum()), "zero_prompt": int(no_prompt.sum())}
    skipped = {reason: count for reason, count in counts.items() if count}
    kept = np.flatnonzero(~no_output & ~no_prompt)
    if len(kept) == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
        dropped = f", {len(prompt_tokens)} dropped: {reasons}" if reasons else ""
        raise TraceError(
            f"{where}: 0 requests after filters ({len(prompt_tokens)} read{dropped}); a trace needs at least 1"
        )
    return kept, skipped


def _open(path: Path, where: str) -> tuple[Any, list[str], str]:
    """Open a Parquet file; return it with its column names and the hash of the same bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{where}: {error.strerror or error}; give the path of a readable Parquet file") from error
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        names: list[str] = file.schema_arrow.names
    except _BROKEN as error:
        raise _unreadable(where, error) from error
    return file, names, hashlib.sha256(content).hexdigest()


def _read_table(file: Any, names: list[str], where: str) -> Any:
    """Return the known columns of a file that has those which a trace needs."""
    known = [name for name in COLUMNS if name in names]
    for name in known:
        if names.count(name) > 1:
            raise TraceError(f"{where}: {name}: found the column twice; allowed is once")
    lacking = [name for name in ("prompt_tokens", "output_tokens") if name not in names]
    arrivals = [name for name in ("arrival_ns", "arrival_s") if name in names]
    if not arrivals:
        lacking.insert(0, "arrival_ns or arrival_s")
    if lacking:
        raise TraceError(
            f"{where}: found no column {' and no column '.join(lacking)}, only {listed(names)};"
            " rename or add the column"
        )
    if len(arrivals) == 2:
        raise TraceError(f"{where}: found both arrival_ns and arrival_s; allowed is one of them; drop the other")
    try:
        table = file.read(columns=known)
        table.validate(full=True)  # among others, that texts are UTF-8
    except _BROKEN as error:
        raise _unreadable(where, error) from error
    required = ("prompt_tokens", "output_tokens", *arrivals)
    # A writer that met nothing but nulls has no type to write; such a column says as much as none.
    empty = [name for name in known if name not in required and pa.types.is_null(table.schema.field(name).type)]
    return table.drop_columns(empty)


def _unreadable(where: str, error: Exception) -> TraceError:
    reason = (str(error).splitlines() or ["unreadable"])[0].rstrip(".")
    return TraceError(
        f"{where}: not a complete Parquet file ({reason}); a trace is a Parquet file, so write it"
        " again or convert it first"
    )


def _read_metadata(file: Any, where: str) -> tuple[dict[str, str], int | None]:
    """Return the keys that describe the trace, and the block size of its prefix hashes."""
    raw: dict[bytes, bytes] = file.metadata.metadata or {}
    texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in raw.items()}
    ours = {key.removeprefix(KEY): text for key, text in texts.items() if key.startswith(KEY)}
    version = ours.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{where}: metadata {KEY}schema_version: found {version!r}; allowed is"
            f" {SCHEMA_VERSION!r}; write the trace again with this version of simcluster"
        )
    block = ours.get("prefix_block_size")
    if block is not None and not (block.isascii() and block.isdigit() and int(block) > 0):
        raise TraceError(
            f"{where}: metadata {KEY}prefix_block_size: found {block!r}; allowed is a whole number of tokens above 0"
        )
    rest = {key: text for key, text in ours.items() if key not in OWN_KEYS}
    return rest, None if block is None else int(block)


def _optional_columns(columns: TraceColumns, prompt_tokens: IntArray, block_size: int | None) -> dict[str, Any]:
    """Return the optional columns that the file has, as arguments of Trace.from_columns."""
    readers: dict[str, Callable[[str], dict[str, Any]]] = {
        "request_id": lambda name: {name: columns.unique_strings(name)},
        "max_tokens": lambda name: {name: columns.integers(name, 1, MAX_TOKENS, null=-1)},
        "finish": lambda name: {"ends_by_length": _ends_by_length(columns, name)},
        "priority": lambda name: {name: columns.integers(name, -(2**31), 2**31 - 1)},
        "cancel_s": lambda name: {"cancel_ns": columns.durations_ns(name, zero_allowed=True)},
        "slo_ttft_s": lambda name: {"slo_ttft_ns": columns.durations_ns(name, zero_allowed=False)},
        "task": lambda name: dict(zip(("task", "task_names"), columns.categories(name), strict=True)),
        "session_id": lambda name: {name: columns.strings(name, nullable=True)},
        "prompt": lambda name: {name: columns.strings(name)},
        **{name: lambda name: {name: columns.by_model(name)} for name in MAPS},
        "prefix_hashes": lambda name: _prefix_columns(columns, name, prompt_tokens, block_size),
    }
    found: dict[str, Any] = {}
    for name, read in readers.items():
        if columns.has(name):
            found |= read(name)
    if "request_id" not in found:
        found["request_id"] = row_names(columns.file_rows)
    return found


def _ends_by_length(columns: TraceColumns, name: str) -> npt.NDArray[np.bool_]:
    codes, endings = columns.categories(name, allowed=("eos", "length"))
    return np.array([ending == "length" for ending in endings])[codes]


def _prefix_columns(
    columns: TraceColumns, name: str, prompt_tokens: IntArray, block_size: int | None
) -> dict[str, Any]:
    """Return the prefix hashes; a prompt has one per block begun, or none (nothing known)."""
    if block_size is None:
        raise TraceError(
            f"{columns.path}: {name}: found no {KEY}prefix_block_size in the file's"
            " metadata; add the number of tokens that one hash covers"
        )
    offsets, values = columns.integer_lists(name)
    counts = np.diff(offsets)
    needed = -(-prompt_tokens // block_size)
    bad = (counts > 0) & (counts != needed)
    if bad.any():
        row = np.flatnonzero(bad)[0]
        columns.fail(
            name,
            bad,
            f"{counts[row]} hashes for {prompt_tokens[row]} prompt tokens",
            f"allowed is one per {block_size} tokens begun, here {needed[row]}, or none at all",
        )
    return {"prefix_offsets": offsets, "prefix_values": values, "prefix_block_size": block_size}
