"""Open a foreign file: what kind it is, which columns it has, its first rows, and all rows in blocks."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import TraceError
from simcluster.workload.importing.text import Block, csv_blocks, json_blocks, read_head
from simcluster.workload.trace_columns import listed
from simcluster.workload.trace_schema import KEY

__all__ = ["Kind", "Source", "open_source"]

Kind = Literal["csv", "jsonl", "parquet", "json"]
Progress = Callable[[float], None]

_HEAD_BYTES = 1 << 20
_HEAD_ROWS = 1000
_LARGEST_JSON = 1 << 30
_BATCH_ROWS = 131_072
_BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)  # what a damaged Parquet file can raise
_DELIMITERS = (",", "\t", ";", "|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A foreign file.

    Attributes:
        path: the file.
        kind: how its bytes are laid out.
        names: its columns; of JSONL the keys of its first lines.
        place: what messages call a row.
        delimiter: what separates the values of a CSV file.
        metadata: what a Parquet file says about itself under our keys.
        arrays: the columns of a JSON file, which is read whole.
    """

    path: Path
    kind: Kind
    names: tuple[str, ...]
    place: str
    delimiter: str = ","
    metadata: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Any]] = field(default_factory=dict)

    def blocks(self, wanted: dict[str, tuple[Any, ...]], progress: Progress = lambda _: None) -> Iterator[Block]:
        """Return all rows in blocks.

        Args:
            wanted: the columns to read, each with the Arrow types that JSON values may have as a whole.
            progress: told the share that is read, 0 to 1.

        Raises:
            TraceError: the file cannot be read; one line that names the first bad line or row.
        """
        match self.kind:
            case "csv":
                return csv_blocks(self.path, self.names, self.delimiter, tuple(wanted), progress)
            case "jsonl":
                return json_blocks(self.path, wanted, progress)
            case "parquet":
                return _parquet_blocks(self.path, tuple(wanted), progress)
            case "json":
                return iter([_array_block(self.arrays, tuple(wanted))])

    def head(self, wanted: dict[str, tuple[Any, ...]]) -> Block:
        """Return the first rows, 1000 at most.

        Raises:
            TraceError: the file cannot be read.
        """
        for block in self.blocks(wanted):
            return Block(
                {name: column[:_HEAD_ROWS] for name, column in block.columns.items()}, block.places[:_HEAD_ROWS]
            )
        return Block({name: [] for name in wanted}, np.zeros(0, dtype=np.int64))


def open_source(path: Path) -> Source:
    """Recognise how a file is laid out by its first bytes.

    Raises:
        TraceError: it cannot be read, is empty, or is laid out in another way.
    """
    if path.is_dir():
        raise TraceError(f"{path}: is a folder; give one file")
    head = read_head(path, _HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return _open_parquet(path)
    text = head.lstrip()
    if not text:
        raise TraceError(f"{path}: 0 requests after filters (0 read); the file is empty; give a trace")
    if text.startswith(b"{"):
        return _open_json(path, text)
    if text.startswith(b"["):
        raise TraceError(f"{path}: found one JSON list; allowed is one JSON object per line; split the list into lines")
    return _open_csv(path, head)


# ---- Parquet -------------------------------------------------------------------------------------


def _open_parquet(path: Path) -> Source:
    try:
        file = pq.ParquetFile(path)
        names: list[str] = file.schema_arrow.names
        raw: dict[bytes, bytes] = file.metadata.metadata or {}
    except _BROKEN as error:
        raise _damaged(path, error) from error
    texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in raw.items()}
    ours = {key.removeprefix(KEY): text for key, text in texts.items() if key.startswith(KEY)}
    return Source(path=path, kind="parquet", names=tuple(names), place="row", metadata=ours)


def _parquet_blocks(path: Path, wanted: tuple[str, ...], progress: Progress) -> Iterator[Block]:
    try:
        file = pq.ParquetFile(path)
        row, total = 1, max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted)):
            batch.validate(full=True)  # among others, that texts are UTF-8
            places = np.arange(row, row + batch.num_rows, dtype=np.int64)
            yield Block({name: batch.column(name) for name in wanted}, places)
            row += batch.num_rows
            progress((row - 1) / total)
    except _BROKEN as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TraceError:
    reason = (str(error).splitlines() or ["unreadable"])[0].rstrip(".")
    return TraceError(f"{path}: not a complete Parquet file ({reason}); write the file again")


# ---- JSON ----------------------------------------------------------------------------------------


def _open_json(path: Path, text: bytes) -> Source:
    """Tell a file of one object per line from one whole object, such as the result of a benchmark."""
    line = text.split(b"\n", 1)[0]
    first = _parsed(line) if len(line) < len(text) else None
    if isinstance(first, dict) and not _is_arrays(first):
        return Source(path=path, kind="jsonl", names=_keys(text), place="line")
    whole = first if first is not None else _parsed(_read_all(path))
    if isinstance(whole, dict) and _is_arrays(whole):
        arrays = {str(name): value for name, value in whole.items() if isinstance(value, list)}
        return Source(path=path, kind="json", names=tuple(arrays), place="request", arrays=arrays)
    if isinstance(whole, dict) and b"\n" in text.rstrip():
        raise TraceError(f"{path}: found one JSON object over several lines; allowed is one object per line")
    # Let the reader of lines say what else is wrong with them.
    return Source(path=path, kind="jsonl", names=_keys(text), place="line")


def _is_arrays(value: dict[Any, Any]) -> bool:
    return isinstance(value.get("input_lens"), list)


def _read_all(path: Path) -> bytes:
    return read_head(path, _LARGEST_JSON) if path.stat().st_size <= _LARGEST_JSON else b""


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _keys(text: bytes) -> tuple[str, ...]:
    """Return the keys of the first lines, in order of their first appearance."""
    keys: dict[str, None] = {}
    for line in text.split(b"\n", _HEAD_ROWS)[:_HEAD_ROWS]:
        value = _parsed(line)
        if isinstance(value, dict):
            keys.update(dict.fromkeys(map(str, value)))
    return tuple(keys)


def _array_block(arrays: dict[str, list[Any]], wanted: tuple[str, ...]) -> Block:
    columns = {name: arrays[name] for name in wanted if name in arrays}
    count = len(next(iter(columns.values()), []))
    return Block(dict(columns), np.arange(1, count + 1, dtype=np.int64))


# ---- CSV -----------------------------------------------------------------------------------------


def _open_csv(path: Path, head: bytes) -> Source:
    try:
        line = head.split(b"\n", 1)[0].decode("utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: line 1: found bytes that are not UTF-8 text; give CSV, JSONL or Parquet") from error
    delimiter = max(_DELIMITERS, key=line.count)
    try:
        rows = list(csv.reader(io.StringIO(line, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise TraceError(f"{path}: line 1: not a CSV header ({error}); give CSV, JSONL or Parquet") from error
    if "\r" in line:
        raise TraceError(f"{path}: line 1: found a line that ends in a bare carriage return; save it with line feeds")
    names = tuple(name.strip() for name in rows[0]) if rows else ()
    if not any(names):
        raise TraceError(f"{path}: line 1: found no column names; allowed is a CSV header; add one")
    if any(_is_number(name) for name in names):
        raise TraceError(f"{path}: line 1: found {line[:60]!r}; allowed is a header with column names; add one")
    twice = sorted({name for name in names if names.count(name) > 1 and name})
    if twice:
        raise TraceError(f"{path}: line 1: found the column {listed(twice)} twice; allowed is once; rename one")
    return Source(path=path, kind="csv", names=names, place="line", delimiter=delimiter)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
