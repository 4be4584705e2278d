"""Estimators of the time to the first token, the margin, and the learned chance to be on time."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine_helpers import MS
from policy_helpers import make_rates, make_request, make_router, make_settings, make_spec, make_specs, make_view, play
from simcluster.card import FrontEnd
from simcluster.errors import ConfigError
from simcluster.routers.base import ClusterView
from simcluster.routers.cut import OnTimeChance
from simcluster.routers.estimators import LpsEstimator, ThroughputEstimator, lps_wait_s
from simcluster.units import PS_PER_S

PREDICTIVE = ["sfs", "throughput", "lps"]


# Eq. 6


def test_throughput_counts_the_prefill_tokens_left_the_prompt_and_one_decode_step() -> None:
    specs = (make_spec(0), make_spec(1, service_rates=make_rates(theta=2000, decode_s=0.02)))
    view = make_view(specs, [[(100, 5), (200, 5)], [(400, 5)]], at_ms=1)
    estimate = ThroughputEstimator(make_settings(specs)).estimate(make_request(count=2, prompt=50), view)
    assert estimate == pytest.approx([(300 + 50) / 1000 + 0.011, (400 + 50) / 2000 + 0.02])


def test_throughput_follows_what_is_left_and_not_what_was_sent() -> None:
    specs = make_specs(1, max_num_batched_tokens=100)
    view = make_view(specs, [[(250, 5)]], at_ms=110)  # the first chunk of 100 tokens took 10 + 100 ms
    estimate = ThroughputEstimator(make_settings(specs)).estimate(make_request(count=1, prompt=50), view)
    assert estimate == pytest.approx([(150 + 50) / 1000 + 0.011])


def test_throughput_counts_own_dispatches_that_no_snapshot_shows_yet() -> None:
    specs = make_specs(1)
    view = make_view(specs)
    view.views[0].record_dispatch(7, 300, 10, 0)
    estimate = ThroughputEstimator(make_settings(specs)).estimate(make_request(count=1, prompt=50), view)
    assert estimate == pytest.approx([(300 + 50) / 1000 + 0.011])


@pytest.mark.parametrize("kind", [ThroughputEstimator, LpsEstimator])
def test_the_way_to_the_engine_and_back_is_added(kind: type[ThroughputEstimator | LpsEstimator]) -> None:
    near, far = make_specs(1), make_specs(1, front_end=FrontEnd(request_s=1.0, per_prompt_token_s=0.25, output_s=4.0))
    request, view = make_request(count=1, prompt=8), make_view(near)
    delayed = ClusterView(0, PS_PER_S // 2, far, view.views)
    plain = kind(make_settings(near)).estimate(request, view)
    assert kind(make_settings(far)).estimate(request, delayed) == pytest.approx(plain + 1 + 8 / 4 + 4 + 0.5)


@pytest.mark.parametrize("kind", [ThroughputEstimator, LpsEstimator])
def test_a_prompt_that_an_engine_cannot_hold_is_never_served(kind: type[ThroughputEstimator | LpsEstimator]) -> None:
    specs = (make_spec(0, max_model_len=100), make_spec(1, usable_blocks=6), make_spec(2))
    estimator, view = kind(make_settings(specs)), make_view(specs)
    for prompt, served in ((96, [True, True, True]), (99, [True, False, True]), (100, [False, False, True])):
        assert np.isfinite(estimator.estimate(make_request(prompt=prompt), view)).tolist() == served


# Eqs. 10, 11, 13


def test_the_wait_for_a_seat_near_and_above_saturation_c071() -> None:
    assert [lps_wait_s(4, 5, k) for k in (1, 2, 3)] == pytest.approx([0.8, 0.64, 0.512])
    for rate in (5, 5.5, 1e9):
        assert lps_wait_s(rate, 5, 2) == np.inf


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_one_seat_is_mm1_and_seats_without_end_leave_no_wait(rho: float) -> None:
    mu = 3.0
    assert lps_wait_s(rho * mu, mu, 1) == pytest.approx(rho / (mu - rho * mu))
    assert lps_wait_s(rho * mu, mu, 1e6) == pytest.approx(0, abs=1e-12)


def test_regular_arrivals_or_services_halve_the_wait() -> None:
    poisson = lps_wait_s(4, 5, 3)
    assert lps_wait_s(4, 5, 3, ca2=0) == lps_wait_s(4, 5, 3, cs2=0) == pytest.approx(poisson / 2)
    assert lps_wait_s(4, 5, 3, ca2=0, cs2=0) == 0
    assert lps_wait_s(4, 5, 3, ca2=4, cs2=2) == pytest.approx(3 * poisson)


def lps_with(dispatches: Sequence[tuple[float, int]], window_s: float = 60.0) -> LpsEstimator:
    """Return an estimator of two instances that has seen these dispatches (instant [s], instance)."""
    estimator = LpsEstimator(make_settings(make_specs(2)), window_s=window_s)
    for at, instance in dispatches:
        estimator.observe_dispatch(make_request(count=2, arrival=round(at * PS_PER_S)), instance)
    return estimator


def wait_at(estimator: LpsEstimator, at: float) -> list[float]:
    """Return the wait that each instance is given at an instant [s]: mu = 5, k = 2."""
    request = make_request(count=2, prompt=100, arrival=round(at * PS_PER_S))
    waits: list[float] = (estimator.estimate(request, make_view(make_specs(2))) - 0.1 - 0.011).tolist()
    return waits


def test_lps_takes_the_rate_of_its_own_dispatches_over_the_window() -> None:
    estimator = lps_with([(0, 0), (5, 0), (11, 0), (12, 0), (13, 1), (15, 0), (19, 1)], window_s=10)
    assert wait_at(estimator, 20) == pytest.approx([lps_wait_s(0.3, 5, 2), lps_wait_s(0.2, 5, 2)])
    assert wait_at(estimator, 22) == pytest.approx([lps_wait_s(0.1, 5, 2), lps_wait_s(0.2, 5, 2)])
    assert wait_at(estimator, 40) == pytest.approx([0, 0])


def test_lps_divides_by_the_time_since_its_first_request_until_a_window_has_passed() -> None:
    assert wait_at(lps_with([]), 3) == pytest.approx([0, 0])
    assert wait_at(lps_with([(3, 0)]), 5) == pytest.approx([0, 0])
    assert wait_at(lps_with([(3, 0), (4, 0), (4.5, 0), (5, 1)]), 5) == pytest.approx(
        [lps_wait_s(1, 5, 2), lps_wait_s(0.5, 5, 2)]
    )


def test_lps_above_the_service_rate_is_without_bound_and_avoided() -> None:
    estimator = lps_with([(0, 0)] + [(0.1 * k, 0) for k in range(1, 11)])
    assert wait_at(estimator, 1)[0] == np.inf
    router = make_router("lps:arrival_rate=5", make_specs(2))
    decision = router.route(make_request(count=2, utility=[0.1, 0.9]), make_view(make_specs(2)))
    assert decision.predicted_ttft_s is not None
    assert (decision.predicted_ttft_s == np.inf).all()


@pytest.mark.parametrize("policy", ["lps", "lps:cut=residual,margin=0.8", "lps:window_s=1,cs2=3"])
def test_lps_decides_the_same_whatever_is_live(policy: str) -> None:
    specs = tuple(make_spec(j, service_rates=make_rates(theta=3000 / (j + 1))) for j in range(3))
    views = [make_view(specs), make_view(specs, [[(300, 50)] * n for n in (30, 0, 9)], at_ms=500)]
    routers = [make_router(policy, specs) for _ in views]
    assert not routers[0].needs_view
    rng = np.random.default_rng(1)
    reached = set()
    for index in range(300):
        request = make_request(
            index,
            prompt=int(rng.integers(10, 900)),
            utility=rng.random(3).tolist(),
            target_ms=float(rng.uniform(50, 900)),
            arrival=index * 80 * MS,
        )
        one, other = (router.route(request, view) for router, view in zip(routers, views, strict=True))
        assert one.instance == other.instance
        assert (one.predicted_ttft_s == other.predicted_ttft_s).all()
        reached.add(one.instance)
        ttft_s = float(rng.exponential(0.5))
        for router in routers:
            for name, given in (("dispatch", (request, one.instance)), ("first_token", (index, one.instance, ttft_s))):
                observe = getattr(router, f"observe_{name}", None)
                if observe is not None:
                    observe(*given)
    assert reached == {0, 1, 2}


@pytest.mark.parametrize("policy", ["throughput", "lps"])
def test_a_card_without_service_rates_names_the_command_that_adds_them(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_router(policy, make_specs(1, service_rates=None, card="mine"))
    assert str(caught.value) == (
        f"policy '{policy}': card mine of instance a has no service_rates; "
        "add them: python -m simcluster.calibrate.service_rates CARD.json"
    )


# The margin


@pytest.mark.parametrize("policy", PREDICTIVE)
def test_a_margin_asks_for_a_ttft_below_its_share_of_the_target(policy: str) -> None:
    specs = make_specs(2)
    view = make_view(specs, [[(80, 5)], ()], at_ms=1)
    estimate = make_router(policy, specs).route(make_request(count=2, prompt=40), view).predicted_ttft_s
    assert estimate is not None
    for share, reason in ((0.99, "infeasible"), (1.01, "feasible")):
        request = make_request(count=2, prompt=40, utility=[0.9, 0.1], target_ms=1e3 * estimate[1] / 0.8 * share)
        decision = make_router(f"{policy}:margin=0.8", specs).route(request, view)
        assert decision.reason == reason
        assert make_router(policy, specs).route(request, view).reason == "feasible"


@pytest.mark.parametrize("policy", PREDICTIVE)
def test_a_margin_of_one_and_a_hard_cut_change_nothing(policy: str) -> None:
    assert play(f"{policy}:margin=1,cut=hard") == play(policy)


@pytest.mark.parametrize("policy", PREDICTIVE)
@pytest.mark.parametrize("option", ["margin=0.9", "cut=residual"])
def test_margin_and_cut_are_refused_where_there_is_no_target(policy: str, option: str) -> None:
    with pytest.raises(ConfigError, match="weighted objective has no target"):
        make_router(f"{policy}:{option}", make_specs(1), objective="weighted")


@pytest.mark.parametrize("policy", PREDICTIVE)
def test_a_margin_must_be_above_zero(policy: str) -> None:
    with pytest.raises(ConfigError, match="margin = 0; must be above 0"):
        make_router(f"{policy}:margin=0", make_specs(1))


@pytest.mark.parametrize("policy", ["throughput", "lps"])
def test_the_weighted_objective_trades_utility_against_the_estimate(policy: str) -> None:
    specs = (make_spec(0, service_rates=make_rates(theta=100)), make_spec(1))
    request = make_request(count=2, prompt=100, utility=[0.9, 0.4])  # 0.9 s apart
    for weight, chosen in ((0.5, 0), (0.6, 1)):
        router = make_router(policy, specs, objective="weighted", latency_weight=weight)
        assert router.route(request, make_view(specs)).instance == chosen


# The chance to be on time


def learned(residuals: Sequence[float], instance: int = 0, expected: float = 1.0) -> OnTimeChance:
    """Return what has been learned from these residuals of one of two instances."""
    chance = OnTimeChance(2)
    for index, residual in enumerate(residuals):
        chance.expect(index, np.full(2, expected))
        chance.observe_dispatch(make_request(index, count=2), instance)
        chance.observe_first_token(index, instance, expected + residual)
    return chance


def test_until_twenty_residuals_the_cut_is_hard() -> None:
    chance = learned([10.0] * 19)
    assert chance.of(np.array([1.0, 3.0]), 2.0).tolist() == [1, 0]
    assert learned([10.0] * 20).of(np.array([1.0, 3.0]), 2.0).tolist() == [0, 0]


def test_the_chance_is_the_share_of_residuals_that_would_be_on_time() -> None:
    chance = learned([0.5] * 10 + [-0.5] * 30)
    assert chance.of(np.array([1.75, 1.75]), 2.0).tolist() == [0.75, 1]
    assert chance.of(np.array([2.25, 2.25]), 2.0).tolist() == [0.75, 0]
    assert chance.of(np.array([1.25, 1.25]), 2.0).tolist() == [1, 1]
    assert chance.of(np.array([2.75, 2.75]), 2.0).tolist() == [0, 0]


def test_only_the_last_two_hundred_residuals_count() -> None:
    chance = learned([9.0] * 150 + [0.0] * 150)
    assert chance.of(np.array([1.0, 1.0]), 2.0).tolist() == [0.75, 1]
    assert learned([9.0] * 150 + [0.0] * 200).of(np.array([1.0, 1.0]), 2.0).tolist() == [1, 1]


def test_a_residual_belongs_to_the_instance_that_served_and_to_its_own_estimate() -> None:
    chance = OnTimeChance(2)
    for index in range(20):
        chance.expect(index, np.array([1.0, 5.0]))
        chance.observe_dispatch(make_request(index, count=2), 1)  # a wrapper may send it elsewhere
        chance.observe_first_token(index, 1, 6.0)
    assert chance.of(np.array([1.0, 1.5]), 2.0).tolist() == [1, 0]
    assert chance.of(np.array([1.0, 1.0]), 2.0).tolist() == [1, 1]


def test_a_request_that_ends_without_a_token_teaches_nothing() -> None:
    chance = OnTimeChance(2)
    for index in range(30):
        chance.expect(index, np.zeros(2))
        chance.observe_dispatch(make_request(index, count=2), 0)
        chance.observe_end(index, 0)
        chance.observe_first_token(index, 0, 9.0)
    assert chance.of(np.array([1.0, 1.0]), 2.0).tolist() == [1, 1]


@pytest.mark.parametrize("policy", PREDICTIVE)
def test_a_late_instance_loses_what_its_utility_is_worth(policy: str) -> None:
    specs = make_specs(2)
    router = make_router(f"{policy}:cut=residual", specs)
    view = make_view(specs)
    for index in range(40):  # instance 0 is best, and every second time far later than expected
        decision = router.route(make_request(index, count=2, utility=[0.9, 0.0], target_ms=5000), view)
        assert decision.instance == 0
        router.observe_dispatch(make_request(index, count=2), 0)  # type: ignore[attr-defined]
        router.observe_first_token(index, 0, 9.0 if index % 2 else 0.11)  # type: ignore[attr-defined]
    for utility, chosen in (([0.9, 0.4], 0), ([0.9, 0.5], 1), ([-0.1, -0.2], 0), ([0.0, 0.1], 1)):
        decision = router.route(make_request(99, count=2, utility=utility, target_ms=5000), view)
        assert (decision.instance, decision.reason) == (chosen, "feasible")


def test_where_nobody_has_a_chance_the_fastest_is_taken() -> None:
    specs = (make_spec(0), make_spec(1, service_rates=make_rates(theta=2000)))
    router = make_router("throughput:cut=residual", specs)
    decision = router.route(make_request(count=2, utility=[0.9, 0.1], target_ms=1), make_view(specs))
    assert (decision.instance, decision.reason) == (1, "infeasible")


def test_a_policy_listens_only_if_it_learns() -> None:
    specs = make_specs(2)
    for policy in ("sfs", "sfs:margin=0.9", "throughput", "throughput:margin=0.9"):
        assert not hasattr(make_router(policy, specs), "observe_first_token"), policy
    assert not hasattr(make_router("lps", specs), "observe_first_token")
    assert hasattr(make_router("lps", specs), "observe_dispatch")
    for policy in PREDICTIVE:
        assert hasattr(make_router(f"{policy}:cut=residual", specs), "observe_first_token")
