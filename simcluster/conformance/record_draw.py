"""Draw scheduler scenarios at random: options by vLLM's names, and requests.

Three kinds. `small`: a few requests over a small pool, every option. `tight`: likewise, with a pool barely larger than
one request, so that requests are preempted, resumed and evict cached blocks all the time. `large`: 150 requests with
blocks of 16 or 32 and budgets as in practice.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from simcluster.conformance.replay import OUTPUT_BASE

__all__ = ["DrawnScenario", "Kind", "draw_scenario"]

Kind = Literal["small", "tight", "large"]
Json = dict[str, Any]
T = TypeVar("T")

_SHARED_BASE = 900_000_000  # token ids of shared prefixes
_PROMPT_BASE = 1_000_000_000  # of prompts that share nothing
_BETWEEN = 100_000  # between the ids of two groups or requests
_LARGE_REQUESTS = 150


@dataclass(frozen=True, slots=True)
class DrawnScenario:
    """What one recording is made from.

    Attributes:
        config: every option, by vLLM's names.
        requests: what arrives, in the recorded format.
    """

    config: Json
    requests: list[Json]


class _Dice:
    """A random stream with the few draws that are needed, as plain Python numbers."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        return int(self._rng.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def one_of(self, *values: T) -> T:
        return values[self.integer(0, len(values) - 1)]

    def lognormal(self, mean: float, sigma: float, low: int, high: int) -> int:
        return min(max(int(self._rng.lognormal(mean, sigma)), low), high)

    def exponential(self, mean: float) -> float:
        return float(self._rng.exponential(mean)) if mean else 0.0


def draw_scenario(kind: Kind, rng: np.random.Generator) -> DrawnScenario:
    """Draw one scenario.

    Args:
        kind: see above.
        rng: its stream.
    """
    dice = _Dice(rng)
    config = _large_options(dice) if kind == "large" else _small_options(dice, tight=kind == "tight")
    _common_options(dice, config)
    if kind == "large":
        return DrawnScenario(config, _large_requests(dice, config))
    return DrawnScenario(config, _small_requests(dice, config, tight=kind == "tight"))


def _small_options(dice: _Dice, *, tight: bool) -> Json:
    block_size, max_model_len = dice.one_of(1, 2, 4, 4, 4, 8, 16), dice.one_of(24, 32, 48, 64)
    needed = -(-max_model_len // block_size)  # blocks of the longest request: the pool must hold it
    if tight:
        spare = dice.integer(0, max(1, needed // 3))
    else:
        spare = dice.integer(0, needed) if dice.chance(0.6) else dice.integer(needed, 4 * needed)
    return {
        "block_size": block_size,
        "num_gpu_blocks": 1 + needed + spare,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": dice.one_of(4, 6, 8, 12, 16, 24, 32, 64),
        "max_num_seqs": dice.one_of(3, 4, 6, 8, 12) if tight else dice.one_of(1, 2, 3, 4, 6, 8),
        "long_prefill_token_threshold": dice.one_of(2, 3, 4, 6, 8, 12),
    }


def _large_options(dice: _Dice) -> Json:
    block_size = dice.one_of(16, 16, 32)
    tight = dice.chance(0.6)
    return {
        "block_size": block_size,
        "num_gpu_blocks": 1 + (dice.integer(4600, 8000) if tight else 65536) // block_size,
        "max_model_len": 2048,
        "max_num_batched_tokens": dice.one_of(256, 512, 1024, 2048, 8192),
        "max_num_seqs": dice.one_of(32, 64, 128, 256),
        "long_prefill_token_threshold": dice.one_of(64, 128, 256),
    }


def _common_options(dice: _Dice, config: Json) -> None:
    """Add the options that are drawn alike for every kind."""
    chunked = dice.chance(0.9)
    budget = config["max_num_batched_tokens"]
    if not chunked:
        budget = max(budget, config["max_model_len"])
    seqs = min(config["max_num_seqs"], budget)
    thresholds = dice.chance(0.3)
    config.update(
        policy="priority" if dice.chance(0.3) else "fcfs",
        async_scheduling=dice.chance(0.5),
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_num_active_seqs=dice.integer(1, seqs) if dice.chance(0.1) else None,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=dice.chance(0.45),
        long_prefill_token_threshold=config["long_prefill_token_threshold"] if thresholds else 0,
        long_prefill_token_threshold_adaptive=thresholds and dice.chance(0.4),
        scheduler_reserve_full_isl=dice.chance(0.75),
        watermark=dice.one_of(0.02, 0.05, 0.1, 0.2, 0.4) if dice.chance(0.2) else 0.0,
        prefill_schedule_interval=dice.one_of(2, 3, 4) if dice.chance(0.1) else 1,
    )


def _request(dice: _Dice, config: Json, at: float, max_tokens: int, prompt: list[list[int]]) -> Json:
    return {
        "arrival_iter": int(at),
        "arrival_time": round(at, 6),
        "priority": dice.integer(0, 3) if config["policy"] == "priority" else 0,
        "prompt": prompt,
        "prompt_len": sum(count for _, count in prompt),
        "max_tokens": max_tokens,
        "eos_at": None,
        "abort_iter": None,
    }


def _small_requests(dice: _Dice, config: Json, *, tight: bool) -> list[Json]:
    most = config["max_model_len"] - 1
    groups = dice.integer(1, 3)
    at = 0
    requests: list[Json] = []
    for r in range(dice.integer(4, 14) if tight else dice.integer(2, 12)):
        at = max(0, at + dice.one_of(0, 0, 0, 1, 1, 2, 3, 6) - (1 if tight else 0))
        length = dice.one_of(dice.integer(1, 6), dice.integer(1, most // 2), dice.integer(1, most))
        answer = dice.integer(4, 40) if tight else dice.one_of(1, 2, dice.integer(1, 10), dice.integer(1, 30))
        prompt = [[_PROMPT_BASE + r * _BETWEEN, length]]
        if config["enable_prefix_caching"] and dice.chance(0.75):
            prompt = _shared_prompt(dice, requests, r, dice.integer(0, groups - 1), length, most)
        tie = dice.chance(0.2)  # equal keys of the priority policy
        request = _request(dice, config, at if tie else at + 0.001 * r, answer, prompt)
        if dice.chance(0.3):
            request["eos_at"] = dice.integer(1, answer)
        if dice.chance(0.08):
            request["abort_iter"] = at + dice.integer(0, 12)
        requests.append(request)
    return requests


def _shared_prompt(dice: _Dice, earlier: list[Json], r: int, group: int, length: int, most: int) -> list[list[int]]:
    """Return a prompt that begins like another one, or the next turn of an earlier request."""
    own = _PROMPT_BASE + r * _BETWEEN
    if not earlier or dice.chance(0.7):
        shared = dice.integer(1, length)
        runs = [[_SHARED_BASE + group * _BETWEEN, shared], [own, length - shared]]
    else:
        before = dice.integer(0, len(earlier) - 1)
        end = earlier[before]["eos_at"]
        answer = end - 1 if end else earlier[before]["max_tokens"]
        runs = [*earlier[before]["prompt"], [OUTPUT_BASE * (before + 1), answer], [own, dice.integer(1, 4)]]
    prompt, left = [], most
    for first, count in runs:
        taken = min(count, left)
        if taken > 0:
            prompt.append([first, taken])
            left -= taken
    return prompt


def _large_requests(dice: _Dice, config: Json) -> list[Json]:
    gap = dice.one_of(0.0, 0.5, 0.5, 1.0, 2.0)  # mean, in turns of the loop
    longest = 200
    at = 0.0
    requests = []
    for r in range(_LARGE_REQUESTS):
        at += dice.exponential(gap)
        length, answer = dice.lognormal(5.5, 0.9, 20, 1200), dice.lognormal(4.0, 0.9, 1, longest)
        prompt = [[_PROMPT_BASE + r * _BETWEEN, length]]
        shared = min(length - 1, dice.one_of(0, 64, 200, 333, 512))
        if config["enable_prefix_caching"] and shared:
            prompt = [[_SHARED_BASE + dice.integer(0, 5) * _BETWEEN, shared], [prompt[0][0], length - shared]]
        by_eos = dice.chance(0.5)
        request = _request(dice, config, at, longest if by_eos else answer, prompt)
        if by_eos:
            request["eos_at"] = answer
        if dice.chance(0.03):
            request["abort_iter"] = int(at) + dice.integer(0, 150)
        requests.append(request)
    return requests
