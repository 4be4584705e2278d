"""The instruction counts that CI holds: measure them, and write them anew after a change that is meant to move them.

python tests/perf/instruction_counts.py

rewrites instruction_counts.json beside this file.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from simcluster import _native
from simcluster.bench.instructions import GUARDED, find_valgrind
from simcluster.bench.machine import today

FILE = Path(__file__).with_suffix(".json")
TOLERANCE = 0.10


def toolchain() -> dict[str, str]:
    """Return what the counts depend on besides the code."""
    version = subprocess.run([find_valgrind(), "--version"], capture_output=True, text=True, check=True)
    return {"compiler": _native.compiler(), "valgrind": version.stdout.strip()}


def committed() -> dict[str, Any]:
    """Return the reference counts and the toolchain that they were measured with."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


if __name__ == "__main__":
    counts = {name: round(count(), 1) for name, count in GUARDED.items()}
    content = {"date": today(), "toolchain": toolchain(), "tolerance": TOLERANCE, "counts": counts}
    FILE.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
