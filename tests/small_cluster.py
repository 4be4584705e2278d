"""Small clusters for tests: a trace, a card whose steps take 10 ms + 1 ms per token, a scenario, a run.

Everything goes through the files and the builder that a user's run goes through.
"""

import json
from pathlib import Path
from typing import Any

import polars as pl

from simcluster.card import Card, write_card
from simcluster.experiment.build import build_world
from simcluster.experiment.run import PolicyRun, run_policy
from simcluster.scenario import Scenario
from simcluster.shipped import find_file
from simcluster.world import World
from trace_files import write_file

__all__ = ["INSTANCE", "frame", "make_card", "make_world", "run_once", "scenario_data"]

INSTANCE: dict[str, Any] = {
    "card": "u.json",
    "price": {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0},
    "quality": 0.5,
    "true_model": {"noise": None},
}


def make_card(folder: Path, name: str = "u", **changes: Any) -> Path:
    """Write a card of a synchronous engine on a CPU with the step time of the cases; return its path."""
    shipped = find_file("qwen3-8b-h100", "calibration", ".json").read_text(encoding="utf-8")
    step = {"b0_s": 0.010, "b1_s": 0.001, "b2_s": 0.0, "b3_s": 0.0}
    content = json.loads(shipped) | {
        "name": name,
        "model": "M",
        "device": "CPU",
        "max_model_len": 4096,
        "kv_cache": {"num_gpu_blocks": 1001, "block_size": 16},
        "host_time_s": 0.0,
        "fits": {"eq9": step},
        "chosen_fit": "eq9",
    }
    path = folder / f"{name}.json"
    write_card(Card.model_validate_json(json.dumps(content | changes)), path)
    return path


def scenario_data(instances: int | list[dict[str, Any]] = 1, **sections: Any) -> dict[str, Any]:
    """Return a scenario as plain data: equal instances a, b, ... or changes of each one, and other sections."""
    changes = [{} for _ in range(instances)] if isinstance(instances, int) else instances
    entries = [INSTANCE | {"name": "abcdefgh"[number]} | change for number, change in enumerate(changes)]
    return {
        "name": "small",
        "workload": {"trace": "t.parquet"},
        "cluster": {"instances": entries},
        "slo": {"ttft": "none"},
    } | sections


def make_world(folder: Path, columns: dict[str, Any], data: dict[str, Any]) -> tuple[Scenario, World]:
    """Write the trace, and the card unless it is there, into a folder and build the world of a scenario."""
    if not (folder / "u.json").exists():
        make_card(folder)
    write_file(folder / "t.parquet", **columns)
    scenario = Scenario.model_validate(data)
    return scenario, build_world(scenario, folder / "small.yaml")


def run_once(
    folder: Path, columns: dict[str, Any], data: dict[str, Any], policy: str = "round_robin"
) -> tuple[PolicyRun, pl.DataFrame]:
    """Run one policy and return the run and its table of requests."""
    scenario, world = make_world(folder, columns, data)
    run = run_policy(scenario, world, policy)
    return run, frame(run, "requests")


def frame(run: PolicyRun, name: str) -> pl.DataFrame:
    """Return a table of a run."""
    found = pl.from_arrow(run.tables[name])
    assert isinstance(found, pl.DataFrame)
    return found
