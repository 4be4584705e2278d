"""Figures about whole runs: through the SimPy loop in this process, and as commands of their own."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from simcluster.backends.simulated import SimulatedCluster
from simcluster.bench.measure import Measured, cpu_s
from simcluster.bench.workload import bench_scenario
from simcluster.errors import SimulationError
from simcluster.experiment.build import build_world
from simcluster.scenario import override

__all__ = ["loop_seconds", "python_policy", "run_memory", "run_seconds", "run_sfs_seconds", "simpy_rate"]

_PYTHON_POLICY = "simcluster.bench.policy:FewestResident"
_FULL_RUN = 1_000_000

# Starts a command from a process that is small itself, since the peak that the system tells of a child counts what
# its parent held when it was started; prints what the child used.
_LAUNCHER = """
import json, os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, used = os.wait4(child, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


@dataclass(frozen=True, slots=True)
class _Usage:
    """What a command used: CPU time [s] of user and system, peak resident memory [bytes]."""

    cpu_s: float
    peak_bytes: int


def _usage(command: list[str], folder: Path) -> _Usage:
    launcher = [sys.executable, "-S", "-E", "-c", _LAUNCHER, *command]
    done = subprocess.run(launcher, capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603
    code, cpu, peak = json.loads(done.stdout) if done.returncode == 0 else (done.returncode, 0.0, 0)
    if code != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SimulationError(f"{' '.join(command[1:])}: exit code {code} ({reason})")
    return _Usage(cpu, peak)


@cache
def _whole_run(policy: str, instances: int, count: int) -> _Usage:
    """Run the command on the bench scenario, records written."""
    scenario, _ = bench_scenario(instances, count)
    with tempfile.TemporaryDirectory(prefix="simcluster-bench-") as name:
        folder = Path(name)
        (folder / "bench.yaml").write_text(scenario.model_dump_json(), encoding="utf-8")  # JSON is YAML
        options = ["--policy", policy, "--decisions", "winner", "--out", "out", "--json", "--quiet"]
        return _usage([sys.executable, "-m", "simcluster", "run", "bench.yaml", *options], folder)


def _run_size(instances: int, count: int) -> str:
    return f"1 run of {count:,} requests on {instances} instances"


def run_seconds(quick: bool) -> Measured:
    """Return the CPU time of a whole run under round robin [s]."""
    count = 10_000 if quick else _FULL_RUN
    usage = _whole_run("round_robin", 16, count)
    return Measured((usage.cpu_s,), _run_size(16, count), judged=count == _FULL_RUN)


def run_memory(quick: bool) -> Measured:
    """Return the peak memory of the same run [GiB]."""
    count = 10_000 if quick else _FULL_RUN
    usage = _whole_run("round_robin", 16, count)
    return Measured((usage.peak_bytes / 2**30,), _run_size(16, count), judged=count == _FULL_RUN)


def run_sfs_seconds(quick: bool) -> Measured:
    """Return the CPU time of a whole run under SFS [s]."""
    count = 500 if quick else _FULL_RUN
    usage = _whole_run("sfs", 100, count)
    return Measured((usage.cpu_s,), _run_size(100, count), judged=count == _FULL_RUN)


# ---- in this process ---------------------------------------------------------------------------------------------


def loop_seconds(
    policy: str, instances: int, count: int, repetitions: int, *, ends_on_time: bool = False
) -> list[float]:
    """Return the CPU time of the main loop [s], nothing written.

    Args:
        policy: who routes.
        instances: how many.
        count: requests.
        repetitions: runs.
        ends_on_time: the loop also wakes up at every end of a request, since the last request waits for another one.
    """
    scenario, path = bench_scenario(instances, count)
    scenario = override(scenario, policies=[policy], decisions="off")
    world = build_world(scenario, path)
    if ends_on_time:
        after = np.full(count, -1, dtype=np.int64)
        after[-1] = count - 2
        world = replace(world, after=after, think_ps=np.zeros(count, dtype=np.int64))
    return [cpu_s(SimulatedCluster(world, scenario, policy).run) for _ in range(repetitions)]


def _rate(policy: str, count: int, repetitions: int, *, ends_on_time: bool = False) -> Measured:
    seconds = loop_seconds(policy, 16, count, repetitions, ends_on_time=ends_on_time)
    return Measured(tuple(count / each for each in seconds), f"16 instances, {repetitions} x {count:,} requests")


def simpy_rate(quick: bool) -> Measured:
    """Return requests per CPU-second through the SimPy loop, which wakes up at every arrival and every end."""
    return _rate("round_robin", *((5000, 3) if quick else (200_000, 5)), ends_on_time=True)


def python_policy(quick: bool) -> Measured:
    """Return requests per CPU-second under a policy written in Python."""
    return _rate(_PYTHON_POLICY, *((1000, 3) if quick else (50_000, 5)))
