"""ServeGen: production arrival rates and length histograms per client and window of ten minutes.

Two layouts are read: tables (Parquet, CSV or JSONL) with one row per client and window, and the folders of the original
with `chunk-N-trace.csv` and `chunk-N-dataset.json` per client.
"""

import ast
import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from simcluster.errors import TraceError
from simcluster.validation import one_line
from simcluster.workload.importing.sources import open_source
from simcluster.workload.importing.values import BadValueError, as_numbers, as_texts
from simcluster.workload.trace_columns import FloatArray, IntArray

__all__ = ["Histograms", "Rates", "draw_arrivals", "draw_lengths", "read_lengths", "read_rates"]

WINDOW_S = 600.0
_MOST_PER_WINDOW = 10_000_000
_LONGEST = 2**31
_FIELDS = ("input_tokens", "output_tokens")
_PATTERNS = ("gamma", "weibull")


@dataclass(frozen=True, slots=True)
class Rates:
    """Arrival rates, one entry per client and window.

    Attributes:
        client: number of the client, shape (k,).
        start_s: start of the window [s], shape (k,).
        rate_rps: requests of the window over its length [1/s], shape (k,).
        cv: coefficient of variation of the gaps, shape (k,).
        weibull_shape: shape of Weibull gaps; NaN where the gaps are gamma-distributed, shape (k,).
    """

    client: IntArray
    start_s: FloatArray
    rate_rps: FloatArray
    cv: FloatArray
    weibull_shape: FloatArray


Histograms = dict[int, dict[float, dict[str, tuple[IntArray, FloatArray]]]]
"""Lengths [tokens] and their probabilities by client, start of the window [s], and field."""

_BROKEN = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    SyntaxError,
    RecursionError,
    MemoryError,
)  # what a damaged dataset can raise


# ---- reading -------------------------------------------------------------------------------------


def read_rates(path: Path) -> Rates:
    """Read arrival rates.

    Raises:
        TraceError: the file is unreadable, or a value is not allowed; one line that says where.
    """
    names = ("client", "t_s", "rate_rps", "cv", "pattern", "p1")
    if path.is_dir():
        rows = list(_chunk_rates(path))
        columns: dict[str, Any] = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        columns["places"] = np.arange(1, len(rows) + 1)
    else:
        columns = _read_table(path, names)
    numbers = {name: _numbers(path, name, columns) for name in ("client", "t_s", "rate_rps", "cv")}
    patterns = [str(text).lower() for text in as_texts(columns["pattern"]).to_pylist()]
    strange = [place for place, text in enumerate(patterns) if text not in _PATTERNS]
    if strange:
        raise TraceError(
            f"{path}: pattern, row {columns['places'][strange[0]]}: found {patterns[strange[0]]!r}; "
            f"allowed is {' or '.join(_PATTERNS)}"
        )
    shapes = _numbers(path, "p1", columns)
    weibull = np.where([text == "weibull" for text in patterns], shapes, np.nan)
    _require(path, "p1", columns, np.isnan(weibull) | (weibull > 0.05), "a shape above 0.05")
    _require(path, "rate_rps", columns, numbers["rate_rps"] >= 0, "0 or more")
    _require(path, "cv", columns, numbers["cv"] >= 0, "0 or more")
    return Rates(numbers["client"].astype(np.int64), numbers["t_s"], numbers["rate_rps"], numbers["cv"], weibull)


def read_lengths(path: Path) -> Histograms:
    """Read histograms of prompt and answer lengths; other fields are ignored.

    Raises:
        TraceError: the file is unreadable, or a value is not allowed; one line that says where.
    """
    if path.is_dir():
        return _chunk_lengths(path)
    columns = _read_table(path, ("client", "window_s", "field", "tokens", "prob"))
    client = _numbers(path, "client", columns).astype(np.int64)
    window = _numbers(path, "window_s", columns)
    tokens = _numbers(path, "tokens", columns)
    prob = _numbers(path, "prob", columns)
    _require(path, "tokens", columns, (tokens >= 0) & (tokens <= _LONGEST), f"0 to {_LONGEST}")
    _require(path, "prob", columns, prob >= 0, "0 or more")
    fields = np.array(as_texts(columns["field"]).to_pylist(), dtype=object)
    result: Histograms = {}
    for field in _FIELDS:
        rows = np.flatnonzero(fields == field)
        order = rows[np.lexsort((window[rows], client[rows]))]
        cuts = np.flatnonzero((np.diff(client[order]) != 0) | (np.diff(window[order]) != 0)) + 1
        for part in np.split(order, cuts):
            if len(part):
                by_window = result.setdefault(int(client[part[0]]), {})
                by_window.setdefault(float(window[part[0]]), {})[field] = _histogram(tokens[part], prob[part])
    return _usable(path, result)


def _histogram(tokens: FloatArray, prob: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return lengths of one token or more and their probabilities, which add up to 1.

    Raises:
        ValueError: a length is outside 0 to 2^31, or a probability is not a finite number of 0 or more.
    """
    if not (np.all((tokens >= 0) & (tokens <= _LONGEST)) and np.all((prob >= 0) & np.isfinite(prob))):
        raise ValueError(f"found lengths outside 0 to {_LONGEST} or bad probabilities")
    total = float(prob.sum())
    share = prob / total if math.isfinite(total) and total > 0 else np.full(len(prob), 1 / len(prob))
    return np.maximum(np.rint(tokens), 1).astype(np.int64), share


def _usable(path: Path, found: Histograms) -> Histograms:
    """Keep the windows that have both fields."""
    both = {
        client: {start: fields for start, fields in windows.items() if len(fields) == len(_FIELDS)}
        for client, windows in found.items()
    }
    result = {client: windows for client, windows in both.items() if windows}
    if not result:
        raise TraceError(f"{path}: found no histogram of both input_tokens and output_tokens; give ServeGen's lengths")
    return result


def _read_table(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return whole columns of a table as lists, and the place of each row under `places`."""
    source = open_source(path)
    lacking = [name for name in names if name not in source.names]
    if lacking:
        raise TraceError(f"{path}: found no column {lacking[0]}, only {', '.join(source.names)}; give ServeGen's table")
    columns: dict[str, Any] = {name: [] for name in names}
    places: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    for block in source.blocks(dict.fromkeys(names, ()) if source.kind != "jsonl" else _json_types(names)):
        places.append(block.places)
        for name in names:
            values = block.columns[name]
            columns[name].extend(values if isinstance(values, list) else values.to_pylist())
    columns["places"] = np.concatenate(places)
    return columns


def _json_types(names: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    texts = ("pattern", "field")
    return {name: ((pa.string(),) if name in texts else (pa.float64(),)) for name in names}


def _numbers(path: Path, name: str, columns: dict[str, Any]) -> FloatArray:
    """Return a column of finite numbers, float64."""
    try:
        values = as_numbers(columns[name])
    except BadValueError as bad:
        place = columns["places"][bad.index]
        raise TraceError(f"{path}: {name}, row {place}: found {bad.found}; {bad.allowed}") from None
    result: FloatArray = values.fill_null(math.nan).to_numpy(zero_copy_only=False)
    _require(path, name, columns, np.isfinite(result) & (np.abs(result) < 1e9), "a finite number")
    return result


def _require(path: Path, name: str, columns: dict[str, Any], good: Any, allowed: str) -> None:
    if not np.all(good):
        row = int(np.flatnonzero(~np.asarray(good))[0])
        raise TraceError(
            f"{path}: {name}, row {columns['places'][row]}: found {columns[name][row]!r}; allowed is {allowed}"
        )


# ---- the original's folders ----------------------------------------------------------------------


def _chunks(folder: Path, ending: str) -> Iterator[tuple[int, Path]]:
    found = 0
    for path in sorted(folder.glob(f"chunk-*-{ending}")):
        number = path.name.removeprefix("chunk-").removesuffix(f"-{ending}")
        if number.isascii() and number.isdigit():
            found += 1
            yield int(number), path
    if not found:
        raise TraceError(f"{folder}: found no chunk-N-{ending}; give a ServeGen folder or a table")


def _chunk_rates(folder: Path) -> Iterator[tuple[Any, ...]]:
    for client, path in _chunks(folder, "trace.csv"):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.reader(file):
                    if row and len(row) < 5:
                        raise TraceError(f"{path}: found {','.join(row)!r}; allowed is start,rate,cv,pattern,p1,p2")
                    if row and row[3]:
                        yield (client, *row[:5])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise TraceError(
                f"{path}: cannot be read ({one_line(str(error))[:200]}); give a ServeGen folder"
            ) from error


def _chunk_lengths(folder: Path) -> Histograms:
    result: Histograms = {}
    for client, path in _chunks(folder, "dataset.json"):
        try:
            windows = json.loads(path.read_bytes())
            for start, fields in windows.items():
                if not math.isfinite(float(start)):
                    raise ValueError(f"found the window {start}")
                for field in _FIELDS:
                    pairs = ast.literal_eval(fields.get(field, "{}"))
                    if pairs:
                        tokens, prob = (np.array(list(part), dtype=np.float64) for part in (pairs, pairs.values()))
                        by_window = result.setdefault(client, {})
                        by_window.setdefault(float(start), {})[field] = _histogram(tokens, prob)
        except _BROKEN as error:
            raise TraceError(
                f"{path}: not a ServeGen dataset ({one_line(str(error))[:200]}); give a ServeGen folder"
            ) from error
    return _usable(folder, result)


# ---- drawing -------------------------------------------------------------------------------------


def draw_arrivals(
    rates: Rates, window_s: tuple[float, float], rate_scale: float, rng: np.random.Generator
) -> tuple[IntArray, IntArray, FloatArray]:
    """Draw the requests of a stretch of time.

    Every client has in each window as many requests as its rate says. Their gaps have the shape that was fitted
    (gamma by the coefficient of variation, or Weibull) and are stretched to fill the window, so the rate is kept.

    Args:
        rates: arrival rates.
        window_s: from, to [s, in the time of the rates].
        rate_scale: factor on every rate.
        rng: the generator to draw from.

    Returns:
        Arrivals after the start of the stretch [ns], the client of each, and the start of its window [s], shape (n,)
        each, ascending by arrival.
    """
    start_s, end_s = window_s
    inside = np.flatnonzero((rates.start_s + WINDOW_S > start_s) & (rates.start_s < end_s))
    order = inside[np.lexsort((rates.client[inside], rates.start_s[inside]))]
    expected = rates.rate_rps[order] * WINDOW_S * rate_scale
    whole = np.rint(expected)
    dither = np.floor(expected + rng.random(len(order)))
    almost_whole = np.abs(expected - whole) < 1e-3 + 2e-7 * expected  # rates are counts, stored in few digits
    counts = np.where(almost_whole, whole, dither)
    if counts.sum() > _MOST_PER_WINDOW:
        raise TraceError(
            f"arrivals: the window has {counts.sum():,.0f} requests; allowed are {_MOST_PER_WINDOW:,}; "
            "take a shorter window or a smaller rate_scale"
        )
    times, clients, starts = [np.zeros(0)], [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for entry, count in zip(order.tolist(), counts.astype(np.int64).tolist(), strict=True):
        offsets_s = WINDOW_S * _spread(count, float(rates.cv[entry]), float(rates.weibull_shape[entry]), rng)
        times.append(rates.start_s[entry] + offsets_s)
        clients.append(np.full(count, rates.client[entry]))
        starts.append(np.full(count, rates.start_s[entry]))
    at_s, client, start = np.concatenate(times), np.concatenate(clients), np.concatenate(starts)
    keep = np.flatnonzero((at_s >= start_s) & (at_s < end_s))
    keep = keep[np.argsort(at_s[keep], kind="stable")]
    return np.rint((at_s[keep] - start_s) * 1e9).astype(np.int64), client[keep], start[keep]


def _spread(count: int, cv: float, weibull_shape: float, rng: np.random.Generator) -> FloatArray:
    """Return where `count` arrivals lie in a window, as shares of it, shape (count,)."""
    if count == 0:
        return np.zeros(0)
    if not math.isnan(weibull_shape):
        gaps = rng.weibull(weibull_shape, count + 1)
    elif cv > 0:
        gaps = rng.standard_gamma(1 / cv**2, count + 1)
    else:
        gaps = np.ones(count + 1)
    ends = np.cumsum(gaps)
    if not (math.isfinite(ends[-1]) and ends[-1] > 0):  # every gap was too small for a float
        return np.sort(rng.random(count))
    shares: FloatArray = ends[:-1] / ends[-1]
    return shares


def draw_lengths(
    histograms: Histograms, client: IntArray, start_s: FloatArray, pool: bool, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Draw prompt and answer lengths from the histogram of each request's client and window.

    A window without a histogram takes the client's latest earlier one, else its first. Prompt and answer are
    independent within a window: the source has no joint distribution.

    Args:
        histograms: lengths.
        client: client of each request, -1 for none, shape (n,).
        start_s: start of its window [s], shape (n,).
        pool: draw for clients without histograms from all clients; else they get 0 tokens.
        rng: the generator to draw from.

    Returns:
        Prompt and answer lengths [tokens], int64, shape (n,) each; 0 for a client without histograms.
    """
    prompts, answers = np.zeros(len(client), dtype=np.int64), np.zeros(len(client), dtype=np.int64)
    everyone = [fields for _, windows in sorted(histograms.items()) for _, fields in sorted(windows.items())]
    pooled = {field: _joined([fields[field] for fields in everyone]) for field in _FIELDS} if pool else None
    for (number, start), rows in _groups(client, start_s):
        windows = histograms.get(number)
        fields = pooled if windows is None else windows[max((w for w in windows if w <= start), default=min(windows))]
        if fields is not None:
            for target, field in ((prompts, "input_tokens"), (answers, "output_tokens")):
                tokens, share = fields[field]
                target[rows] = rng.choice(tokens, size=len(rows), p=share)
    return prompts, answers


def _joined(parts: list[tuple[IntArray, FloatArray]]) -> tuple[IntArray, FloatArray]:
    """Mix histograms, each with the same weight."""
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([share for _, share in parts]) / len(parts)


def _groups(client: IntArray, start_s: FloatArray) -> Iterator[tuple[tuple[int, float], IntArray]]:
    order = np.lexsort((start_s, client))
    cuts = np.flatnonzero((np.diff(client[order]) != 0) | (np.diff(start_s[order]) != 0)) + 1
    for rows in np.split(order, cuts):
        if len(rows):
            yield (int(client[rows[0]]), float(start_s[rows[0]])), rows
