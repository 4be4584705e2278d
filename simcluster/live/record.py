"""Write what a client measured in front of live servers as an ordinary run directory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from simcluster.backends.ledger import DecisionLog
from simcluster.backends.predictions import Predictions
from simcluster.experiment.run import PolicyRun
from simcluster.experiment.summary import Ended, run_manifest, run_summary
from simcluster.experiment.tables import TableRecorder
from simcluster.live.client.measure import measuring_report, request_rows
from simcluster.live.client.send import Outcome
from simcluster.records import FolderWriter, MemoryWriter, TableWriter
from simcluster.routers.base import SHED, Decision
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["LiveRun", "record_live_run"]


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """What is left of a run against live servers.

    Attributes:
        policy: who decided.
        outcomes: of the requests that were sent.
        lag_ps: how late each was sent [ps].
        decisions: (number of the request, decision, age of what it rests on [ps] or -1, what estimators beside the
            policy expect of the chosen instance [s]), in order; a request that was tried again has several.
        estimators: names of these estimators.
        instance: where requests went that nobody decided about; -1: nowhere.
        clock_ps: the client's clock at the end [ps].
        samples: of the instances' load, as the table of instances, or None.
        interrupted: somebody ended it.
        how: what the manifest says about servers, speed and what was assumed.
    """

    policy: str
    outcomes: list[Outcome]
    lag_ps: list[int]
    decisions: list[tuple[int, Decision, int, Sequence[float]]] = field(default_factory=list)
    estimators: Sequence[str] = ()
    instance: int = -1
    clock_ps: int = 0
    samples: pa.Table | None = None
    interrupted: bool = False
    how: dict[str, Any] = field(default_factory=dict)

    def instances(self) -> dict[int, int]:
        """Return where each request went last, by number; SHED for one that was turned away."""
        return {index: decision.instance for index, decision, _, _ in self.decisions}


def record_live_run(scenario: Scenario, world: World, run: LiveRun, folder: Path | None = None) -> PolicyRun:
    """Turn a run against live servers into tables, metrics and a manifest, as those of a simulation are.

    Args:
        scenario: as it was run.
        world: the requests.
        run: what was measured.
        folder: the policy's directory, or None to write nothing.

    Raises:
        ConfigError: the folder cannot be written.
    """
    stems = ["requests", "instances"] + ["decisions"] * (scenario.output.decisions != "off")
    if folder is None:
        memory = MemoryWriter(stems)
        summary, manifest = _record(scenario, world, run, memory)
        return PolicyRun(run.policy, summary, memory.tables(), manifest)
    with FolderWriter(folder, stems) as writer:
        summary, manifest = _record(scenario, world, run, writer)
        writer.finish(manifest, summary)
    return PolicyRun(run.policy, summary, {}, manifest, folder)


def _record(
    scenario: Scenario, world: World, run: LiveRun, writer: TableWriter
) -> tuple[dict[str, Any], dict[str, Any]]:
    recorder = TableRecorder(world, writer)
    went = run.instances()
    shed = {index for index, instance in went.items() if instance == SHED}
    for each in run.outcomes:
        if each.index in shed:
            each.status, each.reason = "rejected", "shed"

    def instance_of(index: int) -> int:
        return went.get(index, run.instance)

    recorder.requests(request_rows(run.outcomes, instance_of))
    log = DecisionLog(len(world.instances), full=scenario.output.decisions == "full")
    predictions = Predictions(run.policy, run.estimators, len(world.known))
    for index, decision, age_ps, beside in run.decisions:
        log.add(index, decision, age_ps)
        predictions.record(index, decision, beside or [np.nan] * len(run.estimators))
    if scenario.output.decisions != "off" and len(log):
        recorder.decisions(log.take())
    recorder.estimates(predictions)
    if run.samples is not None and run.samples.num_rows:
        writer.write("instances", run.samples)
    writer.close()
    ended = Ended(
        policy=run.policy,
        num_sent=len(run.outcomes),
        clock_ps=run.clock_ps,
        interrupted=run.interrupted,
        decision_time_ns=None,
    )
    summary = run_summary(scenario, world, writer, ended)
    summary["measuring"] = measuring_report(world, run.outcomes, run.lag_ps, instance_of)
    manifest = run_manifest(scenario, world, run.policy, "live")
    manifest["live"] = run.how
    return summary, manifest
