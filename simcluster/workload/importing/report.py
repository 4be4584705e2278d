"""What an import did, for people and for machines."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from simcluster.workload.trace_columns import IntArray, counted

__all__ = ["ImportReport", "Tally"]

_NAMED = 5  # places that are named before "and N more"


@dataclass(slots=True)
class Tally:
    """Counts things that happened to rows, and remembers where the first ones were.

    Attributes:
        place: what a row is called.
        counts: how often, by what happened.
        first: the first places, by what happened.
    """

    place: str
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[int]] = field(default_factory=dict)

    def add(self, what: str, places: IntArray) -> None:
        """Count rows at these places."""
        if len(places):
            self.counts[what] = self.counts.get(what, 0) + len(places)
            known = self.first.setdefault(what, [])
            known.extend(places[: _NAMED - len(known)].tolist())

    def mask(self, what: str, places: IntArray, hit: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Count the rows marked; return the mask of the others."""
        self.add(what, places[hit])
        return ~hit

    def line(self, what: str) -> str:
        """Write `3 rows (zero_output): lines 4, 9, 12`."""
        count, first = self.counts[what], self.first[what]
        where = ", ".join(f"{place:,}" for place in first)
        more = f" and {count - len(first):,} more" if count > len(first) else ""
        return f"{counted(count)} ({what}): {self.place}{'s' if count > 1 else ''} {where}{more}"

    def as_data(self) -> dict[str, dict[str, Any]]:
        """Return counts and first places as plain data."""
        return {what: {"rows": count, f"first_{self.place}s": self.first[what]} for what, count in self.counts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import did.

    Attributes:
        source: the file that was read.
        out: the trace that was written.
        format: format of the source.
        reasons: what was recognised and why.
        columns: the source's column for each of ours.
        ignored: columns of the source that were not used.
        read: rows read.
        kept: requests of the trace.
        skipped: rows left out, by reason.
        changed: rows changed or worth knowing about, by what.
        notes: what happened to the trace as a whole.
        span_s: from the first arrival to the last [s].
        window_rate_rps: requests per second of the window that --start and --end give [1/s], or None.
    """

    source: str
    out: str
    format: str
    reasons: tuple[str, ...]
    columns: dict[str, str]
    ignored: tuple[str, ...]
    read: int
    kept: int
    skipped: Tally
    changed: Tally
    notes: tuple[str, ...]
    span_s: float
    window_rate_rps: float | None

    @property
    def rate_rps(self) -> float | None:
        """Mean arrival rate, (n - 1) / span [1/s]; None where all arrive at once."""
        return (self.kept - 1) / self.span_s if self.span_s > 0 else None

    def lines(self) -> list[str]:
        """Return the report for people, one fact per line."""
        rate = f", {self.rate_rps:.4g} requests/s" if self.rate_rps is not None else ""
        text = [*self.reasons]
        text.append("columns: " + ", ".join(f"{ours} = {theirs!r}" for ours, theirs in self.columns.items()))
        if self.ignored:
            text.append("ignored columns: " + ", ".join(map(repr, self.ignored)))
        text.extend(f"skipped {self.skipped.line(what)}" for what in self.skipped.counts)
        text.extend(self.changed.line(what) for what in self.changed.counts)
        text.extend(self.notes)
        if self.window_rate_rps is not None:
            text.append(f"the window has {self.window_rate_rps:.4g} requests/s")
        text.append(
            f"{self.out}: {counted(self.kept, 'request')} of {counted(self.read)} over {self.span_s:,.6g} s{rate}"
        )
        return text

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {
            "source": self.source,
            "out": self.out,
            "format": self.format,
            "reasons": list(self.reasons),
            "columns": self.columns,
            "ignored_columns": list(self.ignored),
            "rows_read": self.read,
            "requests": self.kept,
            "skipped": self.skipped.as_data(),
            "changed": self.changed.as_data(),
            "notes": list(self.notes),
            "span_s": self.span_s,
            "rate_rps": self.rate_rps,
            "window_rate_rps": self.window_rate_rps,
        }
