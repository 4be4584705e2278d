"""What live requests hold, measured in a process of its own: `python -m simcluster.bench.live COUNT`.

So many requests reach sixteen instances at once, under round robin, so that at the last arrival all of them are live.
Printed are the bytes per request by which the process has grown since the trace was in memory: the engines, the
cluster's rows, and what Python keeps beside them.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from simcluster.backends.simulated import SimulatedCluster
from simcluster.bench.measure import Measured
from simcluster.bench.workload import bench_scenario
from simcluster.errors import ConfigError, SimulationError
from simcluster.experiment.build import build_world
from simcluster.scenario import override

__all__ = ["live_bytes"]

_INSTANCES = 16
_COUNTS = (96_000, 144_000, 192_000)  # multiples of the arrivals between two calls of on_progress
_STATM = Path("/proc/self/statm")


def _resident_bytes() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _run(count: int) -> int:
    """Return by how much this process has grown when the last of so many requests has arrived [bytes]."""
    scenario, path = bench_scenario(_INSTANCES, count)
    scenario = override(scenario, policies=["round_robin"], decisions="off")
    scenario = scenario.model_copy(update={"measure": scenario.measure.model_copy(update={"drain": False})})
    world = build_world(scenario, path)
    known = replace(world.known, arrival_ps=np.arange(len(world.known), dtype=np.int64))
    world = replace(world, known=known)
    seen: list[tuple[int, int]] = []

    def note(sent: int) -> None:
        if sent == count:
            seen.append((cluster.num_open, _resident_bytes() - before))

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # else what was used for building the trace would be used again without growing
        trim(0)
    before = _resident_bytes()
    cluster = SimulatedCluster(world, scenario, "round_robin", on_progress=note)
    cluster.run()
    num_live, grown = seen[0]
    if num_live != count:
        raise SimulationError(f"bench live-bytes: {num_live} of {count} requests were live")
    return grown


def live_bytes(quick: bool) -> Measured:
    """Return the memory that a live request takes beside its row in the trace [bytes].

    Raises:
        ConfigError: the system does not tell a process's memory.
        SimulationError: the process that is measured failed.
    """
    if not _STATM.exists():
        raise ConfigError(f"bench live-bytes: reads {_STATM}, which this system does not have; measure it on Linux")
    counts = (19_200,) if quick else _COUNTS
    values = []
    for count in counts:
        command = [sys.executable, "-m", "simcluster.bench.live", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SimulationError(f"bench live-bytes: exit code {done.returncode} ({reason})")
        values.append(json.loads(done.stdout))
    size = f"{_INSTANCES} instances, {' / '.join(f'{count:,}' for count in counts)} live at once"
    return Measured(tuple(values), size, judged=not quick)


if __name__ == "__main__":
    _run(640)  # what is loaded when it is first used
    requested = int(sys.argv[1])
    json.dump(_run(requested) / requested, sys.stdout)
