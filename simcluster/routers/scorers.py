"""Policies that weigh several signals: llm-d's scorers and Dynamo's cost of KV blocks."""

from typing import ClassVar, Literal

import numpy as np

from simcluster.request import FloatArray, Request
from simcluster.routers.base import NONE_HEALTHY, ClusterView, Decision
from simcluster.routers.objective import choose_best
from simcluster.routers.settings import RouterSettings
from simcluster.routers.tracking import InFlight, PrefixIndex

__all__ = ["KvCost", "WeightedScorers"]


class _OwnState:
    """What both policies remember: their own open requests and the prompts that they sent where."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._open = InFlight(settings.num_instances)
        self._index = PrefixIndex(settings.instances)
        self._block = np.array([spec.engine.block_size for spec in settings.instances], dtype=np.int64)

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Note an open request and its prompt."""
        uncached = int((request.prompt_tokens - self._index.matched_tokens(request))[instance])
        self._open.sent(request.index, instance, uncached, -(-uncached // int(self._block[instance])))
        self._index.insert(request, instance)

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        """Note that the prompt has been computed."""
        self._open.first_token(request_index)

    def observe_end(self, request_index: int, instance: int) -> None:
        """Note an end."""
        self._open.ended(request_index)


def _sample(weights: FloatArray, rng: np.random.Generator) -> int:
    """Draw an index with chances in proportion to the weights; evenly if all are 0."""
    shares = np.cumsum(weights if weights.any() else np.ones(len(weights)))
    return min(int(np.searchsorted(shares, rng.random() * shares[-1], side="right")), len(weights) - 1)


class WeightedScorers(_OwnState):
    """The largest weighted sum of scores from 0 to 1: queue, kv, prefix, no_hit_lru, active, token_load.

    queue: waiting requests, least to most; kv: KV blocks not in use; prefix: share of the prompt's blocks sent there
    before; no_hit_lru: for a prompt known nowhere, who got such a prompt longest ago, else 1/2; active: own open
    requests; token_load: own uncached prompt tokens without a first token, this one's too, against `token_threshold`.
    The picker takes the maximum or draws in proportion to the sums.
    Source: llm-d-router scorers of these names; weights of its optimised baseline.
    """

    needs_view: ClassVar[bool] = True

    def __init__(
        self,
        settings: RouterSettings,
        *,
        queue: float = 2.0,
        kv: float = 2.0,
        prefix: float = 3.0,
        no_hit_lru: float = 2.0,
        active: float = 0.0,
        token_load: float = 0.0,
        token_threshold: int = 4_194_304,
        picker: Literal["max", "weighted_random"] = "max",
    ) -> None:
        super().__init__(settings)
        weights = (queue, kv, prefix, no_hit_lru, active, token_load)
        names = ("queue", "kv", "prefix", "no_hit_lru", "active", "token_load")
        for name, weight in zip(names, weights, strict=True):
            if weight < 0:
                raise ValueError(f"{name} = {weight:g}; must be 0 or more")
        if token_threshold < 1:
            raise ValueError(f"token_threshold = {token_threshold}; must be at least 1")
        self._weights = {name: weight for name, weight in zip(names, weights, strict=True) if weight}
        self._token_threshold, self._picker = token_threshold, picker
        self._cold: dict[int, None] = {}  # who got a prompt known nowhere, longest ago first

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Add the scores of the healthy instances up, then pick."""
        among = view.candidates
        known = self._index.matched(request)
        matched = [known[j] for j in among]
        total = [0.0] * len(among)
        for name, weight in self._weights.items():
            scores = self._scored(name, request, view, among, matched)
            total = [before + weight * more for before, more in zip(total, scores, strict=True)]
        if len(among) == len(known):
            score = np.array(total)
        else:
            score = np.full(len(known), -np.inf)
            score[among] = total
        if self._picker == "max":
            return choose_best(score, self._settings.ties, view.healthy)
        chosen = among[_sample(score[among], self._settings.rng)]
        return Decision(chosen, NONE_HEALTHY if view.none_healthy else "score", None, score)

    def _scored(
        self, name: str, request: Request, view: ClusterView, among: list[int], matched: list[int]
    ) -> list[float]:
        """Return one score, from 0 to 1, of the instances among which to choose."""
        if name == "queue":
            waiting = [view.views[j].num_waiting for j in among]
            most, span = max(waiting), max(waiting) - min(waiting)
            return [(most - count) / span for count in waiting] if span else [1.0] * len(among)
        if name == "kv":
            return [1.0 - view.views[j].kv_usage for j in among]
        if name == "prefix":
            blocks = 0 if request.prefix_hashes is None else len(request.prefix_hashes)
            return [count / max(blocks, 1) for count in matched]
        if name == "no_hit_lru":
            return [0.5] * len(among) if any(matched) else self._coldest(among)
        if name == "active":
            counts = [int(self._open.requests[j]) for j in among]
            return [1.0 - count / max(*counts, 1) for count in counts]
        uncached = request.prompt_tokens - self._index.matched_tokens(request)
        tokens = [int(self._open.prefill_tokens[j] + uncached[j]) for j in among]
        return [1.0 - min(count / self._token_threshold, 1.0) for count in tokens]

    def _coldest(self, among: list[int]) -> list[float]:
        """Rank by when the last unknown prompt came: never, then longest ago."""
        allowed = set(among)
        order = [j for j in among if j not in self._cold] + [j for j in self._cold if j in allowed]
        rank = {j: place for place, j in enumerate(order)}
        return [1.0 - rank[j] / max(len(among) - 1, 1) for j in among]

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Note the request, and who got an unknown prompt."""
        if not any(self._index.matched(request)):
            self._cold.pop(instance, None)
            self._cold[instance] = None
        super().observe_dispatch(request, instance)


class KvCost(_OwnState):
    """The least cost in KV blocks: `scale` * (own open prefills + prompt - overlap) + own open blocks.

    Prefills count until their first token, blocks until the end, this request's own included, without the part of a
    prompt that the instance was sent before. With `form=lmetric` the product prefill * (own open requests + 1)
    instead. `temperature` above 0 draws by a softmax of the costs over their range.
    Source: Dynamo `kv` router (prefill_load_scale, router_temperature), its lmetric form; llm-d's lmetric scorer.
    """

    needs_view: ClassVar[bool] = False

    def __init__(
        self,
        settings: RouterSettings,
        *,
        scale: float = 1.0,
        form: Literal["sum", "lmetric"] = "sum",
        temperature: float = 0.0,
    ) -> None:
        super().__init__(settings)
        for name, value in (("scale", scale), ("temperature", temperature)):
            if value < 0:
                raise ValueError(f"{name} = {value:g}; must be 0 or more")
        self._scale, self._form, self._temperature = scale, form, temperature

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Take the least cost, or draw by temperature."""
        uncached = request.prompt_tokens - self._index.matched_tokens(request)
        prefill = (self._open.prefill_tokens + uncached) / self._block
        if self._form == "lmetric":
            cost = prefill * (self._open.requests + 1)
        else:
            cost = self._scale * prefill + self._open.blocks + -(-uncached // self._block)
        if self._temperature == 0:
            return choose_best(-cost, self._settings.ties, view.healthy)
        candidates = view.candidates
        among = cost[candidates]
        weights = np.exp((among.min() - among) / (max(float(np.ptp(among)), 1e-12) * self._temperature))
        chosen = candidates[_sample(weights, self._settings.rng)]
        return Decision(chosen, NONE_HEALTHY if view.none_healthy else "score", None, -cost)
