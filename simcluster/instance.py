"""What is known about an instance: its model, engine, prices and step-time models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from simcluster import _native
from simcluster.card import FrontEnd, ServiceRates, StepTimeFit
from simcluster.units import ps_from_seconds

__all__ = ["InstanceSpec", "TrueModel", "lognormal_factors", "recorded_factors", "step_time_model"]

_NOISE_ROWS = 4096
_FACTOR_UNIT = 2**32
_TERMS = {
    "b0": "b0_s",
    "b1": "b1_s",
    "b1x": "b1x_s",
    "b2": "b2_s",
    "b3": "b3_s",
    "b4": "b4_s",
    "b5": "b5_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """What a router may know about an instance.

    Attributes:
        index: position in the cluster.
        name: unique name.
        model: served model; several instances of one model are its replicas.
        card: name of the calibration card.
        price_in: price of prompt tokens [USD per million tokens = micro-dollars per token].
        price_out: price of output tokens [USD per million tokens = micro-dollars per token].
        engine: resolved scheduler options.
        believed: step-time model that routers use.
        front_end: time outside the engine.
        service_rates: mean rates that the card states, or None.
        badge: how far the card can be trusted, in one line.
    """

    index: int
    name: str
    model: str
    card: str
    price_in: float
    price_out: float
    engine: _native.SchedulerConfig
    believed: _native.StepTimeModel
    front_end: FrontEnd
    service_rates: ServiceRates | None = None
    badge: str = ""

    def engine_arrival_ps(self, sent_ps: int, prompt_tokens: int) -> int:
        """Return when a request sent at an instant [ps] reaches the engine [ps]."""
        delay = self.front_end.request_s + self.front_end.per_prompt_token_s * prompt_tokens
        return sent_ps + ps_from_seconds(delay)

    @property
    def output_hop_ps(self) -> int:
        """Time from the engine to the client [ps]."""
        return ps_from_seconds(self.front_end.output_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueModel:
    """How fast a simulated instance really is; never handed to a router but the oracle.

    Attributes:
        step_time: coefficients.
        noise: multiplicative noise per step, or None.
        description: for reports.
    """

    step_time: _native.StepTimeModel
    noise: _native.StepNoise | None
    description: str


def step_time_model(fit: StepTimeFit, host_time_s: float, scale: float = 1.0) -> _native.StepTimeModel:
    """Round the coefficients of a fit to whole picoseconds.

    Args:
        fit: coefficients [s].
        host_time_s: host time per step [s].
        scale: factor on all coefficients, the host time excepted.
    """
    model = _native.StepTimeModel()
    for native_name, name in _TERMS.items():
        setattr(model, native_name, ps_from_seconds(getattr(fit, name) * scale))
    model.hinge_tokens = fit.hinge_tokens
    model.host = ps_from_seconds(host_time_s)
    return model


def lognormal_factors(sigma: float) -> npt.NDArray[np.int64]:
    """Return equally likely factors of a log-normal noise with mean 1, in units of 2**-32.

    Args:
        sigma: standard deviation of the logarithm, 0 or more.

    Returns:
        (4096,) int64; the quantiles at the middle of equal shares, scaled to mean 1.
    """
    shares = (np.arange(_NOISE_ROWS) + 0.5) / _NOISE_ROWS
    factors = np.exp(sigma * ndtri(shares))
    units: npt.NDArray[np.int64] = np.rint(factors / factors.mean() * _FACTOR_UNIT).astype(np.int64)
    return units


def recorded_factors(residuals: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return recorded over predicted times of steps as factors, in units of 2**-32.

    Args:
        residuals: (n,) equally likely ones, above 0; their mean is kept, since it is part of what was recorded.

    Returns:
        (n,) int64.
    """
    units: npt.NDArray[np.int64] = np.rint(np.asarray(residuals) * _FACTOR_UNIT).astype(np.int64)
    return units
