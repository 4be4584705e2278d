"""`simcluster sweep`."""

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from simcluster.cli import experiments as common
from simcluster.errors import ConfigError
from simcluster.experiment.cells import CellFailure
from simcluster.experiment.executors import Outcome
from simcluster.experiment.fields import Axis, combine, parse_axis
from simcluster.experiment.plan import Place, Plan, make_points, measure_text, seed_text
from simcluster.experiment.store import write_table
from simcluster.experiment.sweep import cells_table, summary_rows, sweep, tidy_table
from simcluster.records import write_json
from simcluster.report.comparison_tables import sweep_table
from simcluster.report.tables import footnotes

__all__ = ["sweep_fields"]

_DEFAULT_SEEDS = 3


def sweep_fields(
    scenario: common.ScenarioName,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="FIELD=VALUE,VALUE,...; may be given several times; [*]: every instance."),
    ] = None,
    zipped: Annotated[bool, typer.Option("--zip", help="First values together, then second ones; not a grid.")] = False,
    rates: common.Rates = None,
    policies: common.Policies = None,
    policy: common.Policy = None,
    seeds: Annotated[int, typer.Option(min=1, max=100_000, help="Number of seeds.")] = _DEFAULT_SEEDS,
    seed: common.Seed = None,
    trace: common.Trace = None,
    recipe: common.Recipe = None,
    executor: common.Executor = "local",
    workers: common.Workers = None,
    out: common.Out = None,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Run policies over values of any scenario fields.

    Fields are named by their path as `simcluster scenario show` prints them. With --out, cells.parquet has one row per
    point, policy and seed, and summary.parquet one per point and policy.

    Examples:
    * `simcluster sweep quickstart --set routing.refresh_interval_s=0,0.05,0.5 --policies sfs,random --out runs/stale`

    * `simcluster sweep quickstart --set 'cluster.instances[0].replicas=1,2' --set workload.rate_scale=1,2 --zip`

    * `simcluster sweep quickstart --set 'cluster.instances[*].true_model.noise.sigma=0,0.03,0.1' --rates 4,8 --json`
    """
    loaded = common.load(scenario, policies, policy, seed, trace, recipe, show=not quiet)
    axes = [parse_axis(text, loaded.scenario) for text in assignments or []]
    _check_axes(axes, rates)
    fields = combine(axes, zipped=zipped)
    points = make_points(loaded.scenario, fields, common.chosen_rates(loaded, rates), loaded.base)
    plan = Plan(loaded.path, points, loaded.policies)
    common.quietly([f"warning: {each}" for each in loaded.world.warnings], quiet=quiet)
    what = {"kind": "sweep", "scenario": loaded.scenario.name, "fields": [axis.path for axis in axes]}
    first = loaded.scenario.seed
    chosen = list(range(first, first + seeds))
    with common.open_runner(executor, workers, out, what, show=not quiet) as runner:
        outcomes = sweep(plan, chosen, runner)
    rows = summary_rows(plan, outcomes)
    result = {
        "schema_version": 1,
        **what,
        "scenario_sha256": loaded.scenario.digest(),
        "base_rate_rps": loaded.base.rate_rps,
        "base_rate_source": loaded.base.source,
        "seeds": chosen,
        "method": _method(loaded, chosen),
        "points": rows,
        **_cells(plan, outcomes),
    }
    if out is not None:
        write_table(out / "cells.parquet", cells_table(plan, outcomes))
        write_table(out / "summary.parquet", tidy_table(rows))
        write_json(out / "sweep.json", result)
    if as_json:
        common.print_json(result)
    else:
        _print(loaded, result, quiet=quiet)
    common.finish(result)


def _check_axes(axes: list[Axis], rates: str | None) -> None:
    if not axes and rates is None:
        raise ConfigError("--set: is missing; give FIELD=VALUE,VALUE,... or --rates")
    paths = {axis.path for axis in axes}
    clashing = paths & {
        "workload.rate_scale",
        "workload.rate_rps",
        "workload.trace",
        "workload.recipe",
        "workload.limit",
    }
    if rates is not None and clashing:
        raise ConfigError(
            f"--rates: {', '.join(sorted(clashing))} changes the rate too; sweep workload.rate_scale instead"
        )


def _cells(plan: Plan, outcomes: dict[Place, Outcome]) -> dict[str, Any]:
    """Return every cell with its whole summary."""
    cells: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for place, outcome in outcomes.items():
        point = plan.points[place.point]
        labels = {"point": place.point, **point.fields, "rate_rps": point.rate_rps}
        cell = {**labels, "policy": place.policy, "seed": place.seed}
        if isinstance(outcome, CellFailure):
            failures.append(cell | {"error": outcome.message})
        else:
            cells.append(cell | {"summary": outcome.summary})
            notes |= dict.fromkeys(outcome.notes["assumptions"])
    return {"cells": cells, "failures": failures, "assumptions": list(notes)}


def _method(loaded: common.Loaded, seeds: list[int]) -> list[str]:
    """Say how it was measured, for people."""
    lines = [f"{measure_text(loaded.scenario)}; percentiles: linear"]
    if loaded.base.rate_rps is not None:
        lines.append(f"base rate {loaded.base.rate_rps:.6g} req/s ({loaded.base.source})")
    lines.append(f"{seed_text(seeds)}; intervals: 95 % BCa bootstrap of the mean over seeds, not of differences")
    if loaded.is_one_trace:
        lines.append("every seed replays the same trace: intervals show step times and ties, not other traffic")
    return lines


def _print(loaded: common.Loaded, result: dict[str, Any], *, quiet: bool) -> None:
    title = f"{loaded.scenario.name}: {len(result['points'])} points and policies, {seed_text(result['seeds'])}"
    parts: list[RenderableType] = [sweep_table(result["points"], result["fields"], title)]
    failed = [
        f"FAILED point {each['point']}, {each['policy']}, seed {each['seed']}: {each['error']}"
        for each in result["failures"]
    ]
    if failed:
        parts.append(footnotes("cells without a result:", failed, style="bold"))
    if not quiet:
        parts.append(footnotes("this rests on:", [*result["method"], *result["assumptions"]]))
    common.print_all(parts)
