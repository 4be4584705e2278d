"""`simcluster compare`."""

from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType

from simcluster.cli import experiments as common
from simcluster.errors import ConfigError
from simcluster.experiment.compare import Rules, compare
from simcluster.experiment.plan import Plan, make_points, measure_text, seed_text
from simcluster.records import write_json
from simcluster.report.comparison import BEST, METRICS
from simcluster.report.comparison_tables import load_table, rate_name
from simcluster.report.statistics import BLOCK_RESAMPLES, RESAMPLES
from simcluster.report.tables import footnotes

__all__ = ["compare_policies"]

_DEFAULT_SEEDS = 8  # enough for the signed rank test with up to seven policies

MetricName = Literal[
    "on_time_utility", "slo_attainment", "ttft_p50_s", "ttft_p99_s", "share_negative_utility", "cost_micro_usd"
]


def compare_policies(
    scenario: common.ScenarioName,
    policies: common.Policies = None,
    policy: common.Policy = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Number of seeds; default: 8, and 1 with a trace.")
    ] = None,
    seed: common.Seed = None,
    rates: common.Rates = None,
    metric: Annotated[MetricName, typer.Option(help="What verdicts and winners are about.")] = "on_time_utility",
    reference: Annotated[
        str | None, typer.Option(help="Policy that others are compared with, or best; default: the first.")
    ] = None,
    until_width: Annotated[
        float | None,
        typer.Option(help="Add seeds until no interval of a difference in the metric is wider than this."),
    ] = None,
    max_seeds: Annotated[int, typer.Option(min=1, max=100_000, help="Most seeds with --until-width.")] = 100,
    block_requests: Annotated[
        int | None, typer.Option(min=1, help="With a trace: requests per block of the bootstrap; default: chosen.")
    ] = None,
    trace: common.Trace = None,
    recipe: common.Recipe = None,
    executor: common.Executor = "local",
    workers: common.Workers = None,
    out: common.Out = None,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Compare policies over seeds and rates: which is better, by how much, and is it sure?

    For each seed all policies meet the same requests, so that differences are paired. Differences have BCa bootstrap
    intervals and Wilcoxon's signed rank test with Holm's correction. With a trace there is one sample of traffic, and
    blocks of it take the place of seeds.

    Examples:
    * `simcluster compare quickstart --recipe quickstart --policies shortest_queue,sfs --seeds 8`

    * `simcluster compare quickstart --recipe quickstart -p throughput -p sfs --rates 2,5,8,12 --out runs/compared`

    * `simcluster compare quickstart --trace my_trace.parquet --policies sfs,random --json`
    """
    loaded = common.load(scenario, policies, policy, seed, trace, recipe, show=not quiet)
    is_one_trace = loaded.is_one_trace
    rules = _rules(loaded, metric, reference, until_width, max_seeds, block_requests)
    first = loaded.scenario.seed
    count = seeds or (1 if is_one_trace else _DEFAULT_SEEDS)
    points = make_points(loaded.scenario, [{}], common.chosen_rates(loaded, rates), loaded.base)
    plan = Plan(loaded.path, points, loaded.policies, keep_requests=is_one_trace)
    common.quietly([f"warning: {each}" for each in loaded.world.warnings], quiet=quiet)
    what = {"kind": "comparison", "scenario": loaded.scenario.name}
    with common.open_runner(executor, workers, out, what, show=not quiet) as runner:
        found = compare(plan, range(first, first + count), runner, rules)
    result = {
        "schema_version": 1,
        **what,
        "scenario_sha256": loaded.scenario.digest(),
        "base_rate_rps": loaded.base.rate_rps,
        "base_rate_source": loaded.base.source,
        "method": _method(loaded, found),
        **found,
    }
    if out is not None:
        write_json(out / "compare.json", result)
    if as_json:
        common.print_json(result)
    else:
        _print(loaded, result, quiet=quiet)
    common.finish(result)


def _rules(
    loaded: common.Loaded,
    metric: str,
    reference: str | None,
    until_width: float | None,
    max_seeds: int,
    block_requests: int | None,
) -> Rules:
    if len(loaded.policies) < 2:
        raise ConfigError(f"--policies: found {', '.join(loaded.policies)}; give at least two to compare")
    reference = reference or loaded.policies[0]
    if reference not in (BEST, *loaded.policies):
        raise ConfigError(f"--reference = {reference!r}; must be best or one of {', '.join(loaded.policies)}")
    if until_width is not None and not 0 < until_width < 1e9:
        raise ConfigError(f"--until-width = {until_width:g}; must be a number above 0, in the unit of the metric")
    if until_width is not None and loaded.is_one_trace:
        raise ConfigError("--until-width: one trace has no more traffic to add; use --recipe, or leave it out")
    if block_requests is not None and not loaded.is_one_trace:
        raise ConfigError("--block-requests: seeds are independent and need no blocks; leave it out")
    return Rules(METRICS[metric], reference, until_width, max_seeds, block_requests)


def _method(loaded: common.Loaded, found: dict[str, Any]) -> list[str]:
    """Say how it was measured and decided, for people."""
    seeds, scenario, metric = found["seeds"], loaded.scenario, METRICS[found["metric"]]
    others = len(found["policies"]) - 1
    lines = [
        f"{measure_text(scenario)}; percentiles: linear",
        f"base rate {loaded.base.rate_rps:.6g} req/s ({loaded.base.source}); rates are set by "
        f"{'rate_scale' if scenario.workload.rate_rps is None else 'rate_rps, so that bursts last as long at each'}"
        if loaded.base.rate_rps is not None
        else f"no rate: {loaded.base.source}",
    ]
    if found["blocks"] is not None:
        lines += [
            f"one trace, {loaded.scenario.workload.trace}, is one sample of traffic: intervals say how sure a"
            " difference is for traffic like it, nothing about other days; --recipe draws anew for every seed",
            f"paired moving-block bootstrap, {found['blocks']['text']}; {BLOCK_RESAMPLES:,} resamples, percentile"
            f" intervals widened for few blocks; p: twice the share of resamples beyond 0{_holm(others)}",
        ]
        if len(seeds) > 1:
            lines.append(f"{seed_text(seeds)} draw step times and ties anew for the same requests; means over them")
    else:
        lines += [
            f"{seed_text(seeds)}: for each, all policies meet the same arrivals, lengths, qualities and targets",
            f"paired differences over seeds: 95 % BCa bootstrap intervals, {RESAMPLES:,} resamples, widened for few"
            f" seeds; p: Wilcoxon signed rank{_holm(others)}",
        ]
    lines.append(
        f"a difference is shown where the interval leaves out 0 and p is at most 0.05; {metric.label} decides; each"
        " load is judged by itself, and a winner is chosen after the fact"
    )
    if found["stopping"] is not None:
        looks = found["stopping"]["looks_at_seeds"]
        lines.append(
            f"stopped by interval width {found['stopping']['until_width']:g}: looked {len(looks)} times, at"
            f" {', '.join(map(str, looks))} seeds; intervals of repeated looks are slightly too narrow"
        )
    if found["needs_truth"]:
        lines.append(f"{', '.join(found['needs_truth'])} knows the truth and cannot win")
    return lines


def _holm(others: int) -> str:
    return f", Holm over {others} policies" if others > 1 else ""


def _print(loaded: common.Loaded, result: dict[str, Any], *, quiet: bool) -> None:
    title = f"{loaded.scenario.name}: {len(loaded.world.known):,} requests, {len(loaded.world.instances)} instances, "
    title += f"{seed_text(result['seeds'])}; reference {result['reference']}"
    verdicts = [f"{rate_name(load['rate_rps'])}: {line}" for load in result["loads"] for line in load["verdicts"]]
    if result["area"] is not None:
        verdicts += [f"area over all rates: {line}" for line in result["area"]["verdicts"]]
    verdicts += [f"FAILED {_cell_name(each)}: {each['error']}" for each in result["failures"]]
    parts: list[RenderableType] = [
        load_table(result["loads"], result["metric"], title),
        footnotes(f"verdicts on {METRICS[result['metric']].label}:", verdicts, style="bold"),
    ]
    if not quiet:
        notes = [*result["method"], *result["trace_notes"], *result["assumptions"]]
        parts.append(footnotes("this rests on:", notes))
    common.print_all(parts)


def _cell_name(cell: dict[str, Any]) -> str:
    return f"{cell['policy']}, seed {cell['seed']}, {rate_name(cell['rate_rps'])}"
