"""Run one scenario under one or several policies, all meeting the same requests."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from simcluster import _native
from simcluster.backends.base import EngineFactory
from simcluster.backends.simulated import SimulatedCluster
from simcluster.backends.vllm_engine import vllm_engine_factory
from simcluster.experiment.summary import Ended, run_manifest, run_summary
from simcluster.experiment.tables import TableRecorder
from simcluster.records import FolderWriter, MemoryWriter, TableWriter, read_frame, write_json, write_summary
from simcluster.report.metrics import Window
from simcluster.report.regret import REGRET_COLUMNS, regret
from simcluster.routers import folder_names
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["EngineName", "PolicyRun", "engine_factory", "run_policies", "run_policy"]

Progress = Callable[[str, int], None]
EngineName = Literal["native", "vllm"]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Result of one policy.

    Attributes:
        policy: name.
        summary: metrics as plain data.
        tables: tables by file stem: requests, decisions, estimates, instances; empty for a run that was written.
        manifest: what was run.
        folder: where it was written, or None.
    """

    policy: str
    summary: dict[str, Any]
    tables: dict[str, pa.Table]
    manifest: dict[str, Any]
    folder: Path | None = None

    def frame(self, stem: str, columns: Sequence[str]) -> pl.DataFrame:
        """Return columns of a table, wherever it is."""
        return read_frame(self.tables[stem] if self.folder is None else self.folder / f"{stem}.parquet", columns)


def engine_factory(engine: EngineName, world: World) -> EngineFactory:
    """Return what builds the engines of a world.

    Raises:
        ConfigError: vLLM is asked for, but missing or unable to run the instances.
    """
    return vllm_engine_factory(world) if engine == "vllm" else _native.Engine


def run_policies(
    scenario: Scenario,
    world: World,
    policies: list[str],
    out: Path | None = None,
    on_progress: Progress = lambda _policy, _sent: None,
    engine: EngineName = "native",
) -> list[PolicyRun]:
    """Run several policies one after the other; Ctrl-C ends the current one and skips the rest.

    Args:
        scenario: the scenario.
        world: what it fixes.
        policies: names, as users write them.
        out: run directory, or None to write nothing; what it holds of other policies goes away.
        on_progress: called with the policy and the number of requests sent.
        engine: what schedules inside the instances: the native engine, or the installed vLLM's own classes.

    Raises:
        SimulationError: an engine makes no progress.
        ConfigError: the run directory cannot be written, or vLLM is missing or cannot run the instances.
    """
    runs: list[PolicyRun] = []
    folders = folder_names(policies)
    for policy in policies:
        folder = None if out is None else out / folders[policy]
        run = run_policy(scenario, world, policy, on_progress, engine, folder)
        runs.append(run)
        if out is not None:  # after each policy, so that what is there is valid if a later one fails
            write_summary(out, {run.policy: run.summary for run in runs})
        if run.summary["interrupted"]:
            break
    _add_regrets(runs)
    if out is not None:
        for run in runs:
            write_json(out / folders[run.policy] / "summary.json", run.summary)
        write_summary(out, {run.policy: run.summary for run in runs})
    return runs


def run_policy(
    scenario: Scenario,
    world: World,
    policy: str,
    on_progress: Progress = lambda _policy, _sent: None,
    engine: EngineName = "native",
    folder: Path | None = None,
) -> PolicyRun:
    """Run one policy; the arguments are those of `run_policies`, the folder is this policy's.

    Raises:
        SimulationError: an engine makes no progress.
        ConfigError: the folder cannot be written, or vLLM is missing or cannot run the instances.
    """
    stems = ["requests", "instances"] + ["decisions"] * (scenario.output.decisions != "off")
    if folder is None:
        memory = MemoryWriter(stems)
        summary, manifest = _run(scenario, world, policy, on_progress, engine, memory)
        return PolicyRun(policy, summary, memory.tables(), manifest)
    with FolderWriter(folder, stems) as writer:
        summary, manifest = _run(scenario, world, policy, on_progress, engine, writer)
        writer.finish(manifest, summary)
    return PolicyRun(policy, summary, {}, manifest, folder)


def _run(
    scenario: Scenario, world: World, policy: str, on_progress: Progress, engine: EngineName, writer: TableWriter
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one policy, its records going to a writer; return its metrics and what was run."""
    build_engine = engine_factory(engine, world)
    recorder = TableRecorder(world, writer)
    cluster = SimulatedCluster(
        world,
        scenario,
        policy,
        on_progress=lambda sent: on_progress(policy, sent),
        build_engine=build_engine,
        recorder=recorder,
    )
    with _stop_on_interrupt(cluster.interrupt):
        cluster.run()
    recorder.estimates(cluster.predictions)
    writer.close()
    ended = Ended(
        policy=policy,
        num_sent=cluster.num_sent,
        clock_ps=cluster.clock_ps,
        interrupted=cluster.interrupted,
        decision_time_ns=cluster.decision_time_ns,
        prefix_cache=_prefix_cache(cluster),
        reports=cluster.reports(),
    )
    return run_summary(scenario, world, writer, ended), run_manifest(scenario, world, policy, engine)


def _add_regrets(runs: list[PolicyRun]) -> None:
    """Compare every policy with the oracle, if that is among them and was not cut short."""
    best = next((run for run in runs if run.policy == "oracle" and not run.summary["interrupted"]), None)
    if best is None:
        return
    oracle = best.frame("requests", REGRET_COLUMNS)
    for run in runs:
        window = Window(*run.summary["window_s"])
        run.summary["regret"] = regret(run.frame("requests", REGRET_COLUMNS), oracle, window)


def _prefix_cache(cluster: SimulatedCluster) -> dict[str, Any]:
    """Sum up prefix hits [tokens]; recomputation after a preemption is kept apart."""
    queries, hits, preempted_queries, preempted_hits = cluster.loads()[:, 6:].sum(axis=0).tolist()
    return {
        "queries": queries,
        "hits": hits,
        "hit_rate": hits / queries if queries else None,
        "preempted_queries": preempted_queries,
        "preempted_hits": preempted_hits,
    }


@contextlib.contextmanager
def _stop_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first Ctrl-C into a clean stop; a second one interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        stop()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
