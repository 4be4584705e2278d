"""Policies that follow the load: tokens, capacity, KV cache, samples of instances, observed latency."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from simcluster.instance import InstanceSpec
from simcluster.request import FloatArray, Request
from simcluster.routers.base import NONE_HEALTHY, ClusterView, Decision, estimate_ttft
from simcluster.routers.baselines import Scored, draw
from simcluster.routers.objective import choose_best
from simcluster.routers.settings import RouterSettings
from simcluster.routers.tracking import InFlight
from simcluster.units import PS_PER_S

__all__ = [
    "EwmaLatency",
    "LeastKv",
    "LeastTokens",
    "NormalizedLoad",
    "PowerOfTwo",
    "VllmDp",
    "WeightedRandom",
    "decode_speeds",
]

_BATCH, _CONTEXT = 32, 1024  # the batch at which instances are compared


def decode_speeds(instances: Sequence[InstanceSpec]) -> FloatArray:
    """Return how fast each instance decodes [tokens/s], (j,).

    Output tokens per second of 32 requests (or max_num_seqs) with 1,024 tokens of context each, by the step time
    that routers believe and the host time: B / max(T, host) in the asynchronous loop, B / (T + host) in the other.
    """
    speeds = []
    for spec in instances:
        batch = min(_BATCH, spec.engine.max_num_seqs)
        device = spec.believed.device_time([], [_CONTEXT] * batch)
        speeds.append(batch * PS_PER_S / max(spec.believed.period(device, spec.engine.async_scheduling), 1))
    return np.array(speeds)


class LeastTokens(Scored):
    """The instance with the fewest tokens to compute: uncached prompt left plus predicted output left.

    Source: llm-d's token load, AIBrix `throughput`; vllm-project/router#51.
    """

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the tokens left."""
        return -view.tokens_left().astype(np.float64)


class NormalizedLoad(Scored):
    """The least load over capacity, this request's own load included; capacity: decoded tokens/s as believed.

    Source: AIBrix `load-balance` (load over drain rate), Dynamo `device-aware-weighted`; for mixed hardware.
    """

    def __init__(self, settings: RouterSettings, *, load: Literal["tokens", "requests"] = "tokens") -> None:
        super().__init__(settings)
        self._load = load
        self._speeds = decode_speeds(settings.instances)

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the time that the load takes, up to a factor."""
        if self._load == "requests":
            load = view.num_resident() + 1
        else:
            load = view.tokens_left() + request.prompt_tokens + request.predicted_output_tokens
        return -load / self._speeds


class PowerOfTwo:
    """Of d healthy instances drawn at random the one with the least load.

    Source: Mitzenmacher 2001; vllm-router, SMG and AIBrix `power_of_two`, Ray Serve.
    """

    needs_view: ClassVar[bool] = True

    def __init__(
        self,
        settings: RouterSettings,
        *,
        d: int = 2,
        load: Literal["requests", "tokens", "predicted_ttft"] = "requests",
    ) -> None:
        if d < 1:
            raise ValueError(f"d = {d}; must be at least 1")
        self._rng, self._d, self._load = settings.rng, d, load

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Draw, then compare; of equals the one drawn first."""
        left = view.candidates
        drawn = [left.pop(int(self._rng.random() * len(left))) for _ in range(min(self._d, len(left)))]
        ttft_s = None
        if self._load == "predicted_ttft":
            ttft_s = estimate_ttft(request, view, drawn)
            loads = ttft_s[drawn].tolist()
        elif self._load == "tokens":
            loads = [view.views[j].prefill_tokens_left + view.views[j].decode_tokens_left for j in drawn]
        else:
            loads = [view.views[j].num_resident for j in drawn]
        least = min(loads)
        score = np.full(len(view.views), -np.inf)
        score[drawn] = [-load for load in loads]
        reason = NONE_HEALTHY if view.none_healthy else "score"
        return Decision(drawn[loads.index(least)], reason, ttft_s, score, loads.count(least))


class WeightedRandom:
    """A healthy instance by chance, in proportion to the tokens/s that it decodes as believed.

    Source: LiteLLM `simple-shuffle`, llm-d's weighted picker.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings) -> None:
        self._rng = settings.rng
        self._speeds = decode_speeds(settings.instances)

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Draw an instance."""
        candidates = view.candidates
        shares = np.cumsum(self._speeds[candidates])
        at = int(np.searchsorted(shares, self._rng.random() * shares[-1], side="right"))
        return Decision(candidates[min(at, len(candidates) - 1)], NONE_HEALTHY if view.none_healthy else "score")


class LeastKv(Scored):
    """The instance with the smallest share of its KV blocks in use.

    Source: AIBrix `least-kv-cache`, llm-d's KV cache scorer.
    """

    def score(self, request: Request, view: ClusterView) -> FloatArray:
        """Return minus the share in use."""
        return -view.kv_usage()


class VllmDp:
    """The least max(clients * own open requests, waiting + running), plus 6 * waiting * (KV use - 1/2) if positive.

    Own dispatches since the snapshot count as waiting, times the number of routers; ties by its own rotation.
    Source: the data-parallel balancer of vLLM 0.33, `v1/engine/core_client.py`.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        self._open = InFlight(settings.num_instances)
        self._clients = settings.num_replicas
        self._start = settings.num_instances * settings.replica // settings.num_replicas

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Take the smallest score, scanned from a start that moves on by one."""
        loads = np.empty(len(view.views))
        for j, known in enumerate(view.views):
            waiting = known.num_waiting + (self._clients - 1) * known.num_dispatched_since
            loads[j] = max(self._clients * int(self._open.requests[j]), waiting + known.num_running)
            if waiting:
                loads[j] += waiting * 6.0 * max(0.0, known.kv_usage - 0.5)
        candidates = view.candidates
        least = loads[candidates].min()
        ties = [j for j in candidates if loads[j] == least]
        chosen = next((j for j in ties if j >= self._start), ties[0])
        self._start = (self._start + 1) % len(loads)
        return Decision(chosen, NONE_HEALTHY if view.none_healthy else "score", None, -loads, len(ties))

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Count an open request."""
        self._open.sent(request.index, instance)

    def observe_end(self, request_index: int, instance: int) -> None:
        """Forget it."""
        self._open.ended(request_index)


class EwmaLatency:
    """The least observed TTFT, as an exponentially weighted mean of weight `alpha`; any instance with chance `explore`.

    An instance without observations counts as instant. Known to oscillate: a control.
    Source: LiteLLM `latency-based-routing`, AIBrix `least-latency`.
    """

    needs_view: ClassVar[bool] = False

    def __init__(self, settings: RouterSettings, *, alpha: float = 0.3, explore: float = 0.05) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha = {alpha:g}; must be above 0 and at most 1")
        if not 0 <= explore <= 1:
            raise ValueError(f"explore = {explore:g}; must be from 0 to 1")
        self._ties, self._rng, self._alpha, self._explore = settings.ties, settings.rng, alpha, explore
        self._mean_s = np.zeros(settings.num_instances)
        self._seen = np.zeros(settings.num_instances, dtype=np.bool_)

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Explore, or take the instance that was fastest."""
        if self._explore > 0 and self._rng.random() < self._explore:
            return draw(self._rng, view, "explore")
        return choose_best(-self._mean_s, self._ties, view.healthy)

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        """Move the instance's mean towards a TTFT."""
        weight = self._alpha if self._seen[instance] else 1.0
        self._mean_s[instance] += weight * (ttft_s - self._mean_s[instance])
        self._seen[instance] = True
