"""Import a foreign trace: read it in blocks, put the requests in order, write a trace file."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from simcluster.errors import TraceError
from simcluster.workload.importing.detect import Reading, read_as
from simcluster.workload.importing.identity import checked_links, unique_ids
from simcluster.workload.importing.options import ImportOptions
from simcluster.workload.importing.report import ImportReport
from simcluster.workload.importing.rows import FILLED, WIDE, Gathered, gather_block, too_long_a_span
from simcluster.workload.importing.sources import Source, open_source
from simcluster.workload.trace_columns import IntArray
from simcluster.workload.trace_schema import COLUMNS, MAPS, OWN_KEYS
from simcluster.workload.trace_writer import TraceWriter, cannot_write, file_metadata

__all__ = ["import_trace"]

_ROW_GROUP = 1 << 20
_REQUIRED_TEXTS = ("request_id", "task", "prompt")


@dataclass(slots=True)
class _Ordered:
    """The requests of the trace in order of arrival.

    Attributes:
        arrival_ns: arrivals after the first one [ns], ascending, shape (n,).
        rows: position of each among the gathered rows, shape (n,).
        notes: what was done to the arrivals.
        window_rate_rps: requests per second of the window, or None.
    """

    arrival_ns: IntArray
    rows: IntArray
    notes: list[str]
    window_rate_rps: float | None


def import_trace(
    path: Path, out: Path, options: ImportOptions, progress: Callable[[float], None] = lambda _: None
) -> ImportReport:
    """Turn a foreign trace into a trace file.

    The file is read in blocks, so that memory holds the requests' columns and nothing else: about 30 bytes per
    request without texts and hashes. Nothing is written unless all rows could be read.

    Args:
        path: CSV, JSONL, Parquet, or a result of vllm bench serve.
        out: the trace file to write.
        options: how to read it and what to do with its rows.
        progress: told the share of the file that is read, 0 to 1.

    Returns:
        What was read, recognised, skipped and changed.

    Raises:
        AmbiguousTraceError: the file has several plausible readings.
        TraceError: the file is not readable, or a row is not allowed; or the trace cannot be written.
        ConfigError: an option is out of range.
    """
    options.check()
    if not out.parent.is_dir():  # better now than after ten million rows
        raise cannot_write(out, "no such folder")
    source = open_source(path)
    reading = read_as(source, options)
    gathered = Gathered(source, reading, options)
    for block in source.blocks(_wanted(source, reading), progress):
        if source.kind == "json":
            _check_arrays(source, reading)
        gather_block(gathered, block)
    too_long_a_span(gathered)
    _refuse_empty(gathered, sum(map(len, gathered.arrivals)))
    arrivals, places = np.concatenate(gathered.arrivals), np.concatenate(gathered.places)
    gathered.arrivals.clear()
    table = pa.concat_tables(gathered.tables, promote_options="permissive")
    gathered.tables.clear()
    table = _filled(table)
    ordered = _order(gathered, arrivals, places)
    gathered.settle(places[ordered.rows])
    _require_texts(gathered, table, places)
    table = unique_ids(gathered, table, ordered.rows, places)
    table = checked_links(gathered, table, ordered.rows, places)
    _write(out, table, ordered, _metadata(gathered, ordered))
    return _report(gathered, ordered, out)


def _wanted(source: Source, reading: Reading) -> dict[str, tuple[Any, ...]]:
    maps = {name: () for name in MAPS if source.kind == "parquet" and name in source.names}
    return reading.wanted() | maps


def _check_arrays(source: Source, reading: Reading) -> None:
    lengths = {theirs: len(source.arrays[theirs]) for theirs in reading.columns.values()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise TraceError(f"{source.path}: found arrays of different lengths: {found}; allowed is one value per request")


def _refuse_empty(gathered: Gathered, kept: int) -> None:
    if kept:
        return
    dropped = sum(gathered.skipped.counts.values())
    reasons = ", ".join(f"{what} {count}" for what, count in gathered.skipped.counts.items())
    filtered = f", {dropped} dropped: {reasons}" if reasons else ""
    raise TraceError(
        f"{gathered.source.path}: 0 requests after filters ({gathered.read} read{filtered}); a trace needs at least 1"
    )


def _order(gathered: Gathered, arrivals: IntArray, places: IntArray) -> _Ordered:
    """Choose the window, sort, move the first arrival to 0, cut gaps, change the speed."""
    options, notes = gathered.options, []
    assert gathered.earliest_ns is not None  # at least one row was read
    offsets = arrivals - gathered.earliest_ns
    rows, window_s = _window(gathered, offsets, places)
    _refuse_empty(gathered, len(rows))
    late = np.flatnonzero(np.diff(offsets[rows]) < 0) + 1
    if len(late):
        gathered.changed.add("sorted: arrived before the row above", places[rows[late]])
        rows = rows[np.argsort(offsets[rows], kind="stable")]
    offsets = offsets[rows]
    shift = int(offsets[0])
    first_s = (gathered.earliest_ns + shift) / 1e9
    if first_s != 0 and not gathered.reading.unit.is_date:
        notes.append(f"rebased: the first arrival was at {first_s:,.10g} s and is now at 0 s")
    offsets = offsets - shift
    if options.max_gap_s is not None:
        offsets = _cut_gaps(gathered, offsets, places[rows])
    if options.speed != 1:
        offsets = np.rint(offsets / options.speed).astype(np.int64)
        notes.append(f"speed {options.speed:g}: intervals are divided by it")
    return _Ordered(offsets, rows, notes, None if window_s is None else len(rows) / window_s)


def _window(gathered: Gathered, offsets: IntArray, places: IntArray) -> tuple[IntArray, float | None]:
    """Return the rows in [start, end) after the first arrival of the file, and the window's length [s]."""
    start_s, end_s = gathered.options.start_s, gathered.options.end_s
    keep = np.ones(len(offsets), dtype=np.bool_)
    if start_s is not None:
        keep &= gathered.skipped.mask("before_start", places, offsets < round(start_s * 1e9))
    if end_s is not None:
        keep &= gathered.skipped.mask("after_end", places, keep & (offsets >= round(end_s * 1e9)))
    return np.flatnonzero(keep), None if end_s is None else end_s - (start_s or 0.0)


def _cut_gaps(gathered: Gathered, offsets: IntArray, places: IntArray) -> IntArray:
    assert gathered.options.max_gap_s is not None
    limit = round(gathered.options.max_gap_s * 1e9)
    gaps = np.diff(offsets, prepend=np.int64(0))
    gathered.changed.add(f"gap before it cut to {gathered.options.max_gap_s:g} s", places[gaps > limit])
    cut: IntArray = np.cumsum(np.minimum(gaps, limit))
    return cut


def _filled(table: Any) -> Any:
    """Return the table with defaults where a whole block had no value."""
    for name, value in FILLED.items():
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, table.column(name).fill_null(value))
    return table


def _require_texts(gathered: Gathered, table: Any, places: IntArray) -> None:
    for name in _REQUIRED_TEXTS:
        if name in table.column_names and table.column(name).null_count:
            missing = table.column(name).is_null().to_numpy()
            column = gathered.reading.columns[name]
            raise TraceError(
                f"{gathered.source.path}: {column}, {gathered.source.place} {places[np.flatnonzero(missing)[0]]}: "
                f"found null; other rows have a value; fill it in or drop the column"
            )


# ---- writing -------------------------------------------------------------------------------------


def _write(out: Path, table: Any, ordered: _Ordered, metadata: dict[str, str]) -> None:
    """Write the requests in groups, so that no second copy of all columns is made."""
    with TraceWriter(out, metadata) as writer:
        for start in range(0, len(ordered.rows), _ROW_GROUP):
            rows = ordered.rows[start : start + _ROW_GROUP]
            first, last = int(rows.min()), int(rows.max())
            part = table.slice(first, last - first + 1)
            if not bool(np.all(np.diff(rows) == 1)):
                part = part.combine_chunks().take(pa.array(rows - first))
            arrival_ns = pa.array(ordered.arrival_ns[start : start + _ROW_GROUP])
            part = part.add_column(0, "arrival_ns", arrival_ns)
            writer.write(_widened(part.select([name for name in COLUMNS if name in part.column_names])))


def _widened(table: Any) -> Any:
    """Return the table with its whole numbers in 64 bits, as every trace file has them."""
    fields = [each.with_type(WIDE.get(each.type, each.type)) for each in table.schema]
    return table.cast(pa.schema(fields))


def _metadata(gathered: Gathered, ordered: _Ordered) -> dict[str, str]:
    """Describe where the trace comes from and what was done to it."""
    source, reading = gathered.source, gathered.reading
    said = {key: text for key, text in source.metadata.items() if key not in OWN_KEYS}
    inner = f"; it says: {said['source']}" if "source" in said else ""
    with source.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    done = [f"{what} {count}" for tally in (gathered.skipped, gathered.changed) for what, count in tally.counts.items()]
    said |= {
        "source": f"imported from {source.path.name}, format {reading.format.name}{inner}",
        "imported_sha256": digest,
        "imported_rows": str(gathered.read),
        "imported_changes": "; ".join([*done, *ordered.notes]) or "none",
    }
    return file_metadata(said, reading.hash_block if _has_hashes(gathered) else None)


def _has_hashes(gathered: Gathered) -> bool:
    return "prefix_hashes" in gathered.reading.columns


def _report(gathered: Gathered, ordered: _Ordered, out: Path) -> ImportReport:
    source, reading = gathered.source, gathered.reading
    used = set(reading.columns.values()) | set(MAPS)
    return ImportReport(
        source=str(source.path),
        out=str(out),
        format=reading.format.name,
        reasons=reading.reasons,
        columns={ours: theirs for ours, theirs in reading.columns.items() if theirs in source.names},
        ignored=tuple(name for name in source.names if name not in used),
        read=gathered.read,
        kept=len(ordered.rows),
        skipped=gathered.skipped,
        changed=gathered.changed,
        notes=tuple(ordered.notes),
        span_s=int(ordered.arrival_ns[-1]) / 1e9,
        window_rate_rps=ordered.window_rate_rps,
    )
