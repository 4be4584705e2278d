"""What a policy is built from."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from simcluster.instance import InstanceSpec
from simcluster.routers.objective import TieBreaker

__all__ = ["RouterSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of one router.

    Attributes:
        num_instances: size of the cluster.
        objective: `slo` (paper eq. 3) or `weighted` (eq. 5).
        latency_weight: delta of eq. 5 [1/s].
        ties: the router's tie rule.
        rng: the router's own random stream.
        instances: (j,) what is fixed about each instance.
        num_replicas: independent routers, this one included.
        replica: this router's number, from 0.
        all_candidates: estimate every candidate for the records, also those that can neither win nor come second.
    """

    num_instances: int
    objective: Literal["slo", "weighted"]
    latency_weight: float
    ties: TieBreaker
    rng: np.random.Generator
    instances: tuple[InstanceSpec, ...] = ()
    num_replicas: int = 1
    replica: int = 0
    all_candidates: bool = True
