import numpy as np
import pytest

from simcluster.errors import ConfigError
from simcluster.rng import Stream, generator
from simcluster.workload import ttft_targets_s


def test_targets_follow_the_formula_of_the_paper_with_its_draws() -> None:
    prompts = np.array([10, 1_400, 7_000, 12_000])
    targets_s = ttft_targets_s(prompts, seed=3)
    draws = generator(3, Stream.TARGETS).random((4, 2))
    for p, (first, second), target_s in zip(prompts, draws, targets_s, strict=True):
        u_ms = 1 + 4 * first
        v = 0.98 + 0.04 * second
        expected_ms = min(1120, max(150, u_ms + (155 + 3.5e-3 * p) * v))
        assert target_s == pytest.approx(expected_ms / 1e3, rel=1e-12)


def test_targets_stay_within_the_range_of_the_draws() -> None:
    prompts = np.full(20_000, 2_000)
    targets_ms = ttft_targets_s(prompts, seed=1) * 1e3
    base_ms = 155 + 3.5e-3 * 2_000
    assert targets_ms.min() >= 1 + 0.98 * base_ms
    assert targets_ms.max() <= 5 + 1.02 * base_ms
    # Mean of u plus mean of v times the base; standard error 0.016 ms.
    assert targets_ms.mean() == pytest.approx(3 + base_ms, abs=0.08)


def test_long_prompts_meet_the_ceiling_and_no_prompt_falls_below_the_floor() -> None:
    assert ttft_targets_s(np.array([300_000]), seed=1).tolist() == [1.12]
    shortest = ttft_targets_s(np.zeros(5_000, dtype=np.int64), seed=1)
    assert shortest.min() >= 0.15


def test_scale_multiplies_the_finished_target() -> None:
    prompts = np.array([50, 7_000, 300_000])
    doubled = ttft_targets_s(prompts, seed=1, scale=2.0)
    assert doubled == pytest.approx(2 * ttft_targets_s(prompts, seed=1), rel=1e-12)


def test_equal_seeds_give_equal_targets_and_others_do_not() -> None:
    prompts = np.full(8, 100)
    first = ttft_targets_s(prompts, seed=1)
    assert np.array_equal(first, ttft_targets_s(prompts, seed=1))
    assert not np.array_equal(first, ttft_targets_s(prompts, seed=2))
    assert not np.array_equal(first, ttft_targets_s(prompts, seed=1, replication=1))


def test_the_targets_of_a_prefix_do_not_depend_on_what_follows() -> None:
    prompts = np.arange(1, 101)
    assert np.array_equal(ttft_targets_s(prompts, 1)[:10], ttft_targets_s(prompts[:10], 1))


def test_no_request_has_no_target() -> None:
    assert ttft_targets_s(np.array([], dtype=np.int64), seed=1).shape == (0,)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="must be finite and above 0"):
        ttft_targets_s(np.array([1]), seed=1, scale=scale)


def test_a_negative_prompt_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_tokens = -1"):
        ttft_targets_s(np.array([3, -1]), seed=1)
