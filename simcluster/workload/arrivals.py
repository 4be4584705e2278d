"""Arrival processes."""

import math

import numpy as np
import numpy.typing as npt

from simcluster.errors import ConfigError
from simcluster.units import ns_from_seconds

__all__ = ["poisson_arrivals_ns"]


def poisson_arrivals_ns(rate_rps: float, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the first n arrivals of a Poisson process that starts at time 0.

    The gaps are summed as float seconds and each instant is then rounded, so rounding errors do not
    add up. A longer draw from the same generator begins with the same arrivals.

    Args:
        rate_rps: mean arrival rate [1/s], above 0.
        n: number of arrivals, 0 or more.
        rng: the generator to draw the gaps from.

    Returns:
        Arrival instants [ns], int64, shape (n,), ascending; equal instants are possible.

    Raises:
        ConfigError: the rate or n is out of range, or the last arrival is beyond the clock's range.
    """
    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise ConfigError(f"rate_rps = {rate_rps!r}; must be a finite number of requests/s above 0")
    if n < 0:
        raise ConfigError(f"n = {n}; must be a number of arrivals of 0 or more")
    arrivals_s = np.cumsum(rng.exponential(scale=1.0 / rate_rps, size=n))
    if n > 0:
        try:
            ns_from_seconds(float(arrivals_s[-1]))
        except ValueError as error:
            raise ConfigError(
                f"rate_rps = {rate_rps!r} puts the last of {n} arrivals too late: {error};"
                " raise the rate or draw fewer requests"
            ) from error
    return np.rint(arrivals_s * 1e9).astype(np.int64)
