"""Policies on whole simulated clusters: shedding, exploring, what routers observe, independence of random streams."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import recording_policy
from engine_helpers import MS
from policy_helpers import make_request, make_router, make_specs, make_view
from simcluster.backends.simulated import SimulatedCluster
from simcluster.experiment.build import build_world
from simcluster.experiment.run import PolicyRun, run_policies, run_policy
from simcluster.routers import SHED
from simcluster.scenario import Scenario, load_scenario, override
from simcluster.world import World
from small_cluster import frame, make_world, run_once, scenario_data

RECORDER = "recording_policy:RoundRobin"


@pytest.fixture(scope="module")
def quickstart() -> tuple[Scenario, World]:
    scenario, path = load_scenario("quickstart")
    scenario = override(scenario, rate_scale=1.5)
    scenario = scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"limit": 300})})
    return scenario, build_world(scenario, path)


@pytest.fixture
def log() -> Iterator[list[Any]]:
    recording_policy.LOG.clear()
    recording_policy.RoundRobin.built = 0
    yield recording_policy.LOG
    recording_policy.LOG.clear()


# ---- admission ---------------------------------------------------------------------------------------------------


def test_admission_turns_a_request_away_only_if_nobody_is_expected_to_be_in_time() -> None:
    """One step of 10 + 100 ms per request, at 1 ms; a works on another one until 110 ms, then takes 110 ms."""
    specs = make_specs(2)
    view = make_view(specs, [[(100, 9)], ()], at_ms=1)
    for policy in ("admission(sfs)", "admission(round_robin)", "admission(power_of_two:load=predicted_ttft,d=1)"):
        for target_ms, shed in ((109, True), (110, False), (None, False)):
            request = make_request(count=2, target_ms=target_ms, utility=[0.9, 0.1], arrival=MS)
            decision = make_router(policy, specs).route(request, view)
            assert (decision.instance == SHED) == shed, (policy, target_ms)
            assert (decision.reason == "shed") == shed
    ill = make_view(specs, [[(100, 9)], ()], at_ms=1, healthy=[True, False])
    for target_ms, shed in ((219, True), (220, False)):  # beside a decoding request: 111 ms
        request = make_request(count=2, target_ms=target_ms, arrival=MS)
        decision = make_router("admission(sfs)", specs).route(request, ill)
        assert (decision.instance == SHED) == shed


def test_admission_leaves_the_inner_choice_alone() -> None:
    specs = make_specs(3)
    view = make_view(specs, [[(40, 9)] * n for n in (3, 1, 2)], at_ms=1)
    request = make_request(target_ms=9000, utility=[0.1, 0.2, 0.3])
    for inner in ("shortest_queue", "sfs", "latency_agnostic", "least_tokens"):
        plain = make_router(inner, specs).route(request, view)
        assert make_router(f"admission({inner})", specs).route(request, view).instance == plain.instance


def overload(folder: Path, policy: str) -> tuple[PolicyRun, pl.DataFrame]:
    """Run 12 requests of 110 ms each that come at once to two instances, with a target of 350 ms."""
    columns = {"arrival_ns": [0] * 12, "prompt_tokens": [100] * 12, "output_tokens": [1] * 12}
    engine = {"max_num_batched_tokens": 128, "max_num_seqs": 1}
    data = scenario_data([{"engine": engine, "quality": 0.8}] * 2, slo={"ttft": 0.35}, output={"decisions": "full"})
    return run_once(folder, columns, data, policy)


def test_a_shed_request_is_rejected_and_counted_everywhere(tmp_path: Path) -> None:
    run, requests = overload(tmp_path, "admission(shortest_queue)")
    summary = run.summary
    assert summary["requests"] == {"submitted": 12, "finished": 6, "rejected": 6, "failed": 0, "unfinished": 0}
    assert summary["reasons"]["rejected"] == {"shed": 6}
    assert summary["slo_attainment"] == 0.5
    assert summary["on_time_utility"] == pytest.approx(0.8 * 6 / 12)
    assert summary["composition"]["all"] == pytest.approx({"a": 0.25, "b": 0.25})
    assert summary["ttft_s"]["count"] == 6
    assert summary["error_rate"] == 0
    shed = requests.filter(pl.col("status") == "rejected")
    assert shed.height == 6
    for column in ("instance", "model", "prompt_tokens", "first_token_ns", "quality", "utility"):
        assert shed[column].is_null().all()
    assert set(shed["cost_micro_usd"]) == {0.0}
    assert not shed["on_time"].any()
    assert (shed["end_ns"] == shed["arrival_ns"]).all()
    assert set(shed["reason"]) == {"shed"}


def test_the_decision_record_of_a_shed_request_has_no_instance_but_its_estimates(tmp_path: Path) -> None:
    run, _ = overload(tmp_path, "admission(shortest_queue)")
    shed = frame(run, "decisions").filter(pl.col("reason") == "shed")
    assert shed.height == 6
    for column in ("instance", "snapshot_age_s", "predicted_ttft_s", "predicted_utility", "score", "runner_up"):
        assert shed[column].is_null().all()
    assert all(min(values) > 0.35 for values in shed["candidate_ttft_s"])


def test_without_admission_the_same_requests_are_all_served_and_half_of_them_late(tmp_path: Path) -> None:
    run, _ = overload(tmp_path, "shortest_queue")
    assert (run.summary["requests"]["finished"], run.summary["slo_attainment"]) == (12, 0.5)


def test_requests_add_up_under_admission_at_any_load(quickstart: tuple[Scenario, World]) -> None:
    scenario, world = quickstart
    tight = world.known.slo_ttft_ps.copy()
    tight[::2] = 30 * 10**9  # 30 ms
    hasty = replace(world, known=replace(world.known, slo_ttft_ps=tight))
    summary = run_policy(scenario, hasty, "admission(sfs)").summary
    counts = summary["requests"]
    assert counts["submitted"] == 300 == sum(counts[key] for key in ("finished", "rejected", "failed", "unfinished"))
    assert counts["rejected"] == summary["reasons"]["rejected"]["shed"] > 0


# ---- epsilon -----------------------------------------------------------------------------------------------------


def test_epsilon_0_is_the_inner_policy_and_epsilon_1_is_random(quickstart: tuple[Scenario, World]) -> None:
    scenario, world = quickstart

    def places(policy: str) -> list[str]:
        return frame(run_policy(scenario, world, policy), "requests")["instance"].to_list()

    assert places("epsilon(shortest_queue,p=0)") == places("shortest_queue")
    decisions = frame(run_policy(scenario, world, "epsilon(shortest_queue,p=0.2)"), "decisions")
    explored = decisions.filter(pl.col("reason") == "explore")
    assert 30 < explored.height < 90
    assert explored["instance"].n_unique() == 3
    everything = frame(run_policy(scenario, world, "epsilon(largest,p=1)"), "decisions")
    assert set(everything["reason"]) == {"explore"}
    assert min(everything["instance"].value_counts()["count"]) > 70


def test_wrappers_need_the_view_only_if_they_or_the_inner_policy_do() -> None:
    specs = make_specs(2)
    needs = {
        policy: make_router(policy, specs).needs_view
        for policy in ("epsilon(random)", "epsilon(sfs)", "admission(random)", "epsilon(admission(random))")
    }
    assert list(needs.values()) == [False, True, True, True]


# ---- what routers observe ----------------------------------------------------------------------------------------


def test_a_router_hears_of_its_requests_in_order_when_its_clients_saw_it(
    quickstart: tuple[Scenario, World], log: list[Any]
) -> None:
    scenario, world = quickstart
    requests = frame(run_policy(scenario, world, RECORDER), "requests")
    arrival, first, end = (requests[f"{name}_ns"].to_list() for name in ("arrival", "first_token", "end"))
    now = 0
    heard: dict[str, list[int]] = {"dispatch": [], "first_token": [], "end": []}
    before: list[tuple[int, int, int]] = []
    for kind, request, value, ttft_s in log:
        if kind == "route":
            assert before == sorted(before)
            now, before = value, []
            continue
        heard[kind].append(request)
        assert value == request % 3
        if kind == "dispatch":
            continue
        seen_ns = first[request] if kind == "first_token" else end[request]
        before.append((seen_ns, kind == "end", request))
        if kind == "first_token":
            assert ttft_s == pytest.approx((seen_ns - arrival[request]) / 1e9, abs=1e-9)
    last = world.known.arrival_ps[-1] / 1000
    assert now == world.known.arrival_ps[-1]
    assert heard["dispatch"] == list(range(300))
    for kind, instants in (("first_token", first), ("end", end)):
        assert sorted(heard[kind]) == [k for k, seen_ns in enumerate(instants) if seen_ns <= last]


def test_nothing_is_told_before_the_client_has_seen_it(quickstart: tuple[Scenario, World], log: list[Any]) -> None:
    scenario, world = quickstart
    requests = frame(run_policy(scenario, world, RECORDER), "requests")
    seen_ns = {"first_token": requests["first_token_ns"].to_list(), "end": requests["end_ns"].to_list()}
    now = 0
    pending: list[tuple[str, int]] = []
    for kind, request, value, _ in log:
        if kind == "route":
            now = value
            for what, number in pending:
                assert seen_ns[what][number] * 1000 - 500 <= now
            pending = []
        elif kind != "dispatch":
            pending.append((kind, request))
    assert now == int(world.known.arrival_ps[-1])


@pytest.mark.parametrize("policy", ["ewma_latency", "vllm_dp", "kv_cost", "weighted_scorers:active=2", RECORDER])
def test_what_a_router_hears_does_not_depend_on_who_else_looks(
    quickstart: tuple[Scenario, World], log: list[Any], policy: str
) -> None:
    """Samples of the time series advance the engines at other instants; nothing else may change."""
    scenario, world = quickstart
    results = []
    for interval in (0.003, 1.0, 1000.0):
        log.clear()
        recording_policy.RoundRobin.built = 0
        output = scenario.output.model_copy(update={"sample_interval_s": interval})
        run = run_policy(scenario.model_copy(update={"output": output}), world, policy)
        results.append((list(log), run.tables["requests"], run.tables["decisions"]))
    for others in results[1:]:
        assert others[0] == results[0][0]
        assert others[1].equals(results[0][1])
        assert others[2].equals(results[0][2])


def test_each_of_several_routers_hears_of_its_own_requests_alone(
    quickstart: tuple[Scenario, World], log: list[Any]
) -> None:
    scenario, world = quickstart
    routing = scenario.routing.model_copy(update={"replicas": 3})
    run_policy(scenario.model_copy(update={"routing": routing}), world, RECORDER)
    heard = [(request, number) for kind, request, _, number in log if kind in ("dispatch", "end")]
    assert len(heard) > 300 + 150  # a router hears nothing more after its last decision
    assert all(number == request % 3 for request, number in heard)


def test_rejected_and_cancelled_requests_end_for_the_router_too(tmp_path: Path, log: list[Any]) -> None:
    columns = {
        "arrival_ns": [0, 0, 0, 9 * 10**9],
        "prompt_tokens": [5000, 100, 100, 4],
        "output_tokens": [1, 500, 1, 1],
        "cancel_s": [None, 0.5, None, None],
    }
    scenario, world = make_world(tmp_path, columns, scenario_data(1))
    requests = frame(run_policy(scenario, world, RECORDER), "requests")
    assert requests["status"].to_list() == ["rejected", "failed", "finished", "finished"]
    told = [(kind, request) for kind, request, *_ in log if kind in ("first_token", "end")]
    assert sorted(told) == [("end", 0), ("end", 1), ("end", 2), ("first_token", 1), ("first_token", 2)]


def test_a_router_without_observers_costs_no_collection(quickstart: tuple[Scenario, World]) -> None:
    scenario, world = quickstart
    listens = {
        policy: SimulatedCluster(world, scenario, policy)._observations.wanted(0)
        for policy in (
            "round_robin",
            "sfs",
            "cache_aware",
            "epsilon(sfs)",
            "ewma_latency",
            "epsilon(vllm_dp)",
            RECORDER,
        )
    }
    assert [policy for policy, wanted in listens.items() if wanted] == ["ewma_latency", "epsilon(vllm_dp)", RECORDER]


# ---- on a cluster ------------------------------------------------------------------------------------------------


def test_ewma_moves_away_from_an_instance_that_gets_slow(tmp_path: Path) -> None:
    """b is ten times slower than a; after the first answers only exploration goes there."""
    instances = [{}, {"true_model": {"noise": None, "scale": 10.0}}]
    n = 200
    columns = {"arrival_ns": [k * 10**9 for k in range(n)], "prompt_tokens": [20] * n, "output_tokens": [2] * n}
    _, requests = run_once(tmp_path, columns, scenario_data(instances), "ewma_latency")
    places = requests["instance"].to_list()
    assert places[:2] == ["a", "b"]
    assert 0 < places[2:].count("b") < 20
    _, requests = run_once(tmp_path, columns, scenario_data(instances), "ewma_latency:explore=0")
    assert requests["instance"].to_list() == ["a", "b"] + ["a"] * (n - 2)


def test_cache_aware_turns_shared_prefixes_into_hits(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    n = 240
    groups = rng.integers(0, 12, n).tolist()
    columns = {
        "arrival_ns": np.arange(n) * 300 * 10**6,
        "prompt_tokens": [160] * n,
        "output_tokens": [4] * n,
        "prefix_hashes": [
            [int(g) * 100 + k for k in range(8)] + [10**6 + i] * 1 + [10**7 + i] for i, g in enumerate(groups)
        ],
        "metadata": {"simcluster.prefix_block_size": "16"},
    }
    data = scenario_data(3, routing={"tie": "rotate"})
    rate = {
        policy: run_once(tmp_path, columns, data, policy)[0].summary["prefix_cache"]["hit_rate"]
        for policy in ("random", "cache_aware", "prefix_hash:tokens=128", "kv_cost", "weighted_scorers")
    }
    assert rate["cache_aware"] > 0.74
    assert rate["prefix_hash:tokens=128"] > 0.74
    assert min(rate["kv_cost"], rate["weighted_scorers"]) > rate["random"] + 0.02
    assert rate["random"] < 0.7


def test_stale_views_herd_but_not_where_routers_count_their_own(tmp_path: Path) -> None:
    """Forty requests between two refreshes: without the overlay all follow the same snapshot."""
    columns = {"arrival_ns": [10**9] * 40, "prompt_tokens": [4] * 40, "output_tokens": [50] * 40}
    spread = {}
    for policy in ("shortest_queue", "least_tokens", "vllm_dp", "kv_cost"):
        routing = {"refresh_interval_s": 5.0, "overlay": False}
        _, requests = run_once(tmp_path, columns, scenario_data(4, routing=routing), policy)
        spread[policy] = requests["instance"].n_unique()
    assert spread == {"shortest_queue": 1, "least_tokens": 1, "vllm_dp": 4, "kv_cost": 4}


def test_several_vllm_routers_start_at_different_instances(tmp_path: Path) -> None:
    columns = {"arrival_ns": [0] * 4, "prompt_tokens": [4] * 4, "output_tokens": [50] * 4}
    routing = {"replicas": 4, "refresh_interval_s": 5.0}
    _, requests = run_once(tmp_path, columns, scenario_data(4, routing=routing), "vllm_dp")
    assert requests["instance"].to_list() == ["a", "b", "c", "d"]


# ---- C043 --------------------------------------------------------------------------------------------------------


def test_policies_and_the_number_of_instances_change_no_arrival_and_no_length_c043() -> None:
    scenario, path = load_scenario("quickstart")
    data = scenario.model_dump() | {"seed": 7}
    data["workload"] |= {"trace": None, "recipe": "quickstart", "limit": 200}
    instances = data["cluster"]["instances"]
    worlds, tables = [], []
    for count in (2, 3):
        chosen = Scenario.model_validate(data | {"cluster": {"instances": instances[:count]}})
        world = build_world(chosen, path)
        worlds.append(world)
        for run in run_policies(chosen, world, ["round_robin", "random"]):
            tables.append(frame(run, "requests"))
    for name in ("arrival_ps", "max_tokens", "slo_ttft_ps"):
        np.testing.assert_array_equal(getattr(worlds[0].known, name), getattr(worlds[1].known, name))
    np.testing.assert_array_equal(worlds[0].truth.output_tokens, worlds[1].truth.output_tokens[:, :2])
    np.testing.assert_array_equal(worlds[0].known.prompt_tokens, worlds[1].known.prompt_tokens[:, :2])
    columns = ["request_id", "task", "arrival_ns", "prompt_tokens", "slo_ttft_s"]
    assert all(table[columns].equals(tables[0][columns]) for table in tables[1:])
    pairs = [(tables[0], tables[1]), (tables[0], tables[2]), (tables[2], tables[3])]
    for one, other in pairs:  # where a request went to the same instance, its answer is the same
        same = one["instance"] == other["instance"]
        assert same.sum() > 30
        assert (one.filter(same)["output_tokens"] == other.filter(same)["output_tokens"]).all()
        assert not same.all()
