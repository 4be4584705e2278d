"""`simcluster live-compare`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from simcluster.cli.building import built
from simcluster.cli.wide import print_wide
from simcluster.errors import ConfigError
from simcluster.live.client.send import Outcome
from simcluster.live.compare.all_policies import MockOptions, Sight, compare_live, with_mock
from simcluster.live.compare.live_run import LiveSetup
from simcluster.records import output_folder
from simcluster.report.tables import footnotes, number, policy_table
from simcluster.routers import base_policy, check_policy, located, split_list
from simcluster.scenario import load_scenario, override

__all__ = ["live_compare"]

_SIDES = ("simulated", "live")
_ROWS = (  # of the table: metric, heading, digits, scale
    ("ttft_s_p50", "TTFT p50\nms", 2, 1e3),
    ("ttft_s_p99", "TTFT p99\nms", 1, 1e3),
    ("tpot_s_p50", "TPOT p50\nms", 3, 1e3),
    ("e2e_s_p50", "E2E p50\ns", 3, 1.0),
    ("slo_attainment", "in SLO\n%", 1, 100.0),
    ("on_time_utility", "on-time\nutility", 4, 1.0),
)


def live_compare(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or the name of a shipped one.")],
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="Policy; may be given several times.")
    ] = None,
    mock: Annotated[bool, typer.Option("--mock", help="Start mock servers; else the urls are used.")] = False,
    sight: Annotated[Sight, typer.Option(help="With --mock: what tells the router the servers' state.")] = "shm",
    speed: Annotated[float, typer.Option(min=1e-4, max=1e4, help="With --mock: simulated seconds per second.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first requests only.")] = None,
    rate_scale: Annotated[float | None, typer.Option(help="Multiply the arrival rate by this.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace instead of the scenario's workload.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed instead of the scenario's.")] = None,
    estimators: Annotated[str | None, typer.Option(help="Score these TTFT estimators too: sfs,throughput,lps.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write comparison.json and run directories, live/ and simulated/, here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Send a trace through the live router to servers, simulate the same, and show both side by side.

    For each policy the router runs in front of the instances' urls, or of fresh mock servers, and a client sends the
    trace at its own instants. Then the policy is simulated on the same requests. Policies see the trace's limits and
    the scenario's predictions, as in simulation; true answer lengths are looked up after the decision, for the server.

    Examples:
    * `simcluster live-compare quickstart --mock --speed 0.2 --limit 100 -p sfs -p shortest_queue`

    * `simcluster live-compare mine.yaml --limit 200 --out runs/live`
    """
    if not mock and (speed != 1 or sight != "shm"):
        raise ConfigError("--speed and --sight are for mock servers; add --mock, or leave them out")
    loaded, path = load_scenario(scenario)
    names = policy or [located(name, path.parent) for name in loaded.routing.policies if base_policy(name) != "oracle"]
    loaded = override(
        loaded,
        policies=list(dict.fromkeys(names)),
        trace=trace,
        rate_scale=rate_scale,
        seed=seed,
        limit=limit,
        decisions="winner" if loaded.output.decisions == "off" else None,
        estimators=None if estimators is None else list(dict.fromkeys(split_list(estimators))),
    )
    for name in loaded.routing.policies:
        check_policy(name)
    arguments = None
    if mock:
        loaded, arguments = with_mock(loaded, path, MockOptions(speed=speed, sight=sight, trace=trace))
    with _folders(out):
        world = built(loaded, path, show=not quiet)
        setup = LiveSetup(scenario=loaded, path=path, world=world, speed=speed, mock_arguments=arguments)
        with _progress(len(world.known), show=not quiet) as on_end:
            result = compare_live(setup, out, on_end)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        _print(result)
    if result["interrupted"]:
        Console(stderr=True).print("stopped early: the last policy's numbers are partial", style="yellow")
        raise typer.Exit(130)


@contextmanager
def _folders(out: Path | None) -> Iterator[None]:
    """Make sure that both run directories can be written."""
    with ExitStack() as stack:
        for side in ("live", "simulated"):
            stack.enter_context(output_folder(None if out is None else out / side))
        yield


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[str, Outcome], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(policy: str, _: Outcome) -> None:
            if policy not in tasks:
                tasks[policy] = bar.add_task(policy, total=total)
            bar.advance(tasks[policy])

        yield report


def _print(result: dict[str, Any]) -> None:
    print_wide(_metrics(result))
    print_wide(_composition(result["policies"]))
    remarks = []
    for policy, found in result["policies"].items():
        share, late = found["identical_decisions"], found["late_steps_share"]
        parts = [f"{number(share, 2, 100)} % of {found['compared']:,} decisions are identical"]
        if late is not None:
            parts.append(f"{late:.3%} of the mock servers' steps were told of over 1 % of the median TTFT late")
        missed = found["late_requests_share"]
        if missed is not None:
            parts.append(f"{missed:.3%} of the requests reached a mock server's engine later than in simulation")
        for name, sides in found["estimators"].items():
            both = ", ".join(f"{number(sides[side], 2, 1e3)} ms {side}" for side in ("simulated", "live"))
            parts.append(f"mean |predicted - observed| TTFT of {name}: {both}")
        lag = found["measuring"]["schedule_lag_s"]
        parts.append(
            f"requests were sent {number(lag['p99'], 2, 1e3)} ms late at p99, {number(lag['max'], 2, 1e3)} at most"
        )
        remarks += [f"{policy}: {part}" for part in parts]
    Console().print(footnotes("read this as:", remarks))


def _metrics(result: dict[str, Any]) -> Table:
    """Return three rows per policy: both sides, and how far simulation is from live."""
    title = f"{result['scenario']}: {result['requests']:,} requests, {result['servers']}, speed {result['speed']:g}"
    table = policy_table(title)
    for heading in ("", "finished", "rejected\nfail/unfin", *(row[1] for row in _ROWS)):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, found in result["policies"].items():
        for side in _SIDES:
            counts, metrics = found["requests"][side], found["metrics"]
            lost = f"{counts['rejected']}/{counts['failed']}/{counts['unfinished']}"
            cells = [number(metrics[name][side], digits, scale) for name, _, digits, scale in _ROWS]
            table.add_row(policy if side == _SIDES[0] else "", side, f"{counts['finished']:,}", lost, *cells)
        errors = [f"{number(metrics[name]['error'], 2, 100)} %" for name, *_ in _ROWS]
        table.add_row("", "error", "", "", *errors, end_section=True)
    return table


def _composition(policies: dict[str, dict[str, Any]]) -> Table:
    table = policy_table("where requests went: %")
    names = sorted({name for found in policies.values() for side in _SIDES for name in found["composition"][side]})
    for heading in ("", *names):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, found in policies.items():
        for side in _SIDES:
            shares = [number(found["composition"][side].get(name, 0.0), 1, 100) for name in names]
            table.add_row(policy if side == _SIDES[0] else "", side, *shares)
    return table
