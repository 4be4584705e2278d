"""From the raw form of a recording to its Parquet files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import simcluster
from simcluster.calibrate.raw import DECODE, HEADER, PRODUCES, RawEngine, RawStep, read_engine
from simcluster.calibrate.recording import PHASES, REQUESTS, STEPS
from simcluster.errors import CalibrationError

__all__ = ["Collected", "collect"]


class Collected(NamedTuple):
    """What a recording holds."""

    folder: Path
    steps: int
    requests: int
    complete: bool
    device: str
    phases: dict[str, int]  # steps of each
    preemptions: int
    recording_us: float  # median cost of recording a step, outside of what counts as execution
    worker_steps: int  # with times from inside of the worker


def collect(folder: Path, raw: Path | None = None) -> Collected:
    """Write recording.json, steps.parquet and requests.parquet from what a recorder left behind.

    Args:
        folder: where they go.
        raw: the raw files; by default those in `folder`/raw, or in the folder itself.

    Raises:
        CalibrationError: there is nothing to collect.
    """
    raw = raw or (folder / "raw" if (folder / "raw").is_dir() else folder)
    engine = read_engine(raw)
    if not engine.steps:
        raise CalibrationError(f"{raw}: the engine ran no step that was written; record again")
    steps, worker_steps = _steps(engine)
    requests = _requests(engine, _clients(raw))
    info = _info(folder, raw, engine)
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (("steps", steps), ("requests", requests)):
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
    # Last, since a folder with this file is a recording.
    (folder / "recording.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    phases = {each["values"]: each["counts"] for each in steps["phase"].value_counts().to_pylist()}
    return Collected(
        folder=folder,
        steps=len(steps),
        requests=len(requests),
        complete=info["complete"],
        device=info["device"],
        phases={name: phases[name] for name in PHASES if name in phases},
        preemptions=sum(len(step.preempted) for step in engine.steps),
        recording_us=info["recording_us"],
        worker_steps=worker_steps,
    )


def _info(folder: Path, raw: Path, engine: RawEngine) -> dict[str, Any]:
    job_file = folder / "job.json"
    job = json.loads(job_file.read_text(encoding="utf-8")) if job_file.exists() else {}
    place = HEADER.index("recording_ns")
    cost_us = float(np.median([step.header[place] for step in engine.steps])) / 1e3
    resolved = engine.resolved
    plan = job.get("plan", {"phases": ["served"], "attached": True})
    return {
        "schema_version": 1,
        "simcluster_version": simcluster.__version__,
        "vllm_version": resolved["vllm_version"],
        "model": job.get("name") or resolved["model"],
        "device": resolved["device"],
        "loop": resolved["loop"],
        "engine": resolved["engine"],
        "plan": plan,
        "seed": plan.get("seed"),
        "started_at": resolved["started_at"],
        # A server that was recorded has no plan to complete.
        "complete": not job or (raw / "complete").exists(),
        "recording_us": cost_us,
    }


def _clients(raw: Path) -> dict[str, list[int | None]]:
    """Return when each request was sent, first and last answered, by the id that the plan gave it."""
    file = raw / "client.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row[0]: row[1:] for row in rows}


def _phase(request_id: str) -> str:
    """Return the phase that a plan wrote into an id; what came from elsewhere was served."""
    name = request_id.partition(":")[0]
    return name if name in PHASES else "served"


def _requests(engine: RawEngine, clients: dict[str, list[int | None]]) -> pa.Table:
    produced: dict[int, int] = {}
    for step in engine.steps:
        for number, _, _, kind in step.entries:
            if kind & PRODUCES:
                produced[number] = produced.get(number, 0) + 1
    rows = []
    for number, (_, _, key, added_ns, prompt, most) in sorted(engine.requests.items()):
        _, _, output, reason, _ = engine.ends.get(number, (None, None, produced.get(number, 0), None, None))
        # vLLM appends a random part to the ids that it is given.
        times = clients.get(key) or clients.get(key.rpartition("-")[0]) or [None] * 3
        rows.append((key, added_ns, prompt, most, output, _phase(key), reason, *times))
    return _table(rows, REQUESTS)


def _table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _steps(engine: RawEngine) -> tuple[pa.Table, int]:
    worker, matched = _worker_times(engine)
    columns: dict[str, Any] = {name: [] for name in STEPS.names}
    previous = 0
    for row, step in enumerate(engine.steps):
        values = dict(zip(HEADER, step.header, strict=True))
        counts = _counts(step)
        begin, handed, back, end = (values[name] for name in ("t_sched0", "t_sched1", "t_upd0", "t_upd1"))
        first = previous == 0
        fields = {
            **{name: values[name] for name in HEADER if name in columns},
            **counts,
            "step": row + 1,
            "t_prev_upd1": previous,
            "n_preempted": len(step.preempted),
            "comp": _composition(engine, step),
            "exec_ms": (back - handed) / 1e6,
            "step_ms": (end - begin) / 1e6,
            "sched_ms": (handed - begin) / 1e6,
            "upd_ms": (end - back) / 1e6,
            "gap_ms": None if first else (begin - previous) / 1e6,
            "period_ms": None if first else (end - previous) / 1e6,
            "phase": _phase(engine.requests[step.entries[0][0]][2]),
            "preempted": [engine.requests[number][2] for number in step.preempted],
        }
        fields |= {name: None if np.isnan(column[row]) else column[row] for name, column in worker.items()}
        for name, value in fields.items():
            columns[name].append(value)
        previous = end
    return pa.table([pa.array(columns[field.name], field.type) for field in STEPS], schema=STEPS), matched


def _composition(engine: RawEngine, step: RawStep) -> list[dict[str, Any]]:
    return [
        {
            "request_id": engine.requests[number][2],
            "num_tokens": tokens,
            "context": context,
            "is_decode": bool(kind & DECODE),
            "produces_token": bool(kind & PRODUCES),
            "prompt_tokens": engine.requests[number][4],
        }
        for number, tokens, context, kind in step.entries
    ]


def _counts(step: RawStep) -> dict[str, float]:
    prefills = [(tokens, context) for _, tokens, context, kind in step.entries if not kind & DECODE]
    decodes = [context for _, _, context, kind in step.entries if kind & DECODE]
    return {
        "n_prefill_reqs": len(prefills),
        "prefill_tokens": sum(tokens for tokens, _ in prefills),
        "decode_reqs": len(decodes),
        "tokens": sum(tokens for tokens, _ in prefills) + len(decodes),
        "decode_ctx": sum(decodes),
        "max_decode_ctx": max(decodes, default=0),
        "prefill_attn": sum(tokens * context + tokens * (tokens + 1) / 2 for tokens, context in prefills),
        "n_samples": sum(bool(kind & PRODUCES) for *_, kind in step.entries),
    }


def _worker_times(engine: RawEngine) -> tuple[dict[str, NDArray[np.float64]], int]:
    """Return the times inside of the worker [ms] by step, NaN where there are none, and for how many there are.

    Batches reach the worker in the order of the steps. The files may be cut off at different places, so each step
    takes the first batch that began after it was scheduled, if that has its number of tokens.
    """
    steps, worker = engine.steps, engine.worker
    begin = np.array([step.header[0] for step in steps])
    back = np.array([step.header[2] for step in steps])
    tokens = np.array([sum(entry[1] for entry in step.entries) for step in steps])
    names = ("w_exec_ms", "w_total_ms", "w_cpu_ms")
    if not len(worker):
        return {name: np.full(len(steps), np.nan) for name in names}, 0
    place = _in_order(worker, tokens) if engine.resolved["loop"] == "async" else None
    if place is None:
        place = np.minimum(np.searchsorted(worker[:, 1], begin), len(worker) - 1)
    rows = worker[place]
    end = np.where(rows[:, 4] > 0, rows[:, 4], rows[:, 2])
    fits = (rows[:, 0] == tokens) & (rows[:, 1] >= begin) & (rows[:, 1] <= back)
    values = (rows[:, 2] - rows[:, 1], end - rows[:, 1], rows[:, 6] - rows[:, 5])
    times = {name: np.where(fits, value / 1e6, np.nan) for name, value in zip(names, values, strict=True)}
    return times, int(fits.sum())


def _in_order(worker: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the k-th batch for the k-th step, if they agree as far as both go."""
    common = min(len(worker), len(tokens))
    if (worker[:common, 0] != tokens[:common]).any():
        return None
    return np.minimum(np.arange(len(tokens)), len(worker) - 1)
