"""The fluid bound: solved by hand, against the engine, above every policy."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simcluster import _native
from simcluster.errors import SimulationError
from simcluster.experiment.bound import fluid_bound, fluid_optimum, idle_ttft_s, work_s
from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import Scenario, load_scenario
from simcluster.units import PS_PER_S
from simcluster.world import World

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "paper.yaml"


def paper(noise: bool = True, **workload: Any) -> tuple[Scenario, World]:
    scenario, path = load_scenario(str(SCENARIO))
    data = scenario.model_dump()
    data["workload"] |= workload
    if not noise:
        for item in data["cluster"]["instances"]:
            item["true_model"]["noise"] = None
    scenario = Scenario.model_validate(data)
    return scenario, build_world(scenario, path)


def test_two_instances_by_hand() -> None:
    """Three requests worth 1.0 at A (2 s each) and 0.4 at B (1 s each); A has 3 s, B has 1 s.

    A takes one and a half of them (1.5), B one (0.4); half a request is dropped: 1.9 in all, 1.9 / 3 per request.
    """
    found = fluid_optimum(
        np.tile([1.0, 0.4], (3, 1)),
        np.tile([2.0, 1.0], (3, 1)),
        np.array([3.0, 1.0]),
        np.ones((3, 2), dtype=bool),
    )
    assert found.on_time_utility == pytest.approx(1.9 / 3)
    assert found.shares == pytest.approx([0.5, 1 / 3])
    assert found.load == pytest.approx([1.0, 1.0])


def test_scarce_time_goes_to_the_request_whose_advantage_per_second_is_largest() -> None:
    """A: 0.9 for either request, 2 s and 1 s; B: 0.5 and 0.1, free. A has 1 s.

    Request 1 gains 0.8 per second of A, request 0 gains 0.2: request 1 takes A whole, request 0 goes to B.
    """
    utility, work = np.array([[0.9, 0.5], [0.9, 0.1]]), np.array([[2.0, 0.0], [1.0, 0.0]])
    found = fluid_optimum(utility, work, np.array([1.0, 1.0]), np.ones((2, 2), dtype=bool))
    assert found.on_time_utility == pytest.approx((0.5 + 0.9) / 2)
    # Not allowed at A, it would lose 0.8 and the other could have half of A.
    forbidden = fluid_optimum(utility, work, np.array([1.0, 1.0]), np.array([[True, True], [False, True]]))
    assert forbidden.on_time_utility == pytest.approx((0.5 * 0.9 + 0.5 * 0.5 + 0.1) / 2)


def test_what_costs_more_than_it_is_worth_is_dropped_for_free() -> None:
    found = fluid_optimum(np.array([[-1.0]]), np.array([[1.0]]), np.array([9.0]), np.ones((1, 1), dtype=bool))
    assert found.on_time_utility == 0
    assert found.shares.tolist() == found.load.tolist() == [0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_idle_ttft_is_that_of_an_idle_engine(asynchronous: bool) -> None:
    _, world = paper(noise=False, limit=40)
    for spec in world.instances:
        spec.engine.async_scheduling = asynchronous
        spec.engine.max_num_batched_tokens = 2048
    expected = idle_ttft_s(world)
    for spec, model in zip(world.instances, world.true_models, strict=True):
        views = [_native.InstanceView(spec.engine, model.step_time, 100, True)]
        for row in range(40):
            prompt = world.known.prompt_tokens[row, spec.index : spec.index + 1]
            first = _native.estimate_first_token(views, row, prompt, np.array([50]), np.array([0]))[0]
            assert first / PS_PER_S == pytest.approx(expected[row, spec.index], rel=1e-6)


def test_no_engine_serves_a_burst_faster_than_the_work_that_the_bound_counts() -> None:
    _, world = paper(noise=False, limit=300)
    work = work_s(world)
    for spec, model in zip(world.instances, world.true_models, strict=True):
        engine = _native.Engine(spec.engine, model.step_time)
        for row in range(300):
            prompt, answer = world.known.prompt_tokens[row, spec.index], world.truth.output_tokens[row, spec.index]
            engine.submit(row, int(prompt), int(answer), 0)
        engine.advance_to(10**16)
        busy = engine.busy_time / PS_PER_S
        assert 0.6 < work[:, spec.index].sum() / busy < 1


def test_no_policy_is_above_the_bound() -> None:
    scenario, world = paper(limit=1000, rate_rps=16.0)
    bound = fluid_bound(world)
    assert (bound.load <= 1 + 1e-9).all()
    assert bound.shares.sum() <= 1 + 1e-9
    reached = {name: run_policy(scenario, world, name).summary["on_time_utility"] for name in ("sfs", "round_robin")}
    assert reached["round_robin"] < reached["sfs"] < bound.on_time_utility < 0.7


def test_the_bound_falls_with_the_load_and_with_targets_that_nobody_meets() -> None:
    values = [fluid_bound(paper(limit=500, rate_rps=rate)[1]).on_time_utility for rate in (2.0, 20.0, 60.0)]
    assert values[0] > values[1] > values[2] > 0
    scenario, path = load_scenario(str(SCENARIO))
    data = scenario.model_dump()
    data["workload"]["limit"] = 500
    data["slo"]["ttft_scale"] = 1e-3
    assert fluid_bound(build_world(Scenario.model_validate(data), path)).on_time_utility == 0


def test_replicas_share_the_work_of_their_model() -> None:
    scenario, path = load_scenario(str(SCENARIO))
    data = scenario.model_dump()
    data["workload"] |= {"limit": 500, "rate_rps": 40.0}
    one = fluid_bound(build_world(Scenario.model_validate(data), path))
    data["cluster"]["instances"][1]["replicas"] = 2
    two = fluid_bound(build_world(Scenario.model_validate(data), path))
    assert two.shares.shape == (4,)
    assert two.on_time_utility > one.on_time_utility


def test_a_world_without_time_has_no_bound() -> None:
    with pytest.raises(SimulationError, match="all requests arrive at one instant"):
        fluid_bound(paper(limit=1)[1])


def test_a_few_thousand_requests_on_three_instances_take_less_than_a_second() -> None:
    _, world = paper(limit=2000)
    before = time.process_time()
    fluid_bound(world)
    assert time.process_time() - before < 1.0
