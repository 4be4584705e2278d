"""Run one scenario under one or several policies, all meeting the same requests."""

import contextlib
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import polars as pl
import pyarrow as pa

import simcluster
from simcluster import _native
from simcluster.backends.base import EngineFactory
from simcluster.backends.simulated import SimulatedCluster
from simcluster.backends.vllm_engine import vllm_engine_factory
from simcluster.backends.vllm_setup import vllm_version
from simcluster.experiment.tables import decisions_table, estimates_table, instances_table, requests_table
from simcluster.records import write_json, write_run
from simcluster.report.estimators import score_estimates
from simcluster.report.metrics import Window, measured_window, summarise
from simcluster.report.regret import regret
from simcluster.routers import base_policy, folder_names
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S
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
        tables: tables by file stem: requests, decisions, instances.
        manifest: what was run.
    """

    policy: str
    summary: dict[str, Any]
    tables: dict[str, pa.Table]
    manifest: dict[str, Any]


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
        out: run directory, or None to write nothing.
        on_progress: called with the policy and the number of requests sent.
        engine: what schedules inside the instances: the native engine, or the installed vLLM's own classes.

    Raises:
        SimulationError: an engine makes no progress.
        ConfigError: the run directory cannot be written, or vLLM is missing or cannot run the instances.
    """
    runs: list[PolicyRun] = []
    folders = folder_names(policies)
    for policy in policies:
        run = run_policy(scenario, world, policy, on_progress, engine)
        runs.append(run)
        if out is not None:  # after each policy, so that what is there is valid if a later one fails
            write_run(out / folders[policy], run.manifest, run.tables, run.summary)
            write_json(out / "summary.json", {"policies": {run.policy: run.summary for run in runs}})
        if run.summary["interrupted"]:
            break
    _add_regrets(runs)
    if out is not None:
        for run in runs:
            write_json(out / folders[run.policy] / "summary.json", run.summary)
        write_json(out / "summary.json", {"policies": {run.policy: run.summary for run in runs}})
    return runs


def run_policy(
    scenario: Scenario,
    world: World,
    policy: str,
    on_progress: Progress = lambda _policy, _sent: None,
    engine: EngineName = "native",
) -> PolicyRun:
    """Run one policy; the arguments are those of `run_policies`.

    Raises:
        SimulationError: an engine makes no progress.
        ConfigError: vLLM is missing or cannot run the instances.
    """
    build_engine = engine_factory(engine, world)
    cluster = SimulatedCluster(
        world, scenario, policy, on_progress=lambda sent: on_progress(policy, sent), build_engine=build_engine
    )
    with _stop_on_interrupt(cluster.interrupt):
        cluster.run()
    ledger = cluster.ledger
    tables = {"requests": requests_table(ledger), "instances": instances_table(ledger)}
    if scenario.output.decisions != "off":
        tables["decisions"] = decisions_table(ledger)
    estimates = estimates_table(ledger, cluster.predictions)
    if estimates is not None:
        tables["estimates"] = estimates
    return PolicyRun(policy, _summary(scenario, cluster, tables), tables, _manifest(scenario, world, policy, engine))


def _summary(scenario: Scenario, cluster: SimulatedCluster, tables: dict[str, pa.Table]) -> dict[str, Any]:
    ledger, measure = cluster.ledger, scenario.measure
    requests = _frame(tables["requests"])
    stopped_early = cluster.interrupted or (measure.horizon_s is None and not measure.drain)
    window = measured_window(
        requests,
        measure.warmup_s,
        None if cluster.interrupted else measure.horizon_s,
        ledger.clock_ps / PS_PER_S if stopped_early else None,
    )
    summary = summarise(requests, window, scenario.slo.tpot_s, sum(cluster.world.num_gpus))
    summary["not_submitted"] = len(cluster.world.known) - ledger.num_sent
    summary["interrupted"] = cluster.interrupted
    summary["needs_truth"] = base_policy(cluster.policy) == "oracle"
    summary["prefix_cache"] = _prefix_cache(cluster)
    summary["estimators"] = (
        score_estimates(requests, _frame(tables["estimates"]), window) if "estimates" in tables else None
    )
    summary["regret"] = None
    summary["policy_reports"] = cluster.reports()
    summary["mean_decision_us"] = cluster.decision_time_ns / max(ledger.num_sent, 1) / 1e3
    return summary


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _add_regrets(runs: list[PolicyRun]) -> None:
    """Compare every policy with the oracle, if that is among them and was not cut short."""
    best = next((run for run in runs if run.policy == "oracle" and not run.summary["interrupted"]), None)
    if best is None:
        return
    oracle = _frame(best.tables["requests"])
    for run in runs:
        window = Window(*run.summary["window_s"])
        run.summary["regret"] = regret(_frame(run.tables["requests"]), oracle, window)


def _prefix_cache(cluster: SimulatedCluster) -> dict[str, Any]:
    """Sum up prefix hits [tokens]; recomputation after a preemption is kept apart."""
    stats = [engine.prefix_stats for engine in cluster.engines]
    queries, hits, preempted_queries, preempted_hits = (sum(column) for column in zip(*stats, strict=True))
    return {
        "queries": queries,
        "hits": hits,
        "hit_rate": hits / queries if queries else None,
        "preempted_queries": preempted_queries,
        "preempted_hits": preempted_hits,
    }


def _manifest(scenario: Scenario, world: World, policy: str, engine: EngineName) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "policy": policy,
        "engine": engine,
        "seed": scenario.seed,
        "scenario": scenario.resolved(),
        "scenario_sha256": scenario.digest(),
        "inputs": world.inputs,
        "instances": [
            {
                "name": spec.name,
                "model": spec.model,
                "card": spec.card,
                "num_gpus": gpus,
                "true_model": model.description,
            }
            for spec, model, gpus in zip(world.instances, world.true_models, world.num_gpus, strict=True)
        ],
        "assumptions": list(world.assumptions),
        "warnings": list(world.warnings),
        "trace_notes": list(world.notes),
        "versions": {
            "simcluster": simcluster.__version__,
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            **({"vllm": vllm_version()} if engine == "vllm" else {}),
        },
        "command": sys.argv[1:] if sys.argv and sys.argv[0].endswith("simcluster") else None,
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
