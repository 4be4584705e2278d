"""What every policy promises, whatever its rule."""

import inspect
from typing import Any

import numpy as np
import pytest

from policy_helpers import make_request, make_router, make_specs, make_view, play
from simcluster.experiment.policy_check import check_router
from simcluster.routers import POLICIES, SHED, WRAPPERS, ClusterView
from simcluster.routers.base import NONE_HEALTHY
from simcluster.routers.names import parameters

LIVE = [name for name in POLICIES if name != "oracle"]  # the oracle needs a view that only the simulator builds
VARIANTS = [
    "power_of_two:load=tokens",
    "power_of_two:load=predicted_ttft,d=3",
    "normalized_load:load=requests",
    "weighted_scorers:picker=weighted_random",
    "weighted_scorers:active=2,token_load=2",
    "kv_cost:form=lmetric",
    "kv_cost:temperature=0.5",
    "admission(sfs)",
    "admission(shortest_queue)",
    "epsilon(cache_aware,p=0.3)",
    "admission(epsilon(vllm_dp))",
    "sfs:margin=0.9",
    "sfs:cut=residual",
    "throughput:cut=residual,margin=0.8",
    "admission(throughput)",
    "ml_latency:first=40,every=60",
    "ml_latency:first=40,cut=residual,start=random",
    "quality_threshold:threshold=0.6",
]


@pytest.mark.parametrize("policy", LIVE + VARIANTS)
def test_every_policy_passes_its_own_test(policy: str) -> None:
    checks = check_router(policy, decisions=400, limit_us=1e6)
    assert [check.name for check in checks] == [
        "never an unhealthy instance",
        "same seed, same decisions",
        "fair ties, rule random",
        "fair ties, rule rotate",
        "time per decision",
    ]
    assert [(check.name, check.detail) for check in checks if not check.passed] == []


@pytest.mark.parametrize("policy", LIVE + VARIANTS)
def test_without_a_healthy_instance_the_least_bad_one_is_taken_and_the_reason_says_so(policy: str) -> None:
    specs = make_specs(3)
    loads = [[(40, 40)] * 5, [(40, 40)] * 2, [(40, 40)] * 9]
    router = make_router(policy, specs)
    request = make_request(utility=[0.1, 0.9, 0.2], blocks=[1, 2], session="s")
    decision = router.route(request, make_view(specs, loads, at_ms=100, healthy=[False] * 3))
    assert decision.reason == NONE_HEALTHY
    assert 0 <= decision.instance < 3
    by_load = ("shortest_queue", "least_tokens", "least_kv", "sfs", "admission(shortest_queue)", "vllm_dp")
    if policy in by_load:
        assert decision.instance == 1


@pytest.mark.parametrize("policy", LIVE + VARIANTS)
def test_one_healthy_instance_gets_everything_even_if_it_is_the_worst(policy: str) -> None:
    specs = make_specs(3)
    loads = [[(40, 40)], [(40, 40)] * 9, ()]
    router = make_router(policy, specs)
    view = make_view(specs, loads, at_ms=100, healthy=[False, True, False])
    for index in range(20):
        request = make_request(index, utility=[0.9, 0.1, 0.9], blocks=[index], session=f"s{index}")
        assert router.route(request, view).instance == 1


@pytest.mark.parametrize("policy", [name for name in LIVE if not getattr(POLICIES[name], "needs_view", True)])
def test_a_policy_that_needs_no_view_does_not_look_at_one(policy: str) -> None:
    specs = make_specs(3)
    blind: Any = [object()] * 3
    decision = make_router(policy, specs).route(make_request(blocks=[1], session="s"), ClusterView(0, 0, specs, blind))
    assert 0 <= decision.instance < 3


@pytest.mark.parametrize("policy", LIVE + VARIANTS)
def test_a_cluster_of_one_gets_every_request(policy: str) -> None:
    specs = make_specs(1)
    router = make_router(policy, specs)
    for index in range(5):
        assert router.route(make_request(index, count=1, blocks=[1], session="s"), make_view(specs)).instance == 0


@pytest.mark.parametrize("policy", LIVE + VARIANTS)
def test_a_long_game_depends_on_the_seed_alone(policy: str) -> None:
    first = play(policy)
    assert first == play(policy)
    assert set(first) <= {SHED, 0, 1, 2}


# What a parameter is changed to, for every parameter of every policy.
CHANGES: dict[tuple[str, str], str] = {
    ("normalized_load", "load"): "requests",
    ("power_of_two", "d"): "3",
    ("power_of_two", "load"): "tokens",
    ("ewma_latency", "alpha"): "1",
    ("ewma_latency", "explore"): "0.5",
    ("session_hash", "places"): "7",
    ("prefix_hash", "tokens"): "16",
    ("prefix_hash", "factor"): "3",
    ("prefix_hash", "places"): "7",
    ("cache_aware", "cache_threshold"): "0.1",
    ("cache_aware", "balance_abs_threshold"): "2",
    ("cache_aware", "balance_rel_threshold"): "30",
    ("weighted_scorers", "queue"): "0",
    ("weighted_scorers", "kv"): "0",
    ("weighted_scorers", "prefix"): "0",
    ("weighted_scorers", "no_hit_lru"): "0",
    ("weighted_scorers", "active"): "5",
    ("weighted_scorers", "token_load"): "5000",
    ("weighted_scorers", "token_threshold"): "2000",
    ("weighted_scorers", "picker"): "weighted_random",
    ("kv_cost", "scale"): "5",
    ("kv_cost", "form"): "lmetric",
    ("kv_cost", "temperature"): "1",
    ("sfs", "margin"): "0.5",
    ("sfs", "cut"): "residual",
    ("sfs_plus", "price"): "0",
    ("sfs_plus", "slack_price"): "50",
    ("sfs_plus", "horizon_s"): "20",
    ("sfs_plus", "shed"): "true",
    ("throughput", "margin"): "0.5",
    ("throughput", "cut"): "residual",
    ("lps", "margin"): "0.5",
    ("lps", "cut"): "residual",
    ("lps", "window_s"): "10",
    ("lps", "arrival_rate"): "4.9",
    ("lps", "ca2"): "100",
    ("lps", "cs2"): "100",
    ("ml_latency", "margin"): "0.2",
    ("ml_latency", "cut"): "residual",
    ("ml_latency", "start"): "random",
    ("ml_latency", "first"): "20",
    ("ml_latency", "every"): "20",
    ("ml_latency", "keep"): "30",
    ("quality_threshold", "threshold"): "0.9",
    ("quality_threshold", "share"): "0.1",
    ("quality_threshold", "first"): "5",
    ("epsilon", "p"): "0.5",
}
BESIDE = {  # what must be set too, for the parameter to bind
    ("ml_latency", "margin"): "first=40,",
    ("ml_latency", "cut"): "first=40,margin=0.2,",
    ("ml_latency", "start"): "first=40,",
    ("ml_latency", "every"): "first=40,margin=0.2,",
    ("ml_latency", "keep"): "first=40,every=60,margin=0.2,",
    ("weighted_scorers", "token_threshold"): "token_load=5,",
    ("cache_aware", "balance_rel_threshold"): "balance_abs_threshold=2,",
}


@pytest.mark.parametrize(("policy", "parameter"), CHANGES)
def test_every_parameter_changes_decisions_c072(policy: str, parameter: str) -> None:
    written = f"{policy}(shortest_queue)" if policy in WRAPPERS else policy
    beside = BESIDE.get((policy, parameter), "")
    default = play(f"{written}:{beside}".rstrip(":,"))
    assert play(f"{written}:{beside}{parameter}={CHANGES[policy, parameter]}") != default


def test_no_parameter_goes_untested_c072() -> None:
    factories = POLICIES | WRAPPERS
    assert set(CHANGES) == {(name, key) for name, factory in factories.items() for key in parameters(factory)}


@pytest.mark.parametrize("name", [*POLICIES, *WRAPPERS])
def test_every_policy_says_its_rule_and_its_source(name: str) -> None:
    text = inspect.getdoc((POLICIES | WRAPPERS)[name])
    assert text is not None
    assert text.splitlines()[0].endswith(".")
    assert "\nSource: " in text


def test_numpy_floats_never_tie_by_accident_between_equal_instances() -> None:
    """Equal instances under equal load score equally, so that the tie rule decides and not the last bit."""
    specs = make_specs(3)
    view = make_view(specs, [[(37, 9)] * 3] * 3, at_ms=77)
    for policy in LIVE:
        decision = make_router(policy, specs).route(make_request(utility=[0.3] * 3), view)
        if decision.score is not None and np.isfinite(decision.score).all() and policy != "weighted_scorers":
            assert decision.num_tied == 3, policy
