"""Figures about SFS over all instances at once: native loops, no Python call in what is measured.

Views believe the true step times and know how long answers are, and steps have no noise, so a view foresees its
instance exactly. Models differ in utility alone, which goes round from request to request, so that they get equal load.
"""

from dataclasses import dataclass
from functools import cache

from simcluster import _native
from simcluster.bench.measure import Measured, cpu_s
from simcluster.bench.states import engines_for
from simcluster.bench.workload import Requests, engine_parts, requests

__all__ = ["RoutedCluster", "decision", "decision_seconds", "routed_cluster", "routed_rate"]

_TARGET_S = 0.5
_UTILITIES = (0.5, 0.7, 0.9)
_WARM = 300  # requests per instance before anything is measured; an answer takes about 120 arrivals
_REFRESH_AFTER = 64  # dispatches to an instance; a view keeps all that its snapshot does not show


@dataclass(slots=True)
class RoutedCluster:
    """Engines whose requests one router hands out by SFS.

    Attributes:
        engines: (j,) engines.
        views: (j,) the router's views of them.
        fleet: the views, ready for decisions.
        utilities: (models,) utilities; which model has which goes round from request to request.
        asked: the requests.
        num_routed: how many of them have been routed.
    """

    engines: list[_native.Engine]
    views: list[_native.InstanceView]
    fleet: _native.Fleet
    utilities: list[float]
    asked: Requests
    num_routed: int = 0

    def route(self, count: int, *, refresh_after: int = _REFRESH_AFTER) -> list[int]:
        """Route the next requests and return the instances chosen, (count,).

        Args:
            count: how many.
            refresh_after: dispatches to an instance after which its view is refreshed at the next one.
        """
        asked = self.asked
        first, self.num_routed = self.num_routed, self.num_routed + count
        return _native.bench_route(
            self.engines,
            self.views,
            self.fleet,
            self.utilities,
            asked.prompt_tokens,
            asked.output_tokens,
            asked.at_ps,
            first,
            count,
            _TARGET_S,
            refresh_after,
        )

    def decide(self, explain: _native.Explain, repeats: int) -> int:
        """Decide again and again about a prompt of 512 tokens that comes with the last request; the instance chosen."""
        now = int(self.asked.at_ps[self.num_routed - 1])
        return _native.bench_decisions(self.fleet, self.utilities, 512, 256, now, _TARGET_S, explain, repeats)


def routed_cluster(instances: int, models: int, count: int) -> RoutedCluster:
    """Return an idle cluster at 80 % load with so many requests to come, its instances of the models in turn."""
    config, model = engine_parts()
    views = [_native.InstanceView(config, model, 256, True) for _ in range(instances)]
    fleet = _native.Fleet(views, [j % models for j in range(instances)])
    utilities = list(_UTILITIES[:models])
    return RoutedCluster(engines_for(config, model, instances), views, fleet, utilities, requests(count, instances))


@cache
def _loaded(instances: int, models: int) -> RoutedCluster:
    cluster = routed_cluster(instances, models, _WARM * instances)
    cluster.route(_WARM * instances)
    return cluster


def decision_seconds(cluster: RoutedCluster, explain: _native.Explain, repeats: int) -> float:
    """Return the CPU time of a decision by eq. 3 [s], views being up to date."""
    cluster.decide(_native.Explain.all, 4)
    return cpu_s(lambda: cluster.decide(explain, repeats)) / repeats


def decision(explain: _native.Explain, models: int, quick: bool) -> Measured:
    """Time a decision over all instances [us], repeated at one instant."""
    instances, repeats = (50, 50) if quick else (1000, 200 if explain == _native.Explain.all else 5000)
    cluster = _loaded(instances, models)
    values = tuple(decision_seconds(cluster, explain, repeats) * 1e6 for _ in range(9))
    what = f"{cluster.fleet.num_estimated:,} of {instances:,} instances estimated, models: {models}"
    return Measured(values, f"{what}, 9 x {repeats:,} decisions", judged=instances == 1000)


def routed_rate(quick: bool) -> Measured:
    """Return requests per CPU-second routed by SFS and simulated, runners-up estimated too."""
    instances, count, repetitions = (20, 500, 3) if quick else (1000, 50_000, 5)
    warm = _WARM * instances
    cluster = routed_cluster(instances, len(_UTILITIES), warm + count * repetitions)
    cluster.route(warm)
    values = tuple(count / cpu_s(lambda: cluster.route(count)) for _ in range(repetitions))
    size = f"{instances:,} instances, {repetitions} x {count:,} requests after {warm:,}, views refreshed"
    size += f" after {_REFRESH_AFTER} dispatches"
    return Measured(values, size, judged=instances == 1000)
