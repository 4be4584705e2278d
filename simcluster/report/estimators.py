"""Scores of TTFT estimators: predicted against observed, for the instance that each request was really sent to.

Counted are the requests that arrive in the measured window and have a first token. An estimate without bound (LPS above
saturation) has no error; it counts as `unbounded` and as expected to be late.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from simcluster.report.metrics import Window

__all__ = ["ESTIMATOR_COLUMNS", "PROMPT_EDGES", "resident_requests", "score_estimates"]

ESTIMATOR_COLUMNS = (  # of the table of requests; what `score_estimates` looks at
    *("request_id", "instance", "model", "status", "arrival_ns", "end_ns"),
    *("prompt_tokens", "ttft_s", "slo_ttft_s"),
)
PROMPT_EDGES = (256, 2048)  # prompt tokens: short up to the first, long above the second

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


def score_estimates(requests: pl.DataFrame, estimates: pl.DataFrame, window: Window) -> dict[str, dict[str, Any]]:
    """Score every estimator of a run.

    Args:
        requests: table of requests, as in requests.parquet.
        estimates: table of estimates, as in estimates.parquet.
        window: measured window.

    Returns:
        By estimator: the scores of `_scores`, and the same by load (terciles of the requests resident at the instance
        when the request arrives), by prompt length, instance and model. Plain data; what cannot be computed is None.
    """
    counted = requests.with_columns(resident=resident_requests(requests)).filter(
        window.holds("arrival_ns")
        & pl.col("ttft_s").is_not_null()
        & pl.col("status").is_in(["rejected", "failed"]).not_()
    )
    loads = _terciles(counted["resident"].to_numpy())
    result: dict[str, dict[str, Any]] = {}
    for name in estimates["estimator"].unique(maintain_order=True).to_list():
        rows = counted.join(estimates.filter(pl.col("estimator") == name), on="request_id", how="inner")
        resident, prompt = rows["resident"].to_numpy(), rows["prompt_tokens"].to_numpy()
        result[name] = {
            **_scores(rows),
            "by_resident": _by_range(rows, resident, loads),
            "by_prompt_tokens": _by_range(rows, prompt, list(PROMPT_EDGES)),
            "by_instance": _by_name(rows, "instance"),
            "by_model": _by_name(rows, "model"),
        }
    return result


def resident_requests(requests: pl.DataFrame) -> pl.Series:
    """Return how many requests each one finds at its instance: sent there before and not ended, (n,); 0 if not sent.

    Of requests that arrive at one instant, earlier rows come first.
    """
    found: _Ints = np.zeros(requests.height, dtype=np.int64)
    numbered = requests.with_row_index("row").filter(pl.col("instance").is_not_null())
    for _, group in numbered.group_by("instance"):
        ordered = group.sort("arrival_ns", "row")
        arrivals = ordered["arrival_ns"].to_numpy()
        ends = np.sort(ordered["end_ns"].drop_nulls().to_numpy())
        found[ordered["row"].to_numpy()] = np.arange(len(arrivals)) - np.searchsorted(ends, arrivals, side="right")
    return pl.Series(np.maximum(found, 0))


def _scores(rows: pl.DataFrame) -> dict[str, Any]:
    """Score the estimates of some requests.

    * `bias_s`, `bias`: mean of predicted - observed [s], and of its share in the observed;
    * `mape`, `median_ape`: mean and median of the absolute share;
    * `kendall_tau`: rank agreement, tau-b, those without bound last;
    * `false_on_time`, `false_late`: shares of the requests with a target tau for which predicted <= tau < observed,
      and observed <= tau < predicted.
    """
    predicted = rows["predicted_ttft_s"].fill_null(np.inf).to_numpy()
    observed, target = rows["ttft_s"].to_numpy(), rows["slo_ttft_s"].cast(pl.Float64).to_numpy()
    bounded = np.isfinite(predicted)
    error = predicted[bounded] - observed[bounded]
    share = error / observed[bounded]
    has_target = ~np.isnan(target)
    expected, came = (predicted <= target)[has_target], (observed <= target)[has_target]
    return {
        "count": rows.height,
        "unbounded": int(np.count_nonzero(~bounded)),
        "bias_s": _mean(error),
        "bias": _mean(share),
        "mape": _mean(np.abs(share)),
        "median_ape": float(np.median(np.abs(share))) if len(share) else None,
        "kendall_tau": _rank_agreement(predicted, observed),
        "false_on_time": _mean(expected & ~came),
        "false_late": _mean(~expected & came),
    }


def _mean(values: _Floats | _Bools) -> float | None:
    return float(values.mean()) if len(values) else None


def _rank_agreement(predicted: _Floats, observed: _Floats) -> float | None:
    if len(predicted) < 2 or (predicted == predicted[0]).all() or (observed == observed[0]).all():
        return None
    from scipy.stats import kendalltau  # noqa: PLC0415  (slow to import, and needed where somebody predicts)

    return float(kendalltau(predicted, observed).statistic)


def _terciles(values: _Ints) -> list[int]:
    """Return the values up to which the lower and the middle third go."""
    return [int(value) for value in np.quantile(values, [1 / 3, 2 / 3], method="lower")] if len(values) else []


def _by_range(rows: pl.DataFrame, values: _Ints, edges: list[int]) -> list[dict[str, Any]]:
    """Score parts of the requests: values up to the first edge, up to the next, and above the last; empty: left out."""
    number = np.searchsorted(np.unique(np.array(edges, dtype=np.int64)), values, side="left")
    parts = []
    for part in np.unique(number).tolist():
        inside = number == part
        limits = {"lowest": int(values[inside].min()), "highest": int(values[inside].max())}
        parts.append({**limits, **_scores(rows.filter(inside))})
    return parts


def _by_name(rows: pl.DataFrame, column: str) -> dict[str, dict[str, Any]]:
    names = sorted(rows[column].unique().to_list())
    return {name: _scores(rows.filter(pl.col(column) == name)) for name in names}
