"""A learned TTFT: gradient-boosted trees on counts and tokens, trained while the router works."""

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from simcluster.request import FloatArray, Request
from simcluster.routers.base import ClusterView, Decision, Router
from simcluster.routers.baselines import Random, RoundRobin, ShortestQueue
from simcluster.routers.cut import Cut
from simcluster.routers.predictive import Predictive
from simcluster.routers.settings import RouterSettings

__all__ = ["MlEstimator", "MlLatency"]

_FEATURES = (
    "model",
    "prompt_tokens",
    "predicted_output_tokens",
    "num_waiting",
    "num_running",
    "prefill_tokens_left",
    "decode_tokens_left",
    "kv_usage",
)
_TREES = 100
_PARAMETERS = {
    "objective": "regression",
    "num_leaves": 31,
    "learning_rate": 0.1,
    "min_data_in_leaf": 20,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 1,
    "verbosity": -1,
}
_LEAST_S = 1e-6


class MlEstimator:
    """Gradient-boosted trees from what a view tells in numbers to the logarithm of the TTFT.

    Features: the model (a category that replicas share), prompt and predicted answer length, waiting and running
    requests, prefill and decode tokens left, KV use. Nothing is known before `first` TTFTs have been observed, of all
    instances together; then the trees are trained on the last `keep`, and anew after every further `every`.
    Training is deterministic: equal observations give equal trees.

    Source: llm-d's predicted latency; the trees are LightGBM's.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings, *, first: int = 300, every: int = 300, keep: int = 5000) -> None:
        for name, value in (("first", first), ("every", every), ("keep", keep)):
            if value < 1:
                raise ValueError(f"{name} = {value}; must be at least 1")
        kinds = [(spec.model, spec.card) for spec in settings.instances]
        known = list(dict.fromkeys(kinds))
        self._kind = np.array([known.index(kind) for kind in kinds], dtype=np.float64)
        self._next, self._every = first, every
        self._observed: deque[tuple[FloatArray, float]] = deque(maxlen=max(keep, 1))
        self._num_observed = 0
        self._last: tuple[int, FloatArray] | None = None
        self._open: dict[int, FloatArray] = {}
        self._trees: Any = None

    @property
    def trained(self) -> bool:
        """Whether it can predict."""
        return self._trees is not None

    def estimate(self, request: Request, view: ClusterView) -> FloatArray:
        """Return the predicted TTFT, nan while nothing has been learned."""
        rows = self._features(request, view)
        self._last = (request.index, rows)
        if self._trees is None:
            return np.full(len(rows), np.nan)
        ttft_s: FloatArray = np.exp(self._trees.predict(rows, num_threads=1))
        return ttft_s

    def _features(self, request: Request, view: ClusterView) -> FloatArray:
        """Return one row per instance, columns as in _FEATURES."""
        rows = np.empty((len(view.views), len(_FEATURES)))
        rows[:, 0] = self._kind
        rows[:, 1] = request.prompt_tokens
        rows[:, 2] = request.predicted_output_tokens
        rows[:, 3:] = [
            (each.num_waiting, each.num_running, each.prefill_tokens_left, each.decode_tokens_left, each.kv_usage)
            for each in view.views
        ]
        return rows

    def observe_dispatch(self, request: Request, instance: int) -> None:
        """Note what was known about the instance that the request was sent to."""
        if self._last is not None and self._last[0] == request.index:
            self._open[request.index] = self._last[1][instance]

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        """Learn from a TTFT."""
        row = self._open.pop(request_index, None)
        if row is None:
            return
        self._observed.append((row, float(np.log(max(ttft_s, _LEAST_S)))))
        self._num_observed += 1
        if self._num_observed >= self._next:
            self._next += self._every
            self._train()

    def observe_end(self, request_index: int, instance: int) -> None:
        """Forget a request that never had a first token."""
        self._open.pop(request_index, None)

    def _train(self) -> None:
        import lightgbm  # noqa: PLC0415  (slow to import, and needed here alone)

        rows, targets = (np.array(column) for column in zip(*self._observed, strict=True))
        data = lightgbm.Dataset(rows, targets, feature_name=list(_FEATURES), categorical_feature=[0])
        self._trees = lightgbm.train(_PARAMETERS, data, num_boost_round=_TREES)


_START: dict[str, Callable[[RouterSettings], Router]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "shortest_queue": ShortestQueue,
}


class MlLatency(Predictive):
    """The objective of eq. 3 or eq. 5 on TTFTs that boosted trees have learned from the router's own observations.

    Until the trees are trained on the `first` TTFTs it acts as the policy `start`; it trains anew after every further
    `every`, on the last `keep`. What it never tries it never unlearns: `epsilon(ml_latency,p=0.01)` explores.

    Source: llm-d's predicted latency, the modern rival of simulation; the paper, eqs. 3, 5.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        margin: float = 1.0,
        cut: Cut = "hard",
        start: Literal["shortest_queue", "round_robin", "random"] = "shortest_queue",
        first: int = 300,
        every: int = 300,
        keep: int = 5000,
    ) -> None:
        self._learned = MlEstimator(settings, first=first, every=every, keep=keep)
        super().__init__(settings, self._learned, margin, cut)
        self._start: Router = _START[start](settings)

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Decide by what has been learned, or as the first policy does."""
        if self._learned.trained:
            return super().route(request, view)
        self._learned.estimate(request, view)  # what it knew when it decided
        decision = self._start.route(request, view)
        if decision.reason == "score":
            decision.reason = "warmup"
        return decision
