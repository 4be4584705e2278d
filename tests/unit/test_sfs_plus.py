"""sfs_plus: what it learns, whom it spares, and what it charges for. Steps take 10 ms and 1 ms per token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from policy_helpers import make_request, make_router, make_spec, make_specs, make_view
from simcluster.errors import ConfigError
from simcluster.routers import SHED
from simcluster.routers.base import ClusterView
from simcluster.routers.sfs_plus import SfsPlus
from simcluster.units import PS_PER_S

FREE = "sfs_plus:price=0,slack_price=0"


def two_models() -> Any:
    return (make_spec(0, model="large"), make_spec(1, model="small"))


def sent(router: SfsPlus, view: ClusterView, index: int, **changes: Any) -> int:
    """Let a router decide, and send the request where it says."""
    request = make_request(index, count=len(view.views), **changes)
    j = router.route(request, view).instance
    view.views[j].record_dispatch(index, int(request.prompt_tokens[j]), 10, view.now_ps)
    router.observe_dispatch(request, j)
    return j


def taught(router: SfsPlus, view: ClusterView, instance: int, late_ms: float, count: int = 25) -> None:
    """Let requests of 100 tokens to an idle instance have their first token so much later than expected."""
    for index in range(1000, 1000 + count):
        request = make_request(index, count=len(view.views))
        router.route(request, view)
        router.observe_dispatch(request, instance)
        router.observe_first_token(index, instance, 0.110 + late_ms / 1e3)


def plus(policy: str, specs: Sequence[Any], **changes: Any) -> SfsPlus:
    router = make_router(policy, specs, **changes)
    assert isinstance(router, SfsPlus)
    return router


def test_an_idle_cluster_serves_everybody_where_utility_is_largest() -> None:
    specs = two_models()
    for target_ms in (None, 200):
        request = make_request(count=2, utility=[0.9, 0.8], target_ms=target_ms)
        assert plus("sfs_plus", specs).route(request, make_view(specs)).instance == 0


def test_estimates_are_those_of_sfs() -> None:
    specs = make_specs(3)
    view = make_view(specs, [[(200, 5)], [], [(100, 5), (300, 5)]], at_ms=5)
    request = make_request(utility=[0.5, 0.5, 0.5], target_ms=900)
    estimate = make_router("sfs", specs).route(request, view).predicted_ttft_s
    assert np.array_equal(plus("sfs_plus", specs).route(request, view).predicted_ttft_s, estimate)


def test_without_residuals_the_cut_is_hard() -> None:
    specs = two_models()
    view = make_view(specs, [[(200, 5)], []], at_ms=1)
    assert plus(FREE, specs).route(make_request(count=2, utility=[0.9, 0.2], target_ms=111), view).instance == 1


@pytest.mark.parametrize(("late_ms", "chosen"), [(50, 1), (-50, 0)])
def test_an_instance_whose_estimates_were_too_short_is_trusted_less(late_ms: float, chosen: int) -> None:
    specs = two_models()
    router, view = plus(FREE, specs), make_view(specs)
    taught(router, view, 0, late_ms)
    assert router.route(make_request(count=2, utility=[0.9, 0.8], target_ms=140), view).instance == chosen


def test_estimates_that_were_too_long_let_it_try_what_sfs_would_not() -> None:
    specs = two_models()
    router, view = plus(FREE, specs), make_view(specs)
    taught(router, view, 0, -50)
    assert router.route(make_request(count=2, utility=[0.9, 0.1], target_ms=100), view).instance == 0


def test_replicas_learn_from_each_other() -> None:
    specs = (make_spec(0, model="large"), make_spec(1, model="large"), make_spec(2, model="small"))
    router, view = plus(FREE, specs), make_view(specs)
    taught(router, view, 0, 50)
    assert router.route(make_request(utility=[0.9, 0.9, 0.8], target_ms=140), view).instance == 2


def test_only_the_last_two_hundred_residuals_count() -> None:
    specs = two_models()
    router, view = plus(FREE, specs), make_view(specs)
    taught(router, view, 0, 50, count=30)
    taught(router, view, 0, 0, count=200)
    assert router.route(make_request(count=2, utility=[0.9, 0.8], target_ms=140), view).instance == 0


@pytest.mark.parametrize(("target_ms", "chosen"), [(150, 1), (400, 0)])
def test_a_newcomer_does_not_make_those_late_with_whom_it_would_share_a_batch(target_ms: float, chosen: int) -> None:
    specs = two_models()
    router, view = plus(FREE, specs), make_view(specs)
    assert sent(router, view, 0, utility=[0.9, 0.1], target_ms=target_ms) == 0
    assert sent(router, view, 1, utility=[0.9, 0.8], target_ms=1000) == chosen


def test_who_has_had_its_first_token_or_has_ended_is_harmed_no_more() -> None:
    for over in ("first_token", "end"):
        specs = two_models()
        router, view = plus(FREE, specs), make_view(specs)
        assert sent(router, view, 0, utility=[0.9, 0.1], target_ms=150) == 0
        if over == "end":
            router.observe_end(0, 0)
        else:
            router.observe_first_token(0, 0, 0.110)
        assert sent(router, view, 1, utility=[0.9, 0.8], target_ms=1000) == 0


@pytest.mark.parametrize(("policy", "chosen"), [(FREE, 0), ("sfs_plus:slack_price=0", 1)])
def test_a_request_that_loses_little_leaves_a_scarce_instance_to_the_next_ones(policy: str, chosen: int) -> None:
    specs = two_models()
    router = plus(policy, specs)
    view = make_view(specs)
    for index in range(40):  # 20 each second, and only the large one is any good to them
        view.now_ps = index * PS_PER_S // 20
        router.route(make_request(index, count=2, utility=[0.9, 0.1], target_ms=120, arrival=view.now_ps), view)
    last = make_request(40, count=2, utility=[0.5, 0.45], target_ms=1000, arrival=view.now_ps)
    assert router.route(last, view).instance == chosen


@pytest.mark.parametrize(("policy", "chosen"), [("sfs_plus:slack_price=0", 0), ("sfs_plus:price=0", 1)])
def test_delay_has_a_price_even_where_targets_still_allow_it(policy: str, chosen: int) -> None:
    specs = two_models()
    router = plus(policy, specs)
    view = make_view(specs)
    for index in range(40):
        view.now_ps = index * PS_PER_S // 20
        router.route(make_request(index, count=2, utility=[0.9, 0.1], target_ms=2000, arrival=view.now_ps), view)
    last = make_request(40, count=2, utility=[0.5, 0.45], target_ms=1000, arrival=view.now_ps)
    assert router.route(last, view).instance == chosen


@pytest.mark.parametrize(("replicas", "chosen"), [(1, 1), (7, 0)])
def test_replicas_share_the_price_of_a_delay_that_holds_up_one_of_them(replicas: int, chosen: int) -> None:
    models = ["large"] * replicas + ["small"]
    specs = tuple(make_spec(j, model=model) for j, model in enumerate(models))
    router = plus("sfs_plus:price=0,slack_price=0.1", specs)
    view = make_view(specs)
    for index in range(41):
        view.now_ps = index * PS_PER_S // 20
        large, small = (0.9, 0.1) if index < 40 else (0.5, 0.45)
        utility = [large] * replicas + [small]
        request = make_request(index, count=replicas + 1, utility=utility, target_ms=2000, arrival=view.now_ps)
        decision = router.route(request, view)
    assert decision.instance == chosen


@pytest.mark.parametrize(("policy", "sheds"), [("sfs_plus:shed=true", True), ("sfs_plus", False)])
def test_a_hopeless_request_is_turned_away_only_if_that_is_wanted(policy: str, *, sheds: bool) -> None:
    specs = two_models()
    request = make_request(count=2, utility=[0.9, 0.8], target_ms=50)  # the first step alone takes 110 ms
    decision = plus(policy, specs).route(request, make_view(specs))
    assert (decision.instance == SHED) == sheds
    assert (decision.reason == "shed") == sheds


def test_an_answer_that_costs_more_than_it_is_worth_is_not_made_late_on_purpose() -> None:
    specs = two_models()
    view = make_view(specs, [[], [(500, 5)]])  # the second would be late, which counts as 0
    assert plus(FREE, specs).route(make_request(count=2, utility=[-0.2, -0.4], target_ms=200), view).instance == 0


def test_equals_are_left_to_the_tie_rule() -> None:
    specs = make_specs(4)
    router = plus("sfs_plus", specs, tie="rotate")
    view = make_view(specs)
    chosen = [router.route(make_request(k, count=4, target_ms=500), view) for k in range(4)]
    assert [(each.instance, each.num_tied) for each in chosen] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_request_that_nobody_can_serve_is_still_decided() -> None:
    specs = make_specs(2, max_model_len=64)
    decision = plus("sfs_plus", specs).route(make_request(count=2, prompt=100), make_view(specs))
    assert decision.instance == 0
    assert np.isinf(decision.predicted_ttft_s).all() if decision.predicted_ttft_s is not None else False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("price=-1", "price = -1; must be 0 or more"),
        ("slack_price=-0.5", "slack_price = -0.5; must be 0 or more"),
        ("horizon_s=0", "horizon_s = 0; must be above 0"),
    ],
)
def test_a_bad_parameter_is_named(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_router(f"sfs_plus:{options}", make_specs(2))


def test_it_needs_targets_and_says_so() -> None:
    with pytest.raises(ConfigError, match="set objective: slo"):
        make_router("sfs_plus", make_specs(2), objective="weighted")


def test_what_others_decided_teaches_nothing() -> None:
    specs = two_models()
    router, view = plus(FREE, specs), make_view(specs)
    for index in range(50):
        router.observe_dispatch(make_request(index, count=2), 0)
        router.observe_first_token(index, 0, 9.0)
    request = make_request(99, count=2, utility=[0.9, 0.8], target_ms=140)
    assert router.route(request, view).instance == 0
    router.observe_dispatch(request, 0)
