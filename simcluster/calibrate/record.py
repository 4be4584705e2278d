"""Starting the process that is recorded, following it, and leaving none of its processes behind."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from simcluster.backends.vllm_setup import NOT_INSTALLED
from simcluster.calibrate.plan import PHASES
from simcluster.calibrate.recorder import FOLDER_VARIABLE
from simcluster.errors import CalibrationError, ConfigError

__all__ = ["EngineProcess", "Job", "PlanSettings", "attach_lines", "prepare", "processes_of_group", "raise_on_signals"]

_RESERVED = ("--scheduler-cls", "--worker-cls", "--async-scheduling", "--no-async-scheduling", "--model")
_STOP_S = 20.0  # until a plan that was asked to stop is killed
_KILL_S = 10.0  # until killed processes must be gone
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What decides the plan, beside the engine's limits; see `build_plan`."""

    seed: int
    minutes: float
    phases: tuple[str, ...] = PHASES
    loads: tuple[float, ...] = (0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Job:
    """A recording to be made.

    Attributes:
        folder: of the recording.
        model: folder or hub name.
        engine_options: as on vLLM's command line.
        loop: engine loop.
        plan: what is run.
        name: name of the model in the recording; "": as vLLM has it.
    """

    folder: Path
    model: str
    engine_options: tuple[str, ...]
    loop: Literal["sync", "async"]
    plan: PlanSettings
    name: str = ""


def prepare(job: Job) -> Path:
    """Check a job and write it into its new folder.

    Raises:
        ConfigError: vLLM is not installed, the folder holds something, or an option belongs to the recorder.
    """
    for word in job.engine_options:
        name = word.partition("=")[0].replace("_", "-")
        if name in _RESERVED:
            raise ConfigError(f"engine option {word}: the recorder sets it itself; take --loop sync or --loop async")
    if job.folder.exists() and (not job.folder.is_dir() or any(job.folder.iterdir())):
        raise ConfigError(f"{job.folder}: exists and is not empty; a recording needs a new folder")
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ConfigError(NOT_INSTALLED)
    (job.folder / "raw").mkdir(parents=True)
    file = job.folder / "job.json"
    content = asdict(job) | {"folder": str(job.folder.resolve())}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return file


def attach_lines(folder: Path, model: str, loop: str) -> list[str]:
    """Return the commands that record a server: set the folder, serve, collect."""
    kind = "RecordingAsyncScheduler" if loop == "async" else "RecordingScheduler"
    flag = "--async-scheduling" if loop == "async" else "--no-async-scheduling"
    here = folder.resolve()
    return [
        f"export {FOLDER_VARIABLE}={here / 'raw'}",
        f"vllm serve {model} {flag} --scheduler-cls simcluster.calibrate.recorder.{kind} "
        "--worker-cls simcluster.calibrate.recorder.RecordingWorker",
        f"simcluster calibrate record --collect {here}",
    ]


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that the engine is cleaned up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def processes_of_group(group: int) -> list[int]:
    """Return the live processes of a process group (Linux)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found


class EngineProcess:
    """vLLM with the plan, in a process group of its own; use it in a `with` statement.

    The group is killed when the statement is left, whatever the reason. If this process is killed, the other end of
    a pipe closes and the group kills itself.

    Args:
        job: file of a prepared job.
    """

    def __init__(self, job: Path) -> None:
        self._log_file = job.parent / "engine.log"
        status_read, status_write = os.pipe()
        life_read, life_write = os.pipe()
        command = [sys.executable, "-m", "simcluster.calibrate.recorder_run", str(job.resolve())]
        command += ["--status", str(status_write), "--lifeline", str(life_read)]
        try:
            with self._log_file.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603  (this very interpreter)
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(status_write, life_read),
                )
        finally:
            os.close(status_write)
            os.close(life_read)
        self._status, self._life = status_read, life_write
        self._rest = b""
        self._up = self._last = False

    @property
    def group(self) -> int:
        """The process group."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what the process tells, until it ends.

        Raises:
            CalibrationError: it told an error, or ended without a word.
        """
        ended = False
        while not self._last:
            if select.select([self._status], [], [], _POLL_S)[0]:
                data = os.read(self._status, 1 << 16)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["event"] == "error":
                        raise CalibrationError(self._explain(event["message"]))
                    self._up = self._up or event["event"] == "plan"
                    self._last = event["event"] in {"complete", "stopped"}
                    yield event
                if data:
                    continue
            if ended:
                status = _status(self._process.returncode)
                raise CalibrationError(self._explain(f"the engine's process ended ({status})"))
            ended = self._process.poll() is not None  # once more, for what it said last

    def stop(self) -> None:
        """Ask a plan that runs to stop, and wait until it has, but not for long."""
        if not self._up:
            return
        with suppress(BrokenPipeError):
            os.write(self._life, b"s")
        end = time.monotonic() + _STOP_S
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S / 4)

    def close(self) -> None:
        """Kill the whole group and wait until it is gone."""
        if self._life >= 0:
            os.close(self._life)
            os.close(self._status)
            self._life = self._status = -1
        end = time.monotonic() + _KILL_S
        while True:
            with suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
            self._process.poll()
            if not processes_of_group(self.group):
                break
            if time.monotonic() > end:
                raise CalibrationError(f"processes {processes_of_group(self.group)} of the engine cannot be killed")
            time.sleep(0.02)
        self._process.wait()

    def _explain(self, message: str) -> str:
        """Add what vLLM's own processes said to a message that only points to them."""
        cause = ""
        if "root cause" in message or "process ended" in message:
            cause = _last_error(self._log_file)
        return f"{cause or message}; vLLM's log is {self._log_file}"


def _status(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _last_error(log: Path) -> str:
    """Return the first error that ends a traceback in a log, without vLLM's prefix."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        text = line.rpartition("] ")[2].strip() if line.startswith(("(", "ERROR")) else line.strip()
        name = text.partition(":")[0]
        if name.endswith(("Error", "Exception")) and name.replace(".", "").isidentifier() and ":" in text:
            return text[:400]
    return ""
