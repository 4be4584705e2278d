"""Regret against the oracle: what it won more from the same requests."""

from typing import Any

import polars as pl

from simcluster.report.metrics import Window

__all__ = ["REGRET_COLUMNS", "regret"]

REGRET_COLUMNS = ("request_id", "arrival_ns", "on_time", "utility")  # of the table of requests


def regret(requests: pl.DataFrame, oracle: pl.DataFrame, window: Window) -> dict[str, Any] | None:
    """Compare the on-time utility of each request with what the oracle got from the same one.

    Args:
        requests: the policy's table of requests, as in requests.parquet.
        oracle: the oracle's.
        window: the policy's measured window; requests that arrive in it count, if both sent them.

    Returns:
        Mean of oracle - policy (late, rejected and unfinished requests count 0), how often the policy got less and how
        often more, and the number of requests; None without any. The oracle cannot know noise or later arrivals, so it
        is a strong policy and no bound.

    Source: paper eq. 4, per request.
    """
    gained = pl.when(pl.col("on_time")).then(pl.col("utility").fill_null(0.0)).otherwise(0.0)
    mine = requests.filter(window.holds("arrival_ns")).select("request_id", own=gained)
    both = mine.join(oracle.select("request_id", best=gained), on="request_id", how="inner")
    if not both.height:
        return None
    lost = both["best"] - both["own"]
    return {
        "count": both.height,
        "on_time_utility": float(lost.mean()),  # type: ignore[arg-type]  # a mean of numbers
        "share_worse": float((lost > 0).mean()),  # type: ignore[arg-type]
        "share_better": float((lost < 0).mean()),  # type: ignore[arg-type]
    }
