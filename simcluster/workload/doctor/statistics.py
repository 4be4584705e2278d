"""Statistics of a trace: arrivals, gaps, burstiness, lengths, sessions."""

from typing import Any

import numpy as np

from simcluster.workload.trace import Trace
from simcluster.workload.trace_columns import IntArray

__all__ = ["arrival_statistics", "length_statistics", "repeated_rows", "session_statistics"]

_WINDOWS_S = (1.0, 10.0, 60.0, 600.0, 3600.0)
_LEAST_WINDOWS = 10  # fewer say nothing about a variance
_BINS = 100


def arrival_statistics(trace: Trace) -> dict[str, Any]:
    """Return rate, gaps and burstiness of the arrivals.

    Returns:
        `span_s` from the first to the last arrival; `rate_rps` = (n - 1) / span; `gap_cv`, the coefficient of
        variation of the gaps (1 for Poisson); `gaps_s`, quantiles; `longest_gap` with where it ends;
        `equal_arrivals`, requests that arrive at the same instant as the one before; `dispersion`, variance over
        mean of the number of arrivals in windows of several sizes (1 for Poisson); `peak_rate_rps` and
        `peak_requests` of the busiest hundredth of the span, and `first_half_rate_rps`. Values without a meaning,
        for example rates without a span, are None.
    """
    arrivals = trace.arrival_ns
    gaps_s = np.diff(arrivals) / 1e9
    span_s = int(arrivals[-1] - arrivals[0]) / 1e9
    mean = float(gaps_s.mean()) if len(gaps_s) else 0.0
    longest = int(np.argmax(gaps_s)) if len(gaps_s) else None
    return {
        "span_s": span_s,
        "rate_rps": len(gaps_s) / span_s if span_s > 0 else None,
        "gap_cv": float(gaps_s.std()) / mean if mean > 0 else None,
        "gaps_s": quantiles(gaps_s) if len(gaps_s) else None,
        "longest_gap": None
        if longest is None
        else {"gap_s": float(gaps_s[longest]), "ends_at_s": int(arrivals[longest + 1]) / 1e9, "row": longest + 2},
        "equal_arrivals": int((gaps_s == 0).sum()),
        "dispersion": _dispersion(arrivals, span_s),
        **_ramp(arrivals, span_s),
    }


def _dispersion(arrivals: IntArray, span_s: float) -> dict[str, float]:
    """Return variance over mean of the counts per window, by window size, over whole windows."""
    result = {}
    for window_s in _WINDOWS_S:
        windows = int(span_s / window_s)
        if windows >= _LEAST_WINDOWS:
            places = (arrivals - arrivals[0]) // round(window_s * 1e9)
            counts = np.bincount(places[places < windows], minlength=windows)
            result[f"{window_s:g} s"] = float(counts.var() / counts.mean())
    return result


def _ramp(arrivals: IntArray, span_s: float) -> dict[str, float | int | None]:
    if span_s <= 0:
        return {"peak_rate_rps": None, "peak_requests": None, "first_half_rate_rps": None}
    share = (arrivals - arrivals[0]) / (span_s * 1e9)
    counts = np.bincount(np.minimum((share * _BINS).astype(np.int64), _BINS - 1), minlength=_BINS)
    return {
        "peak_rate_rps": float(counts.max() * _BINS / span_s),
        "peak_requests": int(counts.max()),
        "first_half_rate_rps": float((share < 0.5).sum() / (span_s / 2)),
    }


def quantiles(values: Any) -> dict[str, float]:
    """Return minimum, quantiles (linear interpolation), maximum and mean."""
    low, median, p90, p99, high = np.quantile(values, [0, 0.5, 0.9, 0.99, 1]).tolist()
    return {"min": low, "p50": median, "p90": p90, "p99": p99, "max": high, "mean": float(np.mean(values))}


def length_statistics(trace: Trace) -> dict[str, Any]:
    """Return quantiles of prompt and answer lengths [tokens], and how many tokens there are."""
    return {
        "prompt_tokens": quantiles(trace.prompt_tokens),
        "output_tokens": quantiles(trace.output_tokens),
        "total_prompt_tokens": int(trace.prompt_tokens.sum()),
        "total_output_tokens": int(trace.output_tokens.sum()),
    }


def repeated_rows(trace: Trace) -> int:
    """Return how many requests have arrival, prompt and answer length of an earlier one; nominal arrivals are none."""
    tied = np.flatnonzero(np.diff(trace.arrival_ns) == 0)
    rows = np.union1d(tied, tied + 1)  # all others are alone at their instant
    if trace.after is not None:
        rows = rows[trace.after[rows] < 0]
    columns = [trace.output_tokens[rows], trace.prompt_tokens[rows], trace.arrival_ns[rows]]
    order = np.lexsort(columns)
    again = np.ones(max(len(rows) - 1, 0), dtype=np.bool_)
    for column in columns:
        again &= np.diff(column[order]) == 0
    return int(again.sum())


def session_statistics(trace: Trace) -> dict[str, Any] | None:
    """Return the number of conversations, requests in them, turns, and requests that wait for an earlier one."""
    if trace.session_id is None:
        return None
    names = [name for name in trace.session_id.tolist() if name is not None]
    _, turns = np.unique(np.array(names, dtype=object), return_counts=True) if names else ([], np.zeros(1))
    return {
        "sessions": len(set(names)),
        "requests_in_sessions": len(names),
        "turns_mean": float(np.mean(turns)),
        "turns_max": int(np.max(turns)),
        "requests_that_wait": 0 if trace.after is None else int((trace.after >= 0).sum()),
    }
