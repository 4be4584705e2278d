"""What was expected of the instance that each request was sent to, by the policy and by estimators beside it."""

from collections.abc import Sequence

import numpy as np

from simcluster.request import FloatArray
from simcluster.routers.base import SHED, Decision

__all__ = ["Predictions"]


class Predictions:
    """Predicted TTFTs of one run; n requests.

    Attributes:
        columns: (n,) [s] by estimator, the policy's own first; inf: without bound, nan: nothing was predicted.
    """

    def __init__(self, policy: str, beside: Sequence[str], n: int) -> None:
        self.columns: dict[str, FloatArray] = {name: np.full(n, np.nan) for name in (policy, *beside)}
        self._policy = policy
        self._beside = tuple(beside)

    def record(self, index: int, decision: Decision, beside: Sequence[float]) -> None:
        """Note what a decision expected, and what estimators beside it did."""
        if decision.instance == SHED:
            return
        if decision.predicted_ttft_s is not None:
            self.columns[self._policy][index] = decision.predicted_ttft_s[decision.instance]
        for name, value in zip(self._beside, beside, strict=True):
            self.columns[name][index] = value
