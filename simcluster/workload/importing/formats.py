"""The formats of foreign traces: what their columns are called and what they mean."""

from dataclasses import dataclass, field

from simcluster.workload.importing.options import DATE, NAMED_UNITS, FormatName, TimeUnit

__all__ = ["FORMATS", "OURS", "Format", "unit_of_name"]

OURS = (
    "arrival",
    "prompt_tokens",
    "output_tokens",
    "request_id",
    "session_id",
    "task",
    "max_tokens",
    "finish",
    "priority",
    "cancel",
    "slo_ttft",
    "after",
    "think",
    "prefix_hashes",
    "prompt",
)
"""Names for `--map`; arrival, cancel, slo_ttft and think are times, the last three of them durations."""

# Columns of our own names are taken from a file of any format.
_OPTIONAL = {
    "request_id": ("request_id",),
    "session_id": ("session_id",),
    "task": ("task",),
    "max_tokens": ("max_tokens",),
    "finish": ("finish",),
    "priority": ("priority",),
    "cancel": ("cancel_s",),
    "slo_ttft": ("slo_ttft_s",),
    "after": ("after",),
    "think": ("think_s",),
    "prefix_hashes": ("prefix_hashes",),
    "prompt": ("prompt",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format.

    Attributes:
        name: as in `--format`.
        title: what it is, for people.
        columns: names in the file for each of ours, the first that is there counts.
        unit: unit of the arrivals; None if it must be found out.
        unit_reason: why.
        hash_block: prompt tokens that one hash covers; None if it must be found out.
    """

    name: FormatName
    title: str
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unit: TimeUnit | None = None
    unit_reason: str = ""
    hash_block: int | None = None

    def names(self, ours: str) -> tuple[str, ...]:
        """Return the names that a column of ours may have in a file."""
        return self.columns.get(ours, ()) + _OPTIONAL.get(ours, ())


_MOONCAKE: dict[str, tuple[str, ...]] = {
    "arrival": ("timestamp",),
    "prompt_tokens": ("input_length",),
    "output_tokens": ("output_length",),
    "prefix_hashes": ("hash_ids",),
}

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format(
            name="simcluster",
            title="columns by this project's names",
            columns={
                "arrival": ("arrival_ns", "arrival_s"),
                "prompt_tokens": ("prompt_tokens",),
                "output_tokens": ("output_tokens",),
                "prefix_hashes": ("prefix_hashes", "hash_ids"),
            },
        ),
        Format(
            name="azure",
            title="Azure LLM inference trace (2023 and 2024)",
            columns={
                "arrival": ("TIMESTAMP",),
                "prompt_tokens": ("ContextTokens",),
                "output_tokens": ("GeneratedTokens",),
            },
            unit=DATE,
            unit_reason="the format has dates",
        ),
        Format(
            name="burstgpt",
            title="BurstGPT",
            columns={
                "arrival": ("Timestamp",),
                "prompt_tokens": ("Request tokens",),
                "output_tokens": ("Response tokens",),
                "session_id": ("Session ID",),
                "task": ("Log Type",),
            },
            unit=NAMED_UNITS["s"],
            unit_reason="the format counts seconds",
        ),
        Format(
            name="mooncake",
            title="Mooncake",
            columns=_MOONCAKE,
            unit=NAMED_UNITS["ms"],
            unit_reason="the format counts milliseconds",
            hash_block=512,
        ),
        Format(name="vllm-timed", title="timed trace of vllm bench serve", columns=_MOONCAKE, hash_block=16),
        Format(
            name="vllm-bench",
            title="result of vllm bench serve --save-detailed",
            columns={
                "arrival": ("start_times",),
                "prompt_tokens": ("input_lens",),
                "output_tokens": ("output_lens",),
            },
            unit=NAMED_UNITS["s"],
            unit_reason="the format counts seconds",
        ),
        Format(name="generic", title="columns by --map"),
    )
}


def unit_of_name(column: str) -> TimeUnit | None:
    """Return the unit that the end of a column's name says, as in `send_time_us`, or None."""
    _, mark, suffix = column.rpartition("_")
    return NAMED_UNITS.get(suffix) if mark and suffix != "date" else None
