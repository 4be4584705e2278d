"""Requests that wait for an earlier one: the columns `after` and `think_s` of a trace file."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simcluster.errors import TraceError
from simcluster.workload.trace_columns import IntArray, TraceColumns

__all__ = ["read_turns"]


def read_turns(file: TraceColumns, taken: TraceColumns) -> tuple[dict[str, Any], int]:
    """Return who waits for whom, as arguments of Trace.from_columns.

    Args:
        file: all rows of the file, m of them.
        taken: the rows of the trace, in its order, n of them.

    Returns:
        `after` and `think_ns`, int64, shape (n,), or nothing without these columns; and how many rows waited for
        a row that is in the file but not in the trace.

    Raises:
        TraceError: a row waits for an unknown or a later one, or has a think time and waits for none.
    """
    if not taken.has("after"):
        if taken.has("think_s"):
            raise TraceError(
                f"{file.path}: think_s: found think times without a column after; allowed is both or neither;"
                " add after, the request_id of the request that must end first"
            )
        return {}, 0
    waited = taken.texts("after")
    waits = waited.is_valid().to_numpy(zero_copy_only=False)
    think_ns = taken.durations_ns("think_s", zero_allowed=True) if taken.has("think_s") else np.full(len(waits), -1)
    idle = (think_ns >= 0) & ~waits
    if idle.any():
        taken.fail("think_s", idle, "a think time", "allowed only where after names a request; leave it null")
    after = _positions(waited, _ids(taken))
    missing = waits & (after < 0)
    strange = missing & (_positions(waited, _ids(file)) < 0)
    if strange.any():
        name = waited[int(np.flatnonzero(strange)[0])].as_py()
        taken.fail("after", strange, f"{name!r}", "allowed is the request_id of another row, or null")
    late = after >= np.arange(len(after))
    if late.any():
        name = waited[int(np.flatnonzero(late)[0])].as_py()
        allowed = "allowed is a request of an earlier arrival, or of an earlier row with the same arrival"
        taken.fail("after", late, f"{name!r}, which does not come earlier", allowed)
    return {"after": after, "think_ns": np.maximum(think_ns, 0)}, int(missing.sum())


def _ids(columns: TraceColumns) -> Any:
    """Return the request ids, by default the row numbers of the file from 0."""
    if columns.has("request_id"):
        return columns.texts("request_id")
    return pa.array(columns.file_rows).cast(pa.large_string())


def _positions(wanted: Any, ids: Any) -> IntArray:
    """Return where each id stands, -1 for null and for those that are not there."""
    positions: IntArray = pc.index_in(wanted, value_set=ids).fill_null(-1).to_numpy().astype(np.int64)
    if ids.null_count:  # a null of one column is not a null of the other
        positions[~wanted.is_valid().to_numpy(zero_copy_only=False)] = -1
    return positions
