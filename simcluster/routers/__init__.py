"""Routing policies: pure, synchronous, without I/O. The same objects decide in simulation and live."""

from collections.abc import Callable, Sequence
from typing import Any

from simcluster.errors import ConfigError
from simcluster.rng import seeded
from simcluster.routers.affinity import CacheAware, PrefixHash, SessionHash
from simcluster.routers.base import SHED, ClusterView, Decision, Observer, Router
from simcluster.routers.baselines import (
    AlwaysBusiest,
    Cheapest,
    Largest,
    LatencyAgnostic,
    QueueDepth,
    Random,
    RoundRobin,
    ShortestQueue,
    Smallest,
)
from simcluster.routers.estimators import Estimator, LpsEstimator, SfsEstimator, ThroughputEstimator
from simcluster.routers.load import (
    EwmaLatency,
    LeastKv,
    LeastTokens,
    NormalizedLoad,
    PowerOfTwo,
    VllmDp,
    WeightedRandom,
)
from simcluster.routers.ml_latency import MlEstimator, MlLatency
from simcluster.routers.names import (
    PolicyName,
    arguments,
    base_policy,
    folder_names,
    located,
    parse,
    split_list,
    suggestion,
)
from simcluster.routers.objective import TieBreaker, choose_best
from simcluster.routers.predictive import Lps, Throughput, sfs
from simcluster.routers.quality_threshold import QualityThreshold
from simcluster.routers.scorers import KvCost, WeightedScorers
from simcluster.routers.settings import RouterSettings
from simcluster.routers.sfs import Oracle
from simcluster.routers.sfs_plus import SfsPlus
from simcluster.routers.shadow import Shadow
from simcluster.routers.user import UserPolicy, entry_point_names, load_class
from simcluster.routers.wrappers import Admission, Epsilon

__all__ = [
    "ESTIMATORS",
    "POLICIES",
    "SHED",
    "WRAPPERS",
    "ClusterView",
    "Decision",
    "Observer",
    "Router",
    "RouterSettings",
    "TieBreaker",
    "base_policy",
    "build_router",
    "build_shadow",
    "check_estimator",
    "check_policy",
    "choose_best",
    "entry_point_names",
    "folder_names",
    "located",
    "split_list",
]

POLICIES: dict[str, Callable[..., Router]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "weighted_random": WeightedRandom,
    "shortest_queue": ShortestQueue,
    "queue_depth": QueueDepth,
    "least_tokens": LeastTokens,
    "normalized_load": NormalizedLoad,
    "least_kv": LeastKv,
    "power_of_two": PowerOfTwo,
    "vllm_dp": VllmDp,
    "ewma_latency": EwmaLatency,
    "session_hash": SessionHash,
    "prefix_hash": PrefixHash,
    "cache_aware": CacheAware,
    "weighted_scorers": WeightedScorers,
    "kv_cost": KvCost,
    "latency_agnostic": LatencyAgnostic,
    "cheapest": Cheapest,
    "quality_threshold": QualityThreshold,
    "largest": Largest,
    "smallest": Smallest,
    "throughput": Throughput,
    "lps": Lps,
    "ml_latency": MlLatency,
    "sfs": sfs,
    "sfs_plus": SfsPlus,
    "oracle": Oracle,
    "always_busiest": AlwaysBusiest,
}
WRAPPERS: dict[str, Callable[..., Router]] = {
    "admission": Admission,
    "epsilon": Epsilon,
}
ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    "sfs": SfsEstimator,
    "throughput": ThroughputEstimator,
    "lps": LpsEstimator,
    "ml_latency": MlEstimator,
}


def build_shadow(names: Sequence[str], settings: RouterSettings) -> Shadow:
    """Build estimators that are asked at every decision without deciding.

    Args:
        names: as users write them: NAME or NAME:key=value,...
        settings: those of the router beside which they stand.

    Raises:
        ConfigError: an estimator or a parameter is unknown or not allowed.
    """
    return Shadow(names, [_build_estimator(name, settings) for name in names])


def _build_estimator(text: str, settings: RouterSettings) -> Estimator:
    name = parse(text)
    factory = ESTIMATORS.get(name.base)
    if factory is None or name.inner is not None:
        raise ConfigError(f"estimator {text!r} is unknown; {suggestion(name.base, ESTIMATORS)}")
    try:
        return factory(settings, **arguments(factory, name, "estimator"))
    except ValueError as error:
        raise ConfigError(f"estimator {text!r}: {error}") from None


def check_estimator(text: str) -> None:
    """Make sure that an estimator exists and that its parameters are allowed.

    Raises:
        ConfigError: it does not, or they are not.
    """
    _build_estimator(text, _PROBE)


def build_router(policy: str, settings: RouterSettings) -> Router:
    """Build one router.

    Args:
        policy: as users write it, see `simcluster.routers.names`.
        settings: what it is built from.

    Raises:
        ConfigError: the policy or a parameter is unknown or not allowed.
        PolicyError: a user's policy cannot be built.
    """
    return _build(parse(policy), settings)


def _build(name: PolicyName, settings: RouterSettings) -> Router:
    factory, is_user, given = _resolve(name)
    if is_user:
        return UserPolicy(factory, name.text, settings, given)
    try:
        inner = () if name.inner is None else (_build(name.inner, settings),)
        router: Router = factory(*inner, settings, **given)
    except ValueError as error:
        raise ConfigError(f"policy {name.text!r}: {error}") from None
    return router


def _resolve(name: PolicyName) -> tuple[Callable[..., Any], bool, dict[str, Any]]:
    """Find a policy's class, whether it is a user's, and its parameters."""
    if name.base in WRAPPERS:
        if name.inner is None:
            raise ConfigError(f"policy {name.text!r}: name the inner policy, as in {name.base}(shortest_queue)")
        return WRAPPERS[name.base], False, arguments(WRAPPERS[name.base], name)
    if name.inner is not None:
        hint = suggestion(name.base, WRAPPERS)
        raise ConfigError(f"policy {name.text!r}: {name.base or 'nothing'} does not wrap a policy; {hint}")
    factory: Callable[..., Any] | None = POLICIES.get(name.base)
    is_user = factory is None
    if factory is None:
        factory = load_class(name.base)
    if factory is None:
        known = [*POLICIES, *WRAPPERS, *entry_point_names()]
        raise ConfigError(f"policy {name.base!r} is unknown; {suggestion(name.base, known)}")
    return factory, is_user, arguments(factory, name)


def check_policy(policy: str) -> None:
    """Make sure that a policy exists and that its parameters are allowed; a user's is loaded but not built.

    Raises:
        ConfigError: it does not, or they are not.
    """
    name: PolicyName | None = parse(policy)
    while name is not None:
        factory, is_user, given = _resolve(name)
        if not is_user:
            inner = () if name.inner is None else (RoundRobin(_PROBE),)
            try:
                factory(*inner, _PROBE, **given)
            except ValueError as error:
                raise ConfigError(f"policy {policy!r}: {error}") from None
        name = name.inner


_PROBE = RouterSettings(
    num_instances=1,
    objective="slo",
    latency_weight=0.0,
    ties=TieBreaker("index", seeded(0)),
    rng=seeded(0),
)
