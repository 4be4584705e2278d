"""Scenarios drawn for recording are ones that vLLM can run, and cover what a scheduler can be asked."""

from typing import get_args

import numpy as np
import pytest

from simcluster import _native
from simcluster.conformance.record_draw import DrawnScenario, Kind, draw_scenario
from simcluster.conformance.replay import EngineLoop, scheduler_config

KINDS: tuple[Kind, ...] = get_args(Kind)


def _draws(kind: Kind, count: int = 200) -> list[DrawnScenario]:
    return [draw_scenario(kind, np.random.Generator(np.random.PCG64(seed))) for seed in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_scenario_keeps_vllms_rules(kind: Kind) -> None:
    for scenario in _draws(kind):
        config = scenario.config
        assert scheduler_config(config, "0.33.0").validate() == ""
        assert config["max_num_seqs"] <= config["max_num_batched_tokens"]
        assert config["max_num_active_seqs"] is None or config["max_num_active_seqs"] <= config["max_num_seqs"]
        longest = -(-config["max_model_len"] // config["block_size"])
        assert longest <= config["num_gpu_blocks"] - 1
        for request in scenario.requests:
            assert 1 <= request["prompt_len"] < config["max_model_len"]
            assert request["prompt_len"] == sum(count for _, count in request["prompt"])
            assert all(count >= 1 for _, count in request["prompt"])
            assert request["eos_at"] is None or 1 <= request["eos_at"] <= request["max_tokens"]
            assert request["abort_iter"] is None or request["abort_iter"] >= request["arrival_iter"]


@pytest.mark.parametrize("kind", KINDS)
def test_arrivals_do_not_go_back(kind: Kind) -> None:
    for scenario in _draws(kind, 50):
        at = [request["arrival_iter"] for request in scenario.requests]
        assert kind == "tight" or at == sorted(at)


def test_the_same_stream_gives_the_same_scenario() -> None:
    for kind in KINDS:
        assert _draws(kind, 3) == _draws(kind, 3)


@pytest.mark.parametrize("kind", ["small", "tight"])
def test_every_option_is_drawn_both_ways(kind: Kind) -> None:
    configs = [scenario.config for scenario in _draws(kind)]
    for name in configs[0]:
        assert len({config[name] for config in configs}) > 1, name
    requests = [request for scenario in _draws(kind) for request in scenario.requests]
    assert any(request["eos_at"] for request in requests)
    assert any(request["abort_iter"] is not None for request in requests)
    assert any(len(request["prompt"]) > 2 for request in requests)


def test_tight_pools_make_requests_give_way() -> None:
    preempted = 0
    for scenario in _draws("tight", 60):
        scheduler = _native.Scheduler(scheduler_config(scenario.config, "0.33.0"))
        loop = EngineLoop({"config": scenario.config, "requests": scenario.requests}, scheduler)
        for turn, _ in enumerate(loop.records()):
            if turn > 5000:
                break
        preempted += loop.totals.preemptions > 0
    assert preempted > 40
