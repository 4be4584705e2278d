"""Policies of affinity and of several signals: what goes where again, and when it moves."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from policy_helpers import make_request, make_router, make_spec, make_specs, make_view
from simcluster.request import Request
from simcluster.routers import ClusterView, Decision, Router
from simcluster.routers.tracking import HashRing, InFlight, PrefixIndex, stable_hash

THREE = make_specs(3)
IDLE = make_view(THREE)


def send(router: Router, request: Request, view: ClusterView = IDLE) -> Decision:
    """Let a router decide and tell it that this was done."""
    decision = router.route(request, view)
    router.observe_dispatch(request, decision.instance)  # type: ignore[attr-defined]
    return decision


def busy(*residents: int) -> ClusterView:
    return make_view(THREE, [[(4, 50)] * count for count in residents], at_ms=100)


# ---- hash ring and sessions ------------------------------------------------------------------------------------


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    assert stable_hash("session-1") == 0xAE49BD2CD463E7AC  # b2sum -l 64
    assert list(HashRing(["a", "b", "c"], 50).owners("session-1")) == [2, 1, 0]


def test_a_ring_splits_keys_evenly_and_a_new_instance_takes_only_its_share() -> None:
    keys = [f"key-{k}" for k in range(6000)]
    three, four = HashRing(["a", "b", "c"], 200), HashRing(["a", "b", "c", "d"], 200)
    before, after = [next(three.owners(key)) for key in keys], [next(four.owners(key)) for key in keys]
    assert all(1700 < count < 2300 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {3}
    assert 1200 < len(moved) < 1800


def test_a_session_stays_where_it_is_whatever_the_load() -> None:
    router = make_router("session_hash", THREE)
    places = {f"s{k}": router.route(make_request(session=f"s{k}"), IDLE).instance for k in range(300)}
    assert all(75 < count < 125 for count in Counter(places.values()).values())
    for session, place in places.items():
        assert router.route(make_request(session=session), busy(9, 9, 9)).instance == place
        assert router.route(make_request(session=session), busy(0, 30, 60)).instance == place


def test_only_the_sessions_of_a_failing_instance_move_and_they_come_back() -> None:
    router = make_router("session_hash", THREE)
    failing = make_view(THREE, healthy=[True, False, True])
    moved_to = Counter[int]()
    for k in range(300):
        request = make_request(session=f"s{k}")
        usual, now = router.route(request, IDLE).instance, router.route(request, failing).instance
        if usual == 1:
            moved_to[now] += 1
        else:
            assert now == usual
        assert router.route(request, IDLE).instance == usual
    assert moved_to[0] > 20
    assert moved_to[2] > 20


def test_without_a_session_the_shortest_queue_is_taken_and_the_reason_says_so() -> None:
    decision = make_router("session_hash", THREE).route(make_request(), busy(3, 1, 2))
    assert (decision.instance, decision.reason) == (1, "no_session")


# ---- prefix hash with bounded load -----------------------------------------------------------------------------


def test_equal_first_tokens_go_together_however_the_prompts_go_on() -> None:
    router = make_router("prefix_hash:tokens=64", THREE)  # 4 blocks of 16
    for group in range(20):
        first = [100 * group + k for k in range(4)]
        chosen = {
            router.route(make_request(blocks=[*first, *(1000 * k + j for j in range(k))]), IDLE).instance
            for k in range(9)
        }
        assert len(chosen) == 1
    assert len({router.route(make_request(blocks=[100 * g, 100 * g + 1]), IDLE).instance for g in range(20)}) == 3


def test_a_hot_prefix_spreads_before_anyone_holds_more_than_factor_times_the_mean() -> None:
    router, view = make_router("prefix_hash:factor=1.5", THREE), make_view(THREE)
    reasons = Counter[str]()
    for index in range(60):
        request = make_request(index, blocks=[7])
        decision = router.route(request, view)
        reasons[decision.reason] += 1
        view.views[decision.instance].record_dispatch(index, 100, 10, 0)
        load = view.num_resident()
        assert load.max() <= np.ceil(1.5 * load.sum() / 3)
    assert sorted(view.num_resident().tolist()) == [0, 30, 30]
    assert set(reasons) == {"score", "overloaded"}


def test_without_hashes_prefix_policies_take_the_shortest_queue() -> None:
    for policy, reason in (("prefix_hash", "no_prefix"), ("cache_aware", "no_match")):
        decision = make_router(policy, THREE).route(make_request(), busy(3, 1, 2))
        assert (decision.instance, decision.reason) == (1, reason)


# ---- what was sent where ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    sent=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=5)), max_size=30),
    asked=st.lists(st.integers(0, 2), max_size=5),
    room=st.integers(1, 8),
)
def test_the_index_is_a_prefix_tree_with_least_recently_sent_blocks_forgotten(
    sent: list[tuple[int, list[int]]], asked: list[int], room: int
) -> None:
    """Against a slow tree: paths as keys, a prompt's last blocks older than its first ones."""

    def hashes(path: list[int]) -> list[int]:  # a chained hash: one number per path
        return [int("1" + "".join(map(str, path[: k + 1]))) for k in range(len(path))]

    index = PrefixIndex([make_spec(j, block_size=16, usable_blocks=room) for j in range(3)])
    slow: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(3)]
    for instance, path in sent:
        index.insert(make_request(blocks=hashes(path)), instance)
        for value in reversed(hashes(path)):
            slow[instance][value] = None
            slow[instance].move_to_end(value)
        while len(slow[instance]) > room:
            slow[instance].popitem(last=False)
    expected = []
    for known in slow:
        values = hashes(asked)
        expected.append(next((k for k, value in enumerate(values) if value not in known), len(values)))
        assert all(value < 100 or value // 10 in known for value in known)  # nobody without those before it
    assert index.matched(make_request(blocks=hashes(asked))) == expected


def test_matched_tokens_never_exceed_the_prompt() -> None:
    index = PrefixIndex(THREE)
    request = make_request(prompt=100, blocks=range(7))  # the seventh block covers 4 tokens
    index.insert(request, 1)
    assert index.matched_tokens(request).tolist() == [0, 100, 0]
    assert index.matched_tokens(make_request(prompt=100, blocks=[0, 1, 2, 9])).tolist() == [0, 48, 0]


def test_open_requests_count_prefill_until_the_first_token_and_blocks_until_the_end() -> None:
    open_ = InFlight(2)
    open_.sent(1, 0, 100, 7)
    open_.sent(2, 0, 30, 2)
    open_.sent(3, 1, 5, 1)
    open_.first_token(1)
    open_.first_token(99)  # not its own
    assert (open_.requests.tolist(), open_.prefill_tokens.tolist(), open_.blocks.tolist()) == ([2, 1], [30, 5], [9, 1])
    open_.ended(1)
    open_.ended(2)  # rejected: never had a first token
    open_.ended(2)
    assert (open_.requests.tolist(), open_.prefill_tokens.tolist(), open_.blocks.tolist()) == ([0, 1], [0, 5], [0, 1])


# ---- cache aware -----------------------------------------------------------------------------------------------


def test_cache_aware_goes_where_the_longest_prefix_was_sent() -> None:
    router = make_router("cache_aware", THREE, tie="rotate")
    first = send(router, make_request(blocks=[1, 2, 3, 4]))
    other = send(router, make_request(blocks=[50, 51, 52, 53]))
    assert (first.reason, other.reason) == ("no_match", "no_match")
    assert first.instance != other.instance
    again = send(router, make_request(blocks=[1, 2, 3, 4, 5]), busy(4, 4, 4))
    assert (again.instance, again.reason) == (first.instance, "prefix")
    assert send(router, make_request(blocks=[50, 51, 9, 10])).instance == other.instance


def test_cache_aware_wants_half_of_the_prompt_by_default() -> None:
    router = make_router("cache_aware", THREE)
    send(router, make_request(blocks=range(10)), busy(5, 5, 0))
    for matching, total, reason in ((5, 10, "prefix"), (4, 9, "no_match"), (10, 20, "prefix"), (10, 21, "no_match")):
        blocks = [*range(matching), *range(100, 100 + total - matching)]
        decision = router.route(make_request(blocks=blocks), busy(0, 1, 2))
        assert (decision.reason, decision.instance) == (reason, 2 if reason == "prefix" else 0)


def test_cache_aware_moves_to_the_shortest_queue_when_the_load_is_uneven() -> None:
    """The load gate needs both: more than 32 apart and more than 1.1 times the fewest."""
    router = make_router("cache_aware", THREE)
    send(router, make_request(blocks=[1, 2]), busy(5, 0, 5))
    hot = make_request(blocks=[1, 2])
    expected = {(0, 32, 5): (1, "prefix"), (0, 33, 5): (0, "balance"), (400, 433, 420): (1, "prefix")}
    for residents, (instance, reason) in expected.items():
        decision = router.route(hot, busy(*residents))
        assert (decision.instance, decision.reason) == (instance, reason), residents
    gentle = make_router("cache_aware:balance_abs_threshold=3", THREE)
    send(gentle, hot, busy(5, 0, 5))
    assert gentle.route(hot, busy(2, 6, 9)).reason == "balance"


def test_cache_aware_forgets_prefixes_that_an_instance_cannot_hold_any_more() -> None:
    specs = make_specs(3, usable_blocks=8)
    router = make_router("cache_aware", specs)
    view = make_view(specs, [(), [(4, 50)], [(4, 50)]], at_ms=1)  # all cold prompts go to 0
    send(router, make_request(blocks=[1, 2, 3, 4]), view)
    send(router, make_request(blocks=[10, 11, 12, 13]), view)
    assert router.route(make_request(blocks=[1, 2, 3, 4]), view).reason == "prefix"
    send(router, make_request(blocks=[20, 21]), view)  # two blocks too many: 4 and 3 go
    assert router.route(make_request(blocks=[1, 2, 3, 4]), view).reason == "prefix"
    send(router, make_request(blocks=[30, 31]), view)
    assert router.route(make_request(blocks=[1, 2, 3, 4]), view).reason == "no_match"
    assert router.route(make_request(blocks=[10, 11, 12, 13]), view).reason == "prefix"


def test_of_equal_matches_the_less_loaded_is_taken() -> None:
    router = make_router("cache_aware", THREE)
    for residents in ((0, 1, 1), (1, 0, 1)):
        send(router, make_request(blocks=[residents[0], 99]), busy(*residents))
        router.observe_dispatch(make_request(blocks=[7, 8]), residents.index(0))  # type: ignore[attr-defined]
    assert router.route(make_request(blocks=[7, 8]), busy(3, 2, 0)).instance == 1
    assert router.route(make_request(blocks=[7, 8]), busy(2, 3, 0)).instance == 0


# ---- weighted scorers ------------------------------------------------------------------------------------------


def scores(policy: str, view: ClusterView, request: Request, *sent: tuple[Request, int]) -> list[float]:
    router = make_router(policy, [*view.instances])
    for each, instance in sent:
        router.observe_dispatch(each, instance)  # type: ignore[attr-defined]
    score = router.route(request, view).score
    assert score is not None
    found: list[float] = score.tolist()
    return found


ONLY = {
    name: ",".join(f"{other}={int(other == name)}" for other in ("queue", "kv", "prefix", "no_hit_lru"))
    for name in ("queue", "kv", "prefix", "no_hit_lru", "none")
}


def test_each_scorer_by_hand() -> None:
    specs = make_specs(3, usable_blocks=20, max_num_seqs=2)
    view = make_view(specs, [[(16, 50)] * 2, [(16, 50)] * 4, [(16, 50)] * 10], at_ms=1)
    assert view.num_waiting().tolist() == [0, 2, 8]
    request = make_request(blocks=[1, 2, 3, 4])
    near, other = make_request(1, prompt=48, blocks=[1, 2, 3]), make_request(2, prompt=80, blocks=[8, 9])
    name = "weighted_scorers"
    assert scores(f"{name}:{ONLY['queue']}", view, request) == pytest.approx([1, 0.75, 0])
    assert scores(f"{name}:{ONLY['kv']}", view, request) == pytest.approx([0.9, 0.9, 0.9])
    assert scores(f"{name}:{ONLY['prefix']}", view, request, (near, 1)) == pytest.approx([0, 0.75, 0])
    assert scores(f"{name}:{ONLY['no_hit_lru']}", view, request, (near, 1)) == [0.5, 0.5, 0.5]
    assert scores(f"{name}:{ONLY['no_hit_lru']}", view, request, (other, 1)) == [1, 0, 0.5]
    active = f"{name}:active=1,{ONLY['none']}"
    assert scores(active, view, request, (near, 1), (other, 1), (make_request(3), 2)) == pytest.approx([1, 0, 0.5])
    tokens = f"{name}:token_load=1,token_threshold=200,{ONLY['none']}"  # 100 tokens, 48 of them known to 1
    assert scores(tokens, view, request, (near, 1), (other, 2)) == pytest.approx([0.5, 0.5, 0.1])


def test_equal_queues_all_score_one() -> None:
    assert scores(f"weighted_scorers:{ONLY['queue']}", busy(3, 3, 3), make_request()) == [1, 1, 1]


def test_default_weights_are_2_2_3_2() -> None:
    """A prefix hit of the whole prompt outweighs the longest queue; half a hit does not."""
    specs = make_specs(2, max_num_seqs=1)
    view = make_view(specs, [(), [(16, 50)] * 4], at_ms=1)
    whole, half = make_request(count=2, blocks=[1, 2]), make_request(count=2, blocks=[1, 5])
    router = make_router("weighted_scorers", specs)
    router.observe_dispatch(whole, 1)  # type: ignore[attr-defined]
    usage = view.kv_usage()
    for request, instance, prefix in ((whole, 1, 1.0), (half, 0, 0.5)):
        decision = router.route(request, view)
        assert decision.score is not None
        assert decision.score.tolist() == pytest.approx([2 + 2 + 0 + 1, 0 + 2 * (1 - usage[1]) + 3 * prefix + 1])
        assert decision.instance == instance


def test_prompts_known_nowhere_go_round_so_that_caches_grow_evenly() -> None:
    router = make_router("weighted_scorers", THREE)
    places = [send(router, make_request(index, blocks=[1000 * index])).instance for index in range(9)]
    assert sorted(places[:3]) == [0, 1, 2]
    assert places[:3] == places[3:6] == places[6:]


def test_scorers_move_a_hot_prefix_when_the_queue_of_its_instance_grows() -> None:
    specs = make_specs(3, max_num_seqs=2, usable_blocks=40)
    router = make_router("weighted_scorers", specs)
    hot = make_request(blocks=[1, 2, 3])
    calm, late = make_view(specs), make_view(specs, [[(64, 50)] * 9, (), ()], at_ms=1)
    assert send(router, hot, calm).instance == 0
    assert router.route(hot, calm).instance == 0
    gentle = make_router("weighted_scorers:prefix=1", specs)
    gentle.observe_dispatch(hot, 0)  # type: ignore[attr-defined]
    assert gentle.route(hot, late).instance != 0
    assert router.route(hot, late).instance == 0  # weight 3 against 2 for the queue and 0.4 for the cache


def test_the_weighted_random_picker_draws_in_proportion_to_the_scores() -> None:
    specs = make_specs(3, max_num_seqs=2)
    view = make_view(specs, [[(16, 50)] * 2, [(16, 50)] * 4, [(16, 50)] * 10], at_ms=1)
    router = make_router(f"weighted_scorers:picker=weighted_random,{ONLY['queue']}", specs)
    counts = Counter(router.route(make_request(), view).instance for _ in range(3500))
    assert counts[2] == 0
    assert chisquare([counts[0], counts[1]], [2000, 1500]).pvalue > 0.001


# ---- cost of KV blocks -----------------------------------------------------------------------------------------


def test_kv_cost_adds_prefill_and_decode_blocks_after_admission() -> None:
    router = make_router("kv_cost", THREE)
    decision = send(router, make_request(1, prompt=160, blocks=range(10)))
    assert decision.score is not None
    assert decision.score.tolist() == [-20, -20, -20]  # 10 blocks to compute, 10 to hold
    follow = make_request(2, prompt=192, blocks=range(12))
    decision = router.route(follow, IDLE)
    assert decision.score is not None  # at 0: 10 + 2 to compute, 10 + 2 to hold; elsewhere 12 + 12
    assert (decision.instance, decision.score.tolist()) == (0, [-24, -24, -24])
    router.observe_first_token(1, 0, 0.1)  # type: ignore[attr-defined]
    decision = router.route(follow, IDLE)
    assert decision.score is not None
    assert (decision.instance, decision.score.tolist()) == (0, [-14, -24, -24])
    router.observe_end(1, 0)  # type: ignore[attr-defined]
    decision = router.route(follow, IDLE)
    assert decision.score is not None
    assert decision.score.tolist() == [-4, -24, -24]


def test_kv_cost_leaves_the_prefix_when_too_much_is_open_there() -> None:
    router = make_router("kv_cost", THREE)
    hot = [make_request(index, prompt=160, blocks=[*range(8), 100 + index, 200 + index]) for index in range(30)]
    places = Counter(send(router, request).instance for request in hot)
    assert places[0] == max(places.values())
    assert len(places) == 3


def test_kv_cost_scale_weighs_the_prefill() -> None:
    for scale, expected in ((0.0, -10.0), (1.0, -20.0), (2.5, -35.0)):
        decision = make_router(f"kv_cost:scale={scale}", THREE).route(make_request(prompt=160, blocks=range(10)), IDLE)
        assert decision.score is not None
        assert decision.score.tolist() == [expected] * 3


def test_lmetric_multiplies_the_prefill_by_open_requests_plus_one() -> None:
    router = make_router("kv_cost:form=lmetric", THREE)
    for index, (instance, prompt) in enumerate([(0, 160), (0, 160), (1, 640)]):
        router.observe_dispatch(make_request(index, prompt=prompt), instance)  # type: ignore[attr-defined]
    router.observe_first_token(0, 0, 0.1)  # type: ignore[attr-defined]
    decision = router.route(make_request(9, prompt=80), IDLE)
    assert decision.score is not None
    assert decision.score.tolist() == [-(10 + 5) * 3, -(40 + 5) * 2, -5]
    assert decision.instance == 2


def test_kv_cost_by_temperature_is_a_softmax_over_the_range_of_the_costs() -> None:
    router = make_router("kv_cost:temperature=0.5", THREE)
    for index, instance in enumerate([1, 2, 2]):
        router.observe_dispatch(make_request(index, prompt=160), instance)  # type: ignore[attr-defined]
    counts = Counter(router.route(make_request(9, prompt=16), IDLE).instance for _ in range(4000))
    weights = np.exp(-np.array([0.0, 0.5, 1.0]) / 0.5)  # costs 2, 22, 42
    expected = 4000 * weights / weights.sum()
    assert chisquare([counts[j] for j in range(3)], expected).pvalue > 0.001


def test_policies_of_several_signals_forget_what_has_ended() -> None:
    for policy in ("kv_cost", "weighted_scorers:active=1,token_load=1", "vllm_dp"):
        router = make_router(policy, THREE)
        fresh = router.route(make_request(0, blocks=[5]), IDLE).score
        for index in range(50):
            router.observe_dispatch(make_request(index, prompt=160), index % 3)  # type: ignore[attr-defined]
        for index in range(50):
            if index % 2 and policy != "vllm_dp":
                router.observe_first_token(index, index % 3, 0.1)  # type: ignore[attr-defined]
            router.observe_end(index, index % 3)  # type: ignore[attr-defined]
        again = router.route(make_request(0, blocks=[5]), IDLE).score
        assert fresh is not None
        assert again is not None
        assert sorted(again.tolist()) == sorted(fresh.tolist())
