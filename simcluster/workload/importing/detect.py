"""Find out what a foreign file means: its format, its columns, the unit of its times, the block of its hashes.

Nothing is guessed: either one reading fits, and the reasons are given, or the question goes back to the user.
"""

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from simcluster.errors import ConfigError, TraceError
from simcluster.workload.importing.formats import FORMATS, OURS, Format, unit_of_name
from simcluster.workload.importing.options import (
    DATE,
    NAMED_UNITS,
    AmbiguousTraceError,
    Choice,
    ImportOptions,
    TimeUnit,
)
from simcluster.workload.importing.sources import Source
from simcluster.workload.importing.values import BadValueError, Column, as_hash_lists, as_instants, as_integers
from simcluster.workload.trace_columns import listed

__all__ = ["REQUIRED", "Reading", "find_columns", "read_as"]

REQUIRED = ("arrival", "prompt_tokens", "output_tokens")
_DURATIONS = ("cancel", "slo_ttft", "think")
_TEXTS = ("request_id", "session_id", "task", "finish", "after", "prompt")
_BLOCKS = (16, 64, 512)  # Alibaba and vLLM; Weka; Mooncake
_TIMED = ("mooncake", "vllm-timed")  # equal columns, other units
_SERVEGEN = ({"client", "t_s", "rate_rps"}, {"client", "window_s", "field", "tokens", "prob"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file means.

    Attributes:
        format: its format.
        columns: the file's column for each of ours.
        unit: unit of the arrivals.
        durations: unit of each duration.
        hash_block: prompt tokens that one prefix hash covers; None without hashes at the head of the file.
        reasons: what was found out and why, for people.
    """

    format: Format
    columns: dict[str, str]
    unit: TimeUnit
    durations: dict[str, TimeUnit]
    hash_block: int | None
    reasons: tuple[str, ...]

    def wanted(self) -> dict[str, tuple[Any, ...]]:
        """Return the file's columns to read, each with the Arrow types that JSON values may have as a whole."""
        return {theirs: _kinds(ours, self.unit) for ours, theirs in self.columns.items()}


def read_as(source: Source, options: ImportOptions) -> Reading:
    """Find out what a file means.

    Raises:
        AmbiguousTraceError: it has several plausible readings.
        TraceError: it has none.
        ConfigError: an option names a column that is not there.
    """
    mapped, units = _mapping(source, options.columns)
    if options.format is not None:
        layout = FORMATS[options.format]
        reasons = [f"format {layout.name} ({layout.title}): as told"]
    else:
        layout, reason = _recognised(source, mapped, options)
        reasons = [f"format {layout.name} ({layout.title}): {reason}"]
    columns = find_columns(source, layout, mapped)
    lacking = [name for name in REQUIRED if name not in columns]
    if lacking:
        raise _lacking(source, layout, lacking)
    unit, reason = _arrival_unit(source, layout, columns["arrival"], options, units.get("arrival"))
    reasons.append(f"time unit {unit.name}: {reason}")
    block = None
    if "prefix_hashes" in columns:
        block, reason = _hash_block(source, layout, columns, options)
        if columns["prefix_hashes"] in source.names:
            reasons.append(f"{block} tokens per hash: {reason}")
    durations = {ours: _duration_unit(theirs, ours, units) for ours, theirs in columns.items() if ours in _DURATIONS}
    return Reading(
        format=layout, columns=columns, unit=unit, durations=durations, hash_block=block, reasons=tuple(reasons)
    )


# ---- columns and format --------------------------------------------------------------------------


def _mapping(source: Source, given: dict[str, str]) -> tuple[dict[str, str], dict[str, TimeUnit]]:
    """Split `--map ours=theirs:unit` and check both names."""
    columns, units = {}, {}
    for ours, text in given.items():
        if ours not in OURS:
            near = difflib.get_close_matches(ours, OURS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(OURS)}"
            if text in OURS:
                hint = f"the trace's name comes first: --map {text}={ours}"
            raise ConfigError(f"--map {ours}={text}; {ours!r} is no column of a trace; {hint}")
        theirs = text
        head, mark, unit = text.rpartition(":")
        if mark and text not in source.names and unit in NAMED_UNITS:
            theirs, units[ours] = head, NAMED_UNITS[unit]
        # A key of JSONL may first show up late.
        if theirs not in source.names and source.kind != "jsonl":
            near = difflib.get_close_matches(theirs, source.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {listed(source.names)}"
            raise ConfigError(f"--map {ours}={text}; {source.path} has no column {theirs!r}; {hint}")
        columns[ours] = theirs
    return columns, units


def find_columns(source: Source, layout: Format, mapped: dict[str, str]) -> dict[str, str]:
    """Return the file's column for each of ours that it has: as mapped, by its exact name, or in another case."""
    folded = {name.casefold(): name for name in reversed(source.names)}
    columns = dict(mapped)
    for ours in OURS:
        names = layout.names(ours)
        exact = [name for name in names if name in source.names]
        alike = [folded[name.casefold()] for name in names if name.casefold() in folded]
        if ours not in columns and (exact or alike):
            columns[ours] = (exact or alike)[0]
        elif ours not in columns and source.kind == "jsonl" and ours not in REQUIRED and names:
            columns[ours] = names[0]  # a key may first show up late; if it never does, the column stays empty
    return columns


def _recognised(source: Source, mapped: dict[str, str], options: ImportOptions) -> tuple[Format, str]:
    if all(ours in mapped for ours in REQUIRED):
        return FORMATS["generic"], "--map names all that is needed"
    fitting = [
        layout
        for layout in FORMATS.values()
        if (layout.name == "vllm-bench") == (source.kind == "json")
        and all(ours in find_columns(source, layout, mapped) for ours in REQUIRED)
    ]
    names = [layout.name for layout in fitting]
    if set(names) == set(_TIMED):
        return _timed(source, mapped, options)
    if len(fitting) > 1:
        choices = tuple(
            Choice(f"{each.name} ({each.title})", f"--format {each.name}", {"format": each.name}) for each in fitting
        )
        raise AmbiguousTraceError(f"{source.path}: the columns fit several formats", choices)
    if not fitting:
        raise _unknown(source, mapped)
    columns = find_columns(source, fitting[0], mapped)
    return fitting[0], f"it has the columns {listed(columns[ours] for ours in REQUIRED)}"


def _timed(source: Source, mapped: dict[str, str], options: ImportOptions) -> tuple[Format, str]:
    """Tell Mooncake's traces from those of vLLM's benchmark, which have the same columns."""
    columns = find_columns(source, FORMATS["mooncake"], mapped)
    fields = listed(columns[ours] for ours in REQUIRED)
    if columns.get("prefix_hashes") in source.names:
        block = options.hash_block or _only_fit(source, columns, (16, 512))[0]
        return FORMATS["mooncake" if block == 512 else "vllm-timed"], f"it has {fields}, and {block} tokens per hash"
    if options.time_unit is not None:
        return FORMATS["mooncake"], f"it has {fields}, and no hashes"
    choices = (
        Choice("mooncake, timestamps in ms", "--format mooncake", {"format": "mooncake"}),
        Choice("vllm-timed, timestamps in s", "--time-unit s", {"format": "vllm-timed", "time_unit": NAMED_UNITS["s"]}),
    )
    raise AmbiguousTraceError(f"{source.path}: {fields} without hashes have two plausible readings", choices)


def _unknown(source: Source, mapped: dict[str, str]) -> TraceError:
    names = set(source.names)
    if any(marks <= names for marks in _SERVEGEN):
        return TraceError(
            f"{source.path}: holds ServeGen rates or lengths, no requests; make a trace of them with "
            "`simcluster trace synth` and a recipe with `arrivals: {kind: servegen, ...}`"
        )
    for layout in FORMATS.values():
        columns = find_columns(source, layout, mapped)
        if "prompt_tokens" in columns and "output_tokens" in columns:
            return _lacking(source, layout, ["arrival"])
    return TraceError(
        f"{source.path}: no known format has the columns {listed(source.names) or '(none)'}; say which is which: "
        "--map arrival=NAME --map prompt_tokens=NAME --map output_tokens=NAME"
    )


def _lacking(source: Source, layout: Format, lacking: list[str]) -> TraceError:
    if lacking == ["arrival"]:
        hint = (
            "name it with --map arrival=NAME, or make a trace of these lengths with `simcluster trace synth` and "
            "a recipe with `lengths: {kind: file, ...}`"
        )
        if layout.name == "vllm-bench":
            hint = "save the result with --save-detailed of a version that writes start_times"
        return TraceError(f"{source.path}: found lengths but no arrivals among {listed(source.names)}; {hint}")
    expected = [" or ".join(layout.names(ours)) or f"--map {ours}=NAME" for ours in lacking]
    return TraceError(
        f"{source.path}: format {layout.name}: found no column {', '.join(expected)}, only {listed(source.names)}; "
        "give the right --format, or --map the columns"
    )


# ---- units ---------------------------------------------------------------------------------------


def _kinds(ours: str, unit: TimeUnit) -> tuple[Any, ...]:
    if ours == "arrival":
        return (pa.string(),) if unit.is_date else (pa.int64(), pa.float64())
    if ours in _DURATIONS:
        return (pa.float64(),)
    if ours in _TEXTS:
        return (pa.string(),)
    return (pa.list_(pa.int64()),) if ours == "prefix_hashes" else (pa.int64(),)


def _arrival_unit(
    source: Source, layout: Format, column: str, options: ImportOptions, mapped: TimeUnit | None
) -> tuple[TimeUnit, str]:
    told = options.time_unit or mapped
    if told is not None:
        return told, "as told"
    values = source.head({column: (pa.int64(), pa.float64(), pa.string())}).columns[column]
    if _are_dates(values):
        return DATE, f"{column} holds dates"
    by_name = unit_of_name(column)
    if layout.unit is None and by_name is not None:
        return by_name, f"the column is called {column}"
    if layout.unit is not None and (layout.name != "mooncake" or options.format or _are_whole(values)):
        return layout.unit, layout.unit_reason
    if layout.name == "vllm-timed" and not _are_whole(values):
        return NAMED_UNITS["s"], f"{column} has fractions, and the format counts seconds by default"
    units = ("s", "ms") if layout.name in _TIMED else ("s", "ms", "us", "ns")
    names = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    choices = tuple(Choice(names[unit], f"--time-unit {unit}", {"time_unit": NAMED_UNITS[unit]}) for unit in units)
    raise AmbiguousTraceError(f"{source.path}: {column}: the unit of the times is not known", choices)


def _are_dates(values: Column) -> bool:
    if isinstance(values, pa.Array) and pa.types.is_timestamp(values.type):
        return True
    given = values[:1] if isinstance(values, list) else values[:1].to_pylist()
    if not given or not isinstance(given[0], str):
        return False
    try:
        as_instants(given, DATE)
    except BadValueError:
        return False
    return True


def _are_whole(values: Column) -> bool:
    try:
        as_integers(values)
    except BadValueError:
        return False
    return True


def _duration_unit(theirs: str, ours: str, units: dict[str, TimeUnit]) -> TimeUnit:
    unit = units.get(ours) or unit_of_name(theirs)
    if unit is None or unit.is_date:
        raise ConfigError(
            f"--map {ours}={theirs}; the unit of this duration is not known; add it: --map {ours}={theirs}:ms"
        )
    return unit


def _hash_block(
    source: Source, layout: Format, columns: dict[str, str], options: ImportOptions
) -> tuple[int | None, str]:
    if options.hash_block is not None:
        return options.hash_block, "as told"
    said = source.metadata.get("prefix_block_size", "")
    if said.isascii() and said.isdigit() and 0 < int(said) <= 2**31:
        return int(said), "the file says so"
    if layout.hash_block is not None:
        return layout.hash_block, "the format's own"
    if columns["prefix_hashes"] not in source.names:
        return None, "no hashes at the head of the file"
    return _only_fit(source, columns, _BLOCKS)


def _only_fit(source: Source, columns: dict[str, str], blocks: tuple[int, ...]) -> tuple[int, str]:
    """Return the block size with which every prompt of the first rows has one hash per block begun."""
    column, lengths = columns["prefix_hashes"], columns["prompt_tokens"]
    head = source.head({column: (pa.list_(pa.int64()),), lengths: (pa.int64(),)})
    try:
        lists, tokens = as_hash_lists(head.columns[column]), as_integers(head.columns[lengths]).fill_null(0)
    except BadValueError as error:
        place = head.places[error.index]
        raise TraceError(
            f"{source.path}: {source.place} {place}: found {error.found} in {column} or {lengths}; {error.allowed}"
        ) from error
    counts = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    prompts = tokens.to_numpy(zero_copy_only=False)[counts > 0]
    counts = counts[counts > 0]
    fitting = [block for block in blocks if bool(np.all(-(-prompts // block) == counts))]
    asked = ", ".join(map(str, blocks[:-1])) + f" and {blocks[-1]}"
    if len(fitting) == 1:
        return fitting[0], f"of {asked}, the only one that fits the first {len(counts):,} prompts with hashes"
    if not fitting:
        raise TraceError(
            f"{source.path}: {column}: none of {asked} tokens per hash fits every prompt; say it with --hash-block N"
        )
    choices = tuple(
        Choice(f"{block} tokens per hash", f"--hash-block {block}", {"hash_block": block}) for block in fitting
    )
    raise AmbiguousTraceError(f"{source.path}: {column}: the number of tokens per hash is not known", choices)
