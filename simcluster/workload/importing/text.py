"""Text files of rows, CSV and JSONL, in blocks.

A block of whole lines is parsed at once by Arrow, all CSV values as text and all JSON values under a fixed schema, so
that nothing is guessed from the head of a file. Where Arrow refuses a block, or does not find one row per line,
Python's own parsers go through it again: they accept what is harmless and name the line of what is not.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from simcluster.errors import TraceError
from simcluster.workload.importing.values import Column
from simcluster.workload.trace_columns import IntArray

__all__ = ["BLOCK_BYTES", "Block", "TextBlock", "csv_blocks", "json_blocks", "read_head", "text_blocks"]

BLOCK_BYTES = 8 << 20
_LONGEST_LINE = 256 << 20
_ROWS = 65_536  # rows of a block that Python parses

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive rows of a file.

    Attributes:
        columns: the wanted columns that are there, n values each.
        places: line or row of each in the file, from 1, shape (n,).
    """

    columns: dict[str, Column]
    places: IntArray


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole lines of a file.

    Attributes:
        line: number of the first line, from 1.
        data: the lines.
    """

    line: int
    data: bytes


def _open(path: Path) -> tuple[IO[bytes], IO[bytes]]:
    """Open a file, unpacked if it is gzip; return it and the file that its progress is measured in."""
    raw = path.open("rb")
    if raw.read(2) != b"\x1f\x8b":
        raw.seek(0)
        return raw, raw
    raw.seek(0)
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw


def read_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, unpacked if it is gzip, without a byte-order mark.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        file, raw = _open(path)
        with raw:
            return file.read(size).removeprefix(b"\xef\xbb\xbf")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def text_blocks(path: Path, progress: Progress, size: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """Read a file in blocks of whole lines, blocks of `size` bytes or more.

    Raises:
        TraceError: the file cannot be read, or has a line of more than 256 MiB.
    """
    try:
        file, raw = _open(path)
        total = max(path.stat().st_size, 1)
        with raw:
            line, rest = 1, b""
            while part := file.read(size):
                part = rest + (part.removeprefix(b"\xef\xbb\xbf") if line == 1 and not rest else part)
                end = part.rfind(b"\n") + 1
                if end == 0:
                    rest = part
                    if len(rest) > _LONGEST_LINE:
                        raise TraceError(f"{path}: line {line}: found more than 256 MiB in one line; is this a trace?")
                    continue
                yield TextBlock(line, part[:end])
                line += part.count(b"\n", 0, end)
                rest = part[end:]
                progress(raw.tell() / total)
            if rest:
                yield TextBlock(line, rest)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TraceError:
    reason = getattr(error, "strerror", None) or error
    return TraceError(f"{path}: cannot be read ({reason}); give the path of a readable trace")


def _text(path: Path, block: TextBlock) -> str:
    try:
        return block.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = block.line + block.data.count(b"\n", 0, error.start)
        raise TraceError(f"{path}: line {line}: found bytes that are not UTF-8 text; save the file as UTF-8") from error


def _line_places(block: TextBlock, rows: int) -> IntArray | None:
    """Return the line of each row if there is one row per line, else None."""
    lines = block.data.count(b"\n") + (not block.data.endswith(b"\n"))
    return np.arange(block.line, block.line + lines, dtype=np.int64) if rows == lines else None


# ---- CSV -----------------------------------------------------------------------------------------


def csv_blocks(
    path: Path, names: tuple[str, ...], delimiter: str, wanted: tuple[str, ...], progress: Progress
) -> Iterator[Block]:
    """Read the rows of a CSV file with a header, every value as text.

    Args:
        path: the file.
        names: columns of its header.
        delimiter: what separates values.
        wanted: the columns to return.
        progress: told the share that is read.

    Raises:
        TraceError: the file cannot be read, or a row has another number of values than the header.
    """
    blocks = _without_header(text_blocks(path, progress))
    for block in blocks:
        if b'"' in block.data:  # quotes can hold line ends, so a block is no longer whole
            yield from _careful_csv(path, _chain(block, blocks), names, delimiter, wanted)
            return
        quick = _quick_csv(block, names, delimiter, wanted)
        if quick is not None:
            yield quick
        else:
            yield from _careful_csv(path, iter([block]), names, delimiter, wanted)


def _without_header(blocks: Iterator[TextBlock]) -> Iterator[TextBlock]:
    first = next(blocks, TextBlock(1, b""))
    head = first.data.find(b"\n") + 1 or len(first.data)
    if first.data[head:]:
        yield TextBlock(2, first.data[head:])
    yield from blocks


def _chain(first: TextBlock, rest: Iterator[TextBlock]) -> Iterator[TextBlock]:
    yield first
    yield from rest


def _quick_csv(block: TextBlock, names: tuple[str, ...], delimiter: str, wanted: tuple[str, ...]) -> Block | None:
    codes = [f"c{number}" for number in range(len(names))]
    places = [names.index(name) for name in wanted]
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(block.data),
            read_options=pa_csv.ReadOptions(column_names=codes, block_size=len(block.data) + 1, use_threads=False),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, quote_char=False),
            convert_options=pa_csv.ConvertOptions(
                include_columns=[codes[place] for place in places],
                column_types={codes[place]: pa.string() for place in places},
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowException:
        return None
    lines = _line_places(block, table.num_rows)
    if lines is None:
        return None
    columns = {name: table.column(codes[place]).combine_chunks() for name, place in zip(wanted, places, strict=True)}
    return Block(columns, lines)


def _careful_csv(
    path: Path, blocks: Iterator[TextBlock], names: tuple[str, ...], delimiter: str, wanted: tuple[str, ...]
) -> Iterator[Block]:
    first = next(blocks)
    start = first.line - 1
    lines = (line for block in _chain(first, blocks) for line in io.StringIO(_text(path, block), newline=""))
    csv.field_size_limit(_LONGEST_LINE)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    places: list[int] = []
    while True:
        place = start + reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise TraceError(f"{path}: line {place}: not CSV ({error}); correct the line") from error
        if row:
            if len(row) != len(names):
                raise TraceError(
                    f"{path}: line {place}: found {len(row)} values; allowed is {len(names)}, as in the header;"
                    " correct the line, or quote values that contain the separator"
                )
            rows.append(row)
            places.append(place)
        if len(rows) == _ROWS or (row is None and rows):
            columns: dict[str, Column] = {
                name: pa.array([values[names.index(name)] for values in rows], pa.large_string()) for name in wanted
            }
            yield Block(columns, np.array(places, dtype=np.int64))
            rows, places = [], []
        if row is None:
            return


# ---- JSONL ---------------------------------------------------------------------------------------


def json_blocks(path: Path, wanted: dict[str, Any], progress: Progress) -> Iterator[Block]:
    """Read the rows of a file with one JSON object per line.

    Args:
        path: the file.
        wanted: the keys to return, each with the Arrow types that its values may have as a whole.
        progress: told the share that is read.

    Raises:
        TraceError: the file cannot be read, or a line is not a JSON object.
    """
    for block in text_blocks(path, progress):
        quick = _quick_json(block, wanted)
        if quick is not None:
            yield quick
        else:
            yield from _careful_json(path, block, tuple(wanted))


def _quick_json(block: TextBlock, wanted: dict[str, Any]) -> Block | None:
    for attempt in range(max(len(kinds) for kinds in wanted.values())):
        schema = pa.schema([(name, kinds[min(attempt, len(kinds) - 1)]) for name, kinds in wanted.items()])
        try:
            table = pa_json.read_json(
                pa.BufferReader(block.data),
                read_options=pa_json.ReadOptions(block_size=len(block.data) + 1, use_threads=False),
                parse_options=pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        except (pa.ArrowException, UnicodeDecodeError):
            continue
        lines = _line_places(block, table.num_rows)
        if lines is None:
            return None
        return Block({name: table.column(name).combine_chunks() for name in wanted}, lines)
    return None


def _careful_json(path: Path, block: TextBlock, wanted: tuple[str, ...]) -> Iterator[Block]:
    rows: list[dict[str, Any]] = []
    places: list[int] = []
    for place, line in enumerate(io.StringIO(_text(path, block), newline="\n"), start=block.line):
        if not line.strip():
            continue
        rows.append(_json_object(path, place, line))
        places.append(place)
        if len(rows) == _ROWS:
            yield Block({name: [row.get(name) for row in rows] for name in wanted}, np.array(places, dtype=np.int64))
            rows, places = [], []
    if rows:
        yield Block({name: [row.get(name) for row in rows] for name in wanted}, np.array(places, dtype=np.int64))


def _json_object(path: Path, place: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:80]
        raise TraceError(f"{path}: line {place}: not JSON ({reason}); correct the line") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}: line {place}: found {type(value).__name__}; allowed is one JSON object per line")
    return value
