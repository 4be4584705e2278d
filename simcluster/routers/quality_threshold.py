"""The cheapest instance that is expected to be good enough: a threshold, given or calibrated to a share."""

from typing import Any, ClassVar

import numpy as np

from simcluster.errors import ConfigError
from simcluster.request import FloatArray, Request
from simcluster.routers.base import ClusterView, Decision
from simcluster.routers.objective import choose_best
from simcluster.routers.settings import RouterSettings

__all__ = ["QualityThreshold", "calibrated_threshold"]


def calibrated_threshold(quality: FloatArray, share: float) -> float:
    """Return the highest threshold below which at most a share of the requests lies.

    Args:
        quality: (n,) predicted quality of the cheapest answer to each request of the calibration set.
        share: share of requests that may be sent on to a dearer instance, 0 to 1.

    Returns:
        A value of the set; inf if all may be sent on, -inf for an empty set.
    """
    allowed = int(share * len(quality) + 1e-9)
    if not len(quality):
        return -np.inf
    return float(np.sort(quality)[allowed]) if allowed < len(quality) else np.inf


class QualityThreshold:
    """The cheapest instance whose predicted quality reaches `threshold`; the best one if none does.

    With `threshold=0` the threshold is calibrated on the first `first` requests, so that a share `share` of them is not
    left to the cheapest instance. The share reached on all requests is reported beside it: other requests, other share.

    Source: RouteLLM's calibrated threshold (lm-sys/RouteLLM#36), for any number of instances.
    """

    needs_view: ClassVar[bool] = False

    def __init__(
        self, settings: RouterSettings, *, threshold: float = 0.0, share: float = 0.5, first: int = 200
    ) -> None:
        for name, value in (("threshold", threshold), ("share", share)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} = {value:g}; must be from 0 to 1")
        if first < 1:
            raise ValueError(f"first = {first}; must be at least 1")
        self._ties, self._share, self._first = settings.ties, share, first
        self._price_in = np.array([spec.price_in for spec in settings.instances])
        self._price_out = np.array([spec.price_out for spec in settings.instances])
        self._given = threshold > 0
        self._threshold = threshold if self._given else -np.inf
        self._seen: list[float] = []
        self._num_decided = self._num_sent_on = 0

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose by predicted quality and cost.

        Raises:
            ConfigError: nobody predicts the quality of answers.
        """
        quality = request.predicted_quality
        if quality is None:
            raise ConfigError("policy 'quality_threshold' needs predictions of quality; choose another policy")
        cost = request.prompt_tokens * self._price_in + request.predicted_output_tokens * self._price_out
        candidates = view.candidates
        least = cost[candidates].min()
        self._calibrate(float(quality[candidates][cost[candidates] == least].max()))
        enough = quality >= self._threshold
        if enough[candidates].any():
            decision = choose_best(np.where(enough, -cost, -np.inf), self._ties, view.healthy)
        else:
            decision = choose_best(quality, self._ties, view.healthy, "below_threshold")
        self._num_decided += 1
        self._num_sent_on += bool(cost[decision.instance] > least)
        return decision

    def _calibrate(self, quality: float) -> None:
        """Take one more request of the calibration set into account."""
        if self._given or len(self._seen) >= self._first:
            return
        self._seen.append(quality)
        self._threshold = calibrated_threshold(np.array(self._seen), self._share)

    def report(self) -> dict[str, Any]:
        """Return the threshold, and which share of the requests went beyond the cheapest instance."""
        return {
            "threshold": self._threshold if np.isfinite(self._threshold) else None,
            "calibrated_on": len(self._seen),
            "target_share": None if self._given else self._share,
            "achieved_share": self._num_sent_on / self._num_decided if self._num_decided else None,
            "decisions": self._num_decided,
        }
