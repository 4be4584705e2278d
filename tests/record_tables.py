"""Tables of requests as a run writes them, from a few numbers per request."""

from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from simcluster.records import REQUESTS

__all__ = ["Row", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request; instants and durations in seconds."""

    arrival: float = 0.0
    scheduled: float | None = None
    first: float | None = None
    end: float | None = None
    prompt: int = 1
    tokens: int = 1
    status: str = "finished"
    reason: str = "stop"
    target: float | None = None
    quality: float = 0.5
    cost: float = 0.0
    utility: float | None = None
    task: str | None = None
    instance: str = "a"
    preemptions: int = 0

    @property
    def on_time(self) -> bool:
        in_time = self.target is None or (self.first is not None and self.first - self.arrival <= self.target)
        return self.status == "finished" and in_time


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def _after(row: Row, instant: float | None) -> float | None:
    return None if instant is None else (round(instant * 1e9) - round(row.arrival * 1e9)) / 1e9


def _record(number: int, row: Row) -> dict[str, Any]:
    done = row.status == "finished"
    tpot = None
    if done and row.tokens > 1 and row.first is not None and row.end is not None:
        tpot = (row.end - row.first) / (row.tokens - 1)
    return {
        "request_id": str(number),
        "task": row.task,
        "instance": row.instance,
        "model": "M",
        "arrival_ns": _ns(row.arrival),
        "scheduled_ns": _ns(row.scheduled),
        "first_token_ns": _ns(row.first),
        "end_ns": _ns(row.end),
        "arrival_s": row.arrival,
        "queue_s": _after(row, row.scheduled),
        "ttft_s": _after(row, row.first),
        "tpot_s": tpot,
        "e2e_s": _after(row, row.end) if done else None,
        "prompt_tokens": row.prompt,
        "output_tokens": row.tokens,
        "cached_tokens": 0,
        "num_preemptions": row.preemptions,
        "status": row.status,
        "reason": row.reason,
        "slo_ttft_s": row.target,
        "on_time": row.on_time,
        "quality": row.quality,
        "cost_micro_usd": row.cost,
        "utility": (row.quality if row.utility is None else row.utility) if done else None,
    }


def table(*rows: Row) -> pl.DataFrame:
    """Return these requests in the columns of requests.parquet."""
    records = [_record(number, row) for number, row in enumerate(rows)]
    frame = pl.from_arrow(pa.Table.from_pylist(records, schema=REQUESTS))
    assert isinstance(frame, pl.DataFrame)
    return frame
