"""Errors of a simulated run against the real one: per request, in distribution, over time."""

from typing import Any

import numpy as np

from simcluster.request import FloatArray
from simcluster.validate.runs import Requests, Series

__all__ = ["compare_requests", "compare_series", "relative_errors"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_INSTANTS = 1000  # at which the load is compared


def relative_errors(observed: FloatArray, simulated: FloatArray) -> dict[str, Any]:
    """Compare values (n,) of the same requests.

    Returns:
        `count` compared, `mape` (mean absolute relative error), `median_ape`, `bias` (mean relative error), and for
        mean, p50, p90 and p99 the observed and simulated value and the relative `error` between them. What cannot be
        computed is None.
    """
    known = np.isfinite(observed) & np.isfinite(simulated)
    real, ours = observed[known], simulated[known]
    positive = real > 0
    shares = (ours[positive] - real[positive]) / real[positive]
    result: dict[str, Any] = {
        "count": len(real),
        "mape": _mean(np.abs(shares)),
        "median_ape": float(np.median(np.abs(shares))) if len(shares) else None,
        "bias": _mean(shares),
    }
    for name, q in (("mean", None), *_QUANTILES.items()):
        result[name] = _pair(real, ours, q) if len(real) else None
    return result


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if len(values) else None


def _pair(real: FloatArray, ours: FloatArray, q: float | None) -> dict[str, float | None]:
    observed, simulated = (float(v.mean() if q is None else np.quantile(v, q)) for v in (real, ours))
    error = (simulated - observed) / observed if observed else None
    return {"observed": observed, "simulated": simulated, "error": error}


def compare_requests(observed: Requests, simulated: Requests) -> dict[str, Any]:
    """Compare TTFT, TPOT and E2E [s] of the same requests, and the throughput of the runs."""
    rates = [float(run.output_tokens.sum()) / run.duration_s for run in (observed, simulated)]
    return {
        "requests": len(observed.arrival_s),
        "not_served": int(np.count_nonzero(~np.isfinite(simulated.e2e_s) & np.isfinite(observed.e2e_s))),
        "ttft_s": relative_errors(observed.ttft_s, simulated.ttft_s),
        "tpot_s": relative_errors(observed.tpot_s, simulated.tpot_s),
        "e2e_s": relative_errors(observed.e2e_s, simulated.e2e_s),
        "output_throughput_tps": {
            "observed": rates[0],
            "simulated": rates[1],
            "error": (rates[1] - rates[0]) / rates[0],
        },
    }


def compare_series(observed: Series, simulated: Series, duration_s: float) -> dict[str, Any]:
    """Compare the load at evenly spaced instants of the real run.

    Returns:
        For running, waiting and kv_usage: mean, p50, p90 and p99 over time, observed and simulated, and the mean
        absolute difference at the same instant; None where the real run does not tell.
    """
    instants = np.linspace(0, duration_s, _INSTANTS)
    real, ours = observed.sampled(instants), simulated.sampled(instants)
    result: dict[str, Any] = {}
    for name in ("running", "waiting", "kv_usage"):
        left, right = getattr(real, name), getattr(ours, name)
        if not np.isfinite(left).all() or (name == "kv_usage" and not left.any()):
            result[name] = None
            continue
        result[name] = {"mean_absolute_difference": float(np.abs(left - right).mean())}
        for label, q in (("mean", None), *_QUANTILES.items()):
            result[name][label] = {
                "observed": float(left.mean() if q is None else np.quantile(left, q)),
                "simulated": float(right.mean() if q is None else np.quantile(right, q)),
            }
    return result
