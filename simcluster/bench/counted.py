"""A small program to run under callgrind: `python -m simcluster.bench.counted` with a task on standard input.

It imports the native module and little else. What counts are differences between two of its runs that differ in
`count` alone, so starting up, reading the task and warming up cancel out.
"""

import json
import sys
from array import array
from typing import Any

from simcluster import _native
from simcluster.bench.states import burst_view, decoding_engine, engines_for

__all__: list[str] = []


def _set_all(target: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        setattr(target, name, value)
    return target


def _columns(path: str) -> tuple[Any, Any, Any]:
    """Read prompt tokens, output tokens and arrivals [ps], one after the other in a file of int64."""
    with open(path, "rb") as file:
        values = array("q", file.read())
    n = len(values) // 3
    return values[:n], values[n : 2 * n], values[2 * n :]


def _run(task: dict[str, Any]) -> None:
    config = _set_all(_native.SchedulerConfig(), task["config"])
    model = _set_all(_native.StepTimeModel(), task["step_time"])
    count, size = task["count"], task["size"]
    if task["kind"] == "core":
        columns = _columns(task["requests"])
        engines = engines_for(config, model, size)
        _native.bench_round_robin(engines, *columns, 0, task["warm"])
        _native.bench_round_robin(engines, *columns, task["warm"], count)
    elif task["kind"] == "steps":
        engine = decoding_engine(config, model, size)
        end = engine.num_steps + count
        while engine.num_steps < end:
            engine.advance_to(engine.now + 10**12)
    else:
        view, snapshot, at = burst_view(config, model, 128, size)
        _native.bench_estimates(view, snapshot, 512, 256, at, count)


if __name__ == "__main__":
    _run(json.load(sys.stdin))
