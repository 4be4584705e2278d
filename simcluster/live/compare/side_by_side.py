"""What simulation and live servers did with the same requests under the same policy, as plain data."""

from typing import Any

import polars as pl

from simcluster.experiment.run import PolicyRun

__all__ = ["side_by_side"]

_LATENCIES = (("ttft_s", ("p50", "p99")), ("tpot_s", ("p50", "p99")), ("e2e_s", ("p50", "p99")))
_NUMBERS = ("slo_attainment", "on_time_utility", "mean_utility", "request_throughput_rps")


def side_by_side(simulated: PolicyRun, live: PolicyRun, mock: dict[str, Any]) -> dict[str, Any]:
    """Compare two runs of one policy on the same requests.

    Args:
        simulated: by the simulator.
        live: measured by a client.
        mock: what the mock servers reported, else nothing.

    Returns:
        * `requests`: counts on both sides;
        * `metrics`: by name `simulated`, `live` and the `error` of simulation relative to live;
        * `composition`: shares of requests by instance, on both sides;
        * `identical_decisions`: share of the requests sent on both sides whose first decision was the same, and
          `compared`, how many these are;
        * `estimators`: by name and side, mean absolute error of the predicted TTFT [s] at the chosen instance;
        * `late_steps_share`: of the mock servers' steps; None with real servers;
        * `late_requests_share`: of the requests to mock servers, which reached an engine later than in simulation;
        * `measuring`: what the client says about its measuring.
    """
    ours, theirs = simulated.summary, live.summary
    metrics = {
        f"{name}_{quantile}": _pair(ours[name][quantile], theirs[name][quantile])
        for name, quantiles in _LATENCIES
        for quantile in quantiles
    } | {name: _pair(ours[name], theirs[name]) for name in _NUMBERS}
    return {
        "requests": {"simulated": ours["requests"], "live": theirs["requests"]},
        "metrics": metrics,
        "composition": {"simulated": ours["composition"]["all"], "live": theirs["composition"]["all"]},
        **_decisions(simulated, live),
        "estimators": _estimators(simulated, live),
        "late_steps_share": mock.get("late_steps_share"),
        "late_requests_share": mock.get("late_requests_share"),
        "mock": mock or None,
        "measuring": theirs["measuring"],
    }


def _pair(ours: float | None, theirs: float | None) -> dict[str, float | None]:
    error = (ours - theirs) / theirs if ours is not None and theirs else None
    return {"simulated": ours, "live": theirs, "error": error}


def _decisions(simulated: PolicyRun, live: PolicyRun) -> dict[str, Any]:
    """Compare where requests were sent first; one that was turned away went nowhere on that side."""
    columns = ["request_id", "instance"]
    first = live.frame("decisions", columns).unique("request_id", keep="first", maintain_order=True)
    both = simulated.frame("decisions", columns).join(first, on="request_id", how="inner", suffix="_live")
    same = both.select(pl.col("instance").eq_missing(pl.col("instance_live"))).to_series()
    return {"identical_decisions": float(same.mean()) if len(same) else None, "compared": len(same)}  # type: ignore[arg-type]


def _estimators(simulated: PolicyRun, live: PolicyRun) -> dict[str, dict[str, float | None]]:
    sides = {"simulated": _errors(simulated), "live": _errors(live)}
    names = dict.fromkeys([*sides["simulated"], *sides["live"]])
    return {name: {side: errors.get(name) for side, errors in sides.items()} for name in names}


def _errors(run: PolicyRun) -> dict[str, float | None]:
    """Return the mean absolute error of every estimator [s], over the requests with a first token and a bound."""
    if not run.summary["estimators"]:
        return {}
    observed = run.frame("requests", ["request_id", "ttft_s"])
    rows = run.frame("estimates", ["request_id", "estimator", "predicted_ttft_s"]).join(observed, on="request_id")
    error = (pl.col("predicted_ttft_s") - pl.col("ttft_s")).abs().mean()
    return dict(rows.group_by("estimator", maintain_order=True).agg(error).iter_rows())
