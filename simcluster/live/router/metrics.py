"""What the router says of itself on `/metrics`: Prometheus' format, base units, predictions paired with what came."""

import math
from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from simcluster.live.router.dispatcher import Dispatcher, LiveDecision
from simcluster.live.router.sight import TIERS

__all__ = ["RouterMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1)
_RATIOS = (-1.0, -0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self, policy: str, instances: Sequence[str]) -> None:
        """Make them, all at 0.

        Args:
            policy: who decides.
            instances: (j,) names.
        """
        self._registry = CollectorRegistry()
        self._policy, self._names = policy, [*instances, "none"]  # the last: went nowhere
        self._requests = self._counter(
            "simcluster_request", "Requests by how they ended.", "policy", "instance", "status"
        )
        self._fallback = self._counter("simcluster_fallback", "Decisions that fell back, by what they used.", "reason")
        self._retries = self._counter(
            "simcluster_retry", "Further attempts at a request, by what went wrong.", "reason"
        )
        self._violations = self._counter("simcluster_slo_violation", "Targets missed, by kind.", "type")
        self._sources = self._counter("simcluster_decision", "Decisions by what told the state.", "source", "tier")
        self._lost = Counter(
            "simcluster_log_lost_events", "Events that the decision log could not keep.", [], registry=self._registry
        )
        self._num_lost = 0
        self._inflight = self._gauge("simcluster_inflight", "Open requests.")
        self._healthy = self._gauge("simcluster_instance_healthy", "1: may be asked, 0: marked after failures.")
        self._ttft = self._histogram("simcluster_ttft_seconds", "From arrival to the first token.", _SECONDS)
        self._predicted = self._histogram("simcluster_predicted_ttft_seconds", "As predicted.", _SECONDS)
        self._error = self._histogram(
            "simcluster_ttft_prediction_error_ratio", "(Predicted - observed) / observed, of the same request.", _RATIOS
        )
        self._itl = self._histogram("simcluster_itl_seconds", "Mean time between tokens of a request.", _SECONDS)
        self._e2e = self._histogram("simcluster_e2e_seconds", "From arrival to the last token.", _SECONDS)
        self._age = self._histogram("simcluster_snapshot_age_seconds", "Of the chosen instance's state.", _SECONDS)
        self._route = Histogram(
            "simcluster_route_duration_seconds", "One decision, the look at all states included.", [],
            buckets=_SHORT, registry=self._registry,
        )  # fmt: skip

    def decided(self, made: LiveDecision, seconds: float) -> None:
        """Count a decision and how long it took [s]."""
        self._route.observe(seconds)
        if made.fallback:
            self._fallback(made.fallback).inc()
        if made.source:
            self._sources(made.source, TIERS[made.tier]).inc()
            if made.age_ps >= 0:
                self._age[made.instance].observe(made.age_ps / 1e12)

    def retried(self, reason: str) -> None:
        """Count a further attempt."""
        self._retries(reason).inc()

    def ended(self, instance: int, status: str) -> None:
        """Count a request that went to an instance, -1 for none, and how it ended."""
        self._requests(self._policy, self._names[instance], status).inc()

    def timed(
        self, instance: int, ttft_s: float | None, predicted_s: float | None, itl_s: float | None, e2e_s: float
    ) -> None:
        """Note the times of a request that finished [s]; None where there is none."""
        self._e2e[instance].observe(e2e_s)
        if itl_s is not None:
            self._itl[instance].observe(itl_s)
        if ttft_s is None:
            return
        self._ttft[instance].observe(ttft_s)
        if predicted_s is not None and math.isfinite(predicted_s):
            self._predicted[instance].observe(predicted_s)
            if ttft_s > 0:
                self._error[instance].observe((predicted_s - ttft_s) / ttft_s)

    def violated(self, kind: str) -> None:
        """Count a missed target: `ttft` or `tpot`."""
        self._violations(kind).inc()

    def lost(self, count: int) -> None:
        """Note how many events the decision log has lost so far."""
        self._lost.inc(max(0, count - self._num_lost))
        self._num_lost = max(count, self._num_lost)

    def text(self, dispatcher: Dispatcher, now_ps: int) -> bytes:
        """Return all of them in Prometheus' text format."""
        for j, (own, health) in enumerate(zip(dispatcher.own.open, dispatcher.health, strict=True)):
            self._inflight[j].set(len(own))
            self._healthy[j].set(health.may_be_asked(now_ps))
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """Return what finds the counter of some labels, quickly: there are few of them."""
        return cache(Counter(name, text, labels, registry=self._registry).labels)

    def _gauge(self, name: str, text: str) -> list[Gauge]:
        made = Gauge(name, text, ["instance"], registry=self._registry)
        return [made.labels(each) for each in self._names[:-1]]

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
        made = Histogram(name, text, ["instance"], buckets=buckets, registry=self._registry)
        return [made.labels(each) for each in self._names[:-1]]
