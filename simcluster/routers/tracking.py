"""What routers remember: their own open requests, the prompts they sent where, and a hash ring of instances."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from simcluster.instance import InstanceSpec
from simcluster.request import IntArray, Request

__all__ = ["HashRing", "InFlight", "PrefixIndex", "stable_hash"]


class InFlight:
    """A router's own requests that have not ended; a policy forwards what it observes.

    Attributes:
        requests: (j,) open requests.
        prefill_tokens: (j,) uncached prompt tokens of those without a first token.
        blocks: (j,) KV blocks of the open prompts, without what was known there before.
    """

    def __init__(self, num_instances: int) -> None:
        self.requests: IntArray = np.zeros(num_instances, dtype=np.int64)
        self.prefill_tokens: IntArray = np.zeros(num_instances, dtype=np.int64)
        self.blocks: IntArray = np.zeros(num_instances, dtype=np.int64)
        self._open: dict[int, tuple[int, int, int]] = {}

    def sent(self, request_index: int, instance: int, prefill_tokens: int = 0, blocks: int = 0) -> None:
        """Note a dispatch."""
        self._open[request_index] = (instance, prefill_tokens, blocks)
        self.requests[instance] += 1
        self.prefill_tokens[instance] += prefill_tokens
        self.blocks[instance] += blocks

    def first_token(self, request_index: int) -> None:
        """Note that a prompt has been computed."""
        if request_index in self._open:
            instance, prefill_tokens, blocks = self._open[request_index]
            self.prefill_tokens[instance] -= prefill_tokens
            self._open[request_index] = (instance, 0, blocks)

    def ended(self, request_index: int) -> None:
        """Note an end."""
        self.first_token(request_index)
        if request_index in self._open:
            instance, _, blocks = self._open.pop(request_index)
            self.requests[instance] -= 1
            self.blocks[instance] -= blocks


class PrefixIndex:
    """Which prompt blocks a router has sent to each instance: its guess at what is cached there.

    Equal hashes mean an equal prefix up to there, so a set of hashes per instance is a prefix tree. It is bounded
    by the instance's KV cache; the blocks that were not sent for the longest time are forgotten first, of one
    prompt the last ones, so that no block is known without those before it.
    """

    def __init__(self, instances: Sequence[InstanceSpec]) -> None:
        self._known: list[dict[int, None]] = [{} for _ in instances]  # in order of last use
        self._room = [(spec.engine.num_gpu_blocks - 1) * spec.engine.block_size for spec in instances]

    def matched(self, request: Request) -> list[int]:
        """Return how many leading blocks of the prompt each instance knows."""
        if request.prefix_hashes is None:
            return [0] * len(self._known)
        hashes: list[int] = request.prefix_hashes.tolist()
        return [_known_until(hashes, known) for known in self._known]

    def matched_tokens(self, request: Request) -> IntArray:
        """Return how many leading prompt tokens each instance knows, (j,)."""
        matched = np.array(self.matched(request), dtype=np.int64)
        return np.minimum(matched * request.prefix_block_size, request.prompt_tokens)

    def insert(self, request: Request, instance: int) -> None:
        """Note that a prompt was sent to an instance."""
        if request.prefix_hashes is None:
            return
        known = self._known[instance]
        for value in reversed(request.prefix_hashes.tolist()):
            known.pop(value, None)
            known[value] = None
        surplus = len(known) - max(self._room[instance] // max(request.prefix_block_size, 1), 1)
        for _ in range(surplus):
            del known[next(iter(known))]


def _known_until(hashes: list[int], known: Collection[int]) -> int:
    """Return how many of a prompt's hashes are known; those known come first."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


def stable_hash(text: str) -> int:
    """Return a 64-bit hash that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class HashRing:
    """Consistent hashing: each instance has many places on a ring and owns the stretch before each of them.

    Source: Karger et al. 1997.
    """

    def __init__(self, names: Sequence[str], places: int) -> None:
        if places < 1:
            raise ValueError(f"places = {places}; must be at least 1")
        points = sorted((stable_hash(f"{name}#{k}"), j) for j, name in enumerate(names) for k in range(places))
        self._points = [point for point, _ in points]
        self._owners = [owner for _, owner in points]

    def owners(self, key: str) -> Iterator[int]:
        """Yield the owner of a key, then the next instances along the ring, each once."""
        start = bisect_left(self._points, stable_hash(key))
        seen: set[int] = set()
        for k in range(len(self._owners)):
            owner = self._owners[(start + k) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
