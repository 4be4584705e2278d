"""The two objectives of the paper by hand, and the tie rule."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.request import FloatArray
from simcluster.routers.objective import TieBreaker, choose_best, choose_slo, choose_weighted

INF = float("inf")


def ties(rule: Any = "index", seed: int = 0) -> TieBreaker:
    return TieBreaker(rule, np.random.Generator(np.random.PCG64(seed)))


def floats(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float64)


# ---- eq. 3 -----------------------------------------------------------------------------------------------------


def test_eq_3_takes_the_largest_utility_among_instances_that_meet_the_target() -> None:
    decision = choose_slo(floats(0.9, 0.7, 0.4), floats(0.3, 0.2, 0.1), 0.2, ties())
    assert (decision.instance, decision.reason, decision.num_tied) == (1, "feasible", 1)


def test_eq_3_takes_the_smallest_ttft_if_no_instance_meets_the_target_c036() -> None:
    decision = choose_slo(floats(0.9, 0.1, 0.95), floats(0.300, 0.250, 0.400), 0.200, ties())
    assert (decision.instance, decision.reason) == (1, "infeasible")
    assert decision.predicted_ttft_s is not None
    assert decision.predicted_ttft_s[decision.instance] == 0.250


def test_a_target_is_met_by_an_estimate_that_equals_it() -> None:
    assert choose_slo(floats(0.9, 0.1), floats(0.2, 0.1), 0.2, ties()).instance == 0
    assert choose_slo(floats(0.9, 0.1), floats(np.nextafter(0.2, 1), 0.1), 0.2, ties()).instance == 1


def test_without_a_target_the_largest_utility_wins_but_never_an_instance_that_cannot_serve() -> None:
    decision = choose_slo(floats(0.9, 0.5, 0.7), floats(INF, 3.0, 9.0), INF, ties())
    assert (decision.instance, decision.reason) == (2, "feasible")


def test_if_nobody_can_serve_there_is_still_a_decision_and_it_says_infeasible() -> None:
    for decision in (
        choose_slo(floats(0.1, 0.9), floats(INF, INF), INF, ties()),
        choose_slo(floats(0.1, 0.9), floats(INF, INF), 0.2, ties()),
        choose_weighted(floats(0.1, 0.9), floats(INF, INF), 1.0, ties()),
    ):
        assert (decision.instance, decision.reason, decision.num_tied) == (0, "infeasible", 2)


# ---- eq. 5 -----------------------------------------------------------------------------------------------------


def test_eq_5_takes_the_largest_utility_minus_weighted_ttft() -> None:
    utility, ttft = floats(0.9, 0.7, 0.2), floats(1.0, 0.5, 0.1)
    chosen = [choose_weighted(utility, ttft, weight, ties()).instance for weight in (0.0, 0.3, 0.5, 1.0, 2.0)]
    assert chosen == [0, 0, 1, 1, 2]
    score = choose_weighted(utility, ttft, 0.5, ties()).score
    assert score is not None
    assert score.tolist() == pytest.approx([0.4, 0.45, 0.15])


def test_eq_5_never_takes_an_instance_that_cannot_serve_whatever_the_weight() -> None:
    for weight in (0.0, 1.0):
        decision = choose_weighted(floats(0.9, -5.0), floats(INF, 100.0), weight, ties())
        assert (decision.instance, decision.reason) == (1, "score")


@given(st.lists(st.tuples(st.integers(-50, 50), st.one_of(st.just(INF), st.floats(0, 9))), min_size=1, max_size=6))
def test_delta_0_is_the_latency_agnostic_choice_among_the_servable(pairs: list[tuple[int, float]]) -> None:
    utility, ttft = floats(*(u / 10 for u, _ in pairs)), floats(*(t for _, t in pairs))
    servable = np.flatnonzero(np.isfinite(ttft))
    decision = choose_weighted(utility, ttft, 0.0, ties())
    if len(servable):
        assert decision.instance in servable
        assert utility[decision.instance] == choose_best(utility[servable], ties()).score.max()  # type: ignore[union-attr]
    else:
        assert decision.reason == "infeasible"


# ---- ties ------------------------------------------------------------------------------------------------------


def test_equal_utilities_go_to_the_smaller_ttft_before_the_tie_rule_is_asked() -> None:
    utility, ttft = floats(0.5, 0.5, 0.5), floats(0.3, 0.1, 0.2)
    for rule in ("index", "rotate", "random"):
        for seed in range(5):
            breaker = ties(rule, seed)
            assert [choose_slo(utility, ttft, 1.0, breaker).instance for _ in range(3)] == [1, 1, 1]
            assert choose_weighted(utility, ttft, 0.0, breaker).instance == 1


def test_equal_scores_of_eq_5_go_to_the_smaller_ttft() -> None:
    decision = choose_weighted(floats(1.0, 0.75), floats(0.5, 0.25), 1.0, ties())
    assert (decision.instance, decision.num_tied) == (1, 1)


@pytest.mark.parametrize(
    ("rule", "chosen"), [("index", [0] * 6), ("rotate", [0, 1, 3, 0, 1, 3])], ids=["index", "rotate"]
)
def test_full_ties_follow_the_tie_rule(rule: str, chosen: list[int]) -> None:
    utility, ttft = floats(0.5, 0.5, 0.4, 0.5), floats(0.1, 0.1, 0.1, 0.1)
    for choose in (choose_slo, choose_weighted):
        breaker = ties(rule)
        decisions = [choose(utility, ttft, 1.0, breaker) for _ in range(6)]
        assert [decision.instance for decision in decisions] == chosen
        assert {decision.num_tied for decision in decisions} == {3}


def test_rotation_goes_on_from_the_last_choice_among_whoever_ties_now() -> None:
    breaker = ties("rotate")
    picks = [breaker.pick(np.array(candidates)) for candidates in ([0, 1, 2], [0, 1, 2], [0, 2], [0, 1], [1, 2])]
    assert picks == [0, 1, 2, 0, 1]


def test_random_ties_reach_every_candidate_and_follow_the_seed() -> None:
    def picks(seed: int) -> list[int]:
        breaker = ties("random", seed)
        return [breaker.pick(np.array([0, 2, 5])) for _ in range(60)]

    assert picks(1) == picks(1)
    assert picks(1) != picks(2)
    assert set(picks(1)) == {0, 2, 5}


@pytest.mark.parametrize("rule", ["index", "rotate", "random"])
def test_without_a_tie_nothing_is_drawn_and_no_turn_is_used_up(rule: str) -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    breaker = TieBreaker(rule, rng)  # type: ignore[arg-type]
    before = rng.bit_generator.state
    for best in (0, 2, 1):
        decision = choose_best(np.eye(3)[best], breaker)
        assert (decision.instance, decision.num_tied) == (best, 1)
        choose_slo(np.eye(3)[best], floats(0.1, 0.1, 0.1), 0.2, breaker)
        choose_weighted(np.eye(3)[best], floats(0.1, 0.1, 0.1), 0.2, breaker)
    assert rng.bit_generator.state == before
    if rule != "random":
        assert breaker.pick(np.array([0, 1, 2])) == 0


def test_the_score_of_a_decision_is_what_decided() -> None:
    utility, ttft = np.array([0.9, 0.1, 0.95]), np.array([0.3, 0.25, 0.4])
    infeasible = choose_slo(utility, ttft, 0.2, ties())
    assert (infeasible.instance, infeasible.reason) == (1, "infeasible")
    assert infeasible.score is not None
    assert infeasible.score.tolist() == [-0.3, -0.25, -0.4]
    feasible = choose_slo(utility, ttft, 0.35, ties())
    assert (feasible.instance, feasible.reason) == (0, "feasible")
    assert feasible.score is not None
    assert feasible.score.tolist() == [0.9, 0.1, -np.inf]
