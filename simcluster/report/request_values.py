"""What one request adds to each metric, for statistics over the requests of one trace."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from simcluster.report.metrics import Window

__all__ = ["MEANS", "QUANTILES", "request_values"]

MEANS = {
    "on_time_utility": "on_time_utility",
    "slo_attainment": "good",
    "share_negative_utility": "negative_utility",
    "cost_micro_usd": "cost_micro_usd",
}
QUANTILES = {"ttft_p50_s": ("ttft_s", 0.5), "ttft_p99_s": ("ttft_s", 0.99)}


def request_values(
    requests: pl.DataFrame, window: Window, request_ids: Sequence[str], tpot_slo_s: float | None = None
) -> pa.Table:
    """Return what each request of a trace counts, so that column means are the metrics of `summarise`.

    Args:
        requests: table of requests, as in requests.parquet.
        window: measured window.
        request_ids: (n,) ids of the trace, in its order.
        tpot_slo_s: TPOT limit [s], or None.

    Returns:
        n rows in the trace's order: on_time_utility, good, negative_utility, cost_micro_usd, ttft_s, NaN where the
        request does not count; arrival_ns, scheduled_ns, end_ns and the number of its instance, -1 where there is none.
    """
    arrived = window.holds("arrival_ns")
    finished = pl.col("status") == "finished"
    good = pl.col("on_time")
    if tpot_slo_s is not None:
        good = good & (pl.col("tpot_s").is_null() | (pl.col("tpot_s") <= tpot_slo_s))
    lost = pl.col("status").is_in(["rejected", "failed"])
    has_limit = tpot_slo_s is not None or requests.filter(arrived)["slo_ttft_s"].is_not_null().any()
    columns = {
        "on_time_utility": pl.when(arrived).then(
            pl.when(pl.col("on_time")).then(pl.col("utility").fill_null(0.0)).otherwise(0.0)
        ),
        "good": pl.when(arrived & pl.lit(has_limit)).then(good.cast(pl.Float64)),
        "negative_utility": pl.when(arrived & finished).then((pl.col("utility") < 0).cast(pl.Float64)),
        "cost_micro_usd": pl.when(arrived).then(pl.col("cost_micro_usd")),
        "ttft_s": pl.when(~lost & window.holds("first_token_ns")).then(pl.col("ttft_s")),
    }
    counted = requests.select(**columns).fill_null(float("nan"))
    position = {request_id: k for k, request_id in enumerate(request_ids)}
    rows = np.array([position[request_id] for request_id in requests["request_id"]], dtype=np.int64)
    result: dict[str, pa.Array] = {}
    for name in columns:
        values = np.full(len(request_ids), np.nan)
        values[rows] = counted[name].to_numpy()
        result[name] = pa.array(values)
    numbers = {name: pl.col(name) for name in ("arrival_ns", "scheduled_ns", "end_ns")}
    where = requests.select(**numbers, instance=pl.col("instance").rank("dense").cast(pl.Int64)).fill_null(-1)
    for name in where.columns:
        whole = np.full(len(request_ids), -1, dtype=np.int64)
        whole[rows] = where[name].to_numpy()
        result[name] = pa.array(whole)
    return pa.table(result)
