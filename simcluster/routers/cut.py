"""From estimates of the TTFT to a choice: the paper's objectives, with a margin or a learned chance to be on time."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from simcluster.request import FloatArray, Request
from simcluster.routers.base import NONE_HEALTHY, ClusterView, Decision
from simcluster.routers.objective import choose_slo, choose_weighted
from simcluster.routers.settings import RouterSettings
from simcluster.units import PS_PER_S

__all__ = ["Choice", "Cut", "OnTimeChance", "forward_observations"]

Cut = Literal["hard", "residual"]

_REMEMBERED, _LEAST = 200, 20
_OBSERVED = ("observe_dispatch", "observe_first_token", "observe_end")


def forward_observations(target: object, parts: list[Any]) -> None:
    """Give an object the methods of `Observer` that its parts have, and no others: who listens costs time."""
    for name in _OBSERVED:
        methods = [getattr(part, name) for part in parts if hasattr(part, name)]
        if methods:
            setattr(target, name, methods[0] if len(methods) == 1 else _all_of(methods))


def _all_of(methods: list[Callable[..., None]]) -> Callable[..., None]:
    def tell(*arguments: object) -> None:
        for method in methods:
            method(*arguments)

    return tell


class OnTimeChance:
    """The chance that a TTFT meets its target, from the last 200 residuals (observed - predicted) of each instance.

    Until 20 residuals of an instance are known, what is expected to be on time is taken to be.
    """

    def __init__(self, num_instances: int) -> None:
        self._residuals = np.zeros((num_instances, _REMEMBERED))
        self._seen = [0] * num_instances
        self._last: tuple[int, FloatArray] | None = None
        self._open: dict[int, float] = {}

    def of(self, ttft_s: FloatArray, target_s: float) -> FloatArray:
        """Return the chance of each instance, (j,)."""
        chance = (ttft_s <= target_s).astype(np.float64)
        for j, seen in enumerate(self._seen):
            if seen >= _LEAST and np.isfinite(ttft_s[j]):
                known = self._residuals[j, : min(seen, _REMEMBERED)]
                chance[j] = np.count_nonzero(ttft_s[j] + known <= target_s) / len(known)
        return chance

    def expect(self, request_index: int, ttft_s: FloatArray) -> None:
        """Note what a decision expected."""
        self._last = (request_index, ttft_s)

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Note what is expected of the instance that the request was really sent to."""
        if self._last is not None and self._last[0] == request.index and np.isfinite(self._last[1][instance]):
            self._open[request.index] = float(self._last[1][instance])

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        """Learn a residual."""
        expected_s = self._open.pop(request_index, None)
        if expected_s is not None:
            self._residuals[instance, self._seen[instance] % _REMEMBERED] = ttft_s - expected_s
            self._seen[instance] += 1

    def observe_end(self, request_index: int, instance: int) -> None:
        """Forget a request that never had a first token."""
        self._open.pop(request_index, None)


class Choice:
    """Chooses by the router's objective.

    Under eq. 3 an instance is feasible if `L <= margin * target`; with `cut=residual` the rule is the largest
    chance-weighted utility `P(L + residual <= margin * target) * U` instead (U itself where it is negative), and the
    smallest L where no instance has a chance.

    Source: paper eqs. 3, 5; margin and residuals are this project's.
    """

    def __init__(self, settings: RouterSettings, margin: float, cut: Cut) -> None:
        if not margin > 0:
            raise ValueError(f"margin = {margin:g}; must be above 0")
        if settings.objective == "weighted" and (margin != 1 or cut != "hard"):
            raise ValueError("the weighted objective has no target; leave margin and cut out, or set objective: slo")
        self._settings, self._margin = settings, margin
        self.chance = OnTimeChance(settings.num_instances) if cut == "residual" else None

    def choose(self, request: Request, view: ClusterView, ttft_s: FloatArray) -> Decision:
        """Choose an instance by predicted utility and TTFT, (j,) [s]."""
        settings, utility = self._settings, request.predicted_utility
        if settings.objective == "weighted":
            return choose_weighted(utility, ttft_s, settings.latency_weight, settings.ties, view.healthy)
        target_s = self._margin * (request.slo_ttft_ps / PS_PER_S) if request.slo_ttft_ps >= 0 else np.inf
        if self.chance is None:
            return choose_slo(utility, ttft_s, target_s, settings.ties, view.healthy)
        self.chance.expect(request.index, ttft_s)
        chance = np.where(np.isfinite(ttft_s), self.chance.of(ttft_s, target_s), 0.0)
        if not chance[view.candidates].any():
            return choose_slo(utility, ttft_s, -np.inf, settings.ties, view.healthy)
        score = np.where(chance > 0, np.where(utility > 0, chance * utility, utility), -np.inf)
        allowed = np.array(view.candidates)
        best = allowed[score[allowed] == score[allowed].max()]
        best = best[ttft_s[best] == ttft_s[best].min()]
        reason = NONE_HEALTHY if view.none_healthy else "feasible"
        return Decision(settings.ties.pick(best), reason, ttft_s, score, len(best))
