"""Everything that is fixed before a run: the instances, the requests and the truth about both."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simcluster.card import Coverage
from simcluster.instance import InstanceSpec, TrueModel
from simcluster.request import IntArray, RequestColumns, RequestTruth

__all__ = ["World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What all policies of a run share; n requests, j instances.

    Attributes:
        instances: (j,) what routers may know.
        true_models: (j,) how fast the instances really are.
        num_gpus: (j,) GPUs of each instance.
        coverages: (j,) the batches that the step times of each were fitted to; empty: unknown.
        request_id: (n,) ids, Python strings.
        task: (n,) task names, or None.
        known: the requests as routers see them.
        truth: what only the engines know.
        after: (n,) the earlier request that must end before this one is sent, -1 for none; None without any.
        think_ps: (n,) from that end to the sending [ps]; None without any.
        cost_weight: lambda [1/micro-dollar].
        assumptions: what results rest on, for people.
        warnings: what looks wrong, for people.
        notes: what the trace reader did to the file, for people.
        inputs: names and hashes of the files that went in.
    """

    instances: tuple[InstanceSpec, ...]
    true_models: tuple[TrueModel, ...]
    num_gpus: tuple[int, ...]
    coverages: tuple[Coverage, ...] = ()
    request_id: npt.NDArray[np.object_]
    task: npt.NDArray[np.object_] | None
    known: RequestColumns
    truth: RequestTruth
    after: IntArray | None = None
    think_ps: IntArray | None = None
    cost_weight: float
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    inputs: dict[str, Any]
