"""Starting `simcluster calibrate record` as a process, and looking for what it leaves behind."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from simcluster.calibrate.record import processes_of_group

STOP_S = 60.0


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def group_of(command: "subprocess.Popen[str]") -> int:
    """Return the process group of the engine that a command has started; 0 before that."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == command.pid and int(fields[2]) == int(folder.name):
            return int(folder.name)
    return 0


@contextmanager
def recording(out: Path, *words: str, environment: dict[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Run the command; whatever a test does, it is gone afterwards."""
    command = [sys.executable, "-m", "simcluster", "calibrate", "record", "--out", str(out), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=out.parent
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def steps_written(out: Path) -> int:
    return sum(path.stat().st_size for path in (out / "raw").glob("steps_*.bin"))


def nobody_is_left(group: int) -> bool:
    return not processes_of_group(group)
