"""Figures about the live router's decisions, each measured in a process of its own, as a router is one.

`python -m simcluster.bench.alone NAME SIZE` prints one, with SIZE `full` or `quick`.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from simcluster.bench.live_figures import live_decision
from simcluster.bench.measure import Measured
from simcluster.bench.snapshot_figures import decision_from_shared_memory
from simcluster.errors import SimulationError

__all__ = ["published_decision", "routers_decision"]

_FIGURES: dict[str, Callable[[bool], Measured]] = {
    "decide-live": live_decision,
    "decide-published": decision_from_shared_memory,
}


def published_decision(quick: bool) -> Measured:
    """Time a decision by eq. 3 over instances whose newest snapshots are copied first [us].

    Raises:
        SimulationError: the process that is measured failed.
    """
    return _alone("decide-published", quick)


def routers_decision(quick: bool) -> Measured:
    """Time the same by the live router, policy sfs [us].

    Raises:
        SimulationError: the process that is measured failed.
    """
    return _alone("decide-live", quick)


def _alone(name: str, quick: bool) -> Measured:
    command = [sys.executable, "-P", "-m", "simcluster.bench.alone", name, "quick" if quick else "full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SimulationError(f"bench {name}: exit code {done.returncode} ({reason})")
    found = json.loads(done.stdout)
    return Measured(tuple(found["values"]), found["size"], found["judged"])


def _main() -> None:
    _, name, size = sys.argv
    gc.collect()
    gc.freeze()  # as the router does when it starts
    measured = _FIGURES[name](size == "quick")
    gc.unfreeze()
    json.dump(asdict(measured), sys.stdout)


if __name__ == "__main__":
    _main()
