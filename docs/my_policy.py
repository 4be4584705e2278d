"""A router policy of one's own: the best answer for the money among the instances that are not crowded.

simcluster run quickstart --policy docs/my_policy.py:Uncrowded --policy sfs
simcluster run quickstart --policy docs/my_policy.py:Uncrowded:most=20
simcluster policy test docs/my_policy.py:Uncrowded
"""

import numpy as np

from simcluster.request import Request
from simcluster.routers import ClusterView, Decision, RouterSettings, choose_best

_CROWDED = -1e6  # below every utility


class Uncrowded:
    """The largest predicted utility among instances with at most `most` requests, else the shortest queue."""

    def __init__(self, settings: RouterSettings, *, most: int = 8) -> None:
        self._ties = settings.ties  # decides among equals by the scenario's rule; for chance use settings.rng
        self._most = most

        self._crowded = 0

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose an instance; returning its index would do as well."""
        load = view.num_resident()
        self._crowded += bool((load > self._most).all())
        score = np.where(load <= self._most, request.predicted_utility, _CROWDED - load)
        return choose_best(score, self._ties, view.healthy)

    def report(self) -> dict[str, int]:
        """Tell what the run's summary should say (`policy_reports`); optional, anything that JSON can hold."""
        return {"crowded_everywhere": self._crowded}
