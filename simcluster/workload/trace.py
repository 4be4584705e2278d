"""Traces: the requests of a workload as columns."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simcluster.workload.trace_columns import IntArray, MapArrays, StrArray
from simcluster.workload.trace_schema import MAPS

__all__ = ["Trace", "row_names"]

_NOT_ROWS = (
    *MAPS,
    "task_names",
    "prefix_offsets",
    "prefix_values",
    "prefix_block_size",
    "metadata",
    "notes",
    "skipped",
    "sha256",
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """The requests of a workload, one row each, in order of arrival.

    Arrays have shape (n,) unless said. Durations count from the request's own arrival, so moving
    or stretching the arrivals leaves them right.

    Attributes:
        request_id: unique ids, Python strings; by default the row number in the file from 0.
        arrival_ns: arrival after the start of the trace [ns], ascending, first one >= 0.
        prompt_tokens: prompt length [tokens], 1 or more.
        output_tokens: true answer length [tokens], 1 or more; hidden from routers.
        max_tokens: the client's limit on the answer [tokens]; -1 where not given.
        ends_by_length: the recorded answer was cut by a limit instead of ending by itself.
        priority: smaller is served earlier (as in vLLM).
        cancel_ns: when the client gives up, after its own arrival [ns]; -1 for never.
        slo_ttft_ns: TTFT target [ns]; -1 where not given.
        task: index into task_names, int32; None without a task column.
        task_names: names of the tasks, sorted.
        session_id: ids of conversations, Python strings or None per row; None without the column.
        after: index of the earlier request that must end before this one is sent; -1 for a request that
            comes at its own arrival; None where all do. For a request with one, arrival_ns is nominal:
            the recorded arrival, or the earliest possible one, as if answers took no time.
        think_ns: from the end of that request to the sending of this one [ns]; 0 without one.
        prompt_tokens_by_model: prompt length by each model's own tokenizer [tokens], per model.
        output_tokens_by_model: true answer length of each model [tokens], per model.
        quality_by_model: true quality of each model's answer, 0 to 1, per model.
        predicted_output_tokens_by_model: answer length that routers expect [tokens], per model.
        predicted_quality_by_model: quality that routers expect, 0 to 1, per model.
        prefix_offsets: request i has the hashes prefix_values[prefix_offsets[i]:prefix_offsets[i
            + 1]], shape (n + 1,); None without hashes.
        prefix_values: hashes of the prompts' blocks; equal hashes mean an equal prefix.
        prefix_block_size: prompt tokens that one hash covers [tokens].
        prompt: prompt texts, Python strings; None without the column.
        metadata: where the trace comes from: source, licence, recipe, seed.
        notes: what the reader did to the file, for people to read.
        skipped: rows of the file left out, counted by reason.
        sha256: hash of the file's bytes; None for a trace that was not read from a file.
    """

    request_id: StrArray
    arrival_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    max_tokens: IntArray
    ends_by_length: npt.NDArray[np.bool_]
    priority: IntArray
    cancel_ns: IntArray
    slo_ttft_ns: IntArray
    task: npt.NDArray[np.int32] | None = None
    task_names: tuple[str, ...] = ()
    session_id: StrArray | None = None
    after: IntArray | None = None
    think_ns: IntArray | None = None
    prompt_tokens_by_model: MapArrays = field(default_factory=dict)
    output_tokens_by_model: MapArrays = field(default_factory=dict)
    quality_by_model: MapArrays = field(default_factory=dict)
    predicted_output_tokens_by_model: MapArrays = field(default_factory=dict)
    predicted_quality_by_model: MapArrays = field(default_factory=dict)
    prefix_offsets: IntArray | None = None
    prefix_values: IntArray | None = None
    prefix_block_size: int | None = None
    prompt: StrArray | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    sha256: str | None = None

    @classmethod
    def from_columns(
        cls, arrival_ns: IntArray, prompt_tokens: IntArray, output_tokens: IntArray, **optional: Any
    ) -> "Trace":
        """Return a trace of these columns; optional ones are named as the attributes.

        Raises:
            ValueError: two columns have different lengths, or a request waits for a later one.
        """
        n = len(arrival_ns)
        columns: dict[str, Any] = {
            # One value for all rows takes no memory; such an array is read only.
            "max_tokens": np.broadcast_to(np.int64(-1), n),
            "ends_by_length": np.broadcast_to(np.bool_(False), n),
            "priority": np.broadcast_to(np.int64(0), n),
            "cancel_ns": np.broadcast_to(np.int64(-1), n),
            "slo_ttft_ns": np.broadcast_to(np.int64(-1), n),
        }
        columns.update(optional)
        if "request_id" not in columns:
            columns["request_id"] = row_names(np.arange(n))
        columns |= _links(columns.get("after"), columns.get("think_ns"))
        return cls(
            arrival_ns=arrival_ns,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            **columns,
        )

    def __post_init__(self) -> None:
        n = len(self.arrival_ns)
        for name, column in self._rows().items():
            if len(column) != n:
                raise ValueError(f"{name} has {len(column)} rows, arrival_ns has {n}")
        if self.prefix_offsets is not None and len(self.prefix_offsets) != n + 1:
            raise ValueError(f"prefix_offsets must have {n + 1} entries")
        if (self.after is None) != (self.think_ns is None):
            raise ValueError("after and think_ns come together")
        if self.after is not None and (self.after >= np.arange(n)).any():
            raise ValueError("a request can only wait for one of an earlier row")

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def _rows(self) -> dict[str, npt.NDArray[Any]]:
        """Return every column that has one value per request, maps as `name[key]`."""
        columns = {
            name: getattr(self, name)
            for name in (each.name for each in fields(self) if each.name not in _NOT_ROWS)
            if getattr(self, name) is not None
        }
        for name in MAPS:
            columns.update({f"{name}[{key}]": v for key, v in getattr(self, name).items()})
        return columns

    def _contents(self) -> dict[str, npt.NDArray[Any]]:
        """Return all columns, tasks by name, since the codes depend on which names there are."""
        columns = self._rows()
        if self.task is not None:
            columns["task"] = np.array(self.task_names, dtype=object)[self.task]
        if self.prefix_offsets is not None and self.prefix_values is not None:
            columns |= {"offsets": self.prefix_offsets, "values": self.prefix_values}
        return columns

    def take(self, rows: npt.ArrayLike) -> "Trace":
        """Return the requests at these positions, in this order; arrivals are not moved.

        A request whose predecessor (`after`) is left out comes at its nominal arrival.

        Args:
            rows: positions or a mask, shape (m,) or (n,).

        Raises:
            ValueError: a request would stand before the one that it waits for.
        """
        index = np.arange(len(self))[np.asarray(rows)]
        changes: dict[str, Any] = {name: column[index] for name, column in self._rows().items() if "[" not in name}
        for name in MAPS:
            changes[name] = {key: value[index] for key, value in getattr(self, name).items()}
        if self.prefix_offsets is not None and self.prefix_values is not None:
            counts = np.diff(self.prefix_offsets)[index]
            offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            shift = np.repeat(self.prefix_offsets[index] - offsets[:-1], counts)
            changes["prefix_offsets"] = offsets
            changes["prefix_values"] = self.prefix_values[np.arange(offsets[-1]) + shift]
        if self.after is not None and self.think_ns is not None:
            position = np.full(len(self), -1, dtype=np.int64)
            position[index] = np.arange(len(index))
            after = self.after[index]
            changes |= _links(np.where(after >= 0, position[after], -1), self.think_ns[index])
        return replace(self, **changes)

    def with_arrivals(self, arrival_ns: IntArray) -> "Trace":
        """Return the same requests at other instants.

        Args:
            arrival_ns: new arrivals [ns], ascending, shape (n,).
        """
        return replace(self, arrival_ns=arrival_ns)

    def head(self, n: int) -> "Trace":
        """Return the first n requests (all of them if there are fewer).

        Raises:
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"n = {n}; must be 0 or more")
        return self.take(np.arange(min(n, len(self))))

    def task_labels(self) -> StrArray | None:
        """Return each request's task name, Python strings, shape (n,); None without tasks."""
        if self.task is None:
            return None
        labels: StrArray = np.array(self.task_names, dtype=object)[self.task]
        return labels

    def equals(self, other: "Trace") -> bool:
        """Return whether both hold the same requests and metadata, however they were read."""
        mine, theirs = self._contents(), other._contents()
        return (
            mine.keys() == theirs.keys()
            and all(np.array_equal(mine[name], theirs[name]) for name in mine)
            and self.prefix_block_size == other.prefix_block_size
            and self.metadata == other.metadata
        )


def row_names(rows: IntArray) -> StrArray:
    """Return row numbers as ids, Python strings, shape (n,)."""
    names: StrArray = pa.array(rows).cast(pa.string()).to_numpy(zero_copy_only=False)
    return names


def _links(after: IntArray | None, think_ns: IntArray | None) -> dict[str, IntArray | None]:
    """Return both columns, without think times where nothing is waited for; None where no request waits."""
    if after is None or not (after >= 0).any():
        return {"after": None, "think_ns": None}
    think_ns = np.zeros(len(after), dtype=np.int64) if think_ns is None else think_ns
    return {"after": after, "think_ns": np.where(after >= 0, think_ns, 0)}
