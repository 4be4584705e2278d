"""A run on a recipe and the replay of the trace made from it are the same run (C061)."""

from typing import Any

import pytest
import yaml

from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import Scenario
from simcluster.workload.recipe import load_recipe
from simcluster.workload.synth import make_trace
from simcluster.workload.trace_writer import write_trace
from small_cluster import make_card, scenario_data


@pytest.mark.parametrize("policy", ["round_robin", "shortest_queue", "sfs"])
@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_a_replay_of_an_exported_workload_repeats_the_run(tmp_path, rate, policy):
    recipe: dict[str, Any] = {
        "name": "shared-prefixes",
        "seed": 42,
        "requests": 200,
        "arrivals": {"kind": "poisson", "rate_rps": rate},
        "lengths": {
            "kind": "drawn",
            "prompt": {"median": 40, "sigma": 0.8},
            "answer": {"median": 12, "sigma": 0.8},
        },
        "sessions": {
            "turns": {"median": 3, "sigma": 0.5},
            "think_s": {"median": 0.2, "sigma": 0.5},
            "prefix_tokens": 64,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    make_card(tmp_path, kv_cache={"num_gpu_blocks": 301, "block_size": 16}, max_model_len=4096)
    write_trace(make_trace(load_recipe(tmp_path / "recipe.yaml")), tmp_path / "exported.parquet")
    tables = []
    for workload in ({"recipe": "recipe.yaml"}, {"trace": "exported.parquet"}):
        data = scenario_data([{}, {}], seed=42) | {"workload": workload}
        scenario = Scenario.model_validate(data)
        run = run_policy(scenario, build_world(scenario, tmp_path / "s.yaml"), policy)
        tables.append(run.tables["requests"])
    assert tables[0].num_rows == 200
    assert tables[0].equals(tables[1])
    assert sum(tables[0]["cached_tokens"].to_pylist()) > 0
