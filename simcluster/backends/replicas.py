"""The routers of a run, each with its own view of every instance."""

from dataclasses import dataclass

import numpy as np

from simcluster import _native
from simcluster.rng import Stream, generator
from simcluster.routers import build_router, build_shadow
from simcluster.routers.base import ClusterView, OracleView, Router
from simcluster.routers.objective import TieBreaker
from simcluster.routers.settings import RouterSettings
from simcluster.routers.shadow import Shadow
from simcluster.scenario import Scenario
from simcluster.units import ps_from_seconds
from simcluster.world import World

__all__ = ["Replica", "build_replicas"]


@dataclass(slots=True)
class Replica:
    """One router, the estimators beside it, and what they know.

    Attributes:
        number: which one, from 0.
        router: who decides.
        shadow: who is asked beside it.
        view: what it sees; one object for the whole run.
        looks: whether anything depends on the view: decisions, or what is expected beside them.
        decides_by_view: whether decisions do.
        estimates: whether estimators are asked beside it.
        listens: whether it wants to be told what happens to its requests.
        told: whether it wants to be told of its own dispatches, or listens.
        native: its number in the native cluster.
        notes: whose view notes a dispatch: its own, if it looks.
    """

    number: int
    router: Router
    shadow: Shadow
    view: ClusterView
    looks: bool
    decides_by_view: bool
    estimates: bool
    listens: bool = False
    told: bool = False
    native: int = _native.NOBODY
    notes: int = _native.NOBODY

    def join(self, cluster: _native.Cluster) -> None:
        """Let the cluster show it snapshots."""
        self.native = cluster.add_router(self.view.views)
        self.notes = self.native if self.looks else _native.NOBODY


def build_replicas(world: World, scenario: Scenario, policy: str, *, oracle: bool) -> list[Replica]:
    """Build the routers of a run.

    Args:
        world: what is fixed beforehand.
        scenario: routing settings and seed.
        policy: name of the policy.
        oracle: they know the truth, and all that any of them does.

    Raises:
        ConfigError: the policy or a parameter is unknown or not allowed.
        PolicyError: a user's policy cannot be built.
    """
    routing = scenario.routing
    mean_output = np.maximum(np.rint(world.known.predicted_output_tokens.mean(axis=0)), 1)
    mean_output = mean_output[world.known.group_of_instance].astype(np.int64).tolist()
    believed = [spec.believed for spec in world.instances]
    if oracle:
        believed = [model.step_time for model in world.true_models]
    replicas: list[Replica] = []
    views: list[_native.InstanceView] = []
    for number in range(routing.replicas):
        settings = RouterSettings(
            num_instances=len(world.instances),
            objective=routing.objective,
            latency_weight=routing.latency_weight,
            ties=TieBreaker(routing.tie, generator(scenario.seed, Stream.TIES, number)),
            rng=generator(scenario.seed, Stream.ROUTER, number),
            instances=world.instances,
            num_replicas=routing.replicas,
            all_candidates=scenario.output.decisions == "full",
            replica=number,
        )
        if not (oracle and views):  # all routers of the oracle share what they know
            views = [
                _native.InstanceView(spec.engine, model, mean, oracle or routing.overlay)
                for spec, model, mean in zip(world.instances, believed, mean_output, strict=True)
            ]
        view = (OracleView if oracle else ClusterView)(
            0, ps_from_seconds(routing.router_delay_s), world.instances, views
        )
        router = build_router(policy, settings)
        shadow = build_shadow(
            [] if oracle else [name for name in scenario.output.estimators if name != policy], settings
        )
        looks = router.needs_view or shadow.needs_view
        replicas.append(Replica(number, router, shadow, view, looks, router.needs_view, bool(shadow.names)))
    return replicas
