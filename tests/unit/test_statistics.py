"""Statistics of paired comparisons, against values worked out by hand, scipy, and coverage in simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter

from simcluster.report.statistics import (
    Interval,
    area_under,
    block_means,
    block_quantiles,
    block_starts,
    bootstrap_p,
    holm,
    longest_run,
    mean_interval,
    memory,
    pairs_needed,
    percentile_interval,
    wilcoxon_p,
)
from simcluster.rng import seeded

RUNS = 400


def covered(draw: str, n: int, mean: float) -> float:
    """Return how often the interval of n drawn values holds their true mean."""
    rng, hits = seeded(11, n), 0
    for _ in range(RUNS):
        interval = mean_interval(getattr(rng, draw)(size=n), seeded(1))
        assert interval is not None
        hits += interval.low <= mean <= interval.high
    return hits / RUNS


# ---- intervals over seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 20])
def test_the_interval_of_a_mean_covers_it_about_95_times_in_100(n: int) -> None:
    # 400 runs of a true 95 % stay within 0.95 +- 4 * sqrt(0.95 * 0.05 / 400) = 0.044.
    assert covered("standard_normal", n, 0.0) == pytest.approx(0.95, abs=0.044)


def test_the_interval_of_a_skewed_mean_leans_to_the_long_tail() -> None:
    skewed = np.array([0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.4, 3.0])
    interval = mean_interval(skewed, seeded(1))
    assert interval is not None
    mean = skewed.mean()
    assert interval.high - mean > 1.5 * (mean - interval.low)


def test_the_interval_of_few_symmetric_values_is_about_students() -> None:
    values = stats.norm.ppf((np.arange(12) + 0.5) / 12)
    half = stats.t.ppf(0.975, 11) * values.std(ddof=1) / math.sqrt(12)
    interval = mean_interval(values, seeded(1))
    assert interval is not None
    assert interval == pytest.approx((-half, half), rel=0.08)


def test_the_same_values_and_generator_give_the_same_interval() -> None:
    values = seeded(4).normal(size=9)
    assert mean_interval(values, seeded(1)) == mean_interval(values, seeded(1))


@pytest.mark.parametrize(("values", "expected"), [([], None), ([1.5], None), ([2.0, 2.0, 2.0], Interval(2.0, 2.0))])
def test_values_without_spread_have_no_resampled_interval(values: list[float], expected: Interval | None) -> None:
    assert mean_interval(np.array(values), seeded(1)) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_every_interval_lies_within_the_values(values: list[float]) -> None:
    interval = mean_interval(np.array(values), seeded(1))
    assert interval is not None
    room = 1e-9 * max(1.0, *map(abs, values))
    assert min(values) - room <= interval.low <= interval.high <= max(values) + room


# ---- tests and corrections ---------------------------------------------------------------------------------------


def test_the_signed_rank_test_of_one_sign_has_the_p_of_the_coin() -> None:
    assert wilcoxon_p(np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])) == pytest.approx(2 / 2**6)


def test_the_signed_rank_test_is_scipys() -> None:
    values = seeded(8).normal(0.3, 1.0, size=15)
    assert wilcoxon_p(values) == stats.wilcoxon(values).pvalue


def test_no_difference_at_all_has_p_1() -> None:
    assert wilcoxon_p(np.zeros(7)) == 1.0


@pytest.mark.parametrize(("comparisons", "expected"), [(1, 6), (2, 7), (5, 8), (6, 8), (7, 9)])
def test_pairs_needed_is_the_first_number_that_can_be_significant(comparisons: int, expected: int) -> None:
    assert pairs_needed(comparisons) == expected
    assert comparisons * 2.0 ** (1 - expected) <= 0.05 < comparisons * 2.0 ** (2 - expected)


def test_holm_by_hand() -> None:
    # Sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04; none falls below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_no_correction_and_bonferronis(p_values: list[float]) -> None:
    for raw, adjusted in zip(p_values, holm(p_values), strict=True):
        assert raw <= adjusted <= min(1.0, raw * len(p_values))


def test_area_by_hand() -> None:
    # 1..3: (0.6 + 0.5) / 2 * 2 = 1.1; 3..4: (0.5 + 0.1) / 2 = 0.3
    areas = area_under([1.0, 3.0, 4.0], np.array([[0.6, 1.0], [0.5, 1.0], [0.1, 1.0]]))
    assert areas == pytest.approx([1.4, 3.0])


# ---- blocks of one trace -----------------------------------------------------------------------------------------


def test_the_longest_run_ends_where_everybody_has_left() -> None:
    # 0-5, 3-4 and 4-9 overlap; 9 arrives as the last one leaves and is together with it; 20 stands alone.
    arrival, end = np.array([20, 0, 3, 4, 9]), np.array([22, 5, 4, 9, 12])
    assert longest_run(arrival, end) == (0, 12)
    assert longest_run(arrival[:1], end[:1]) == (20, 22)


def test_the_memory_is_that_of_the_longest_queue_at_one_instance() -> None:
    # Instance 0 has a queue from 0 to 25: arrivals at 0, 5, 10, 20 see it, and so does 15 at instance 1.
    arrival, instance = np.array([0, 5, 10, 15, 20, 40, 50]), np.array([0, 0, 0, 1, 0, 0, 1])
    scheduled = np.array([8, 12, 22, 15, 25, 40, 50])
    assert memory(arrival, scheduled, scheduled, instance) == 5
    two_queues = np.array([0, 1, 0, 1, 0, 0, 1])  # 0-8, 10-22 and 20-25 at 0; 5-12 at 1
    assert memory(arrival, scheduled, scheduled, two_queues) == 3


def test_the_memory_is_at_least_as_long_as_answers_take() -> None:
    arrival = np.arange(0, 100, 10)
    assert memory(arrival, arrival, arrival + 35, np.zeros(10, dtype=np.int64)) == 4
    assert memory(arrival[:0], arrival[:0], arrival[:0], arrival[:0]) == 0


def test_a_request_that_is_never_scheduled_queues_to_the_end() -> None:
    arrival = np.arange(0, 100, 10)
    scheduled = np.where(arrival == 30, -1, arrival)
    assert memory(arrival, scheduled, scheduled, np.zeros(10, dtype=np.int64)) == 7


def test_block_means_and_quantiles_are_those_of_the_written_out_resample() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0, 6.0, 7.0])
    starts = np.array([[0, 3, 4], [4, 4, 0]])
    # blocks of 3, the last one cut so that 7 remain: 1 2 nan 4 5 6 5 and 5 6 7 5 6 7 1
    assert block_means(values, starts, 3) == pytest.approx([23 / 6, 37 / 7])
    assert block_quantiles(values, starts, 3, 0.5) == pytest.approx([4.5, 6.0])


def test_blocks_stay_inside_the_trace_and_reach_both_ends() -> None:
    starts = block_starts(10, 4, seeded(2), 500)
    assert starts.shape == (500, 3)
    assert (starts.min(), starts.max()) == (0, 6)


def correlated(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return values of mean 0 whose neighbours correlate by 0.8."""
    values: np.ndarray = lfilter([1.0], [1.0, -0.8], rng.normal(size=n + 100))[100:]
    return values


def test_blocks_cover_the_mean_of_correlated_requests_and_single_requests_do_not() -> None:
    hits = {1: 0, 60: 0}
    starts = {block: block_starts(900, block, seeded(1), 499) for block in hits}
    for run in range(RUNS):
        values = correlated(900, seeded(6, run))
        for block in hits:
            low, high = percentile_interval(block_means(values, starts[block], block), 900 // block)
            hits[block] += low <= 0 <= high
    assert hits[60] / RUNS == pytest.approx(0.95, abs=0.05)
    assert hits[1] / RUNS < 0.70  # such neighbours are worth a ninth of their number


def test_the_p_of_resamples_counts_the_far_side_twice() -> None:
    assert bootstrap_p(np.array([-1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])) == pytest.approx(2 * 2 / 10)
    assert bootstrap_p(np.zeros(9)) == 1.0
