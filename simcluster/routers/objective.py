"""From estimates to a choice: the paper's two objectives, the largest score, and the tie rule."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from simcluster.request import FloatArray, IntArray
from simcluster.routers.base import NONE_HEALTHY, Decision

__all__ = ["TieBreaker", "choose_best", "choose_slo", "choose_weighted"]

TieRule = Literal["index", "rotate", "random"]


class TieBreaker:
    """Chooses among equally good instances: the first, in turn, or at random.

    Without a tie nothing is drawn and the turn does not move, so a tie-free run does not depend on the rule.
    """

    def __init__(self, rule: TieRule, rng: np.random.Generator) -> None:
        self._rule = rule
        self._rng = rng
        self._last = -1

    def pick(self, candidates: IntArray) -> int:
        """Choose one of the candidates, given as ascending indices."""
        if len(candidates) == 1 or self._rule == "index":
            return int(candidates[0])
        if self._rule == "random":
            return int(candidates[self._rng.integers(len(candidates))])
        later = candidates[candidates > self._last]
        self._last = int(later[0] if len(later) else candidates[0])
        return self._last


def _allowed(count: int, healthy: Sequence[bool]) -> tuple[IntArray, bool]:
    """Return the indices of the healthy instances, or of all, and whether none is healthy."""
    indices = np.flatnonzero(healthy) if False in healthy else np.arange(count)
    return (indices, False) if len(indices) else (np.arange(count), True)


def choose_best(score: FloatArray, ties: TieBreaker, healthy: Sequence[bool] = (), reason: str = "score") -> Decision:
    """Take the largest score among the healthy instances, among all if none is healthy.

    Args:
        score: (j,) what to maximise.
        ties: tie rule.
        healthy: (j,) which instances may be chosen; empty: all.
        reason: why this rule decides.
    """
    if False in healthy:
        allowed, none_healthy = _allowed(len(score), healthy)
        best = allowed[score[allowed] == score[allowed].max()]
        if none_healthy:
            reason = NONE_HEALTHY
        else:
            score = np.where(healthy, score, -np.inf)
    else:
        first = int(score.argmax())
        same = score == score[first]
        if np.count_nonzero(same) == 1:
            return Decision(first, reason, None, score)
        best = np.flatnonzero(same)
    return Decision(ties.pick(best), reason, None, score, len(best))


def _largest(score: FloatArray, ttft_s: FloatArray, allowed: IntArray) -> IntArray:
    """Return the instances of largest score among the allowed ones, of these the ones with the smallest TTFT."""
    best = allowed[score[allowed] == score[allowed].max()]
    fastest: IntArray = best[ttft_s[best] == ttft_s[best].min()]
    return fastest


def choose_slo(
    utility: FloatArray, ttft_s: FloatArray, target_s: float, ties: TieBreaker, healthy: Sequence[bool] = ()
) -> Decision:
    """Take the largest utility among instances that meet the target, else the smallest TTFT.

    Args:
        utility: (j,) predicted utility.
        ttft_s: (j,) predicted TTFT [s], inf where the request cannot be served.
        target_s: TTFT target [s]; inf without one.
        ties: tie rule.
        healthy: (j,) which instances may be chosen; empty or none: all.

    Source: paper eq. 3.
    """
    allowed, none_healthy = _allowed(len(ttft_s), healthy)
    expected = ttft_s[allowed]
    feasible = allowed[(expected <= target_s) & np.isfinite(expected)]
    score = np.full(len(ttft_s), -np.inf)  # what decided: utility, or the TTFT where no instance meets the target
    if len(feasible):
        best, reason = _largest(utility, ttft_s, feasible), "feasible"
        score[feasible] = utility[feasible]
    else:
        best, reason = allowed[expected == expected.min()], "infeasible"
        score[allowed] = -expected
    return Decision(ties.pick(best), NONE_HEALTHY if none_healthy else reason, ttft_s, score, len(best))


def choose_weighted(
    utility: FloatArray, ttft_s: FloatArray, latency_weight: float, ties: TieBreaker, healthy: Sequence[bool] = ()
) -> Decision:
    """Take the largest utility - latency_weight * TTFT.

    Args:
        utility: (j,) predicted utility.
        ttft_s: (j,) predicted TTFT [s], inf where the request cannot be served.
        latency_weight: delta [1/s]; 0 gives the latency-agnostic choice among the servable.
        ties: tie rule.
        healthy: (j,) which instances may be chosen; empty or none: all.

    Source: paper eq. 5.
    """
    allowed, none_healthy = _allowed(len(ttft_s), healthy)
    usable = allowed[np.isfinite(ttft_s[allowed])]
    if not len(usable):
        return choose_slo(utility, ttft_s, np.inf, ties, healthy)
    score = np.full(len(ttft_s), -np.inf)
    score[usable] = utility[usable] - latency_weight * ttft_s[usable]
    best = _largest(score, ttft_s, usable)
    return Decision(ties.pick(best), NONE_HEALTHY if none_healthy else "score", ttft_s, score, len(best))
