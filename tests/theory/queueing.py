"""Queueing theory to hold the engine against: closed forms, one exact chain, random inputs, confidence intervals.

Times are in mean service times, so the service rate is 1 and the arrival rate is the load `rho`.

The degenerate engine. With a step time of b1 * (tokens), prompts of one token, a seat for k requests and ample
blocks, a request of n output tokens is n tokens of work: its only prompt token yields the first output token. Every
step gives one token to each seated request and takes b1 for each of them, so the engine works at rate 1 whenever
somebody is there, and the first k requests share it in turns: limited processor sharing (LPS) in slices of one token.

What the slices change. Requests join between steps, and lengths are whole tokens: geometric of mean m is the
exponential rounded up. For one seat nothing else differs, and the engine is the M/G/1 queue of these lengths exactly.
For more seats `stepwise_lps` solves the engine's own Markov chain, so what separates a closed form from the engine is
computed, not estimated. For the sojourn there is also a proof. A request's tokens to come are geometric at every step
boundary, so the mean work present is E[L] minus E[e], where e is the part of the step in progress that is done, and
E[e] = E[n * b1 / 2] over time for n seated requests, with b1 = 1/m. The mean work is Pollaczek and Khinchine's,
whoever is served. So E[L] = rho/(1-rho) * (1 - 1/(2m)) + E[n]/(2m), and with rho <= E[n] <= E[L]
    1 - rho/(2m)  <=  E[L] / (rho/(1-rho))  <=  1    for every number of seats.

Sources:
    Kleinrock, Queueing Systems vol. 1 (1975): M/M/1 (chapter 3), Pollaczek-Khinchine (chapter 5); vol. 2 (1976):
    conservation of work (chapter 3), processor sharing (chapter 4).
    Avi-Itzhak and Halfin, Expected response times in a non-symmetric time sharing queue with a limited number of
    service positions (ITC 12, 1988): LPS.
    arXiv 2607.18253, eqs. 10 (= 12) and 13: the wait under LPS.
    Lavenberg and Welch, A perspective on the use of control variables (Management Science 27, 1981): intervals.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from simcluster.rng import Stream, generator
from simcluster.routers.estimators import lps_wait_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

CONFIDENCE = 0.99


def mm1_sojourn(rho: float) -> float:
    """Mean time in the system of M/M/1, 1 / (mu - alpha); of FCFS, of processor sharing and of LPS with any k."""
    return 1 / (1 - rho)


def mg1_wait(rho: float, second_moment: float) -> float:
    """Mean wait of M/G/1-FCFS, alpha * E[S^2] / (2 (1 - rho)); also the mean work present, whoever is served."""
    return rho * second_moment / (2 * (1 - rho))


def mg1_squared_work(rho: float, second_moment: float, third_moment: float) -> float:
    """Mean square of the work present in M/G/1, from the same transform as the mean."""
    return 2 * mg1_wait(rho, second_moment) ** 2 + rho * third_moment / (3 * (1 - rho))


def lps_wait(rho: float, k: int) -> float:
    """Mean wait for a seat under LPS with exponential lengths, (alpha/mu)^k / (mu - alpha). Source: paper eq. 10.

    It is the function of the routers that is held against the simulations here.
    """
    return lps_wait_s(rho, 1, k)


def general_lps_wait(rho: float, k: int, arrival_scv: float, service_scv: float) -> float:
    """Mean wait under LPS for general lengths, by squared coefficients of variation. Source: paper eq. 13.

    Exact for Poisson arrivals if k = 1 (Pollaczek-Khinchine) or the lengths are exponential (eq. 10); otherwise an
    approximation.
    """
    return lps_wait_s(rho, 1, k, arrival_scv, service_scv)


@dataclass(frozen=True, slots=True)
class Means:
    """Mean wait until the first step, and mean time until the last token."""

    wait: float
    sojourn: float


def stepwise_lps(rho: float, k: int, mean_tokens: int) -> Means:
    """Solve the degenerate engine for geometric outputs exactly, by its chain of steps.

    With x requests at the start of a step, n = min(x, k) get a token and the step takes n tokens of time; each of the n
    leaves with probability 1/m, Poisson(rho * n / m) arrive. Time averages over the chain give the requests without
    a step yet and those with one, and Little's law the waits.
    """
    size = k + 8 + int(np.ceil(np.log(1e-15) / np.log(rho)))  # P(more) is below 1e-15
    states = np.arange(size)
    seated = np.minimum(states, k)
    moves = np.zeros((size, size))
    moves[0, 1] = 1  # idle until somebody comes
    for x in range(1, size):
        arrivals = stats.poisson.pmf(states, rho * seated[x] / mean_tokens)
        for gone, share in enumerate(stats.binom.pmf(np.arange(seated[x] + 1), seated[x], 1 / mean_tokens)):
            moves[x, x - gone :] += share * arrivals[: size - x + gone]
    moves /= moves.sum(axis=1, keepdims=True)
    balance = moves.T - np.eye(size)
    balance[-1] = 1
    visits = np.linalg.solve(balance, (states == size - 1).astype(float))

    step = seated / mean_tokens  # duration in mean service times
    time = visits @ step + visits[0] / rho
    in_seats = visits @ (seated * step) / time
    without_step = visits @ ((states - seated) * step + rho * step**2 / 2) / time
    return Means(without_step / rho, (without_step + in_seats) / rho)


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval for a mean."""

    centre: float
    half: float

    def __contains__(self, value: float) -> bool:
        return abs(value - self.centre) <= self.half

    @property
    def relative_width(self) -> float:
        """Full width over the centre."""
        return 2 * self.half / abs(self.centre)


def interval(values: Floats, controls: Floats | None = None, expected: Floats | None = None) -> Interval:
    """Return the 99 % t-interval of the mean over independent replications.

    `controls` (replications, n) are other averages of the same replications whose means `expected` (n,) are known:
    a replication that happened to get more work than it should waits longer, and regression takes that part out.
    Each control costs one degree of freedom.
    """
    rows = len(values)
    design = np.ones((rows, 1))
    if controls is not None and expected is not None:
        design = np.column_stack([design, controls - expected])
    coefficients = np.linalg.lstsq(design, values)[0]
    freedom = rows - design.shape[1]
    residual = values - design @ coefficients
    variance = residual @ residual / freedom * np.linalg.pinv(design.T @ design)[0, 0]
    return Interval(float(coefficients[0]), float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance)))


def work_found(arrivals: NDArray[Number], services: NDArray[Number]) -> NDArray[Number]:
    """Work present just before each arrival (n,), in the unit of both. Source: Lindley's recursion."""
    steps = services[:-1] - np.diff(arrivals)
    walk = np.concatenate([np.zeros(1, steps.dtype), np.cumsum(steps)])
    found: NDArray[Number] = walk - np.minimum.accumulate(walk)
    return found


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of output lengths: its mean in tokens and E[S^2], E[S^3] in means; 0 long_tokens: geometric."""

    mean: int
    second: float
    third: float
    short_tokens: int = 0
    long_tokens: int = 0
    long_share: float = 0

    @property
    def scv(self) -> float:
        """Squared coefficient of variation."""
        return self.second - 1

    def draw(self, uniform: Floats) -> Ints:
        """Lengths (n,) of numbers in [0, 1), by inversion, which no version of a library redraws."""
        if self.long_tokens:
            return np.where(uniform < self.long_share, self.long_tokens, self.short_tokens)
        beyond_first: Ints = np.floor(np.log1p(-uniform) / np.log1p(-1 / self.mean)).astype(np.int64)
        return beyond_first + 1


def geometric(mean: int) -> Lengths:
    p = 1 / mean
    return Lengths(mean, 2 - p, 6 - 6 * p + p * p)


def equal(mean: int) -> Lengths:
    return Lengths(mean, 1, 1, mean, mean)


def mixed(mean: int) -> Lengths:
    """Nine of ten at half the mean and one at 5.5 times; E[S^2] = 3.25. `mean` is even."""
    short, long = mean // 2, mean * 11 // 2
    second, third = (0.9 * 0.5**power + 0.1 * 5.5**power for power in (2, 3))
    return Lengths(mean, second, third, short, long, 0.1)


def margin(rho: float) -> int:
    """Requests to leave out at either end of a run: 20 relaxation times of M/M/1, 1 / (mu (1 - sqrt(rho))^2)."""
    return int(np.ceil(20 * rho / (1 - np.sqrt(rho)) ** 2))


def draw(lengths: Lengths, rho: float, requests: int, seed: int, replication: int, tick: int) -> tuple[Ints, Ints]:
    """Poisson arrivals in whole ticks and output tokens (n,) each; `tick` ticks are one token of work."""
    gaps = -np.log1p(-generator(seed, Stream.ARRIVALS, replication).random(requests)) * (lengths.mean * tick / rho)
    arrivals = np.cumsum(np.rint(gaps).astype(np.int64))
    return arrivals, lengths.draw(generator(seed, Stream.LENGTHS, replication).random(requests))


def draw_exponential(rho: float, requests: int, seed: int, replication: int) -> tuple[Floats, Floats]:
    """Poisson arrivals and exponential services (n,) each, in mean service times."""
    gaps = -np.log1p(-generator(seed, Stream.ARRIVALS, replication).random(requests)) / rho
    return np.cumsum(gaps), -np.log1p(-generator(seed, Stream.LENGTHS, replication).random(requests))
