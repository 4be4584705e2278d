"""The policies: what each one looks at, C032 to C034, and what they share."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from engine_helpers import Ask, config, start, u_step
from simcluster import _native
from simcluster.errors import ConfigError
from simcluster.experiment.run import run_policy
from simcluster.request import Request
from simcluster.routers import POLICIES, build_router, check_policy
from simcluster.routers.base import ClusterView, Router
from simcluster.routers.objective import TieBreaker
from simcluster.routers.settings import RouterSettings
from small_cluster import frame, make_world, run_once, scenario_data


def router(policy: str, count: int = 2, rule: Any = "index", seed: int = 5) -> Router:
    generators = np.random.SeedSequence(seed).spawn(2)
    ties, own = (np.random.Generator(np.random.PCG64(each)) for each in generators)
    settings = RouterSettings(
        num_instances=count, objective="slo", latency_weight=1.0, ties=TieBreaker(rule, ties), rng=own
    )
    return build_router(policy, settings)


def request(*utility: float) -> Request:
    count = len(utility)
    ones = np.ones(count, dtype=np.int64)
    return Request(0, 0, ones, -1, 0, -1, ones, np.array(utility, dtype=np.float64))


def view_of(*views: _native.InstanceView) -> ClusterView:
    return ClusterView(0, 0, (), list(views), healthy=(True,) * len(views))


def idle_view(dispatched: int = 0) -> _native.InstanceView:
    view = _native.InstanceView(config(), u_step(), 10, True)
    for number in range(dispatched):
        view.record_dispatch(100 + number, 4, 10, 0)
    return view


def busy_view(running: int) -> _native.InstanceView:
    engine = start(config(), *(Ask(0, 4, 50) for _ in range(running)))
    engine.advance_to(10**12 // 10)
    view = idle_view()
    view.refresh(_native.Snapshot.capture(engine))
    return view


def places(folder: Path, policy: str, arrivals_ms: list[int], data: dict[str, Any], output: int = 3) -> list[str]:
    n = len(arrivals_ms)
    columns = {
        "arrival_ns": [ms * 10**6 for ms in arrivals_ms],
        "prompt_tokens": [4] * n,
        "output_tokens": [output] * n,
    }
    _, requests = run_once(folder, columns, data, policy)
    found: list[str] = requests["instance"].to_list()
    return found


# ---- each policy -----------------------------------------------------------------------------------------------


def test_round_robin_takes_each_instance_in_turn() -> None:
    rr, view = router("round_robin", 3), view_of(idle_view(), idle_view(), idle_view())
    assert [rr.route(request(0, 0, 9), view).instance for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_random_is_uniform_and_follows_its_own_stream() -> None:
    def draws(seed: int) -> list[int]:
        policy, view = router("random", 4, seed=seed), view_of(*(idle_view() for _ in range(4)))
        return [policy.route(request(0, 0, 0, 9), view).instance for _ in range(4000)]

    counts = Counter(draws(1))
    assert sorted(counts) == [0, 1, 2, 3]
    assert chisquare(list(counts.values())).pvalue > 0.01
    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_shortest_queue_counts_waiting_and_running_requests_c034() -> None:
    busy, queued = busy_view(8), idle_view(dispatched=1)
    assert (busy.num_waiting, busy.num_running) == (0, 8)
    assert (queued.num_waiting, queued.num_running) == (1, 0)
    assert router("shortest_queue").route(request(0, 0), view_of(busy, queued)).instance == 1
    assert router("shortest_queue").route(request(9, 0), view_of(queued, busy)).instance == 0


def test_always_busiest_is_the_opposite_of_shortest_queue() -> None:
    busy, queued = busy_view(3), idle_view(dispatched=1)
    assert router("always_busiest").route(request(0, 0), view_of(queued, busy)).instance == 1


def test_latency_agnostic_takes_the_largest_utility_however_long_the_queue() -> None:
    busy, idle = busy_view(8), idle_view()
    decision = router("latency_agnostic").route(request(0.2, 0.1), view_of(busy, idle))
    assert (decision.instance, decision.predicted_ttft_s) == (0, None)


def test_oracle_refuses_a_view_that_was_not_made_from_the_truth() -> None:
    with pytest.raises(ConfigError, match="policy 'oracle' needs the simulator's truth; choose another policy"):
        router("oracle").route(request(0.2, 0.1), view_of(idle_view(), idle_view()))


def test_an_unknown_policy_is_named_with_a_suggestion_or_the_list() -> None:
    with pytest.raises(ConfigError, match=r"policy 'shortest_que' is unknown; did you mean shortest_queue\?"):
        check_policy("shortest_que")
    with pytest.raises(ConfigError, match=r"policy 'xyz' is unknown; known: round_robin, .*sfs"):
        check_policy("xyz")


# ---- on a small cluster ----------------------------------------------------------------------------------------


def test_c032_simultaneous_arrivals_see_each_others_dispatches(tmp_path: Path) -> None:
    assert places(tmp_path, "shortest_queue", [0, 0, 0, 0], scenario_data(2)) == ["a", "b", "a", "b"]


def test_always_busiest_sends_a_burst_to_one_instance(tmp_path: Path) -> None:
    assert places(tmp_path, "always_busiest", [0, 0, 0, 5, 5, 9], scenario_data(3)) == ["a"] * 6


def test_round_robin_is_fair_over_any_number_of_requests(tmp_path: Path) -> None:
    counts = Counter(places(tmp_path, "round_robin", list(range(14)), scenario_data(4)))
    assert sorted(counts.values()) == [3, 3, 4, 4]


@pytest.mark.parametrize("policy", ["latency_agnostic", "shortest_queue", "sfs"])
def test_c033_equal_scores_follow_the_tie_rule(tmp_path: Path, policy: str) -> None:
    arrivals = [1000 * number for number in range(9)]  # each request has ended before the next one comes

    def run(rule: str, seed: int = 1) -> list[str]:
        return places(tmp_path, policy, arrivals, scenario_data(3, routing={"tie": rule}, seed=seed))

    assert run("index") == ["a"] * 9
    assert run("rotate") == ["a", "b", "c"] * 3
    assert run("random") == run("random")
    assert len({tuple(run("random", seed)) for seed in range(4)}) > 1
    assert set("".join(run("random"))) == {"a", "b", "c"}


def test_a_tie_rule_changes_nothing_where_there_are_no_ties(tmp_path: Path) -> None:
    arrivals = [7 * number for number in range(30)]
    instances = [{"quality": 0.9}, {"quality": 0.8}]  # utilities differ, so eq. 3 never meets a tie
    runs = [
        places(tmp_path, "sfs", arrivals, scenario_data(instances, routing={"tie": rule}, slo={"ttft": 0.05}))
        for rule in ("index", "rotate", "random")
    ]
    assert runs[0] == runs[1] == runs[2]
    assert set(runs[0]) == {"a", "b"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decides_every_request_and_says_why(tmp_path: Path, policy: str) -> None:
    columns = {"arrival_ns": [0] * 8, "prompt_tokens": [4] * 8, "output_tokens": [3] * 8}
    scenario, world = make_world(tmp_path, columns, scenario_data(2, output={"decisions": "full"}))
    decisions = frame(run_policy(scenario, world, policy), "decisions")
    assert decisions.height == 8
    assert set(decisions["instance"]) <= {"a", "b"}
    rules, fallbacks = {"score", "feasible", "infeasible", "explore"}, {"no_session", "no_prefix", "no_match", "warmup"}
    assert set(decisions["reason"]) <= rules | fallbacks
    assert decisions["num_tied"].min() is not None
    assert decisions["snapshot_age_s"].is_null().all() == (not router(policy).needs_view)


def test_a_decision_record_names_the_runner_up_and_the_margin(tmp_path: Path) -> None:
    price = {"input_usd_per_mtok": 100.0, "output_usd_per_mtok": 200.0}  # 4 + 3 tokens cost 1000 micro-dollars
    instances = [{"quality": 0.5}, {"quality": 1.0, "price": price}, {"quality": 0.8}]
    columns = {"arrival_ns": [0], "prompt_tokens": [4], "output_tokens": [3]}
    scenario, world = make_world(tmp_path, columns, scenario_data(instances, output={"decisions": "full"}))
    row = frame(run_policy(scenario, world, "sfs"), "decisions").row(0, named=True)
    assert (row["instance"], row["runner_up"], row["reason"]) == ("b", "c", "feasible")
    assert row["score"] == row["predicted_utility"] == pytest.approx(0.9)
    assert row["margin"] == pytest.approx(0.1)
    assert row["predicted_ttft_s"] == pytest.approx(0.014)
    assert row["candidate_ttft_s"] == pytest.approx([0.014] * 3)
    assert row["candidate_score"] == pytest.approx([0.5, 0.9, 0.8])


def test_sfs_trades_utility_for_the_target_when_the_best_instance_is_busy(tmp_path: Path) -> None:
    """Four requests at 0, steps of 10 ms + 1 ms per token, prompts of 4: one step serves two within 20 ms."""
    instances = [{"quality": 0.9}, {"quality": 0.5}]
    data = scenario_data(instances, slo={"ttft": 0.020})
    assert places(tmp_path, "sfs", [0, 0, 0, 0], data) == ["a", "a", "b", "b"]
    assert places(tmp_path, "latency_agnostic", [0, 0, 0, 0], data) == ["a"] * 4


def test_a_decision_without_an_alternative_names_no_runner_up(tmp_path: Path) -> None:
    # The second prompt is at the limit of both instances, so no TTFT can be estimated at all.
    columns = {"arrival_s": [0.0, 1.0], "prompt_tokens": [8, 4096], "output_tokens": [2, 2]}
    run, requests = run_once(tmp_path, columns, scenario_data(2), "sfs")
    assert requests["status"].to_list() == ["finished", "rejected"]
    decisions = frame(run, "decisions")
    assert decisions["runner_up"].to_list() == ["b", None]
    assert decisions["margin"].to_list() == [0.0, None]
