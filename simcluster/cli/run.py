"""`simcluster run`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from simcluster.cli.building import built
from simcluster.cli.wide import print_wide
from simcluster.experiment.coverage_check import coverage_warnings
from simcluster.experiment.run import EngineName, PolicyRun, engine_factory, run_policies
from simcluster.records import output_folder
from simcluster.report.estimator_tables import estimator_table
from simcluster.report.tables import comparison, composition_table, footnotes
from simcluster.routers import check_estimator, check_policy, located, split_list
from simcluster.scenario import Scenario, load_scenario, override
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["run"]

_MOST_NAMED = 6  # instances whose shares fit into a table


def run(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or the name of a shipped one.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policy to run; may be given several times; see `simcluster policy list`."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace instead of the scenario's workload.")] = None,
    rate_scale: Annotated[float | None, typer.Option(help="Multiply the arrival rate by this.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed instead of the scenario's.")] = None,
    decisions: Annotated[
        Literal["winner", "full", "off"] | None,
        typer.Option(help="How much of each decision to keep."),
    ] = None,
    estimators: Annotated[
        str | None,
        typer.Option(help="Score these TTFT estimators too, without letting them decide: sfs,throughput,lps."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a run directory here.")] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="What schedules in the instances; vllm: the installed vLLM's own classes, slow, same results."
        ),
    ] = "native",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks.")] = False,
) -> None:
    """Run a scenario under one or several policies and compare them.

    Every policy meets the same requests. Results go to standard output, progress and remarks to standard error.

    Examples:
    * `simcluster run quickstart`

    * `simcluster run quickstart -p sfs -p shortest_queue --rate-scale 1.5 --out runs/fast`

    * `simcluster run quickstart -p power_of_two:load=tokens -p 'admission(sfs)' -p my_policy.py:MyRouter`

    * `simcluster run quickstart -p smallest --estimators sfs,throughput,lps:window_s=30`

    * `simcluster run quickstart --trace my_trace.parquet --json`
    """
    loaded, path = load_scenario(scenario)
    policy = policy or [located(name, path.parent) for name in loaded.routing.policies]
    loaded = override(
        loaded,
        policies=policy,
        trace=trace,
        rate_scale=rate_scale,
        seed=seed,
        decisions=decisions,
        estimators=None if estimators is None else list(dict.fromkeys(split_list(estimators))),
    )
    policies = _checked_policies(loaded)
    console = Console(stderr=True)
    with output_folder(out):
        world = built(loaded, path, show=not quiet)
        if not quiet:
            _warn(console, world.warnings)
        engine_factory(engine, world)  # an engine that cannot run is told of before anything is shown
        with _progress(console, len(world.known), show=not quiet) as progress:
            runs = run_policies(loaded, world, policies, out, progress, engine)
    if as_json:
        result = {"policies": {item.policy: item.summary for item in runs}}
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        _print_tables(loaded, world, runs, quiet)
    if out is not None and not quiet:
        console.print(f"written to {out}", style="dim", highlight=False, markup=False)
    if not quiet:
        _warn(console, coverage_warnings(world, runs))
    if any(item.summary["interrupted"] for item in runs):
        console.print("stopped early: the last policy's numbers are partial", style="yellow")
        raise typer.Exit(130)


def _warn(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def _checked_policies(scenario: Scenario) -> list[str]:
    """Return the policies of a scenario, each once; all names are known, those of estimators too."""
    policies = list(dict.fromkeys(scenario.routing.policies))
    for name in policies:
        check_policy(name)
    for name in scenario.output.estimators:
        check_estimator(name)
    return policies


def _print_tables(scenario: Scenario, world: World, runs: list[PolicyRun], quiet: bool) -> None:
    summaries = {item.policy: item.summary for item in runs}
    n = len(world.known)
    span_s = int(world.known.arrival_ps[-1] - world.known.arrival_ps[0]) / PS_PER_S
    rate = f", {(n - 1) / span_s:.2f} req/s" if span_s > 0 else ""
    parts: list[RenderableType] = [
        comparison(summaries, f"{scenario.name}: {n:,} requests{rate}, {len(world.instances)} instances")
    ]
    names = [spec.name for spec in world.instances]
    if len(names) <= _MOST_NAMED:
        parts.append(composition_table(summaries, names))
    scores = estimator_table(summaries)
    if scores is not None:
        parts.append(scores)
    if not quiet:
        parts.append(footnotes("read this as:", _remarks(world, runs)))
    for part in parts:
        print_wide(part)


def _remarks(world: World, runs: list[PolicyRun]) -> list[str]:
    first = runs[0].summary
    return [
        f"window {first['window_s'][0]:.1f} to {first['window_s'][1]:.1f} s under {runs[0].policy}; percentiles: "
        f"{first['percentile_method']}; on-time utility: paper eq. 4, {world.cost_weight:g} per micro-dollar",
        *_regrets(runs),
        *_reports(runs),
        *world.notes,
        *world.assumptions,
    ]


def _regrets(runs: list[PolicyRun]) -> list[str]:
    """Say what the oracle got more, or that it did not run, if some policy predicts."""
    known = {run.policy: run.summary["regret"] for run in runs if run.summary["regret"] and run.policy != "oracle"}
    if known:
        parts = [f"{policy} {each['on_time_utility']:.4f}" for policy, each in known.items()]
        return [f"regret against the oracle, on-time utility per request: {', '.join(parts)}"]
    if any(run.summary["estimators"] for run in runs):
        return ["no regret is shown: the oracle is not among the policies"]
    return []


def _reports(runs: list[PolicyRun]) -> list[str]:
    """Repeat what policies tell about their runs, one line per router."""
    lines = []
    for item in runs:
        for report in item.summary["policy_reports"]:
            parts = [f"{key} {value:.4g}" for key, value in report.items() if isinstance(value, int | float)]
            lines += [f"{item.policy}: {', '.join(parts)}"] if parts else []
    return lines


class _Rate(ProgressColumn):
    """Requests per second of wall time."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} req/s" if speed else "", style="cyan")


@contextmanager
def _progress(console: Console, total: int, *, show: bool) -> Iterator[Callable[[str, int], None]]:
    if not show:
        yield lambda _policy, _sent: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(policy: str, sent: int) -> None:
            if policy not in tasks:
                tasks[policy] = bar.add_task(policy, total=total)
            bar.update(tasks[policy], completed=sent)

        yield report
