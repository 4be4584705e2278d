"""What figures were measured on: the class of machine, never its name."""

import datetime as dt
import os
import platform
from pathlib import Path

from simcluster import _native

__all__ = ["machine_class", "today"]


def _cpu() -> str:
    """Return the CPU's name with family and model, since the name alone may not tell one generation from another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name") or platform.machine()
    return f"{name} (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else name


def machine_class() -> dict[str, str | int]:
    """Return CPU model, cores, compiler of the native module and Python version."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "compiler": _native.compiler(),
        "python": platform.python_version(),
    }


def today() -> str:
    """Return the date as YYYY-MM-DD."""
    return dt.datetime.now(dt.UTC).date().isoformat()
