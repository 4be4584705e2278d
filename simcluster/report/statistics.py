"""Statistics of paired comparisons: intervals, tests, corrections and areas, as pure functions of arrays.

Nothing here draws from a clock or a hidden generator: who asks for a resampled interval hands in the generator.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, stdtrit

__all__ = [
    "BLOCK_RESAMPLES",
    "LEVEL",
    "RESAMPLES",
    "Interval",
    "area_under",
    "block_means",
    "block_quantiles",
    "block_starts",
    "bootstrap_p",
    "expanded_level",
    "holm",
    "longest_run",
    "mean_interval",
    "memory",
    "pairs_needed",
    "percentile_interval",
    "wilcoxon_p",
]

LEVEL = 0.95  # of every interval
RESAMPLES = 9999  # of the bootstrap over seeds
BLOCK_RESAMPLES = 1999  # of the bootstrap over blocks of one trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def expanded_level(n: int, level: float = LEVEL) -> float:
    """Return the level at which a bootstrap of n values has the level that is wanted.

    With few values it would be too narrow: it resamples from a sample whose deviation is too small by
    sqrt((n - 1) / n), and takes normal quantiles where Student's belong.

    Source: Hesterberg, The American Statistician 69(4), 2015, section 5.3.
    """
    quantile = math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, (1 + level) / 2))
    return min(1 - 2 * float(ndtr(-quantile)), 1 - 1e-12)


def mean_interval(values: FloatArray, rng: np.random.Generator, level: float = LEVEL) -> Interval | None:
    """Return a bootstrap interval of a mean: BCa, widened for small samples.

    Args:
        values: (n,) independent values.
        rng: what draws the resamples; the same state gives the same interval.
        level: wanted level.

    Returns:
        The interval; None below two values.

    Source: BCa: Efron 1987.
    """
    if len(values) < 2:
        return None
    low, high = float(values.min()), float(values.max())
    if low == high:
        return Interval(low, high)
    from scipy import stats  # noqa: PLC0415  (slow to import, and needed by few commands)

    centre = float(values.mean())
    scale = max(high - centre, centre - low)  # to unit size: cubes of tiny values would vanish
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            ((values - centre) / scale,),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=expanded_level(len(values), level),
            method="BCa",
            rng=rng,
        ).confidence_interval
    ends = centre + scale * float(found.low), centre + scale * float(found.high)
    return Interval(*ends) if all(map(math.isfinite, ends)) else Interval(low, high)


def wilcoxon_p(differences: FloatArray) -> float:
    """Return the two-sided p of Wilcoxon's signed rank test; 1 where all differences are 0.

    Args:
        differences: (n,) paired differences, n >= 1.
    """
    if not differences.any():
        return 1.0
    from scipy import stats  # noqa: PLC0415

    return float(stats.wilcoxon(differences).pvalue)


def pairs_needed(comparisons: int, alpha: float = 1 - LEVEL) -> int:
    """Return how many pairs the signed rank test needs at least to be significant after Holm's first step.

    The smallest two-sided p of n pairs is 2 / 2**n, when all differences have one sign.
    """
    n = 1
    while comparisons * 2.0 ** (1 - n) > alpha + 1e-12:
        n += 1
    return n


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for the number of comparisons, in the given order. Source: Holm 1979."""
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, k in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted


def area_under(rates: Sequence[float], values: FloatArray) -> FloatArray:
    """Return the area under curves by the trapezoid rule.

    Args:
        rates: (r,) abscissae, ascending.
        values: (r, n) one curve per column.

    Returns:
        (n,) areas.
    """
    widths = np.diff(np.asarray(rates, dtype=np.float64))
    area: FloatArray = (widths[:, None] * (values[1:] + values[:-1]) / 2).sum(axis=0)
    return area


# ---- one trace: moving blocks ------------------------------------------------------------------------------------


def longest_run(arrival: IntArray, until: IntArray) -> tuple[int, int]:
    """Return start and end of the longest stretch of time that intervals cover without a gap.

    Args:
        arrival: (n,) starts of the intervals, in any order, n >= 1.
        until: (n,) their ends.
    """
    order = np.argsort(arrival, kind="stable")
    start, reach = arrival[order], np.maximum.accumulate(until[order])
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    last = np.append(first[1:], len(start)) - 1
    k = int(np.argmax(reach[last] - start[first]))
    return int(start[first[k]]), int(reach[last[k]])


def memory(arrival: IntArray, scheduled: IntArray, end: IntArray, instance: IntArray) -> int:
    """Return for how many requests it can be felt what happened to one of them.

    That is as long as requests queue at an instance without a break, or as 99 of 100 requests are there.

    Args:
        arrival: (n,) arrivals of the requests that were sent.
        scheduled: (n,) starts of their first steps; negative without one.
        end: (n,) their ends; negative without one.
        instance: (n,) where they went; negative for nowhere.

    Returns:
        A number of requests.
    """
    if len(arrival) == 0:
        return 0
    horizon = max(int(arrival.max()), int(end.max()))
    end = np.where(end < 0, horizon, end)
    waited = np.where(scheduled < 0, end, scheduled)
    ordered = np.sort(arrival)
    lives = np.searchsorted(ordered, end, "right") - np.searchsorted(ordered, arrival, "left")
    longest: int = math.ceil(np.quantile(lives, 0.99))
    for each in np.unique(instance[instance >= 0]):
        here = instance == each
        low, high = longest_run(arrival[here], waited[here])
        longest = max(longest, int(np.searchsorted(ordered, high, "right") - np.searchsorted(ordered, low, "left")))
    return longest


def block_starts(n: int, block: int, rng: np.random.Generator, resamples: int = BLOCK_RESAMPLES) -> IntArray:
    """Draw the moving blocks of each resample, (resamples, ceil(n / block)) first indices.

    Source: Kuensch 1989, the moving-block bootstrap.
    """
    drawn: IntArray = rng.integers(0, n - block + 1, size=(resamples, -(-n // block)))
    return drawn


def block_means(values: FloatArray, starts: IntArray, block: int) -> FloatArray:
    """Return the mean of each resample, NaN left out.

    Args:
        values: (n,) a value per request, NaN where it does not count.
        starts: as `block_starts` draws them.
        block: requests per block; the last one is cut so that a resample has n.
    """
    counted = ~np.isnan(values)
    ends = starts + block
    ends[:, -1] = starts[:, -1] + len(values) - (starts.shape[1] - 1) * block
    sums = np.concatenate(([0.0], np.cumsum(np.where(counted, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(counted)))
    number = (counts[ends] - counts[starts]).sum(axis=1)
    total = (sums[ends] - sums[starts]).sum(axis=1)
    means: FloatArray = np.where(number > 0, total / np.maximum(number, 1), np.nan)
    return means


def block_quantiles(values: FloatArray, starts: IntArray, block: int, q: float) -> FloatArray:
    """Return the linear quantile of each resample, NaN left out; the arguments are those of `block_means`."""
    n = len(values)
    result = np.empty(len(starts))
    offsets = np.arange(block)
    for k, row in enumerate(starts):
        drawn = values[(row[:, None] + offsets).ravel()[:n]]
        drawn = drawn[~np.isnan(drawn)]
        result[k] = np.quantile(drawn, q) if len(drawn) else np.nan
    return result


def percentile_interval(replicates: FloatArray, blocks: int, level: float = LEVEL) -> Interval:
    """Return the interval between two percentiles of resampled values, widened for few blocks.

    Args:
        replicates: the resampled values.
        blocks: how many blocks fit into the trace, at least 2.
        level: wanted level.
    """
    level = expanded_level(blocks, level)
    low, high = np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def bootstrap_p(replicates: FloatArray) -> float:
    """Return the two-sided p of resampled differences: twice the share on the far side of 0, itself included."""
    sides = min(int((replicates <= 0).sum()), int((replicates >= 0).sum()))
    return min(1.0, 2 * (sides + 1) / (len(replicates) + 1))
