"""What a run directory says about its run beside the tables: the metrics and what was run."""

import platform
import sys
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import simcluster
from simcluster.backends.vllm_setup import vllm_version
from simcluster.records import ESTIMATES, TableWriter
from simcluster.report.estimators import ESTIMATOR_COLUMNS, score_estimates
from simcluster.report.metrics import SUMMARY_COLUMNS, measured_window, summarise
from simcluster.routers import base_policy
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["Ended", "run_manifest", "run_summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        policy: name.
        num_sent: requests that were sent.
        clock_ps: the run's last instant [ps].
        interrupted: somebody ended it.
        decision_time_ns: time spent in the router's decisions [ns], or None where nobody took it.
        prefix_cache: hits in the instances' prefix caches, or None where nobody told.
        reports: what the routers tell.
    """

    policy: str
    num_sent: int
    clock_ps: int
    interrupted: bool
    decision_time_ns: int | None
    prefix_cache: dict[str, Any] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)


def run_summary(scenario: Scenario, world: World, writer: TableWriter, ended: Ended) -> dict[str, Any]:
    """Return the metrics of a run whose tables are complete, as plain data."""
    measure = scenario.measure
    scored = "estimates" in writer.stems
    columns = dict.fromkeys((*SUMMARY_COLUMNS, *(ESTIMATOR_COLUMNS if scored else ())))
    requests = writer.frame("requests", list(columns))
    stopped_early = ended.interrupted or (measure.horizon_s is None and not measure.drain)
    window = measured_window(
        requests,
        measure.warmup_s,
        None if ended.interrupted else measure.horizon_s,
        ended.clock_ps / PS_PER_S if stopped_early else None,
    )
    summary = summarise(requests, window, scenario.slo.tpot_s, sum(world.num_gpus))
    summary["not_submitted"] = len(world.known) - ended.num_sent
    summary["interrupted"] = ended.interrupted
    summary["needs_truth"] = base_policy(ended.policy) == "oracle"
    summary["prefix_cache"] = ended.prefix_cache
    summary["estimators"] = (
        score_estimates(requests, writer.frame("estimates", list(ESTIMATES.names)), window) if scored else None
    )
    summary["regret"] = None
    summary["cards"] = {spec.card: spec.badge for spec in world.instances}
    summary["policy_reports"] = ended.reports
    taken_ns = ended.decision_time_ns
    summary["mean_decision_us"] = None if taken_ns is None else taken_ns / max(ended.num_sent, 1) / 1e3
    return summary


def run_manifest(scenario: Scenario, world: World, policy: str, engine: str) -> dict[str, Any]:
    """Return what was run.

    Args:
        scenario: as it was run.
        world: what it fixes.
        policy: name.
        engine: what served the requests: native, vllm, or live.
    """
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
                "card_badge": spec.badge,
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
