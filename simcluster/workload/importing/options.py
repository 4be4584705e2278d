"""What may be asked of an import, and the question that an unclear file raises."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from simcluster.errors import ConfigError, TraceError

__all__ = ["DATE", "NAMED_UNITS", "AmbiguousTraceError", "Choice", "ImportOptions", "TimeUnit"]

FormatName = Literal["simcluster", "azure", "burstgpt", "mooncake", "vllm-timed", "vllm-bench", "generic"]


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit of a column of times.

    Attributes:
        name: `s`, `ms`, `us`, `ns`, `date`, or a number of seconds.
        ns: nanoseconds in one unit; an integer where it is a whole number of them; 0 for dates.
    """

    name: str
    ns: int | float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a unit that a person gave: a name, or the number of seconds in one unit.

        Raises:
            ConfigError: it is neither.
        """
        if text in _UNIT_NS:
            return cls(text, _UNIT_NS[text])
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(
                f"time unit = {text!r}; must be one of {', '.join(_UNIT_NS)}, or how many seconds one unit is, "
                "a finite number above 0; for example ms or 0.001"
            )
        ns = seconds * 1e9
        whole = round(ns)
        return cls(text, whole if whole > 0 and math.isclose(ns, whole, rel_tol=1e-12) else ns)

    @property
    def is_date(self) -> bool:
        """Whether values are dates rather than numbers."""
        return self.ns == 0


_UNIT_NS: dict[str, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "date": 0}
DATE = TimeUnit("date", 0)
NAMED_UNITS = {name: TimeUnit(name, ns) for name, ns in _UNIT_NS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """How to read a foreign trace and what to do with its rows.

    Attributes:
        format: the file's format; None to recognise it.
        columns: column of the file for each of ours, where the format's own choice is not right.
        time_unit: unit of the arrivals; None for the format's or the recognised one.
        hash_block: prompt tokens that one prefix hash covers; None for the format's or the recognised number.
        overflow: `engine` keeps requests beyond the context for the engine to reject or clip, `drop` leaves out
            those whose prompt and output together exceed it.
        max_model_len: context limit [tokens].
        speed: intervals between arrivals are divided by this.
        max_gap_s: longer gaps between arrivals are cut to this [s, in the file's own time].
        start_s: leave out what arrives earlier after the first arrival of the file [s].
        end_s: leave out what arrives at this or later after the first arrival of the file [s].
        zero_output: `skip` rows without output tokens, or keep them as `prefill` only.
        on_duplicate: what to do with a request id that is there twice.
        missing_output: what to do with rows without a number of output tokens.
    """

    format: FormatName | None = None
    columns: dict[str, str] = field(default_factory=dict)
    time_unit: TimeUnit | None = None
    hash_block: int | None = None
    overflow: Literal["engine", "drop"] = "engine"
    max_model_len: int | None = None
    speed: float = 1.0
    max_gap_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    zero_output: Literal["skip", "prefill"] = "skip"
    on_duplicate: Literal["error", "suffix"] = "error"
    missing_output: Literal["error", "drop"] = "error"

    def check(self) -> None:
        """Refuse options that make no sense.

        Raises:
            ConfigError: a value is out of range, or an option lacks another one.
        """
        for name, value in (("--speed", self.speed), ("--max-gap", self.max_gap_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} {value:g}; must be a finite number above 0")
        for name, value in (("--start", self.start_s), ("--end", self.end_s)):
            if value is not None and not (math.isfinite(value) and 0 <= value <= 3.2e8):
                raise ConfigError(f"{name} {value:g}; must be seconds after the first arrival, 0 to 3.2e8 (10 years)")
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise ConfigError(f"--end {self.end_s:g}; must be later than --start {self.start_s or 0.0:g}")
        for name, count in (("--hash-block", self.hash_block), ("--max-model-len", self.max_model_len)):
            if count is not None and not 1 <= count <= 2**31:
                raise ConfigError(f"{name} {count}; must be a number of tokens from 1 to 2147483648")
        if self.overflow == "drop" and self.max_model_len is None:
            raise ConfigError("--overflow drop; needs the context limit; add --max-model-len N")


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to read an unclear file.

    Attributes:
        reading: what it means.
        option: what to add to the command line.
        changes: the same as fields of ImportOptions.
    """

    reading: str
    option: str
    changes: dict[str, Any]


class AmbiguousTraceError(TraceError):
    """A file that can be read in more than one way; only its owner knows which is right.

    Attributes:
        question: the file and what is unclear.
        choices: the plausible readings, two or more.
    """

    def __init__(self, question: str, choices: tuple[Choice, ...]) -> None:
        readings = "; ".join(f"{each.reading} ({each.option})" for each in choices)
        super().__init__(f"{question}: {readings}; add the option that is right")
        self.question = question
        self.choices = choices
