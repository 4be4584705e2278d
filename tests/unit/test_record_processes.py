"""No process outlives a recording, whatever ends it. A stand-in for vLLM starts processes and does nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from record_processes import STOP_S, group_of, nobody_is_left, recording, wait_until
from simcluster.calibrate.record import processes_of_group

STAND_IN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM starts an engine core
{then}
"""


def stand_in(folder: Path, then: str) -> dict[str, str]:
    """Write a package named vllm and return the environment in which it is found."""
    package = folder / "stand_in" / "vllm"
    for part in (package, package / "usage"):
        part.mkdir(parents=True)
        (part / "__init__.py").touch()
    (package / "usage" / "usage_lib.py").write_text(STAND_IN.format(then=then), encoding="utf-8")
    return os.environ | {"PYTHONPATH": str(package.parent)}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A recording whose engine has started a process of its own and is still coming up."""
    environment = stand_in(tmp_path, "time.sleep(600)")
    with recording(tmp_path / "out", "--model", "m", environment=environment) as command:
        wait_until(lambda: group_of(command), STOP_S, "the engine's process is there")
        group = group_of(command)
        wait_until(lambda: len(processes_of_group(group)) == 2, STOP_S, "it has started another")
        yield command, group


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_engine_and_all_that_it_started(
    running: tuple["subprocess.Popen[str]", int], number: signal.Signals
) -> None:
    command, group = running
    command.send_signal(number)
    _, printed = command.communicate(timeout=STOP_S)
    assert nobody_is_left(group)
    assert command.returncode == 130
    assert "Traceback" not in printed


def test_killing_the_command_ends_the_engine_and_all_that_it_started(
    running: tuple["subprocess.Popen[str]", int],
) -> None:
    command, group = running
    command.kill()
    wait_until(lambda: nobody_is_left(group), STOP_S, "the group is gone")


def test_killing_the_engine_ends_what_it_started_and_the_command_says_so(
    running: tuple["subprocess.Popen[str]", int],
) -> None:
    command, group = running
    os.kill(group, signal.SIGKILL)
    _, printed = command.communicate(timeout=STOP_S)
    assert nobody_is_left(group)
    assert command.returncode == 2
    assert "the engine's process ended (killed by SIGKILL)" in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1


def test_what_vllm_raises_on_start_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    environment = stand_in(tmp_path, "raise ValueError('no such device\\nand more')")
    with recording(tmp_path / "out", "--model", "m", environment=environment) as command:
        wait_until(lambda: group_of(command), STOP_S, "the engine's process is there")
        group = group_of(command)
        _, printed = command.communicate(timeout=STOP_S)
    assert nobody_is_left(group)
    assert command.returncode == 2
    log = tmp_path / "out" / "engine.log"
    assert printed == f"error: ValueError: no such device and more; vLLM's log is {log}\n"
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_the_recorder_runs_without_the_native_module_and_without_pyarrow() -> None:
    """A machine with a GPU may have vLLM, numpy and little else."""
    modules = ["recorder", "recorder_run", "recorder_drive", "plan", "raw", "dummy_model"]
    program = (
        "import sys\n"
        "for name in ('simcluster._native', 'pyarrow', 'polars', 'pydantic', 'typer', 'rich', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        f"import {', '.join(f'simcluster.calibrate.{module}' for module in modules)}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
