"""Instruction counts by callgrind, which neither load nor clock speed can change."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import simcluster
from simcluster import _native
from simcluster.bench.measure import Measured
from simcluster.bench.workload import engine_parts, requests
from simcluster.errors import ConfigError, SimulationError

__all__ = ["GUARDED", "core_instructions", "estimate_instructions", "find_valgrind", "per_request", "step_instructions"]

_Kind = Literal["core", "steps", "estimates"]
_WARM, _WARM_MANY = 1000, 100  # requests per instance, if it is one or several

# Starts the small program without site packages, which cost more instructions than what is measured. An editable
# install keeps the native module apart from the sources.
_PROGRAM = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname({package!r}))
import simcluster
simcluster.__path__.append(os.path.dirname({native!r}))
runpy.run_module("simcluster.bench.counted", run_name="__main__")
"""


def find_valgrind() -> str:
    """Return the path of valgrind.

    Raises:
        ConfigError: it is not installed.
    """
    found = shutil.which("valgrind")
    if found is None:
        raise ConfigError("--instructions: valgrind was not found; it counts the instructions; install it")
    return found


def _task(kind: _Kind, size: int, **options: Any) -> dict[str, Any]:
    config, model = engine_parts(**options)
    if kind == "steps":
        config.num_gpu_blocks = 4_000_000
    plain = {}
    for part, name in ((config, "config"), (model, "step_time")):
        values = {key: getattr(part, key) for key in dir(part) if not key.startswith("_")}
        plain[name] = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {"kind": kind, "size": size, **plain}


def _collected(task: dict[str, Any], folder: str) -> int:
    """Return the instructions of the small program that does this task."""
    command = [find_valgrind(), "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-S", "-c"]
    environment = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C"}
    done = subprocess.run(  # noqa: S603
        [*command, _PROGRAM.format(package=str(Path(simcluster.__file__).parent), native=_native.__file__)],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    found = re.search(r"Collected *: *(\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("==")]
        reason = (said or ["no message"])[-1]
        raise SimulationError(f"callgrind: exit code {done.returncode} ({reason})")
    return int(found[1])


def _per_unit(task: dict[str, Any], few: int, many: int) -> float:
    with tempfile.TemporaryDirectory(prefix="simcluster-bench-") as folder:
        if task["kind"] == "core":
            task["warm"] = (_WARM if task["size"] == 1 else _WARM_MANY) * task["size"]
            asked = requests(task["warm"] + many, task["size"])
            path = Path(folder) / "requests"
            path.write_bytes(asked.prompt_tokens.tobytes() + asked.output_tokens.tobytes() + asked.at_ps.tobytes())
            task["requests"] = str(path)
        counts = [_collected(task | {"count": count}, folder) for count in (few, many)]
    return (counts[1] - counts[0]) / (many - few)


def core_instructions(instances: int, few: int, many: int) -> float:
    """Return instructions per request of a run in steady state, round robin.

    Args:
        instances: how many.
        few: requests of the shorter run, beyond the warm-up.
        many: requests of the longer run.

    Raises:
        ConfigError: valgrind is not installed.
        SimulationError: the run under callgrind failed.
    """
    return _per_unit(_task("core", instances), few, many)


def step_instructions(batch: int) -> float:
    """Return instructions per decode step, none jumped over.

    Raises:
        ConfigError: valgrind is not installed.
        SimulationError: the run under callgrind failed.
    """
    return _per_unit(_task("steps", batch), 2000, 22_000)


def estimate_instructions(waiting: int) -> float:
    """Return instructions per SFS estimate from a snapshot, 128 requests running.

    Raises:
        ConfigError: valgrind is not installed.
        SimulationError: the run under callgrind failed.
    """
    return _per_unit(_task("estimates", waiting, max_num_batched_tokens=2048), 10, 110)


def per_request(quick: bool) -> Measured:
    """Count instructions per request on one instance."""
    few, many = (500, 2500) if quick else (10_000, 110_000)
    value = core_instructions(1, few, many)
    return Measured((value,), f"1 instance, {many:,} requests less {few:,}, after {_WARM:,}")


GUARDED = {
    "core": lambda: core_instructions(1, 2000, 22_000),
    "step": lambda: step_instructions(256),
    "estimate": lambda: estimate_instructions(50),
}
"""What a change must not make more than a tenth dearer: per request, per decode step, per SFS estimate."""
