"""Medians and shares of values that are only counted in buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.live.mock.tally import Tally

VALUES = st.lists(st.floats(1e-9, 1e15) | st.just(0.0) | st.just(-3.0), min_size=1, max_size=200)


def tallied(values: list[float]) -> Tally:
    tally = Tally()
    for value in values:
        tally.add(value)
    return tally


def test_without_values_there_is_nothing_to_tell() -> None:
    assert (Tally().median(), Tally().share_above(1.0), Tally().count) == (None, None, 0)


@given(VALUES)
def test_the_median_is_within_half_a_per_cent(values: list[float]) -> None:
    true = max(sorted(values)[len(values) // 2], 0.0)
    assert tallied(values).median() == pytest.approx(true, rel=0.005)


@given(VALUES, st.floats(1e-6, 1e12))
def test_a_share_is_that_of_a_limit_half_a_per_cent_away_at_most(values: list[float], limit: float) -> None:
    share = tallied(values).share_above(limit)
    found = np.array(values)
    assert share is not None
    assert (found > limit * 1.0051).mean() <= share <= (found > limit).mean()


def test_memory_follows_the_spread_and_not_the_number() -> None:
    tally = tallied([1.0 + k / 100_000 for k in range(100_000)])
    assert len(tally._buckets) < 150
