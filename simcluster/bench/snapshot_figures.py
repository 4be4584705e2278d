"""The figure about a router beside real engines: their snapshots lie in shared memory, and every decision reads them.

The worst case: since the last decision every instance has made a step, so that every snapshot is copied.
"""

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from simcluster import _native
from simcluster.bench.measure import Measured, cpu_s
from simcluster.bench.workload import engine_parts
from simcluster.request import FloatArray, IntArray
from simcluster.units import PS_PER_NS

__all__ = ["PublishedCluster", "decision_from_shared_memory", "published_cluster"]

_CAPACITY = 256
_STEP_NS = 20_000_000  # at least one step of every instance lies in it
_FRESH_NS = 10**12  # nothing here is late
_APART_PS = 137_000_000  # instances start one after the other, so that no two are in the same state
_LONGEST_OUTPUT = 7000
_TARGET_S = 0.5
_UTILITIES = (0.5, 0.7, 0.9)


@dataclass(slots=True)
class PublishedCluster:
    """Engines that publish, and a router's views of what they publish.

    Attributes:
        engines: (j,) engines, whose requests all decode.
        writers: (j,) where they publish.
        readers: (j,) what the router reads.
        views: (j,) its views.
        fleet: the views, ready for decisions.
        epoch_ns: CLOCK_MONOTONIC at the engines' 0.
        now_ns: how far the engines are, since then [ns].
        utility: (j,) of the instances' models.
        lengths: four (j,): prompt tokens, output tokens, arrival [ps] and hop [ps].
    """

    engines: list[_native.Engine]
    writers: list[_native.SnapshotWriter]
    readers: _native.SnapshotReaders
    views: list[_native.InstanceView]
    fleet: _native.Fleet
    epoch_ns: int
    now_ns: int
    utility: FloatArray
    lengths: list[IntArray]

    def clock_ns(self) -> int:
        """Return what CLOCK_MONOTONIC would show if the engines ran in real time [ns]."""
        return self.epoch_ns + self.now_ns

    def step(self) -> None:
        """Let every engine run for some steps and publish."""
        self.now_ns += _STEP_NS
        for engine, writer in zip(self.engines, self.writers, strict=True):
            engine.advance_to(self.now_ns * PS_PER_NS)
            writer.publish(engine, self.epoch_ns, now_ns=self.epoch_ns + self.now_ns)

    def copy(self) -> None:
        """Show the views what is published."""
        self.readers.refresh(self.clock_ns(), _FRESH_NS)

    def decide(self) -> int:
        """Decide by eq. 3 about a prompt of 512 tokens that comes now; the instance chosen."""
        prompt, output, at, hop = self.lengths
        at[:] = now = self.now_ns * PS_PER_NS
        _, _, best, _, _ = self.fleet.decide(
            1 << 60, self.utility, prompt, output, at, hop, arrival_time=now, target_s=_TARGET_S
        )
        return int(best[0])


def _decoding(config: _native.SchedulerConfig, model: _native.StepTimeModel, residents: int, at: int) -> _native.Engine:
    engine = _native.Engine(config, model)
    for k in range(residents):
        engine.submit(k, 64 + (997 * k + at // PS_PER_NS) % 900, _LONGEST_OUTPUT, at)
    while engine.num_running < residents or engine.num_steps < 40:
        engine.advance_to(engine.now + _STEP_NS * PS_PER_NS)
    return engine


@contextmanager
def published_cluster(instances: int, residents: int) -> Iterator[PublishedCluster]:
    """Yield so many instances of three models, each with so many requests that decode, which publish.

    Args:
        instances: how many.
        residents: of each.
    """
    config, model = engine_parts()
    engines = [_decoding(config, model, residents, j * _APART_PS) for j in range(instances)]
    names = [f"bench.{os.getpid()}.{j}" for j in range(instances)]
    views = [_native.InstanceView(config, model, 256, True) for _ in names]
    epoch_ns = _native.monotonic_ns()
    writers = [_native.SnapshotWriter(name, _CAPACITY, config) for name in names]
    try:
        utility = np.array([_UTILITIES[j % len(_UTILITIES)] for j in range(instances)])
        lengths = [np.full(instances, value, dtype=np.int64) for value in (512, 256, 0, 0)]
        readers = _native.SnapshotReaders([_native.SnapshotReader(name, epoch_ns) for name in names], views)
        readers.ask(epoch_ns)
        yield PublishedCluster(
            engines,
            writers,
            readers,
            views,
            _native.Fleet(views, [j % len(_UTILITIES) for j in range(instances)]),
            epoch_ns,
            max(engine.now for engine in engines) // PS_PER_NS,
            utility,
            lengths,
        )
    finally:
        for writer in writers:
            writer.close()


def decision_from_shared_memory(quick: bool) -> Measured:
    """Time a decision by eq. 3 over instances whose newest snapshots are copied first [us]."""
    instances, residents, repeats = (5, 4, 5) if quick else (100, 32, 40)
    values, copies = [], []
    with published_cluster(instances, residents) as cluster:
        for _ in range(9):
            copying = deciding = 0.0
            for _ in range(repeats):
                cluster.step()
                copying += cpu_s(cluster.copy)
                deciding += cpu_s(cluster.decide)
            copies.append(copying / repeats * 1e6)
            values.append((copying + deciding) / repeats * 1e6)
    what = f"{instances} instances, {residents} residents each, 9 x {repeats} decisions"
    return Measured(tuple(values), f"{what}; of it {statistics.median(copies):.1f} us to copy", judged=instances == 100)
