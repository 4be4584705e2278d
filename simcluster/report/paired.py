"""Values of one policy that can be subtracted from another's: by seed, or by block of one trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from simcluster.report.statistics import (
    FloatArray,
    Interval,
    area_under,
    bootstrap_p,
    mean_interval,
    percentile_interval,
    wilcoxon_p,
)

__all__ = ["BlockValues", "Difference", "NewGenerator", "SeedValues", "Values"]

NewGenerator = Callable[[], np.random.Generator]


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference.

    Attributes:
        value: mean difference.
        interval: its interval; None where it cannot be known.
        p: two-sided p of no difference; None where it cannot be known.
        pairs: number of pairs; 1 for one trace.
    """

    value: float
    interval: Interval | None
    p: float | None
    pairs: int


class Values(Protocol):
    """A metric of one policy, with its uncertainty."""

    @property
    def mean(self) -> float:
        """The metric."""

    def interval(self) -> Interval | None:
        """Return the interval of the metric itself."""

    def minus(self, other: Self) -> Difference | None:
        """Return the paired difference; None without any pair."""

    def area_with(self, others: Sequence[Self], rates: Sequence[float]) -> Self:
        """Return the area under this curve point and its followers, one for each further rate."""


@dataclass(frozen=True, slots=True)
class SeedValues:
    """One value per seed; pairs are those of equal seeds."""

    by_seed: dict[int, float]
    new_generator: NewGenerator

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(list(self.by_seed.values())))

    def interval(self) -> Interval | None:
        """Return the interval of the mean over seeds."""
        return mean_interval(np.array(list(self.by_seed.values())), self.new_generator())

    def minus(self, other: Self) -> Difference | None:
        """Return the mean difference over the seeds that both have."""
        seeds = [seed for seed in self.by_seed if seed in other.by_seed]
        if not seeds:
            return None
        differences = np.array([self.by_seed[seed] - other.by_seed[seed] for seed in seeds])
        interval = mean_interval(differences, self.new_generator())
        return Difference(float(differences.mean()), interval, wilcoxon_p(differences), len(seeds))

    def area_with(self, others: Sequence[Self], rates: Sequence[float]) -> Self:
        """Return the area of each seed that has a value at every rate."""
        curves = [self.by_seed, *(other.by_seed for other in others)]
        seeds = [seed for seed in self.by_seed if all(seed in curve for curve in curves)]
        areas = area_under(rates, np.array([[curve[seed] for seed in seeds] for curve in curves]))
        return type(self)(dict(zip(seeds, areas.tolist(), strict=True)), self.new_generator)


@dataclass(frozen=True, slots=True)
class BlockValues:
    """The value of one trace and those of its resamples; resample k holds the same requests for every policy.

    Attributes:
        mean: the metric of the trace.
        replicates: that of each resample.
        blocks: how many blocks fit into the trace.
    """

    mean: float
    replicates: FloatArray
    blocks: int

    def interval(self) -> Interval | None:
        """Return the interval over the resamples."""
        return percentile_interval(self.replicates, self.blocks)

    def minus(self, other: Self) -> Difference | None:
        """Return the difference, resample by resample."""
        differences = self.replicates - other.replicates
        return Difference(
            self.mean - other.mean, percentile_interval(differences, self.blocks), bootstrap_p(differences), 1
        )

    def area_with(self, others: Sequence[Self], rates: Sequence[float]) -> Self:
        """Return the area, resample by resample."""
        curves = [self, *others]
        mean = area_under(rates, np.array([[curve.mean] for curve in curves]))
        replicates = area_under(rates, np.array([curve.replicates for curve in curves]))
        return type(self)(float(mean[0]), replicates, self.blocks)
