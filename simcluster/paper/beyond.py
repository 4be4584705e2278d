"""Beyond the paper: old views, several routers, wrong beliefs, and the distance to what is possible at all."""

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from simcluster.errors import SimclusterError
from simcluster.experiment.bound import fluid_bound
from simcluster.experiment.build import build_world
from simcluster.experiment.cells import Cell, CellFailure, CellResult
from simcluster.experiment.executors import Outcome
from simcluster.paper.assumptions import write_recipe
from simcluster.paper.figure import Claim, Figure, FloatArray, Grid, Plot, gain, mean_of, spread
from simcluster.paper.lab import Ask, Fields, Lab, Runs
from simcluster.paper.routing import BASELINES
from simcluster.paper.staleness import SfsWithoutCredit
from simcluster.report.statistics import Interval

__all__ = ["figure_bound", "figure_errors", "figure_routers", "figure_staleness"]

_RATES_RPS = (8.0, 16.0)
_DELAYS_S = (0.0, 0.005, 0.02, 0.05, 0.1, 0.5)
_FEW_DELAYS_S = (0.0, 0.1)
_WITHOUT_CREDIT = f"{SfsWithoutCredit.__module__}:{SfsWithoutCredit.__name__}"
_MODES = {  # name: (overlay, policy)
    "ledger and credit": (True, "sfs"),
    "credit": (False, "sfs"),
    "neither": (False, _WITHOUT_CREDIT),
    "ledger and credit, margin 0.9": (True, "sfs:margin=0.9"),
    "ledger and credit, sfs_plus": (True, "sfs_plus"),
}
_REPLICAS, _FEW_REPLICAS = (1, 2, 4, 8), (1, 4)
_ROUTER_DELAYS_S, _FEW_ROUTER_DELAYS_S = (0.0, 0.02, 0.1, 0.5), (0.1,)
_ROUTER_POLICIES = ("sfs", "sfs:margin=0.9", "sfs_plus")
_SCALES, _FEW_SCALES = (0.8, 0.9, 1.0, 1.1, 1.25), (0.8, 1.0, 1.25)
_BOUND_RATES_RPS, _FEW_BOUND_RATES_RPS = (2.0, 5.0, 8.0, 12.0, 16.0, 20.0, 24.0, 30.0), (8.0, 16.0)
_BOUND_POLICIES = (*BASELINES, "throughput", "lps", "sfs", "sfs:margin=0.9", "sfs_plus", "oracle")


def _scored(runs: Runs, policy: str) -> dict[str, float | None]:
    """Return the columns that every table of this page has."""
    return {
        **spread("on_time_utility", runs.of("on_time_utility")),
        "mape": float(np.nanmean(runs.of("estimators", policy, "mape"))),
        "bias": float(np.nanmean(runs.of("estimators", policy, "bias"))),
    }


def _loss(what: str, runs: Runs, fresh: Runs) -> Claim:
    return Claim(what, None, *gain(runs.of("on_time_utility"), fresh.of("on_time_utility")), "%", is_main=True)


def figure_staleness(lab: Lab) -> Figure:
    """Return OnTimeUtility over the age of the snapshots, with and without ledger and elapsed-time credit."""
    delays = _DELAYS_S if lab.sizes.dense else _FEW_DELAYS_S
    places = [(mode, rate, delay) for mode in _MODES for rate in _RATES_RPS for delay in delays]
    asks = [
        Ask(
            "paper",
            [_MODES[mode][1]],
            [{"workload.rate_rps": rate, "routing.publish_delay_s": delay, "routing.overlay": _MODES[mode][0]}],
        )
        for mode, rate, delay in places
    ]
    found = lab.measure(asks)
    runs = {place: next(iter(answer[0].values())) for place, answer in zip(places, found, strict=True)}
    rows = [
        {"knows": mode, "rate_rps": rate, "snapshot_age_ms": 1e3 * delay, **_scored(each, _MODES[mode][1])}
        for (mode, rate, delay), each in runs.items()
    ]
    return Figure(
        key="staleness",
        title="SFS under old snapshots",
        table=pl.DataFrame(rows),
        claims=[
            _loss(
                f"OnTimeUtility at 100 ms against fresh views, {mode}, {rate:g} requests/s",
                runs[mode, rate, 0.1],
                runs[mode, rate, 0.0],
            )
            for mode in _MODES
            for rate in _RATES_RPS
        ],
        moved_by=(
            "Who else sends: with one router the ledger of its own dispatches holds all that a snapshot would tell. "
            "Taking an old snapshot for the present looks good where it makes the estimate too large, as a margin does."
        ),
        moved_by_short="who else sends",
        plot=Plot("snapshot_age_ms", "on_time_utility", "knows", panel="rate_rps"),
        shown=("knows", "rate_rps", "snapshot_age_ms", "on_time_utility", "mape", "bias"),
    )


def figure_routers(lab: Lab) -> Figure:
    """Return OnTimeUtility over the number of routers that do not know of each other."""
    replicas = _REPLICAS if lab.sizes.dense else _FEW_REPLICAS
    delays = _ROUTER_DELAYS_S if lab.sizes.dense else _FEW_ROUTER_DELAYS_S
    places = [(rate, delay, count) for rate in _RATES_RPS for delay in delays for count in replicas]
    settings: list[Fields] = [
        {"workload.rate_rps": rate, "routing.publish_delay_s": delay, "routing.replicas": count}
        for rate, delay, count in places
    ]
    groups = lab.measure([Ask("paper", _ROUTER_POLICIES, settings)])[0]
    by_place = dict(zip(places, groups, strict=True))
    rows = [
        {"rate_rps": rate, "snapshot_age_ms": 1e3 * delay, "routers": count, "policy": policy, **_scored(runs, policy)}
        for (rate, delay, count), group in by_place.items()
        for policy, runs in group.items()
    ]
    most = replicas[-1]
    return Figure(
        key="routers",
        title="Several routers that do not know of each other's requests",
        table=pl.DataFrame(rows),
        claims=[
            _loss(
                f"OnTimeUtility of {most} routers against one, {policy}, snapshots 100 ms old, {rate:g} requests/s",
                by_place[rate, 0.1, most][policy],
                by_place[rate, 0.1, 1][policy],
            )
            for policy in _ROUTER_POLICIES
            for rate in _RATES_RPS
        ],
        moved_by="The age of the snapshots: what the others sent since is the only thing that a router misses.",
        moved_by_short="the age of the snapshots",
        plot=Plot("routers", "on_time_utility", "snapshot_age_ms", panel="rate_rps"),
        shown=("rate_rps", "snapshot_age_ms", "routers", "policy", "on_time_utility", "mape", "bias"),
    )


# ---- wrong beliefs -------------------------------------------------------------------------------------------------


def _lengths(known: float, noise: float) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["predictions"]["length"] = {"known": known, "noise": noise}

    return change


_LENGTH_PREDICTORS = {
    "lengths: true": _lengths(1.0, 0.0),
    "lengths: noise 0.5 instead of 0.15": _lengths(0.5, 0.5),
    "lengths: the task's mean": _lengths(0.0, 0.0),
    "lengths: noise 1.0 around the task's mean": _lengths(0.0, 1.0),
}


def _beliefs(lab: Lab) -> dict[str, Fields]:
    """Return the fields of each kind of belief."""
    every = "cluster.instances[*].believed_model"
    scales = _SCALES if lab.sizes.dense else _FEW_SCALES
    beliefs: dict[str, Fields] = {
        f"step times times {scale:g}": {} if scale == 1 else {f"{every}.scale": scale} for scale in scales
    }
    if lab.sizes.dense:
        beliefs["eq. 9 on the composed grid"] = {f"{every}.fit": "eq9"}
        beliefs["true step times"] = {f"{every}.fit": "hinge"}
        for number, (name, change) in enumerate(_LENGTH_PREDICTORS.items()):
            beliefs[name] = {"workload.recipe": write_recipe(lab.folder, f"lengths-{number}", change)}
    return beliefs


def figure_errors(lab: Lab) -> Figure:
    """Return OnTimeUtility under wrong step times and wrong lengths."""
    beliefs = _beliefs(lab)
    policies = ("sfs", "sfs:margin=0.9", "throughput")
    places = [(name, rate) for name in beliefs for rate in _RATES_RPS]
    settings = [{**beliefs[name], "workload.rate_rps": rate} for name, rate in places]
    groups = lab.measure([Ask("paper", policies, settings)])[0]
    by_place = dict(zip(places, groups, strict=True))
    rows = [
        {"believed": name, "rate_rps": rate, "policy": policy, **_scored(runs, policy)}
        for (name, rate), group in by_place.items()
        for policy, runs in group.items()
    ]
    return Figure(
        key="errors",
        title="Wrong step times and wrong lengths",
        table=pl.DataFrame(rows),
        claims=[
            _loss(
                f"OnTimeUtility of sfs, {name} against right ones, {rate:g} requests/s",
                by_place[name, rate]["sfs"],
                by_place["step times times 1", rate]["sfs"],
            )
            for name in ("step times times 0.8", "step times times 1.25")
            for rate in _RATES_RPS
        ],
        moved_by=(
            "The sign: an optimistic card costs more than a pessimistic one, since eq. 3 cuts hard at the target. "
            "Other lengths change the predicted cost too, so those rows mix two effects. `throughput` believes the "
            "card's service rates, which do not follow believed_model."
        ),
        moved_by_short="the sign of the error",
        plot=Plot("mape", "on_time_utility", "policy", panel="rate_rps", kind="points"),
        shown=("believed", "rate_rps", "policy", "on_time_utility", "mape", "bias"),
    )


# ---- the bound -----------------------------------------------------------------------------------------------------


def _bound_of(cell: Cell) -> Outcome:
    """Compute the fluid bound of a cell's world."""
    try:
        found = fluid_bound(build_world(cell.scenario, cell.path))
    except SimclusterError as error:
        return CellFailure(str(error))
    summary = {"on_time_utility": found.on_time_utility, "load": found.load.tolist(), "shares": found.shares.tolist()}
    return CellResult(summary, {"assumptions": [], "warnings": [], "trace_notes": []})


def figure_bound(lab: Lab) -> Figure:
    """Return every policy's distance to the fluid bound."""
    rates = _BOUND_RATES_RPS if lab.sizes.dense else _FEW_BOUND_RATES_RPS
    settings = [{"workload.rate_rps": rate} for rate in rates]
    groups = lab.compare("paper", _BOUND_POLICIES, settings)
    bounds = lab.measure([Ask("paper", ["sfs"], settings)], _bound_of, "bound")[0]
    rows, claims = [], []
    for rate, group, bound in zip(rates, groups, bounds, strict=True):
        best = bound["sfs"].of("on_time_utility")
        rows.append(
            {"rate_rps": rate, "policy": "bound", **spread("on_time_utility", best), **spread("distance", 0 * best)}
        )
        reached = {policy: runs.of("on_time_utility") for policy, runs in group.items()}
        for policy, values in reached.items():
            closed, ends = _gap_closed(values, reached["sfs"], best)
            low, high = (None, None) if ends is None else ends
            rows.append(
                {
                    "rate_rps": rate,
                    "policy": policy,
                    **spread("on_time_utility", values),
                    **spread("distance", best - values),
                    "gap_closed": closed,
                    "gap_closed_low": low,
                    "gap_closed_high": high,
                }
            )
            if policy.startswith("sfs") and rate in (8.0, 16.0):
                what = f"distance of {policy} to the bound, {rate:g} requests/s"
                claims.append(Claim(what, None, *mean_of(best - values), ""))
        left = gain(best, reached["sfs"])
        claims.append(Claim(f"what the bound leaves over sfs, {rate:g} requests/s", None, *left, "%", is_main=True))
        closed, ends = _gap_closed(reached["sfs_plus"], reached["sfs"], best)
        what = f"share of that gap which sfs_plus closes, {rate:g} requests/s"
        claims.append(Claim(what, None, *_percent(closed, ends), "%", is_main=True))
    return Figure(
        key="bound",
        title="Distance to the fluid bound",
        table=pl.DataFrame(rows, infer_schema_length=None),
        claims=claims,
        moved_by=(
            "What the predictions know: the bound is for the shipped predictors. It leaves end effects, noise and "
            "waiting out, so part of the distance cannot be closed by any router. gap_closed is the share of the "
            "distance between sfs and the bound that a policy covers."
        ),
        plot=Plot("rate_rps", "on_time_utility", "policy"),
        shown=("rate_rps", "policy", "on_time_utility", "distance", "gap_closed"),
        moved_by_short="end effects, waiting and noise, which the bound leaves out",
        grid=Grid(("policy",), "rate_rps", "gap_closed", "share of the gap between sfs and the bound"),
    )


def _gap_closed(values: FloatArray, sfs: FloatArray, best: FloatArray) -> tuple[float | None, Interval | None]:
    """Return the share of the mean gap between SFS and the bound that a policy covers, with its interval."""
    gap = float((best - sfs).mean())
    if gap <= 0:
        return None, None
    return mean_of((values - sfs) / gap)


def _percent(share: float | None, ends: Interval | None) -> tuple[float | None, Interval | None]:
    scaled = None if ends is None else Interval(100 * ends.low, 100 * ends.high)
    return None if share is None else 100 * share, scaled
