"""Rows of a foreign file: converted, checked and filtered, one block at a time."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from simcluster.errors import TraceError
from simcluster.workload.importing.detect import Reading
from simcluster.workload.importing.options import ImportOptions
from simcluster.workload.importing.report import Tally
from simcluster.workload.importing.sources import Source
from simcluster.workload.importing.text import Block
from simcluster.workload.importing.values import (
    BadValueError,
    as_hash_lists,
    as_instants,
    as_integers,
    as_numbers,
    as_texts,
)
from simcluster.workload.trace_columns import IntArray, TraceColumns
from simcluster.workload.trace_schema import MAPS, MAX_SPAN_NS, MAX_TOKENS

__all__ = ["FILLED", "WIDE", "Gathered", "gather_block"]

FILLED: dict[str, Any] = {"priority": 0, "finish": "eos"}
"""What null means in columns that have a default."""

WIDE = {pa.int32(): pa.int64(), pa.large_list(pa.int32()): pa.large_list(pa.int64())}
"""Types that columns are held in, where their values fit, and the types that they are written in."""

_CONVERT = {
    "prompt_tokens": as_integers,
    "output_tokens": as_integers,
    "max_tokens": as_integers,
    "priority": as_integers,
    "cancel": as_numbers,
    "slo_ttft": as_numbers,
    "think": as_numbers,
    "prefix_hashes": as_hash_lists,
}
_NAMES = {"cancel": "cancel_s", "slo_ttft": "slo_ttft_s", "think": "think_s"}
_LABELS = ("request_id", "session_id", "task", "finish", "after")  # empty text is none
_BOOLS = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Gathered:
    """The rows that were kept so far.

    Attributes:
        source: the file.
        reading: what it means.
        options: what to do with its rows.
        skipped: rows left out, by reason.
        changed: rows changed, by what.
        tables: columns of the trace but the arrivals, one table per block.
        arrivals: arrivals [ns], one array per block.
        places: line or row of each request in the file, one array per block.
        marks: places of rows that were changed, by what, as long as they may still be left out.
        read: rows read.
        earliest_ns: the first arrival of the file, kept or not [ns].
        latest_ns: the last arrival of the file, kept or not [ns].
    """

    source: Source
    reading: Reading
    options: ImportOptions
    skipped: Tally = field(init=False)
    changed: Tally = field(init=False)
    tables: list[Any] = field(default_factory=list)
    arrivals: list[IntArray] = field(default_factory=list)
    places: list[IntArray] = field(default_factory=list)
    marks: dict[str, list[IntArray]] = field(default_factory=dict)
    read: int = 0
    earliest_ns: int | None = None
    latest_ns: int | None = None

    def __post_init__(self) -> None:
        self.skipped = Tally(self.source.place)
        self.changed = Tally(self.source.place)

    def mark(self, what: str, places: IntArray) -> None:
        """Remember rows that were changed."""
        if len(places):
            self.marks.setdefault(what, []).append(places)

    def settle(self, places: IntArray) -> None:
        """Report the changes of the rows that make up the trace."""
        for what, marked in self.marks.items():
            every = np.concatenate(marked)
            self.changed.add(what, every[np.isin(every, places, assume_unique=True)])

    def fail(self, ours: str, places: IntArray, bad: BadValueError) -> NoReturn:
        """Say where a bad value is.

        Raises:
            TraceError: always.
        """
        theirs = self.reading.columns.get(ours, ours)
        name = theirs if theirs.isprintable() else repr(theirs)
        where = f"{self.source.path}: {name}, {self.source.place} {places[bad.index]}"
        raise TraceError(f"{where}: found {bad.found}; {bad.allowed}") from None


def gather_block(gathered: Gathered, block: Block) -> None:
    """Convert, check and filter one block, and keep what is left.

    Raises:
        TraceError: a value is not allowed; one line that names the column, the line or row, and what was found.
    """
    arrival_ns, table = _converted(gathered, block)
    gathered.read += len(block.places)
    _note_span(gathered, arrival_ns)
    keep = _kept_rows(gathered, table, block.places)
    if not keep.all():
        table, arrival_ns = table.filter(pa.array(keep)), arrival_ns[keep]
    places = block.places[keep]
    table, stays = _within_context(gathered, _prefill_only(gathered, table, places), places)
    _check(gathered, table, places[stays])
    gathered.tables.append(_compact(table))
    gathered.arrivals.append(arrival_ns[stays])
    gathered.places.append(places[stays])


def _converted(gathered: Gathered, block: Block) -> tuple[IntArray, Any]:
    """Return arrivals and all other columns under the names and in the units of a trace file."""
    reading = gathered.reading
    columns: dict[str, Any] = {}
    arrival_ns = np.zeros(0, dtype=np.int64)
    for ours, theirs in reading.columns.items():
        values = block.columns[theirs]
        try:
            if ours == "arrival":
                arrival_ns = as_instants(values, reading.unit)
                continue
            converted = _CONVERT.get(ours, as_texts)(values)
        except BadValueError as bad:
            gathered.fail(ours, block.places, bad)
        if ours in _LABELS:
            converted = pc.if_else(pc.equal(converted, ""), pa.scalar(None, converted.type), converted)
        if converted.null_count == len(converted) and ours not in ("prompt_tokens", "output_tokens"):
            continue
        if ours in reading.durations:
            converted = pc.divide(pc.multiply(converted, float(reading.durations[ours].ns)), 1e9)
        if ours in FILLED:
            converted = converted.fill_null(FILLED[ours])
        columns[_NAMES.get(ours, ours)] = converted
    columns |= {name: block.columns[name] for name in MAPS if name in block.columns}
    return arrival_ns, pa.table(columns)


def _note_span(gathered: Gathered, arrival_ns: IntArray) -> None:
    if len(arrival_ns):
        first, last = int(arrival_ns.min()), int(arrival_ns.max())
        gathered.earliest_ns = first if gathered.earliest_ns is None else min(first, gathered.earliest_ns)
        gathered.latest_ns = last if gathered.latest_ns is None else max(last, gathered.latest_ns)


def _kept_rows(gathered: Gathered, table: Any, places: IntArray) -> _BOOLS:
    """Return which rows have a prompt and an answer, and count the others by reason."""
    options, skipped = gathered.options, gathered.skipped
    columns = TraceColumns(str(gathered.source.path), table, places - 1, gathered.source.place)
    prompts = _known(gathered, columns, "prompt_tokens")
    outputs = columns.integers("output_tokens", 0, MAX_TOKENS, null=-1)
    missing = outputs < 0
    if missing.any() and options.missing_output == "error":
        fix = "fill it in, or leave such rows out with --missing-output drop"
        gathered.fail("output_tokens", places, BadValueError(int(np.flatnonzero(missing)[0]), "null", fix))
    keep = skipped.mask("missing_output", places, missing)
    if options.zero_output == "prefill":
        return keep & skipped.mask("zero_prompt", places, keep & (prompts == 0))
    keep &= skipped.mask("zero_output", places, keep & (outputs == 0))
    return keep & skipped.mask("zero_prompt", places, keep & (prompts == 0))


def _known(gathered: Gathered, columns: TraceColumns, name: str) -> IntArray:
    missing = columns.table.column(name).is_null().to_numpy()
    if missing.any():
        index = int(np.flatnonzero(missing)[0])
        gathered.fail(name, columns.file_rows + 1, BadValueError(index, "null", "fill it in or drop the row"))
    return columns.integers(name, 0, MAX_TOKENS)


def _prefill_only(gathered: Gathered, table: Any, places: IntArray) -> Any:
    """Turn rows without output into requests of one token: it comes out of the prefill, so the work is the same."""
    empty = table.column("output_tokens").to_numpy() == 0
    gathered.mark("zero_output, kept as prefill with one token", places[empty])
    if not empty.any():
        return table
    mask = pa.array(empty)
    for name, value, default in (
        ("output_tokens", pa.scalar(1, pa.int64()), None),
        ("max_tokens", pa.scalar(1, pa.int64()), pa.scalar(None, pa.int64())),
        ("finish", pa.scalar("length", pa.large_string()), pa.scalar("eos", pa.large_string())),
    ):
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, pc.if_else(mask, value, table.column(name)))
        else:
            table = table.append_column(name, pc.if_else(mask, value, default))
    return table


def _within_context(gathered: Gathered, table: Any, places: IntArray) -> tuple[Any, _BOOLS]:
    """Count what exceeds the context, and leave it out if so told; return the rest and which rows it is."""
    limit = gathered.options.max_model_len
    everything = np.ones(len(table), dtype=np.bool_)
    if limit is None:
        return table, everything
    prompts = table.column("prompt_tokens").to_numpy()
    too_long = prompts + table.column("output_tokens").to_numpy() > limit
    if gathered.options.overflow == "drop":
        keep = gathered.skipped.mask("exceeds_context", places, too_long)
        return (table if keep.all() else table.filter(pa.array(keep))), keep
    rejected = prompts >= limit
    gathered.mark("prompt fills the context: the engine will reject it", places[rejected])
    gathered.mark("answer runs into the context: the engine will cut it", places[too_long & ~rejected])
    return table, everything


def _check(gathered: Gathered, table: Any, places: IntArray) -> None:
    """Check what is left by the rules of a trace file."""
    columns = TraceColumns(str(gathered.source.path), table, places - 1, gathered.source.place)
    if columns.has("max_tokens"):
        columns.integers("max_tokens", 1, MAX_TOKENS, null=-1)
    if columns.has("priority"):
        columns.integers("priority", -(2**31), 2**31 - 1)
    for name in ("cancel_s", "slo_ttft_s", "think_s"):
        if columns.has(name):
            columns.durations_ns(name, zero_allowed=name != "slo_ttft_s")
    for name in MAPS:
        if columns.has(name):
            columns.by_model(name)
    if columns.has("finish"):
        columns.categories("finish", allowed=("eos", "length"))
    if columns.has("prefix_hashes"):
        _check_hashes(gathered, columns)


def _check_hashes(gathered: Gathered, columns: TraceColumns) -> None:
    block = gathered.reading.hash_block
    offsets, _ = columns.integer_lists("prefix_hashes")
    counts = np.diff(offsets)
    if block is None:
        if counts.any():
            columns.fail("prefix_hashes", counts > 0, "hashes", "say how many tokens one covers: --hash-block N")
        return
    prompts = columns.integers("prompt_tokens", 1, MAX_TOKENS)
    needed = -(-prompts // block)
    bad = (counts > 0) & (counts != needed)
    if bad.any():
        row = np.flatnonzero(bad)[0]
        columns.fail(
            gathered.reading.columns["prefix_hashes"],
            bad,
            f"{counts[row]} hashes for {prompts[row]} prompt tokens",
            f"allowed is one per {block} tokens begun, here {needed[row]}, or none at all; if a hash covers another "
            "number of tokens, say it with --hash-block",
        )


def _compact(table: Any) -> Any:
    """Store whole numbers in 32 bits where they fit: files are large."""
    narrow = {wide: kind for kind, wide in WIDE.items()}
    for place, name in enumerate(table.column_names):
        column = table.column(name)
        if column.type in narrow:
            try:
                table = table.set_column(place, name, column.cast(narrow[column.type]))
            except pa.ArrowException:
                continue
    return table


def too_long_a_span(gathered: Gathered) -> None:
    """Refuse arrivals more than 10 years apart.

    Raises:
        TraceError: they are; the unit of the column is wrong, or two kinds of times are mixed.
    """
    if gathered.earliest_ns is None or gathered.latest_ns is None:
        return
    span_ns = gathered.latest_ns - gathered.earliest_ns
    if span_ns > MAX_SPAN_NS:
        column, unit = gathered.reading.columns["arrival"], gathered.reading.unit.name
        raise TraceError(
            f"{gathered.source.path}: {column}: found arrivals {span_ns / 1e9:g} s apart, read in {unit}; allowed is "
            "10 years; give the right --time-unit, and do not mix times since 1970 with relative ones"
        )
