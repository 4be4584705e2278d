"""Policies of affinity: a session or a prefix goes where it went before, as far as the load allows."""

from typing import ClassVar

import numpy as np

from simcluster.request import FloatArray, Request
from simcluster.routers.base import NONE_HEALTHY, ClusterView, Decision
from simcluster.routers.objective import choose_best
from simcluster.routers.settings import RouterSettings
from simcluster.routers.tracking import HashRing, PrefixIndex

__all__ = ["CacheAware", "PrefixHash", "SessionHash"]


class SessionHash:
    """The owner of the session on a hash ring, or who follows while it is unhealthy; else the shortest queue.

    `places` is the number of places of each instance on the ring.
    Source: vLLM production-stack `session`, vllm-router `consistent_hash`.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings, *, places: int = 200) -> None:
        self._ties = settings.ties
        self._ring = HashRing([spec.name for spec in settings.instances], places)

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Follow the session; without one, balance."""
        if request.session_id is None:
            return choose_best(-view.num_resident().astype(np.float64), self._ties, view.healthy, "no_session")
        owners = self._ring.owners(request.session_id)
        if view.none_healthy:
            return Decision(next(owners), NONE_HEALTHY)
        return Decision(next(j for j in owners if view.healthy[j]))


class PrefixHash:
    """The owner of the prompt's first tokens on a hash ring, or who follows while its load is above the bound.

    Hashed are the first `tokens` tokens, in whole blocks. The bound on resident requests, this one included, is
    `factor` times the mean over the healthy instances. Without prefix hashes, the shortest queue.
    Source: SMG `prefix_hash`; Mirrokni et al. 2018, consistent hashing with bounded loads.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings, *, tokens: int = 256, factor: float = 1.25, places: int = 200) -> None:
        if tokens < 1:
            raise ValueError(f"tokens = {tokens}; must be at least 1")
        if factor < 1:
            raise ValueError(f"factor = {factor:g}; must be at least 1")
        self._ties, self._tokens, self._factor = settings.ties, tokens, factor
        self._ring = HashRing([spec.name for spec in settings.instances], places)

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Take the first instance along the ring whose load stays within the bound."""
        load = view.num_resident()
        if request.prefix_hashes is None or not len(request.prefix_hashes):
            return choose_best(-load.astype(np.float64), self._ties, view.healthy, "no_prefix")
        blocks = min(-(-self._tokens // request.prefix_block_size), len(request.prefix_hashes))
        candidates = view.candidates
        bound = np.ceil(self._factor * (int(load[candidates].sum()) + 1) / len(candidates))
        owners = self._ring.owners(str(request.prefix_hashes[blocks - 1]))
        usable = (j for j in owners if view.none_healthy or view.healthy[j])
        first = next(usable)
        chosen = first if load[first] < bound else next(j for j in usable if load[j] < bound)  # the least loaded is
        if view.none_healthy:
            return Decision(chosen, NONE_HEALTHY)
        return Decision(chosen, "score" if chosen == first else "overloaded")


class CacheAware:
    """The instance that was sent most of this prefix; the shortest queue for a poor match or an uneven load.

    A match is poor below `cache_threshold` of the prompt's blocks. The load is uneven while the resident requests
    differ by more than `balance_abs_threshold` and the most are above `balance_rel_threshold` times the fewest.
    Source: vllm-router and SMG `cache_aware`, whose misses go to the smallest tree (sgl-project/sglang#14532).
    """

    needs_view: ClassVar[bool] = True

    def __init__(
        self,
        settings: RouterSettings,
        *,
        cache_threshold: float = 0.5,
        balance_abs_threshold: int = 32,
        balance_rel_threshold: float = 1.1,
    ) -> None:
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold = {cache_threshold:g}; must be from 0 to 1")
        self._ties, self._threshold = settings.ties, cache_threshold
        self._abs, self._rel = balance_abs_threshold, balance_rel_threshold
        self._index = PrefixIndex(settings.instances)

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Take the best match, or balance."""
        candidates = view.candidates
        loads = [view.views[j].num_resident for j in candidates]
        shortest: FloatArray = -view.num_resident().astype(np.float64)
        most, fewest = max(loads), min(loads)
        if most - fewest > self._abs and most > self._rel * fewest:
            return choose_best(shortest, self._ties, view.healthy, "balance")
        if request.prefix_hashes is None:
            return choose_best(shortest, self._ties, view.healthy, "no_match")
        matched = self._index.matched(request)
        best = max(matched[j] for j in candidates)
        if best == 0 or best < self._threshold * len(request.prefix_hashes):
            return choose_best(shortest, self._ties, view.healthy, "no_match")
        return choose_best(np.where(np.equal(matched, best), shortest, -np.inf), self._ties, view.healthy, "prefix")

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Remember where the prompt went."""
        self._index.insert(request, instance)
