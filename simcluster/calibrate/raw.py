"""The raw form of a recording: what the recorder writes while the engine runs, cheap to append and safe to cut off.

    engine_PID.json     what vLLM resolved
    steps_PID.bin       int64: per step `HEADER`, the numbers of preempted requests, then four per entry of the batch:
                        request number, tokens, context before, kind (sum of `DECODE` and `PRODUCES`)
    requests_PID.jsonl  ["add", number, request id, t_add_ns, prompt_tokens, max_tokens]
                        ["end", number, output_tokens, reason, t_ns]
    worker_PID_RANK.bin int64: per batch `WORKER`

A file may end in the middle of a record; the rest of it is then left out. Times are CLOCK_MONOTONIC [ns]. Nothing but
the standard library and numpy is needed.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcluster.errors import CalibrationError

__all__ = ["DECODE", "HEADER", "PRODUCES", "WORKER", "RawEngine", "RawFiles", "RawStep", "read_engine"]

HEADER = (
    "t_sched0",
    "t_sched1",
    "t_upd0",
    "t_upd1",
    "recording_ns",  # spent on the recording, within t_sched0 to t_sched1
    "n_running",
    "n_waiting",
    "free_blocks",
    "preempted",  # how many numbers follow
    "entries",  # how many entries follow
)
WORKER = ("tokens", "execute_begin", "execute_end", "sample_begin", "sample_end", "cpu_begin", "cpu_end")
DECODE, PRODUCES = 1, 2  # one token past the prompt; the step makes an output token


class RawFiles:
    """The files of one engine.

    Args:
        folder: where they go; made if missing.
        pid: the engine's process.
        resolved: what vLLM made of its options.
    """

    def __init__(self, folder: Path, pid: int, resolved: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"engine_{pid}.json").write_text(json.dumps(resolved, indent=1), encoding="utf-8")
        self._steps = folder / f"steps_{pid}.bin"
        self._requests = folder / f"requests_{pid}.jsonl"

    @staticmethod
    def worker_file(folder: Path, pid: int, rank: int) -> Path:
        """Return the file of a worker."""
        return folder / f"worker_{pid}_{rank}.bin"

    def write(self, requests: list[list[Any]], steps: "array[int]") -> None:
        """Append rows of requests and whole records of steps."""
        if requests:
            with self._requests.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in requests))
        if steps:
            with self._steps.open("ab") as binary:
                binary.write(steps.tobytes())


@dataclass(frozen=True, slots=True)
class RawStep:
    """One step.

    Attributes:
        header: the values of `HEADER`.
        preempted: numbers of the requests that the step preempted.
        entries: (request number, tokens, context before, kind), in batch order.
    """

    header: tuple[int, ...]
    preempted: list[int]
    entries: list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class RawEngine:
    """What one engine left behind.

    Attributes:
        resolved: what vLLM made of its options.
        steps: in the order in which their results came.
        requests: rows "add" by request number.
        ends: rows "end" by request number; a request without one had not ended.
        worker: rows of `WORKER` (n, 7), of the first rank; empty if there was no recording worker.
    """

    resolved: dict[str, Any]
    steps: list[RawStep]
    requests: dict[int, list[Any]]
    ends: dict[int, list[Any]]
    worker: NDArray[np.int64]


def read_engine(folder: Path) -> RawEngine:
    """Read the one engine that a folder holds.

    Raises:
        CalibrationError: no engine was recorded there, or several.
    """
    found = sorted(folder.glob("engine_*.json"))
    if not found:
        raise CalibrationError(
            f"{folder}: no engine_*.json; the engine never came up here, or {folder} is not the folder that "
            "SIMCLUSTER_RECORD_DIR named"
        )
    if len(found) > 1:
        raise CalibrationError(
            f"{folder}: {len(found)} engines recorded here ({', '.join(path.stem for path in found)}); a recording is "
            "of one engine; give each instance and each start a folder of its own"
        )
    pid = found[0].stem.removeprefix("engine_")
    rows = list(_json_lines(folder / f"requests_{pid}.jsonl"))
    requests = {row[1]: row for row in rows if row[0] == "add"}
    return RawEngine(
        resolved=json.loads(found[0].read_text(encoding="utf-8")),
        steps=list(_steps(_integers(folder / f"steps_{pid}.bin"))),
        requests=requests,
        ends={row[1]: row for row in rows if row[0] == "end"},
        worker=_worker(folder),
    )


def _json_lines(file: Path) -> Iterator[list[Any]]:
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
        if line.endswith(b"\n"):
            yield json.loads(line)


def _integers(file: Path) -> NDArray[np.int64]:
    data = file.read_bytes() if file.exists() else b""
    return np.frombuffer(data[: len(data) // 8 * 8], dtype=np.int64)


def _steps(values: NDArray[np.int64]) -> Iterator[RawStep]:
    place, width = 0, len(HEADER)
    while place + width <= len(values):
        header = tuple(values[place : place + width].tolist())
        preempted, entries = header[-2:]
        begin = place + width
        middle = begin + preempted
        place = middle + 4 * entries
        if place > len(values):
            return
        table = values[middle:place].reshape(-1, 4)
        yield RawStep(header, values[begin:middle].tolist(), [(a, b, c, d) for a, b, c, d in table.tolist()])


def _worker(folder: Path) -> NDArray[np.int64]:
    files = sorted(folder.glob("worker_*_0.bin"))
    values = _integers(files[0]) if len(files) == 1 else np.empty(0, dtype=np.int64)
    width = len(WORKER)
    return values[: len(values) // width * width].reshape(-1, width)
