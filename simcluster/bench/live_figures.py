"""The figure about a whole decision of the live router: a look at all shared memories, then the policy's choice."""

import functools
import os
import time
from pathlib import Path

import numpy as np

from simcluster.bench.measure import Measured, cpu_s
from simcluster.bench.snapshot_figures import published_cluster
from simcluster.bench.workload import bench_scenario
from simcluster.experiment.build import build_world
from simcluster.live.endpoints import SHARED_MEMORY, Endpoint
from simcluster.live.router.dispatcher import Dispatcher
from simcluster.live.router.own import OwnRequests
from simcluster.live.router.sight import LiveSight
from simcluster.request import Request
from simcluster.routers.base import ClusterView
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_NS, PS_PER_S

__all__ = ["live_decision"]

_MODELS = 3
_MEET_S = 0.02  # a reader meets a new writer after some 10 ms
_LATER_PS = PS_PER_S // 100  # decisions come after what they have seen


def live_decision(quick: bool) -> Measured:
    """Time a decision by the policy sfs, every instance having published since the last one [us]."""
    instances, residents, repeats = (5, 4, 5) if quick else (100, 32, 40)
    scenario, path = _three_models(instances)
    world = build_world(scenario, path)
    values = []
    with published_cluster(instances, residents) as cluster:
        published = [Endpoint(None, SHARED_MEMORY, f"bench.{os.getpid()}.{j}") for j in range(instances)]
        lengths = [(512, 256)] * instances
        sights: list[LiveSight] = []

        def build_sight(view: ClusterView, own: OwnRequests) -> LiveSight:
            now_ns = cluster.clock_ns
            epoch_ns = cluster.epoch_ns
            sights.append(
                LiveSight(view.instances, view.views, own, published, scenario.live, lengths, epoch_ns, clock_ns=now_ns)
            )
            return sights[0]

        router = Dispatcher(world, scenario, "sfs", build_sight)
        utility = np.sort(cluster.utility)  # equal within a model
        sight = sights[0]
        while sight.sources.count(SHARED_MEMORY) < instances:
            cluster.step()
            router.look(cluster.now_ns * PS_PER_NS)
            time.sleep(_MEET_S)
        for number in range(9):
            seconds = 0.0
            for k in range(repeats):
                cluster.step()
                now = cluster.now_ns * PS_PER_NS
                request = _request(number * repeats + k, now, utility)
                seconds += cpu_s(functools.partial(_decide, router, request, now, (True,) * instances))
            values.append(seconds / repeats * 1e6)
    what = f"{instances} instances, {residents} residents each, 9 x {repeats} decisions"
    return Measured(tuple(values), what, judged=instances == 100)


def _decide(router: Dispatcher, request: Request, now_ps: int, allowed: tuple[bool, ...]) -> None:
    """Do what a router does for each request."""
    router.look(now_ps)
    router.decide(request, now_ps + _LATER_PS, allowed)


def _three_models(instances: int) -> tuple[Scenario, Path]:
    """Return so many instances of three prices, which makes them three models to a policy, and where that lies."""
    scenario, path = bench_scenario(instances, 10)
    data = scenario.model_dump()
    (entry,) = data["cluster"]["instances"]
    shares = [len(range(k, instances, _MODELS)) for k in range(_MODELS)]
    data["cluster"]["instances"] = [
        entry
        | {"name": f"m{k}", "replicas": share, "price": {"input_usd_per_mtok": 0.1, "output_usd_per_mtok": 1.0 + k}}
        for k, share in enumerate(shares)
    ]
    return Scenario.model_validate(data), path


def _request(number: int, now_ps: int, utility: "np.typing.NDArray[np.float64]") -> Request:
    count = len(utility)
    return Request(
        index=2**60 + number,
        arrival_ps=now_ps,
        prompt_tokens=np.full(count, 512),
        max_tokens=-1,
        priority=0,
        slo_ttft_ps=PS_PER_S // 2,
        predicted_output_tokens=np.full(count, 256),
        predicted_utility=utility,
        predicted_quality=utility,
    )
