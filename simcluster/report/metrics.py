"""Metrics of one run, from its table of requests.

Definitions are those of vLLM's benchmark where it has them: TPOT = (E2E - TTFT) / (tokens - 1); percentiles with
linear interpolation. Failed and rejected requests are left out of latencies, count everywhere else and violate
their targets. Each event counts by its own time: a first token towards TTFT, an end towards E2E, TPOT, throughput
and goodput, if it lies in the window. Attainment, utility, cost and composition belong to requests and count those
that arrive in the window. All rates are divided by the one printed duration.
"""

from dataclasses import dataclass
from typing import Any

import polars as pl

__all__ = ["PERCENTILE_METHOD", "SUMMARY_COLUMNS", "Window", "measured_window", "percentiles", "summarise"]

PERCENTILE_METHOD = "linear"
SUMMARY_COLUMNS = (  # of the table of requests; what `summarise` and `measured_window` look at
    *("task", "instance", "status", "reason", "on_time"),
    *("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns", "queue_s", "ttft_s", "tpot_s", "e2e_s", "slo_ttft_s"),
    *("output_tokens", "num_preemptions", "quality", "cost_micro_usd", "utility"),
)
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_STATUSES = ("finished", "rejected", "failed", "unfinished")


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run, both ends included [s]."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length of the window [s]."""
        return self.end_s - self.start_s

    def holds(self, column: str) -> pl.Expr:
        """Return whether the instants [ns] of a column lie inside; whole numbers decide at the ends."""
        return pl.col(column).is_between(*self.bounds_ns)

    @property
    def bounds_ns(self) -> tuple[int, int]:
        """Both ends [ns]."""
        return round(self.start_s * 1e9), round(self.end_s * 1e9)


def measured_window(
    requests: pl.DataFrame, warmup_s: float, horizon_s: float | None, stopped_s: float | None = None
) -> Window:
    """Return the window that rates refer to.

    With a horizon it ends there; without one it ends with the last terminal event, or where the run was stopped
    early. It starts after the warm-up; without warm-up and horizon, with the first arrival.

    Args:
        requests: table of requests.
        warmup_s: warm-up [s].
        horizon_s: horizon [s], or None.
        stopped_s: end of a run that was stopped before all was done [s], or None.
    """
    first = requests["arrival_ns"].min()
    last = requests["end_ns"].max()
    start = warmup_s if warmup_s > 0 or horizon_s is not None or first is None else _seconds(first)
    if horizon_s is not None:
        end = horizon_s
    elif stopped_s is not None:
        end = stopped_s
    else:
        end = start if last is None else _seconds(last)
    return Window(start, max(start, end))


def _seconds(nanoseconds: Any) -> float:
    return float(nanoseconds) / 1e9


def percentiles(values: pl.Series) -> dict[str, float | int | None]:
    """Return count, mean and percentiles of a sample; None where it is empty."""
    values = values.drop_nulls()
    result: dict[str, float | int | None] = {"count": len(values), "mean": _number(values.mean())}
    for name, q in _QUANTILES.items():
        result[name] = _number(values.quantile(q, interpolation="linear"))
    return result


def _where(rows: pl.DataFrame, condition: pl.Expr) -> pl.DataFrame:
    """Filter rows; those of a long run that loses nobody are all kept, and then not copied."""
    kept = rows.select(condition.fill_null(value=False)).to_series()
    return rows if kept.all() else rows.filter(kept)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _rate(amount: float, window: Window) -> float | None:
    return amount / window.duration_s if window.duration_s > 0 else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def summarise(
    requests: pl.DataFrame, window: Window, tpot_slo_s: float | None = None, num_gpus: int = 0
) -> dict[str, Any]:
    """Compute all metrics of a run.

    Args:
        requests: table of requests, as in requests.parquet.
        window: measured window.
        tpot_slo_s: TPOT limit [s], or None; limits are inclusive and a one-token answer has no TPOT to break.
        num_gpus: GPUs of the cluster, for GPU time; 0 where unknown.

    Returns:
        Plain data without NaN; what cannot be computed is None.
    """
    arrived = _where(requests, window.holds("arrival_ns"))
    ended = _where(requests, window.holds("end_ns"))
    finished = _where(ended, pl.col("status") == "finished")
    served = _where(requests, ~pl.col("status").is_in(["rejected", "failed"]))
    ttft = _where(served, window.holds("first_token_ns"))["ttft_s"]
    has_limit = tpot_slo_s is not None or arrived["slo_ttft_s"].is_not_null().any()
    good = pl.col("on_time")
    if tpot_slo_s is not None:
        good = good & (pl.col("tpot_s").is_null() | (pl.col("tpot_s") <= tpot_slo_s))
    num_good = arrived.filter(good).height
    return {
        "requests": _counts(requests),
        "reasons": _reasons(requests),
        "window_s": [window.start_s, window.end_s],
        "duration_s": window.duration_s,
        "percentile_method": PERCENTILE_METHOD,
        "ttft_s": percentiles(ttft),
        "tpot_s": percentiles(finished["tpot_s"]),
        "e2e_s": percentiles(finished["e2e_s"]),
        "queue_s": percentiles(_where(served, window.holds("scheduled_ns"))["queue_s"]),
        "error_rate": _share(arrived.filter(pl.col("status") == "failed").height, arrived.height),
        "slo_attainment": _share(num_good, arrived.height) if has_limit else None,
        "goodput_rps": _rate(finished.filter(good).height, window) if has_limit else None,
        "request_throughput_rps": _rate(finished.height, window),
        "output_throughput_tps": _rate(_tokens_inside(requests, window), window),
        "output_throughput_finished_tps": _rate(_total(finished, "output_tokens"), window),
        **_utility(arrived),
        "cost": _cost(arrived, finished.height, window, num_gpus),
        "num_preemptions": int(_total(requests, "num_preemptions")),
        "composition": composition(arrived),
    }


def _total(requests: pl.DataFrame, column: str) -> float:
    return float(requests[column].sum() or 0)


def _counts(requests: pl.DataFrame) -> dict[str, int]:
    counts = dict(requests["status"].value_counts().iter_rows())
    found = {status: int(counts.get(status, 0)) for status in _STATUSES}
    return {"submitted": requests.height, **found}


def _reasons(requests: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Count why requests ended, by status."""
    table = requests.group_by("status", "reason").len().sort("status", "reason")
    result: dict[str, dict[str, int]] = {}
    for status, reason, count in table.iter_rows():
        result.setdefault(status, {})[reason] = count
    return result


def _tokens_inside(requests: pl.DataFrame, window: Window) -> float:
    """Count the output tokens delivered inside the window, those of unfinished requests included.

    A request that lies wholly inside counts in full. Where the window cuts one that has ended, its tokens are
    taken as evenly spaced from the first to the last; of one without an end, all were delivered before the cut.
    """
    tokens = pl.col("output_tokens")
    start, end = window.bounds_ns
    first, last = pl.col("first_token_ns"), pl.col("end_ns").fill_null(end)
    span = last - first
    inside = (last.clip(upper_bound=end) - first.clip(lower_bound=start)).clip(lower_bound=0)
    share = pl.when(span > 0).then(inside / span).otherwise(1.0)
    head = first.is_between(start, end).cast(pl.Float64)
    overlap = (last >= start) & (first <= end)
    counted = pl.when(overlap).then(head + (tokens - 1) * share).otherwise(0.0)
    rows = _where(requests, pl.col("first_token_ns").is_not_null() & (tokens > 0))
    return float(rows.select(counted.sum()).item() or 0.0)


def _utility(arrived: pl.DataFrame) -> dict[str, Any]:
    """Mean utility; late, rejected, failed and unfinished requests count 0. Source: paper eq. 4."""
    on_time = _where(arrived, pl.col("on_time"))
    finished = _where(arrived, pl.col("status") == "finished")
    n = arrived.height
    return {
        "on_time_utility": _total(on_time, "utility") / n if n else None,
        "mean_utility": _number(finished["utility"].mean()),
        "share_negative_utility": _share(finished.filter(pl.col("utility") < 0).height, finished.height),
        "share_on_time_with_negative_utility": _share(on_time.filter(pl.col("utility") < 0).height, n),
        "mean_quality": _number(finished["quality"].mean()),
    }


def _cost(arrived: pl.DataFrame, num_finished: int, window: Window, num_gpus: int) -> dict[str, Any]:
    gpu_seconds = num_gpus * window.duration_s if num_gpus else None
    return {
        "token_cost_micro_usd_mean": _number(arrived["cost_micro_usd"].mean()),
        "token_cost_usd_total": _total(arrived, "cost_micro_usd") / 1e6,
        "gpu_seconds": gpu_seconds,
        "gpu_seconds_per_finished_request": (
            gpu_seconds / num_finished if gpu_seconds is not None and num_finished else None
        ),
    }


def composition(requests: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Return which share of each task's requests went to each instance, and of all requests under `all`.

    Requests that were turned away are in no share, so that shares then sum up to less than 1.
    """
    result: dict[str, dict[str, float]] = {}
    groups: list[tuple[str, pl.DataFrame]] = [("all", requests)]
    tasks = sorted(t for t in requests["task"].unique().to_list() if t is not None)
    groups += [(task, requests.filter(pl.col("task") == task)) for task in tasks]
    for name, group in groups:
        counts = group["instance"].drop_nulls().value_counts().sort("instance")
        result[name] = {instance: count / group.height for instance, count in counts.iter_rows()}
    return result
