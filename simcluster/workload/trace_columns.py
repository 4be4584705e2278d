"""Columns of a trace file, checked and turned into numpy arrays.

Every check works on whole columns and names the first offending row of the file, counted from 1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simcluster.errors import TraceError
from simcluster.workload.trace_schema import MAPS, MAX_TOKENS

__all__ = ["FloatArray", "IntArray", "MapArrays", "StrArray", "TraceColumns", "counted", "listed"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
StrArray = npt.NDArray[np.object_]
MapArrays = dict[str, npt.NDArray[Any]]

# Seconds up to this bound survive the way to float seconds in a file and back to whole ns.
_MAX_DURATION_S = 1.0e6


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """A table read from a file, with what an error message needs to name a place in it.

    Attributes:
        path: the file, as the user named it.
        table: the columns, n rows.
        file_rows: the row of the file that each row of the table came from, from 0, shape (n,).
        place: what messages call such a row.
    """

    path: str
    table: pa.Table
    file_rows: IntArray
    place: str = "row"

    def has(self, name: str) -> bool:
        """Return whether the column is there."""
        return name in self.table.column_names

    def take(self, rows: IntArray) -> "TraceColumns":
        """Return these rows in this order; they keep their row numbers in the file."""
        if np.array_equal(rows, np.arange(len(self.file_rows))):
            return self
        return replace(self, table=self.table.take(pa.array(rows)), file_rows=self.file_rows[rows])

    def fail(self, name: str, bad: npt.NDArray[np.bool_], found: str, allowed: str) -> NoReturn:
        """Raise a TraceError that names the first row marked bad and counts the others.

        Raises:
            TraceError: always.
        """
        rows = np.flatnonzero(bad)
        more = f" (and {len(rows) - 1} more such rows)" if len(rows) > 1 else ""
        row = int(self.file_rows[rows[0]]) + 1
        raise TraceError(f"{self.path}: {name}, {self.place} {row}: found {found}{more}; {allowed}")

    def integers(self, name: str, low: int, high: int, null: int | None = None) -> IntArray:
        """Return an integer column of any width, int64, shape (n,).

        Args:
            name: the column.
            low: smallest value allowed.
            high: largest value allowed.
            null: what stands for null; without it a null is an error.

        Raises:
            TraceError: another type, a null, or a value outside [low, high].
        """
        return self._integers(name, self._array(name), low, high, null=null)

    def instants_ns(self, name: str, max_span_ns: int) -> IntArray:
        """Return arrival instants [ns], int64, shape (n,), from whole ns or float seconds.

        Args:
            name: `arrival_ns` (integers) or `arrival_s` (any number).
            max_span_ns: largest value allowed on either side of 0 [ns].

        Raises:
            TraceError: another type, a null, NaN or infinity, or a value out of range.
        """
        array = self._array(name)
        seconds = name.endswith("_s")
        limit = max_span_ns / 1e9 if seconds else float(max_span_ns)
        allowed = (
            f"allowed is +-{limit:g} (10 years) from the start of the trace; check the unit"
            f" ({'seconds' if seconds else 'nanoseconds'}), and subtract the first arrival if"
            " these are dates"
        )
        if not seconds:
            return self._integers(name, array, -max_span_ns, max_span_ns, allowed=allowed)
        values = self._floats(name, array, -limit, limit, allowed)
        return np.rint(values * 1e9).astype(np.int64)

    def durations_ns(self, name: str, zero_allowed: bool) -> IntArray:
        """Return durations given in seconds as whole ns, int64, shape (n,); null becomes -1.

        Raises:
            TraceError: another type, NaN or infinity, or a value out of range.
        """
        array = self._array(name)
        given = array.is_valid().to_numpy(zero_copy_only=False)
        low = 0.0 if zero_allowed else 1e-9
        allowed = f"allowed is {low:g} to {_MAX_DURATION_S:g} s after the arrival, or null for none"
        values = self._floats(name, self._filled(name, array, low), low, _MAX_DURATION_S, allowed)
        return np.where(given, np.rint(values * 1e9).astype(np.int64), np.int64(-1))

    def strings(self, name: str, nullable: bool = False) -> StrArray:
        """Return text as Python strings, object array, shape (n,); integers are written out.

        Raises:
            TraceError: another type, or a null where none is allowed.
        """
        array = self._text(name)
        if not nullable:
            self._refuse_nulls(name, array)
        values: StrArray = array.to_numpy(zero_copy_only=False)
        return values

    def texts(self, name: str) -> Any:
        """Return text or integers as an Arrow array of large strings, n entries, nulls left as they are.

        Raises:
            TraceError: another type.
        """
        return self._text(name)

    def unique_strings(self, name: str) -> StrArray:
        """Return text without repetitions, object array, shape (n,).

        Raises:
            TraceError: another type, a null, or one text in two rows.
        """
        values = self.strings(name)
        encoded = self._text(name).dictionary_encode()
        if len(encoded.dictionary) < len(values):
            codes = encoded.indices.to_numpy()
            _, first = np.unique(codes, return_index=True)
            again = np.setdiff1d(np.arange(len(codes)), first)[0]
            rows = self.file_rows[[int(np.flatnonzero(codes == codes[again])[0]), int(again)]] + 1
            raise TraceError(
                f"{self.path}: {name}: found {values[again]!r} in row {rows.min()} and again in"
                f" row {rows.max()}; ids must be unique; rename one of them or drop the column"
                " (row numbers then serve as ids)"
            )
        return values

    def categories(
        self, name: str, allowed: tuple[str, ...] | None = None
    ) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        """Return text as codes, int32, shape (n,), and the sorted names that they index.

        Args:
            name: the column.
            allowed: the names allowed; any by default.

        Raises:
            TraceError: another type, a null, or a name that is not allowed.
        """
        array = self._text(name)
        self._refuse_nulls(name, array)
        encoded = array.dictionary_encode()
        found = np.asarray(encoded.dictionary.to_pylist(), dtype=object)
        codes = encoded.indices.to_numpy()
        if allowed is not None:
            unknown = ~np.isin(found, np.asarray(allowed, dtype=object))
            if unknown.any():
                value = found[np.flatnonzero(unknown)[0]]
                bad = unknown[codes]
                self.fail(name, bad, repr(value), f"allowed is {' or '.join(map(repr, allowed))}")
        order = np.argsort(found)
        rank = np.empty(len(order), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return rank[codes], tuple(str(text) for text in found[order])

    def by_model(self, name: str) -> MapArrays:
        """Return one of the columns `MAPS` as one array of shape (n,) per model.

        Raises:
            TraceError: another type, a null, rows with different keys, or a value out of range.
        """
        if MAPS[name] == "tokens":
            return self.integers_by_key(name, 1, MAX_TOKENS)
        return self.numbers_by_key(name, 0.0, 1.0)

    def integers_by_key(self, name: str, low: int, high: int) -> MapArrays:
        """Return a map<string, integer> column as one int64 array of shape (n,) per key.

        Raises:
            TraceError: another type, a null, rows with different keys, or a value out of range.
        """
        return self._by_key(name, lambda label, array: self._integers(label, array, low, high))

    def numbers_by_key(self, name: str, low: float, high: float) -> MapArrays:
        """Return a map<string, number> column as one float64 array of shape (n,) per key.

        Raises:
            TraceError: another type, a null, rows with different keys, or a value out of range.
        """
        allowed = f"allowed is {low:g} to {high:g}"
        return self._by_key(name, lambda label, array: self._floats(label, array, low, high, allowed))

    def integer_lists(self, name: str) -> tuple[IntArray, IntArray]:
        """Return a list<integer> column as offsets, shape (n + 1,), and values; null is empty.

        Raises:
            TraceError: another type, or a null inside a list.
        """
        array = self._array(name)
        kind = array.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not (is_list and pa.types.is_integer(kind.value_type)):
            self._refuse_type(name, kind, "a list of integers")
        array = array.cast(pa.large_list(pa.int64()))
        counts = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        values = array.flatten()  # leaves out what a null list may hide
        if values.null_count:
            flat = values.is_null().to_numpy(zero_copy_only=False)
            bad = np.zeros(len(counts), dtype=bool)
            bad[np.repeat(np.arange(len(counts)), counts)[flat]] = True
            self.fail(name, bad, "null in the list", "allowed are whole numbers")
        return offsets, values.to_numpy(zero_copy_only=False)

    # ---- one column of one Arrow type ---------------------------------------------------------

    def _array(self, name: str) -> Any:
        return self.table.column(name).combine_chunks()

    def _refuse_type(self, name: str, kind: Any, wanted: str) -> NoReturn:
        raise TraceError(
            f"{self.path}: {name}: found a column of type {kind}; allowed is {wanted};"
            " cast the column when you write the file"
        )

    def _refuse_nulls(self, name: str, array: Any) -> None:
        if array.null_count:
            bad = array.is_null().to_numpy(zero_copy_only=False)
            self.fail(name, bad, "null", "a value is required; fill it in or drop the row")

    def _filled(self, name: str, array: Any, value: float) -> Any:
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            self._refuse_type(name, array.type, "a number of seconds")
        return array.cast(pa.float64(), safe=False).fill_null(value)

    def _integers(
        self,
        name: str,
        array: Any,
        low: int,
        high: int,
        *,
        null: int | None = None,
        allowed: str | None = None,
    ) -> IntArray:
        if not pa.types.is_integer(array.type):
            self._refuse_type(name, array.type, "an integer of any width")
        if null is None:
            self._refuse_nulls(name, array)
        missing = array.is_null().to_numpy(zero_copy_only=False)
        values = array.fill_null(max(low, 0)).to_numpy(zero_copy_only=False)
        bad = (values < low) | (values > high)
        if bad.any():
            value = values[np.flatnonzero(bad)[0]]
            self.fail(name, bad, f"{value}", allowed or f"allowed is {low} to {high}")
        result: IntArray = values.astype(np.int64)
        if null is not None:
            result[missing] = null
        return result

    def _floats(self, name: str, array: Any, low: float, high: float, allowed: str) -> FloatArray:
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            self._refuse_type(name, array.type, "a number")
        self._refuse_nulls(name, array)
        values: FloatArray = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        # Written so that NaN, which compares false with everything, is bad too.
        bad = ~((values >= low) & (values <= high))
        if bad.any():
            self.fail(name, bad, f"{float(values[np.flatnonzero(bad)[0]])!r}", allowed)
        return values

    def _text(self, name: str) -> Any:
        column = self.table.column(name)
        kind = column.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
            column = column.cast(kind)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        if not (is_text or pa.types.is_integer(kind)):
            self._refuse_type(name, kind, "text")
        # Large strings first: 32-bit offsets end at 2 GiB, which prompts can exceed.
        return column.cast(pa.large_string()).combine_chunks()

    def _by_key(self, name: str, read: Callable[[str, Any], npt.NDArray[Any]]) -> MapArrays:
        array = self._array(name)
        if not (pa.types.is_map(array.type) and pa.types.is_string(array.type.key_type)):
            self._refuse_type(name, array.type, "a map from text to numbers")
        self._refuse_nulls(name, array)
        bounds = array.offsets.to_numpy()
        counts = np.diff(bounds)
        keys = array.keys.slice(bounds[0], bounds[-1] - bounds[0]).dictionary_encode()
        items = array.items.slice(bounds[0], bounds[-1] - bounds[0])
        codes = keys.indices.to_numpy()
        names = keys.dictionary.to_pylist()
        owner = np.repeat(np.arange(len(counts)), counts)
        result: MapArrays = {}
        for code in sorted(range(len(names)), key=lambda code: str(names[code])):
            places = np.flatnonzero(codes == code)
            times = np.bincount(owner[places], minlength=len(counts))
            self._require_one_each(name, times, f"key {names[code]!r}")
            result[names[code]] = read(f"{name}[{names[code]!r}]", items.take(pa.array(places)))
        return result

    def _require_one_each(self, name: str, times: IntArray, key: str) -> None:
        allowed = "every row must have the same keys, each once"
        if (times > 1).any():
            self.fail(name, times > 1, f"{key} more than once", allowed)
        lacking = times == 0
        if lacking.all() or not lacking.any():
            return
        # The odd rows are the fewer ones, whether they lack the key or are alone in having it.
        if lacking.sum() * 2 > len(times):
            self.fail(name, ~lacking, f"{key}, which other rows lack", allowed)
        self.fail(name, lacking, f"no {key}, which other rows have", allowed)


def listed(names: Iterable[str]) -> str:
    """Join names of columns, spelling out those that a terminal could not show."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def counted(count: int, thing: str = "row") -> str:
    """Write a number of things, such as `1 row` or `2,000 rows`."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
