"""The CPU time of an estimate, measured inside a run."""

import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.paper.figure import FloatArray
from simcluster.request import Request
from simcluster.routers.base import ClusterView, Decision, estimate_ttft
from simcluster.routers.sfs import Sfs
from simcluster.scenario import Scenario

__all__ = ["TimedSfs", "estimate_times_us"]


class TimedSfs(Sfs):
    """SFS that measures the CPU time of its own thread in each estimate."""

    times_ns: ClassVar[list[int]] = []

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Time one estimate of all instances, then decide as SFS does."""
        before = time.thread_time_ns()
        estimate_ttft(request, view)
        self.times_ns.append(time.thread_time_ns() - before)
        return super().route(request, view)


def estimate_times_us(scenario: Scenario, path: Path) -> FloatArray:
    """Run a scenario under SFS in this process and return the CPU time of each estimate [us], (n,)."""
    TimedSfs.times_ns.clear()
    run_policy(scenario, build_world(scenario, path), f"{TimedSfs.__module__}:{TimedSfs.__name__}")
    return np.array(TimedSfs.times_ns, dtype=np.float64) / 1e3
