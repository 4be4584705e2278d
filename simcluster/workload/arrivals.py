"""Arrival processes.

All start at time 0, sum their gaps as float seconds and round each instant once, so rounding errors do not add up. A
longer draw from the same generators begins with the same arrivals.
"""

import math

import numpy as np
import numpy.typing as npt

from simcluster.errors import ConfigError
from simcluster.units import ns_from_seconds
from simcluster.workload.trace_columns import FloatArray, IntArray

__all__ = ["constant_arrivals_ns", "gamma_arrivals_ns", "mmpp2_arrivals_ns", "mmpp2_rates", "poisson_arrivals_ns"]

_SWITCHES_AT_ONCE = 1024
_MOST_SWITCHES = 2e7


def poisson_arrivals_ns(rate_rps: float, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the first n arrivals of a Poisson process.

    Args:
        rate_rps: mean arrival rate [1/s], above 0.
        n: number of arrivals, 0 or more.
        rng: the generator to draw the gaps from.

    Returns:
        Arrival instants [ns], int64, shape (n,), ascending; equal instants are possible.

    Raises:
        ConfigError: the rate or n is out of range, or the last arrival is beyond the clock's range.
    """
    _check(rate_rps, n)
    return _instants_ns(np.cumsum(rng.exponential(scale=1.0 / rate_rps, size=n)), rate_rps)


def gamma_arrivals_ns(rate_rps: float, burstiness: float, n: int, rng: np.random.Generator) -> IntArray:
    """Draw the first n arrivals of a process with gamma-distributed gaps; the mean rate is kept.

    The gaps have shape `burstiness` and scale 1 / (rate * burstiness), so their mean is 1 / rate and their coefficient
    of variation 1 / sqrt(burstiness). Source: `--burstiness` of `vllm bench serve`.

    Args:
        rate_rps: mean arrival rate [1/s], above 0.
        burstiness: shape of the gaps, above 0; 1 is Poisson, below 1 is burstier.
        n: number of arrivals, 0 or more.
        rng: the generator to draw the gaps from.

    Returns:
        Arrival instants [ns], int64, shape (n,), ascending.

    Raises:
        ConfigError: an argument is out of range, or the last arrival is beyond the clock's range.
    """
    _check(rate_rps, n)
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"burstiness = {burstiness!r}; must be a finite shape above 0")
    gaps_s = rng.gamma(shape=burstiness, scale=1.0 / (rate_rps * burstiness), size=n)
    return _instants_ns(np.cumsum(gaps_s), rate_rps)


def constant_arrivals_ns(rate_rps: float, n: int) -> IntArray:
    """Return n arrivals with equal gaps, the first at 0.

    Args:
        rate_rps: arrival rate [1/s], above 0.
        n: number of arrivals, 0 or more.

    Returns:
        Arrival instants [ns], int64, shape (n,), ascending.

    Raises:
        ConfigError: the rate or n is out of range, or the last arrival is beyond the clock's range.
    """
    _check(rate_rps, n)
    return _instants_ns(np.arange(n) / rate_rps, rate_rps)


def mmpp2_rates(
    rate_rps: float, ratio: float, high_share: float, correlation_s: float
) -> tuple[FloatArray, FloatArray]:
    """Return the two levels of an MMPP-2 and how long it stays in them.

    With mean rate a, ratio r, high share p and correlation time tau: the low rate is a / ((1 - p) + p*r), the high one
    r times that; the process leaves the low state at rate p / tau and the high one at (1 - p) / tau.

    Args:
        rate_rps: mean arrival rate [1/s].
        ratio: high rate over low rate, 1 or more.
        high_share: share of the time in the high state, between 0 and 1.
        correlation_s: correlation time of the rate [s].

    Returns:
        Rates (low, high) [1/s] and mean times spent in (low, high) [s], shape (2,) each.

    Source: paper, MMPP-2; 2 s and 0.2 give 0.1 and 0.4 switches per second.
    """
    low = rate_rps / ((1 - high_share) + high_share * ratio)
    stays_s = np.array([correlation_s / high_share, correlation_s / (1 - high_share)])
    return np.array([low, ratio * low]), stays_s


def mmpp2_arrivals_ns(
    rate_rps: float,
    ratio: float,
    high_share: float,
    correlation_s: float,
    n: int,
    rng: np.random.Generator,
    states: np.random.Generator,
) -> IntArray:
    """Draw the first n arrivals of a Poisson process whose rate jumps between two levels.

    Unit-rate Poisson arrivals are placed where the integral of the rate reaches them, so the gaps and the states are
    independent streams. The first state is drawn from the stationary distribution.

    Args:
        rate_rps: mean arrival rate [1/s], above 0.
        ratio: high rate over low rate, 1 or more.
        high_share: share of the time in the high state, between 0 and 1.
        correlation_s: correlation time of the rate [s], above 0.
        n: number of arrivals, 0 or more.
        rng: the generator to draw the gaps from.
        states: the generator to draw the states from.

    Returns:
        Arrival instants [ns], int64, shape (n,), ascending.

    Raises:
        ConfigError: an argument is out of range, or the last arrival is beyond the clock's range.

    Source: paper, MMPP-2.
    """
    _check(rate_rps, n)
    if not (math.isfinite(ratio) and ratio >= 1 and 0 < high_share < 1 and correlation_s > 0):
        raise ConfigError(
            f"ratio = {ratio!r}, high_share = {high_share!r}, correlation_s = {correlation_s!r}; must be 1 or more, "
            "between 0 and 1, and above 0"
        )
    rates, stays_s = mmpp2_rates(rate_rps, ratio, high_share, correlation_s)
    switches = 2 * n / rate_rps / float(stays_s.sum())
    if switches > _MOST_SWITCHES:
        raise ConfigError(
            f"correlation_s = {correlation_s!r} makes the rate jump {switches:.1g} times within {n} arrivals; "
            f"allowed is {_MOST_SWITCHES:.0e}; the arrivals are as good as Poisson: use kind poisson"
        )
    wanted = np.cumsum(rng.standard_exponential(n))
    state = 1 if states.random() < high_share else 0
    instants_s, loads = [0.0], [0.0]  # corners of the integral of the rate
    while n and loads[-1] < wanted[-1]:
        order = (state + np.arange(_SWITCHES_AT_ONCE)) % 2  # an even number: the state is the same afterwards
        durations_s = states.standard_exponential(_SWITCHES_AT_ONCE) * stays_s[order]
        instants_s.extend((instants_s[-1] + np.cumsum(durations_s)).tolist())
        loads.extend((loads[-1] + np.cumsum(durations_s * rates[order])).tolist())
    return _instants_ns(np.interp(wanted, loads, instants_s), rate_rps)


def _check(rate_rps: float, n: int) -> None:
    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise ConfigError(f"rate_rps = {rate_rps!r}; must be a finite number of requests/s above 0")
    if n < 0:
        raise ConfigError(f"n = {n}; must be a number of arrivals of 0 or more")


def _instants_ns(arrivals_s: FloatArray, rate_rps: float) -> IntArray:
    if len(arrivals_s):
        _refuse_late(float(arrivals_s[-1]), rate_rps, len(arrivals_s))
    instants: IntArray = np.rint(arrivals_s * 1e9).astype(np.int64)
    return instants


def _refuse_late(last_s: float, rate_rps: float, n: int) -> None:
    try:
        ns_from_seconds(last_s)
    except ValueError as error:
        raise ConfigError(
            f"rate_rps = {rate_rps!r} puts the last of {n} arrivals too late: {error};"
            " raise the rate or draw fewer requests"
        ) from error
