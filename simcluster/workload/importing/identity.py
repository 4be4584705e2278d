"""Ids of requests across a whole import: none twice, and nobody waits for a request that is not there."""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from simcluster.errors import TraceError
from simcluster.workload.importing.rows import Gathered
from simcluster.workload.trace_columns import IntArray, TraceColumns
from simcluster.workload.turns import read_turns

__all__ = ["checked_links", "unique_ids"]


def unique_ids(gathered: Gathered, table: Any, rows: IntArray, places: IntArray) -> Any:
    """Return the table with every request id once among these rows.

    Args:
        gathered: for the options and the report.
        table: the gathered rows.
        rows: which of them make up the trace, in its order.
        places: line or row of each gathered row in the file.

    Raises:
        TraceError: an id is there twice, unless --on-duplicate suffix was given.
    """
    if "request_id" not in table.column_names:
        return table
    ids = table.column("request_id")
    again = _repeated(ids, np.sort(rows))
    if not again:
        return table
    if gathered.options.on_duplicate == "error":
        first, second = next(iter(again))
        column, place = gathered.reading.columns["request_id"], gathered.source.place
        raise TraceError(
            f"{gathered.source.path}: {column}: found {ids[second].as_py()!r} in {place} {places[first]} and again in "
            f"{place} {places[second]}; ids must be unique; rename one, or number them with --on-duplicate suffix"
        )
    taken = set(ids.take(pa.array(rows)).to_pylist())
    counts: dict[str, int] = {}
    renamed: dict[int, str] = {}
    for _, row in again:
        name = ids[row].as_py()
        number = counts.get(name, 1) + 1
        while f"{name}#{number}" in taken:
            number += 1
        counts[name] = number
        renamed[row] = f"{name}#{number}"
        taken.add(renamed[row])
    positions = np.array(sorted(renamed), dtype=np.int64)
    gathered.changed.add("request id numbered, since it was there before", places[positions])
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[positions] = True
    names = pa.array([renamed[row] for row in positions.tolist()], pa.large_string())
    new = pc.replace_with_mask(ids.combine_chunks(), pa.array(mask), names)
    return table.set_column(table.column_names.index("request_id"), "request_id", new)


def _repeated(ids: Any, rows: IntArray) -> list[tuple[int, int]]:
    """Return (first row, later row) for each row whose id an earlier row has, in order of the file.

    Ids are compared by a 64-bit hash first: a dictionary of ten million texts would not fit.
    """
    hashes = pl.Series(values=pl.from_arrow(ids.take(pa.array(rows)))).hash().to_numpy()
    order = np.argsort(hashes, kind="stable")
    same = hashes[order][1:] == hashes[order][:-1]
    if not same.any():
        return []
    suspects = np.zeros(len(rows), dtype=np.bool_)
    suspects[order[1:][same]] = True
    suspects[order[:-1][same]] = True
    first: dict[str, int] = {}
    found = []
    for row in rows[suspects].tolist():
        name = ids[row].as_py()
        if name in first:
            found.append((first[name], row))
        else:
            first[name] = row
    return found


def checked_links(gathered: Gathered, table: Any, rows: IntArray, places: IntArray) -> Any:
    """Return the table with no row that waits for a request outside these rows; such rows come at their own arrival.

    Args:
        gathered: for the report.
        table: the gathered rows.
        rows: which of them make up the trace, in its order.
        places: line or row of each gathered row in the file.

    Raises:
        TraceError: a row waits for a later one, or has a think time and waits for none.
    """
    names = [name for name in ("request_id", "after", "think_s") if name in table.column_names]
    if "after" in names:
        table = _without_orphans(gathered, table, rows, places)
    if "after" in names or "think_s" in names:
        taken = table.select(names).take(pa.array(rows))
        columns = TraceColumns(str(gathered.source.path), taken, places[rows] - 1, gathered.source.place)
        read_turns(columns, columns)
    return table


def _without_orphans(gathered: Gathered, table: Any, rows: IntArray, places: IntArray) -> Any:
    after = table.column("after")
    if "request_id" not in table.column_names:
        raise TraceError(
            f"{gathered.source.path}: {gathered.reading.columns['after']}: names requests, but there is no column "
            "request_id; add one"
        )
    present = table.column("request_id").take(pa.array(rows)).combine_chunks()
    there = pc.is_in(after, value_set=present).to_numpy()
    lost = after.is_valid().to_numpy() & ~there
    gathered.changed.add("waited for a request that is left out: comes at its own arrival", places[rows[lost[rows]]])
    if not lost.any():
        return table
    for name in ("after", "think_s"):
        if name in table.column_names:
            column = table.column(name)
            empty = pa.scalar(None, column.type)
            table = table.set_column(table.column_names.index(name), name, pc.if_else(pa.array(lost), empty, column))
    return table
