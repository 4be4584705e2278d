"""Write traces as Parquet files, schema v1, whole or not at all."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import TraceError
from simcluster.workload.trace import Trace
from simcluster.workload.trace_columns import MapArrays
from simcluster.workload.trace_schema import KEY, MAPS, OWN_KEYS, SCHEMA_VERSION, UNITS

__all__ = ["TraceWriter", "cannot_write", "file_metadata", "write_trace"]


class TraceWriter:
    """A trace file in the making, written in parts; it appears under its name when the block ends without an error.

    Attributes:
        metadata: what describes the trace; may be added to until the end.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
        self.metadata = metadata
        self._path = Path(path)
        self._partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def write(self, table: pa.Table) -> None:
        """Append rows; every part must have the same columns.

        Raises:
            TraceError: the file cannot be written.
        """
        try:
            if self._writer is None:
                # Without Arrow's own schema in the metadata the file says the same thing only once.
                self._writer = pq.ParquetWriter(self._partial, table.schema, compression="zstd", store_schema=False)
            self._writer.write_table(table)
        except OSError as error:
            raise self._failed(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._writer is None:
                return
            if kind is None:
                keys = sorted(self.metadata)
                self._writer.add_key_value_metadata({KEY + key: self.metadata[key] for key in keys})
            self._writer.close()
            if kind is None:
                self._partial.replace(self._path)
        except OSError as failure:
            if kind is None:
                raise self._failed(failure) from failure
        finally:
            self._partial.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> TraceError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return cannot_write(self._path, reason)


def cannot_write(path: Path, reason: str) -> TraceError:
    """Return the error of a trace that cannot be written."""
    return TraceError(f"{path}: cannot write the trace ({reason}); give a path in a folder that exists and is writable")


def file_metadata(metadata: dict[str, str], prefix_block_size: int | None) -> dict[str, str]:
    """Add what the format itself says about a file.

    Raises:
        ValueError: a key is taken by the format.
    """
    taken = sorted(set(metadata) & set(OWN_KEYS))
    if taken:
        raise ValueError(f"metadata {taken[0]!r} is set by the file format; use another key")
    every = {"schema_version": SCHEMA_VERSION, "units": UNITS, **metadata}
    return every if prefix_block_size is None else every | {"prefix_block_size": str(prefix_block_size)}


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace file, whole or not at all; equal traces give equal bytes.

    Optional columns that say nothing (all at their default) are left out.

    Raises:
        TraceError: the file cannot be written.
        ValueError: the trace's metadata uses a key that the file format sets itself.
    """
    with TraceWriter(path, file_metadata(trace.metadata, trace.prefix_block_size)) as writer:
        writer.write(pa.table(_arrow_columns(trace)))


def _arrow_columns(trace: Trace) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "request_id": pa.array(trace.request_id, pa.string()),
        "arrival_ns": pa.array(trace.arrival_ns, pa.int64()),
        "prompt_tokens": pa.array(trace.prompt_tokens, pa.int64()),
        "output_tokens": pa.array(trace.output_tokens, pa.int64()),
    }
    if (trace.max_tokens >= 0).any():
        columns["max_tokens"] = pa.array(trace.max_tokens, mask=trace.max_tokens < 0)
    if trace.ends_by_length.any():
        columns["finish"] = pa.array(np.where(trace.ends_by_length, "length", "eos"), pa.string())
    if trace.priority.any():
        columns["priority"] = pa.array(trace.priority, pa.int64())
    for name, values in (("cancel_s", trace.cancel_ns), ("slo_ttft_s", trace.slo_ttft_ns)):
        if (values >= 0).any():
            columns[name] = pa.array(values / 1e9, mask=values < 0)
    for name, texts in (
        ("task", trace.task_labels()),
        ("session_id", trace.session_id),
        ("prompt", trace.prompt),
    ):
        if texts is not None:
            columns[name] = pa.array(texts, pa.string())
    if trace.after is not None and trace.think_ns is not None:
        columns["after"] = pa.array(trace.request_id[trace.after], pa.string(), mask=trace.after < 0)
        columns["think_s"] = pa.array(trace.think_ns / 1e9, mask=trace.after < 0)
    for name, kind in MAPS.items():
        by_model = getattr(trace, name)
        if by_model:
            columns[name] = _map_array(by_model, pa.int64() if kind == "tokens" else pa.float64())
    if trace.prefix_offsets is not None:
        columns["prefix_hashes"] = pa.LargeListArray.from_arrays(
            pa.array(trace.prefix_offsets), pa.array(trace.prefix_values, pa.int64())
        )
    return columns


def _map_array(by_model: MapArrays, kind: Any) -> Any:
    names = sorted(by_model)
    values: npt.NDArray[Any] = np.stack([by_model[name] for name in names], axis=1)
    n = len(values)
    return pa.MapArray.from_arrays(
        pa.array(np.arange(0, n * len(names) + 1, len(names)), pa.int32()),
        pa.array(np.tile(np.array(names, dtype=object), n), pa.string()),
        pa.array(values.ravel(), kind),
    )
