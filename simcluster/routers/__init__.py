"""Routing policies: pure, synchronous, without I/O. The same objects decide in simulation and live."""

import difflib
from collections.abc import Callable

from simcluster.errors import ConfigError
from simcluster.routers.base import Router
from simcluster.routers.baselines import (
    AlwaysBusiest,
    LatencyAgnostic,
    Random,
    RoundRobin,
    ShortestQueue,
)
from simcluster.routers.settings import RouterSettings
from simcluster.routers.sfs import Oracle, Sfs

__all__ = ["POLICIES", "build_router", "check_policy"]

POLICIES: dict[str, Callable[[RouterSettings], Router]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "shortest_queue": ShortestQueue,
    "latency_agnostic": LatencyAgnostic,
    "sfs": Sfs,
    "oracle": Oracle,
    "always_busiest": AlwaysBusiest,
}


def check_policy(name: str) -> None:
    """Make sure that a policy exists.

    Raises:
        ConfigError: it does not.
    """
    if name in POLICIES:
        return
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(POLICIES)}"
    raise ConfigError(f"policy {name!r} is unknown; {hint}")


def build_router(name: str, settings: RouterSettings) -> Router:
    """Build one router.

    Raises:
        ConfigError: the policy is unknown.
    """
    check_policy(name)
    return POLICIES[name](settings)
