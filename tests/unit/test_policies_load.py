"""Policies that follow the load, and those that follow the model: each one's promise, by hand."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from policy_helpers import Load, make_request, make_router, make_spec, make_specs, make_view
from simcluster.routers.baselines import model_sizes
from simcluster.routers.load import decode_speeds

THREE = make_specs(3)


def choose(policy: str, loads: list[Load], at_ms: float = 1, **request: object) -> int:
    view = make_view(THREE, loads, at_ms=at_ms)
    return make_router(policy, THREE).route(make_request(**request), view).instance  # type: ignore[arg-type]


def shares(policy: str, loads: list[Load], draws: int = 3000, seed: int = 1) -> list[int]:
    router = make_router(policy, THREE, seed=seed)
    view = make_view(THREE, loads, at_ms=1)
    counts = Counter(router.route(make_request(index), view).instance for index in range(draws))
    return [counts[j] for j in range(3)]


# ---- tokens and counts -----------------------------------------------------------------------------------------


def test_least_tokens_sees_that_two_long_requests_weigh_more_than_five_short_ones() -> None:
    """vllm-project/router#51."""
    loads: list[Load] = [[(10_000, 10)] * 2, [(100, 10)] * 5, [(10_000, 10)] * 3]
    assert choose("least_tokens", loads) == 1
    assert choose("shortest_queue", loads) == 0


def test_least_tokens_moves_when_the_load_moves() -> None:
    specs = make_specs(2)
    loads: list[Load] = [[(400, 2)], [(200, 300)]]
    router = make_router("least_tokens", specs)
    early = make_view(specs, loads, at_ms=1, mean_output=2)
    assert router.route(make_request(count=2), early).instance == 1  # 402 tokens against 202
    late = make_view(specs, loads, at_ms=430, mean_output=40)  # a has ended, b answers on
    assert router.route(make_request(count=2), late).instance == 0


def test_least_tokens_counts_own_dispatches_that_no_snapshot_shows_yet() -> None:
    view = make_view(THREE)
    router = make_router("least_tokens", THREE)
    places = []
    for index, prompt in enumerate([900, 100, 100, 100, 100]):
        request = make_request(index, prompt=prompt)
        chosen = router.route(request, view).instance
        view.views[chosen].record_dispatch(index, prompt, 10, 0)
        places.append(chosen)
    assert places == [0, 1, 2, 1, 2]


def test_queue_depth_counts_the_waiting_only_c034() -> None:
    specs = make_specs(2, max_num_seqs=8)
    view = make_view(specs, [[(4, 50)] * 8, ()], at_ms=100)
    view.views[1].record_dispatch(1, 4, 10, 0)
    assert [(v.num_waiting, v.num_running) for v in view.views] == [(0, 8), (1, 0)]
    assert make_router("queue_depth", specs).route(make_request(count=2), view).instance == 0
    assert make_router("shortest_queue", specs).route(make_request(count=2), view).instance == 1


def test_least_kv_takes_the_emptiest_cache_not_the_shortest_queue() -> None:
    specs = [make_spec(j, usable_blocks=blocks) for j, blocks in enumerate([100, 400, 100])]
    view = make_view(specs, [[(800, 50)], [(800, 50)] * 2, [(1120, 50)]], at_ms=1)
    assert view.kv_usage().tolist() == pytest.approx([0.5, 0.25, 0.7])
    assert make_router("least_kv", specs).route(make_request(), view).instance == 1


# ---- mixed hardware --------------------------------------------------------------------------------------------


def test_decode_speed_is_32_tokens_per_step_of_32_requests_with_1024_tokens_of_context() -> None:
    plain = make_spec(0, b0=10, b1=1)  # 10 + 32 ms
    contexts = make_spec(1, b0=10, b1=1)
    contexts.believed.b2 = 10**6  # 1 us per token of context: 32.768 ms more
    few = make_spec(2, b0=10, b1=1, max_num_seqs=4)  # 4 tokens in 14 ms
    host = make_spec(3, b0=10, b1=1)
    host.believed.host = 58 * 10**9  # synchronous: comes on top
    ahead = make_spec(4, b0=10, b1=1, async_scheduling=True)
    ahead.believed.host = 58 * 10**9  # asynchronous: the longer of the two
    expected = [32 / 0.042, 32 / 0.074768, 4 / 0.014, 32 / 0.1, 32 / 0.058]
    assert decode_speeds((plain, contexts, few, host, ahead)).tolist() == pytest.approx(expected)


def test_normalized_load_gives_the_faster_instance_its_share() -> None:
    """a is four times as fast as b (10.5 ms against 42 ms per step), so it gets four of five tokens."""
    specs = [make_spec(0, b0=2.5, b1=0.25), make_spec(1)]
    view = make_view(specs)
    router = make_router("normalized_load", specs)
    counts = Counter[int]()
    for index in range(500):
        request = make_request(index, count=2, prompt=100, output=10)
        chosen = router.route(request, view).instance
        view.views[chosen].record_dispatch(index, 100, 10, 0)
        counts[chosen] += 1
    assert counts == {0: 400, 1: 100}


def test_normalized_load_by_requests_counts_requests() -> None:
    specs = [make_spec(0, b0=5, b1=0.5), make_spec(1)]  # twice as fast
    for residents, expected in (([0, 0], 0), ([1, 0], 0), ([2, 0], 1), ([3, 1], 0), ([4, 1], 1)):
        view = make_view(specs, [[(50, 50)] * count for count in residents], at_ms=1)
        router = make_router("normalized_load:load=requests", specs)
        assert router.route(make_request(count=2), view).instance == expected, residents


def test_weighted_random_draws_in_proportion_to_the_speeds() -> None:
    specs = [make_spec(0, b0=2.5, b1=0.25), make_spec(1), make_spec(2, b0=5, b1=0.5)]  # 4 : 1 : 2
    router, view = make_router("weighted_random", specs), make_view(specs)
    counts = Counter(router.route(make_request(index), view).instance for index in range(7000))
    assert chisquare([counts[0], counts[1], counts[2]], [4000, 1000, 2000]).pvalue > 0.001
    failing = make_view(specs, healthy=[False, True, True])
    counts = Counter(router.route(make_request(index), failing).instance for index in range(3000))
    assert chisquare([counts[1], counts[2]], [1000, 2000]).pvalue > 0.001


# ---- samples ---------------------------------------------------------------------------------------------------


def test_power_of_two_takes_the_lighter_of_two_drawn_evenly() -> None:
    counts = shares("power_of_two", [[(40, 40)] * n for n in (1, 2, 3)])
    assert counts[2] == 0
    assert chisquare(counts[:2], [2000, 1000]).pvalue > 0.001


def test_one_draw_is_random_and_as_many_draws_as_instances_take_the_least_loaded() -> None:
    loads: list[Load] = [[(40, 40)] * n for n in (2, 1, 3)]
    assert chisquare(shares("power_of_two:d=1", loads)).pvalue > 0.001
    assert shares("power_of_two:d=3", loads) == [0, 3000, 0]
    assert shares("power_of_two:d=99", loads) == [0, 3000, 0]


def test_power_of_two_compares_by_requests_tokens_or_predicted_ttft() -> None:
    specs = [make_spec(0, b0=10, b1=1), make_spec(1, b0=500, b1=1)]
    view = make_view(specs, [[(300, 2), (300, 2)], [(200, 300)]], at_ms=1, mean_output=300)
    request = make_request(count=2)
    chosen = {
        load: make_router(f"power_of_two:d=2,load={load}", specs).route(request, view).instance
        for load in ("requests", "tokens", "predicted_ttft")
    }
    assert chosen == {"requests": 1, "tokens": 1, "predicted_ttft": 0}


def test_power_of_two_estimates_only_what_it_has_drawn() -> None:
    decision = make_router("power_of_two:load=predicted_ttft", THREE).route(make_request(), make_view(THREE))
    assert decision.predicted_ttft_s is not None
    assert np.count_nonzero(np.isnan(decision.predicted_ttft_s)) == 1
    assert decision.predicted_ttft_s[decision.instance] == pytest.approx(0.110)


# ---- vLLM's own balancer ---------------------------------------------------------------------------------------


def test_vllm_dp_spreads_a_burst_in_turn_although_the_view_stands_still() -> None:
    router, view = make_router("vllm_dp", THREE), make_view(THREE)
    places = []
    for index in range(9):
        request = make_request(index)
        places.append(router.route(request, view).instance)
        router.observe_dispatch(request, places[-1])  # type: ignore[attr-defined]
    assert sorted(places[:3]) == sorted(places[3:6]) == sorted(places[6:]) == [0, 1, 2]


def test_vllm_dp_follows_the_larger_of_own_open_requests_and_the_published_counts() -> None:
    router = make_router("vllm_dp", THREE)
    view = make_view(THREE, [[(4, 50)] * 2, [(4, 50)] * 3, [(4, 50)] * 1], at_ms=100)
    assert router.route(make_request(), view).instance == 2
    for index in range(4):
        router.observe_dispatch(make_request(index), 2)  # type: ignore[attr-defined]
    decision = router.route(make_request(), view)
    assert decision.score is not None
    assert (decision.instance, decision.score.tolist()) == (0, [-2, -3, -4])
    for index in range(4):
        router.observe_end(index, 2)  # type: ignore[attr-defined]
    assert router.route(make_request(), view).instance == 2


def test_vllm_dp_multiplies_own_requests_by_the_number_of_routers() -> None:
    router = make_router("vllm_dp", make_specs(2), num_replicas=4, replica=3)
    view = make_view(make_specs(2), [[(4, 50)] * 5, ()], at_ms=100)
    router.observe_dispatch(make_request(1, count=2), 1)  # type: ignore[attr-defined]
    decision = router.route(make_request(2, count=2), view)
    assert decision.score is not None
    assert (decision.instance, decision.score.tolist()) == (1, [-5, -4])
    view.views[1].record_dispatch(1, 4, 10, 0)
    view.views[1].record_dispatch(2, 4, 10, 0)
    decision = router.route(make_request(3, count=2), view)  # 2 waiting and 3 more times 2 of the others
    assert decision.score is not None
    assert decision.score.tolist() == [-5, -8]


def test_vllm_dp_punishes_a_queue_behind_a_full_cache() -> None:
    """9 of 10 blocks in use and one waiting: 2 + 1 * 6 * 0.4 = 4.4 against 4 running."""
    specs = make_specs(2, usable_blocks=10)
    view = make_view(specs, [[(140, 4), (30, 4)], [(10, 50)] * 4], at_ms=1)
    assert [(v.num_waiting, v.num_running) for v in view.views] == [(1, 1), (0, 4)]
    decision = make_router("vllm_dp", specs).route(make_request(count=2), view)
    assert decision.score is not None
    assert decision.score.tolist() == pytest.approx([-4.4, -4.0])
    assert decision.instance == 1


def test_vllm_dp_rotates_over_ties_from_a_start_of_its_own() -> None:
    view = make_view(THREE)
    router = make_router("vllm_dp", THREE, tie="index")
    assert [router.route(make_request(), view).instance for _ in range(5)] == [0, 1, 2, 0, 1]
    second = make_router("vllm_dp", THREE, num_replicas=3, replica=1)
    assert second.route(make_request(), view).instance == 1


# ---- observed latency ------------------------------------------------------------------------------------------


def observe(router: object, *ttft_s: tuple[int, float]) -> None:
    for instance, value in ttft_s:
        router.observe_first_token(0, instance, value)  # type: ignore[attr-defined]


def test_ewma_takes_the_least_mean_and_moves_when_the_latency_moves() -> None:
    router = make_router("ewma_latency:explore=0,alpha=0.5", THREE)
    view = make_view(THREE)
    observe(router, (0, 0.2), (1, 0.1), (2, 0.3))
    assert router.route(make_request(), view).instance == 1
    observe(router, (1, 0.4))  # 0.25
    decision = router.route(make_request(), view)
    assert decision.score is not None
    assert (decision.instance, decision.score.tolist()) == (0, pytest.approx([-0.2, -0.25, -0.3]))
    observe(router, (0, 0.6), (2, 0.1))  # 0.4 and 0.2
    assert router.route(make_request(), view).instance == 2


def test_ewma_tries_every_instance_before_it_believes_a_mean() -> None:
    router = make_router("ewma_latency:explore=0", THREE)
    view = make_view(THREE)
    places = []
    for index in range(5):
        places.append(router.route(make_request(index), view).instance)
        observe(router, (places[-1], [0.3, 0.2, 0.4][places[-1]]))
    assert places == [0, 1, 2, 1, 1]


def test_ewma_explores_with_the_given_chance_and_so_never_starves_an_instance() -> None:
    router = make_router("ewma_latency:explore=0.3", THREE)
    observe(router, (0, 0.1), (1, 9.0), (2, 9.0))
    view = make_view(THREE)
    decisions = [router.route(make_request(index), view) for index in range(3000)]
    explored = [decision.instance for decision in decisions if decision.reason == "explore"]
    assert 800 < len(explored) < 1000
    assert chisquare([explored.count(j) for j in range(3)]).pvalue > 0.001
    assert {decision.instance for decision in decisions if decision.reason == "score"} == {0}


# ---- fixed properties of the model -----------------------------------------------------------------------------


def test_cheapest_weighs_both_prices_with_this_requests_lengths() -> None:
    specs = [make_spec(0, price_in=1.0, price_out=1.0), make_spec(1, price_in=0.1, price_out=5.0)]
    router, view = make_router("cheapest", specs), make_view(specs)
    assert router.route(make_request(count=2, prompt=1000, output=10), view).instance == 1  # 1010 against 150
    assert router.route(make_request(count=2, prompt=100, output=500), view).instance == 0  # 600 against 2510


def test_model_sizes_come_from_the_names_and_else_from_the_output_prices() -> None:
    names = ["Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct", "Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "qwen3-32b"]
    assert model_sizes([make_spec(0, model=name) for name in names]).tolist() == [0.6, 8, 56, 30, 32]
    mixed = [make_spec(0, model="Qwen3-8B", price_out=2.0), make_spec(1, model="gpt", price_out=9.0)]
    assert model_sizes(mixed).tolist() == [2.0, 9.0]


def test_largest_and_smallest_take_their_model_whatever_the_load() -> None:
    specs = [make_spec(j, model=name) for j, name in enumerate(["Q-8B", "Q-32B", "Q-0.6B"])]
    view = make_view(specs, [(), [(40, 40)] * 30, [(40, 40)] * 30], at_ms=1)
    assert make_router("largest", specs).route(make_request(), view).instance == 1
    assert make_router("smallest", specs).route(make_request(), view).instance == 2


def test_replicas_of_the_fixed_model_share_its_requests_by_the_tie_rule() -> None:
    specs = [make_spec(j, model=name) for j, name in enumerate(["Q-32B", "Q-8B", "Q-32B"])]
    router, view = make_router("largest", specs, tie="rotate"), make_view(specs)
    assert [router.route(make_request(), view).instance for _ in range(4)] == [0, 2, 0, 2]
