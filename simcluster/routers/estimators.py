"""Estimators of the time to the first token: by forward simulation, from live token counts, from rates alone."""

import math
from collections import deque
from typing import ClassVar, Protocol

import numpy as np

from simcluster.card import ServiceRates
from simcluster.instance import InstanceSpec
from simcluster.request import FloatArray, Request
from simcluster.routers.base import ClusterView, estimate_ttft
from simcluster.routers.settings import RouterSettings
from simcluster.units import PS_PER_S

__all__ = ["Estimator", "LpsEstimator", "SfsEstimator", "ThroughputEstimator", "lps_wait_s"]


class Estimator(Protocol):
    """Predicts the TTFT of a request on every instance; it may also have methods of `Observer`."""

    @property
    def needs_view(self) -> bool:
        """Whether estimates depend on what instances publish."""
        ...

    def estimate(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the expected TTFT [s], (j,); inf where it is without bound or cannot be served, nan if unknown."""
        ...


class SfsEstimator:
    """Simulates each engine forward to the request's first token. Source: paper eqs. 7, 8."""

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        pass

    def estimate(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the end of the step with the first token, the way to the client included."""
        return estimate_ttft(request, view)


def _rates(spec: InstanceSpec) -> ServiceRates:
    if spec.service_rates is None:
        raise ValueError(
            f"card {spec.card} of instance {spec.name} has no service_rates; "
            "add them: python -m simcluster.calibrate.service_rates CARD.json"
        )
    return spec.service_rates


class _MeanRates:
    """What eqs. 6 and 11 share: prefill and one decode step at the card's mean rates, and the way there and back."""

    def __init__(self, settings: RouterSettings) -> None:
        specs = settings.instances
        rates = [_rates(spec) for spec in specs]
        self._per_token_s = np.array([1 / each.prefill_throughput_tps for each in rates])
        self._per_prompt_token_s = self._per_token_s + [spec.front_end.per_prompt_token_s for spec in specs]
        ways = [spec.front_end.request_s + spec.front_end.output_s for spec in specs]
        self._fixed_s = np.array(ways) + [each.mean_decode_step_s for each in rates]
        self._most_tokens = np.array(
            [
                min(spec.engine.max_model_len - 1, (spec.engine.num_gpu_blocks - 1) * spec.engine.block_size)
                for spec in specs
            ]
        )

    def idle_s(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the TTFT of a request that need not wait [s], (j,); inf if its prompt is too long."""
        prompt = request.prompt_tokens
        idle: FloatArray = self._fixed_s + prompt * self._per_prompt_token_s
        if view.router_delay_ps:
            idle += view.router_delay_ps / PS_PER_S
        if (prompt > self._most_tokens).any():
            idle[prompt > self._most_tokens] = np.inf
        return idle


class ThroughputEstimator(_MeanRates):
    """Prefill tokens left at the instance, and the prompt's own, at the mean prefill throughput; one decode step.

    Source: paper eq. 6.
    """

    needs_view: ClassVar[bool] = True

    def estimate(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the time that all prefill tokens take, own dispatches since the snapshot included."""
        left = np.array([known.prefill_tokens_left for known in view.views], dtype=np.float64)
        ttft_s: FloatArray = self.idle_s(request, view) + left * self._per_token_s
        return ttft_s


def lps_wait_s(
    arrival_rate: float, service_rate: float, parallelism: float, ca2: float = 1.0, cs2: float = 1.0
) -> float:
    """Return the mean wait for a seat under limited processor sharing [s]; inf if the queue is unstable.

    Args:
        arrival_rate: alpha [requests/s].
        service_rate: mu [requests/s].
        parallelism: k, seats [requests].
        ca2: squared coefficient of variation of the gaps between arrivals; 1: Poisson.
        cs2: squared coefficient of variation of the service requirement; 1: exponential.

    Source: paper eq. 13; eq. 10 for ca2 = cs2 = 1.
    """
    rho = arrival_rate / service_rate
    if rho >= 1:
        return math.inf
    return (ca2 + cs2) / 2 * math.pow(rho, parallelism) / (service_rate - arrival_rate)


class LpsEstimator(_MeanRates):
    """The mean wait for a seat under limited processor sharing at the rate of the router's own dispatches.

    Nothing live is used: each instance's arrival rate is that of the router's dispatches over the last `window_s`
    seconds (until then over the time since its first one), or `arrival_rate` if that is above 0.

    Source: paper eqs. 10, 11, 13.
    """

    needs_view: ClassVar[bool] = False

    def __init__(
        self,
        settings: RouterSettings,
        *,
        window_s: float = 60.0,
        arrival_rate: float = 0.0,
        ca2: float = 1.0,
        cs2: float = 1.0,
    ) -> None:
        for name, value, allowed in (
            ("window_s", window_s, window_s > 0),
            ("arrival_rate", arrival_rate, arrival_rate >= 0),
            ("ca2", ca2, ca2 >= 0),
            ("cs2", cs2, cs2 >= 0),
        ):
            if not allowed:
                raise ValueError(f"{name} = {value:g}; must be {'above 0' if name == 'window_s' else '0 or more'}")
        super().__init__(settings)
        rates = [_rates(spec) for spec in settings.instances]
        self._services = [(each.service_rate_rps, each.parallelism) for each in rates]
        self._window_ps = round(window_s * PS_PER_S)
        self._given, self._ca2, self._cs2 = arrival_rate, ca2, cs2
        self._first_ps: int | None = None
        self._sent: list[deque[int]] = [deque() for _ in rates]

    def estimate(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the mean wait, the prefill and one decode step."""
        now = request.arrival_ps
        waits = [
            lps_wait_s(self._given or self._rate(j, now), rate, seats, self._ca2, self._cs2)
            for j, (rate, seats) in enumerate(self._services)
        ]
        return self.idle_s(request, view) + waits

    def _rate(self, instance: int, now_ps: int) -> float:
        """Return the rate of dispatches to an instance [requests/s]; the very first request only starts the clock."""
        sent = self._sent[instance]
        while sent and sent[0] <= now_ps - self._window_ps:
            sent.popleft()
        if self._first_ps is None or not sent:
            return 0.0
        span = min(now_ps - self._first_ps, self._window_ps) or self._window_ps
        return len(sent) * PS_PER_S / span

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Note a dispatch."""
        if self._first_ps is None:
            self._first_ps = request.arrival_ps
        else:
            self._sent[instance].append(request.arrival_ps)
