"""Values of foreign files: one column of any kind in, one checked Arrow array out.

A column is an Arrow array (text from CSV, typed values from Parquet and from clean JSON) or a Python list (JSON values
that need a closer look). Whole columns are cast at once; only where that fails is each value looked at, to accept what
is harmless (`512.0` for a count) and to name the first that is not.
"""

import datetime as dt
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simcluster.workload.importing.options import TimeUnit
from simcluster.workload.trace_columns import IntArray

__all__ = ["BadValueError", "Column", "as_hash_lists", "as_instants", "as_integers", "as_numbers", "as_texts"]

Column = Any  # pa.Array or list[object]

_INT64 = 2**63
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_EARLIEST_YEAR, _LATEST_YEAR = 1678, 2261  # int64 nanoseconds around 1970


class BadValueError(ValueError):
    """A value that is not allowed.

    Attributes:
        index: its position in the column.
        found: the value as text.
        allowed: what is allowed instead.
    """

    def __init__(self, index: int, found: str, allowed: str) -> None:
        super().__init__(f"{index}: {found}; {allowed}")
        self.index = index
        self.found = found
        self.allowed = allowed


def as_integers(column: Column) -> Any:
    """Return whole numbers as int64; empty text and null become null.

    Raises:
        BadValueError: a value is not a whole number that int64 can hold.
    """
    return _cast(column, pa.int64(), _integer, "allowed is a whole number")


def as_numbers(column: Column) -> Any:
    """Return numbers as float64; empty text and null become null; NaN and infinity stay.

    Raises:
        BadValueError: a value is not a number.
    """
    return _cast(column, pa.float64(), _number, "allowed is a number")


def as_texts(column: Column) -> Any:
    """Return text as large strings; whole numbers are written out, null and NaN become null.

    Raises:
        BadValueError: a value is neither text nor a whole number.
    """
    return _cast(column, pa.large_string(), _text, "allowed is text or a whole number")


def as_hash_lists(column: Column) -> Any:
    """Return lists of 64-bit integers as large lists of int64; null becomes null. Unsigned ones keep their bits.

    Raises:
        BadValueError: a value is not such a list.
    """
    if isinstance(column, pa.Array) and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        kind = column.type.value_type
        if pa.types.is_integer(kind) and kind != pa.uint64() and column.flatten().null_count == 0:
            return column.cast(pa.large_list(pa.int64()))
    allowed = "allowed is a list of whole 64-bit numbers, or nothing"
    rows = _each(column if isinstance(column, list) else _values(column, allowed), _hashes, allowed)
    return pa.array(rows, pa.large_list(pa.int64()))


def as_instants(column: Column, unit: TimeUnit) -> IntArray:
    """Return instants as whole nanoseconds, int64, shape (n,); dates count from 1970 in UTC.

    Numbers are split at the point first, so that seconds since 1970 keep what their digits say.

    Raises:
        BadValueError: a value is missing, is not of this unit, or is beyond int64 nanoseconds.
    """
    if unit.is_date:
        nanoseconds = _dates(column)
    elif _all_whole(column):
        nanoseconds = _scaled_integers(as_integers(column), unit)
    else:
        nanoseconds = _scaled_floats(as_numbers(column), unit)
    if nanoseconds.null_count:
        index = int(np.flatnonzero(nanoseconds.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadValueError(index, "no arrival", "every row needs one; fill it in or drop the row")
    result: IntArray = nanoseconds.to_numpy(zero_copy_only=False)
    return result


# ---- whole columns -------------------------------------------------------------------------------


def _cast(column: Column, kind: Any, one: Callable[[object], object], allowed: str) -> Any:
    """Cast a column whole if its type says that nothing can be lost, else value by value."""
    if isinstance(column, pa.Array):
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if _is_safe(column, kind):
            try:
                return column.cast(kind)
            except pa.ArrowException:
                pass
        column = _values(column, allowed)
    return pa.array(_each(column, one, allowed), kind)


def _values(column: Any, allowed: str) -> list[Any]:
    """Return the values of a column of plain ones; others, such as dates, may not even have a Python value."""
    kind = column.type
    plain = pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if len(column) and not (plain or _is_text(kind) or is_list or pa.types.is_null(kind)):
        raise BadValueError(0, f"a column of type {kind}", allowed)
    values: list[Any] = column.to_pylist()
    return values


def _is_safe(column: Any, kind: Any) -> bool:
    given = column.type
    if pa.types.is_null(given) or given == kind:
        return True
    is_number = bool(pa.types.is_integer(given) or pa.types.is_floating(given))  # Arrow refuses a cast that would round
    if pa.types.is_integer(kind):
        return is_number or (_is_text(given) and not _any_contains(column, "x"))  # Arrow reads 0x10 as 16
    if pa.types.is_floating(kind):
        return is_number or _is_text(given)
    return bool(_is_text(given) or pa.types.is_integer(given))


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _any_contains(column: Any, letter: str) -> bool:
    return bool(pc.any(pc.match_substring(column.cast(pa.large_string()), letter, ignore_case=True)).as_py())


def _each(values: list[Any], one: Callable[[object], object], allowed: str) -> list[Any]:
    result = []
    for index, value in enumerate(values):
        try:
            result.append(one(value))
        except ValueError:
            raise BadValueError(index, _shown(value), allowed) from None
    return result


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- one value -----------------------------------------------------------------------------------


def _integer(value: object) -> int | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        if not (text.isascii() and len(text) < 400) or "_" in text:
            raise ValueError(text)
        try:
            number: int | float = int(text)
        except ValueError:
            number = float(text)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    else:
        raise ValueError("neither a number nor text")
    if isinstance(number, float):
        if not number.is_integer():
            raise ValueError("not whole")
        number = int(number)
    if not -_INT64 <= number < _INT64:
        raise ValueError("beyond int64")
    return number


def _number(value: object) -> float | None:
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        if not text.isascii() or "_" in text:
            raise ValueError(text)
        return float(text)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("beyond float64") from None
    raise ValueError("neither a number nor text")


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        if value is not None:
            value.encode()  # a lone surrogate, which JSON can spell, is not text
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**128:
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    raise ValueError("neither text nor a whole number")


def _hashes(value: object) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("not a list")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not -_INT64 <= item < 2 * _INT64:
            raise ValueError("not a 64-bit number")
    return [item - 2 * _INT64 if item >= _INT64 else item for item in value]


# ---- times ---------------------------------------------------------------------------------------


def _all_whole(column: Column) -> bool:
    if isinstance(column, list):
        return all(isinstance(value, int) and not isinstance(value, bool) for value in column)
    if _is_text(column.type):
        return not bool(pc.any(pc.match_substring_regex(column.cast(pa.large_string()), r"[^0-9-]")).as_py())
    return bool(pa.types.is_integer(column.type))


def _scaled_integers(numbers: Any, unit: TimeUnit) -> Any:
    if isinstance(unit.ns, float):
        return _scaled_floats(numbers.cast(pa.float64(), safe=False), unit)
    limit = (_INT64 - 1) // unit.ns
    _refuse_beyond(numbers, limit)
    return pc.multiply(numbers, unit.ns)


def _scaled_floats(numbers: Any, unit: TimeUnit) -> Any:
    values = numbers.fill_null(0.0).to_numpy(zero_copy_only=False)
    # Written so that NaN, which compares false with everything, is bad too.
    bad = ~(np.abs(values) < 2.0**63 / float(unit.ns))
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        raise BadValueError(index, repr(float(values[index])), f"allowed is an instant in {unit.name}; check the unit")
    if isinstance(unit.ns, float):
        nanoseconds = np.rint(values * unit.ns).astype(np.int64)
    else:
        whole = np.floor(values)
        nanoseconds = whole.astype(np.int64) * unit.ns + np.rint((values - whole) * unit.ns).astype(np.int64)
    return pa.array(nanoseconds, mask=numbers.is_null().to_numpy(zero_copy_only=False))


def _refuse_beyond(numbers: Any, limit: int) -> None:
    bad = pc.or_(pc.greater(numbers, limit), pc.less(numbers, -limit)).fill_null(False).to_numpy(zero_copy_only=False)
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        raise BadValueError(index, str(numbers[index].as_py()), "is beyond the clock; check the time unit")


def _dates(column: Column) -> Any:
    allowed = "allowed is a date and time such as 2030-01-31 10:00:00.5, with or without a zone, 1678 to 2261"
    if isinstance(column, pa.Array):
        if pa.types.is_timestamp(column.type):
            return _whole_nanoseconds(column)
        if _is_text(column.type):
            first = column[0].as_py() if len(column) else None
            zone = "UTC" if first and _ZONE.search(first) else None  # a column is written with zones or without
            try:
                return column.cast(pa.timestamp("ns", zone)).cast(pa.int64())
            except pa.ArrowException:
                pass
        column = _values(column, allowed)
    return pa.array(_each(column, _date, allowed), pa.int64())


def _whole_nanoseconds(column: Any) -> Any:
    try:
        return column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
    except pa.ArrowException:
        years = pc.year(column).to_numpy(zero_copy_only=False)
        index = int(np.flatnonzero(~((years >= _EARLIEST_YEAR) & (years < _LATEST_YEAR)))[0])
        raise BadValueError(index, f"the year {years[index]:g}", "allowed are the years 1678 to 2261") from None


def _date(value: object) -> int | None:
    """Read one ISO date; without a zone it is UTC."""
    if value is None:
        return None
    if isinstance(value, dt.datetime):
        moment, extra = value, 0
    elif isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        moment, extra = _parse(text)
    else:
        raise ValueError("not a date")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    since = moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    nanoseconds = ((since.days * 86_400 + since.seconds) * 10**6 + since.microseconds) * 1000 + extra
    if not -_INT64 <= nanoseconds < _INT64:
        raise ValueError("beyond int64")
    return nanoseconds


def _parse(text: str) -> tuple[dt.datetime, int]:
    """Return a date and the nanoseconds beyond its microseconds, which Python's own dates cannot hold."""
    if len(text) < 10 or text[4] != "-" or not text.isascii():
        raise ValueError("not an ISO date")
    head, point, rest = text.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    if not point or digits == 0:
        return dt.datetime.fromisoformat(text), 0
    if digits > 9:
        raise ValueError("more than nine digits")
    fraction = rest[:digits].ljust(9, "0")
    return dt.datetime.fromisoformat(f"{head}.{fraction[:6]}{rest[digits:]}"), int(fraction[6:])
