"""The learned latency, and the quality threshold."""

from pathlib import Path

import numpy as np
import pytest

from policy_helpers import make_request, make_router, make_settings, make_spec, make_specs, make_view
from simcluster.errors import ConfigError
from simcluster.routers.ml_latency import MlEstimator
from simcluster.routers.quality_threshold import QualityThreshold, calibrated_threshold
from simcluster.routers.settings import RouterSettings
from small_cluster import run_once, scenario_data

# ---- ml_latency --------------------------------------------------------------------------------------------------


def taught(count: int, **options: int) -> MlEstimator:
    """Return an estimator of three instances of which number j takes (j + 1) * prompt / 1000 s for each prompt."""
    kinds = [make_spec(j, model=f"M{j}") for j in range(3)]
    estimator = MlEstimator(make_settings(kinds), **options)
    rng = np.random.default_rng(5)
    for index in range(count):
        prompt, j = int(rng.integers(10, 2000)), index % 3
        request = make_request(index, prompt=prompt)
        estimator.estimate(request, make_view(kinds))
        estimator.observe_dispatch(request, j)
        estimator.observe_first_token(index, j, (j + 1) * prompt / 1000)
    return estimator


def estimates(estimator: MlEstimator, prompt: int) -> list[float]:
    found: list[float] = estimator.estimate(make_request(10**6, prompt=prompt), make_view(make_specs(3))).tolist()
    return found


def test_nothing_is_predicted_before_the_first_observations() -> None:
    assert np.isnan(estimates(taught(299, first=300), 500)).all()
    assert np.isfinite(estimates(taught(300, first=300), 500)).all()


def test_it_learns_what_depends_on_the_model_and_the_prompt() -> None:
    estimator = taught(1500, first=1500)
    for prompt in (300, 900, 1500):
        assert estimates(estimator, prompt) == pytest.approx([prompt / 1000 * (j + 1) for j in range(3)], rel=0.15)


def test_equal_observations_give_equal_predictions() -> None:
    assert estimates(taught(400), 700) == estimates(taught(400), 700)


def test_it_trains_anew_on_the_last_observations() -> None:
    once, again = taught(200, first=200, every=100), taught(299, first=200, every=100)
    assert estimates(once, 700) == estimates(again, 700)
    assert estimates(taught(300, first=200, every=100), 700) != estimates(once, 700)
    forgetful, only_last = taught(300, first=300, keep=60), taught(300, first=300, keep=300)
    assert estimates(forgetful, 700) != estimates(only_last, 700)


def test_until_it_has_learned_it_acts_as_the_first_policy_and_says_so() -> None:
    specs = make_specs(3)
    router = make_router("ml_latency:first=5,start=round_robin", specs)
    for index in range(6):
        request = make_request(index, utility=[0.1, 0.2, 0.9])
        decision = router.route(request, make_view(specs))
        learning = index < 5
        assert decision.reason == ("warmup" if learning else "feasible")
        assert (decision.predicted_ttft_s is None) == learning
        assert decision.instance == (index % 3 if learning else 2)
        router.observe_dispatch(request, decision.instance)  # type: ignore[attr-defined]
        router.observe_first_token(index, decision.instance, 0.1)  # type: ignore[attr-defined]


def test_what_a_wrapper_sends_elsewhere_teaches_about_that_instance() -> None:
    estimator = MlEstimator(make_settings(make_specs(2)), first=1)
    request = make_request(0, count=2)
    estimator.observe_dispatch(request, 0)  # never estimated: explored without asking
    estimator.observe_first_token(0, 0, 1.0)
    assert not estimator.trained


# ---- quality_threshold -------------------------------------------------------------------------------------------


def test_a_threshold_calibrated_on_other_data_reaches_another_share_c039() -> None:
    """The case's scores say how much a request needs the strong model: 1 - quality of the weak one."""
    weak = {"calibration": [0.9, 0.8, 0.7, 0.6], "live": [0.5, 0.4, 0.3, 0.2]}
    assert calibrated_threshold(np.array(weak["calibration"]), 0.5) == 0.8
    router = QualityThreshold(priced(), share=0.5, first=4)
    shares = []
    for set_name in ("calibration", "live"):
        for quality in weak[set_name]:
            router.route(make_request(count=2, quality=[quality, 1.0]), make_view(make_specs(2)))
        shares.append(router.report())
    assert shares[0]["threshold"] == shares[1]["threshold"] == 0.8
    fresh = QualityThreshold(priced(), threshold=0.8)
    for quality in weak["calibration"]:
        fresh.route(make_request(count=2, quality=[quality, 1.0]), make_view(make_specs(2)))
    assert fresh.report()["achieved_share"] == 0.5
    live = shares[1]["achieved_share"] * 8 - shares[0]["achieved_share"] * 4
    assert live == 4  # all of the live ones
    assert shares[1]["target_share"] == 0.5


def priced() -> RouterSettings:
    """Return settings of a cheap and a dear instance."""
    return make_settings([make_spec(0, price_out=1.0), make_spec(1, price_out=2.0)])


@pytest.mark.parametrize(
    ("share", "threshold"), [(0, 0.1), (0.24, 0.1), (0.25, 0.2), (0.5, 0.3), (0.99, 0.4), (1, np.inf)]
)
def test_the_threshold_is_the_highest_that_sends_no_more_than_the_share_on(share: float, threshold: float) -> None:
    quality = np.array([0.4, 0.1, 0.3, 0.2])
    assert calibrated_threshold(quality, share) == threshold
    assert np.count_nonzero(quality < threshold) <= share * 4
    assert calibrated_threshold(np.full(4, 0.5), 0.75) == 0.5  # equal ones stay together


def test_the_cheapest_that_is_good_enough_is_taken_else_the_best() -> None:
    specs = [make_spec(j, price_out=price) for j, price in enumerate((2.0, 1.0, 3.0))]
    router = make_router("quality_threshold:threshold=0.6", specs)
    for quality, chosen, reason in (
        ([0.7, 0.6, 0.9], 1, "score"),
        ([0.7, 0.5, 0.9], 0, "score"),
        ([0.5, 0.5, 0.9], 2, "score"),
        ([0.5, 0.4, 0.3], 0, "below_threshold"),
    ):
        decision = router.route(make_request(quality=quality), make_view(specs))
        assert (decision.instance, decision.reason) == (chosen, reason)


@pytest.mark.parametrize("option", ["threshold=1.5", "share=-0.1", "first=0"])
def test_a_threshold_out_of_range_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} = "):
        make_router(f"quality_threshold:{option}", make_specs(1))


def test_the_share_reached_is_in_the_summary_beside_its_target(tmp_path: Path) -> None:
    columns = {"arrival_ns": [0, 1, 2, 3], "prompt_tokens": [5] * 4, "output_tokens": [4] * 4}
    price = {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 1.0}
    data = scenario_data([{"quality": 0.5}, {"quality": 0.9, "price": price}])
    for share, threshold, achieved, instance in ((0.5, 0.5, 0.0, "a"), (1.0, None, 1.0, "b")):
        run, requests = run_once(tmp_path, columns, data, f"quality_threshold:share={share}")
        assert run.summary["policy_reports"] == [
            {
                "threshold": threshold,
                "calibrated_on": 4,
                "target_share": share,
                "achieved_share": achieved,
                "decisions": 4,
            }
        ]
        assert requests["instance"].to_list() == [instance] * 4
    wrapped, _ = run_once(tmp_path, columns, data, "epsilon(quality_threshold:threshold=0.9)")
    assert wrapped.summary["policy_reports"][0]["target_share"] is None
    assert run_once(tmp_path, columns, data)[0].summary["policy_reports"] == []
