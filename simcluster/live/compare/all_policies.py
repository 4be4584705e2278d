"""Run every policy live and in simulation, on the same requests, and put both side by side."""

import asyncio
import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simcluster.experiment.run import PolicyRun, run_policy
from simcluster.live.client.send import Outcome
from simcluster.live.compare.live_run import LiveSetup, run_live
from simcluster.live.compare.side_by_side import side_by_side
from simcluster.live.endpoints import publishing
from simcluster.live.open_files import allow_many_files
from simcluster.live.record import record_live_run
from simcluster.records import write_json, write_summary
from simcluster.routers import folder_names
from simcluster.scenario import Scenario

__all__ = ["MockOptions", "Sight", "compare_live", "with_mock"]

# The least that a request takes from when it is due to a mock server's engine.
_WAY_S = 0.001  # simulated
_WAY_WALL_S = 0.01  # of wall-clock time

Sight = Literal["shm", "metrics", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """How mock servers are run.

    Attributes:
        speed: simulated seconds per second.
        sight: what tells their state to the router.
        trace: instead of the scenario's workload, or None.
    """

    speed: float = 1.0
    sight: Sight = "shm"
    trace: Path | None = None


def with_mock(scenario: Scenario, path: Path, options: MockOptions) -> tuple[Scenario, list[str]]:
    """Return a scenario in front of mock servers, and the arguments of `simcluster mock` for these.

    Requests take 1 ms to an engine at least, and 10 ms of wall-clock time, in simulation as live: as a rule HTTP takes
    less, and thus makes no difference.

    Args:
        scenario: with its seed.
        path: where it was read.
        options: how they are run.
    """
    delay_s = max(scenario.routing.router_delay_s, _WAY_S, _WAY_WALL_S * options.speed)
    scenario = scenario.model_copy(update={"routing": scenario.routing.model_copy(update={"router_delay_s": delay_s})})
    arguments = [str(path), "--speed", str(options.speed), "--seed", str(scenario.seed)]
    if options.trace is not None:
        arguments += ["--trace", str(options.trace.absolute())]
    if options.sight == "shm":
        name = f"live-compare-{os.getpid()}"
        return publishing(scenario, name), [*arguments, "--publish", name]
    instances = [each.model_copy(update={"snapshot": options.sight}) for each in scenario.cluster.instances]
    cluster = scenario.cluster.model_copy(update={"instances": instances})
    return scenario.model_copy(update={"cluster": cluster}), arguments


def compare_live(
    setup: LiveSetup,
    out: Path | None = None,
    on_end: Callable[[str, Outcome], None] = lambda _policy, _outcome: None,
) -> dict[str, Any]:
    """Run every policy of a scenario on both sides; Ctrl-C ends the live run at hand and skips the rest.

    Args:
        setup: what is run.
        out: where run directories are written, as `live` and `simulated`, with `comparison.json`; None: nowhere.
        on_end: is told of every request that has ended live, with the policy.

    Returns:
        Plain data: what was run, and under `policies` what `side_by_side` says of each; `interrupted`.

    Raises:
        ConfigError: an instance has no url, a policy cannot run live, or the folder cannot be written.
        MockServersError: the mock servers do not start.
    """
    scenario, world = setup.scenario, setup.world
    allow_many_files()
    folders = folder_names(list(scenario.routing.policies))
    result: dict[str, Any] = {
        "scenario": scenario.name,
        "requests": len(world.known),
        "servers": "mock" if setup.is_mock else "real servers",
        "speed": setup.speed,
        "interrupted": False,
        "policies": {},
    }
    runs: dict[str, dict[str, PolicyRun]] = {"live": {}, "simulated": {}}
    for policy in scenario.routing.policies:
        sides = {side: None if out is None else out / side / folders[policy] for side in runs}
        gc.collect()
        gc.freeze()  # the world need not be looked at while times are taken
        try:
            ended, mock = asyncio.run(run_live(setup, policy, functools.partial(on_end, policy)))
        finally:
            gc.unfreeze()
        live = record_live_run(scenario, world, ended, sides["live"])
        simulated = run_policy(scenario, world, policy, folder=sides["simulated"])
        result["policies"][policy] = side_by_side(simulated, live, mock)
        for side, run in (("live", live), ("simulated", simulated)):
            runs[side][policy] = run
            if out is not None:
                write_summary(out / side, {name: each.summary for name, each in runs[side].items()})
        if ended.interrupted:
            result["interrupted"] = True
            break
    if out is not None:
        write_json(out / "comparison.json", result)
    return result
