"""A recording of a real vLLM engine: every step with its composition and times, every request with its arrival.

A recording is a folder

    recording.json     what ran: model, device, versions, vLLM's resolved options (`RecordingInfo`)
    steps.parquet      one row per engine step that computed something (`STEPS`), in the order of the steps
    requests.parquet   one row per request that reached the engine (`REQUESTS`)

or, in the older form, the file steps_X.parquet with steps_X.meta.json and reqs_X.parquet beside it, where `comp` is
JSON text. All times are CLOCK_MONOTONIC of one machine. `load_recording` reads both, checks that the rows can be
true, and gives them in the newer form.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simcluster.calibrate.recording_checks import check_requests, check_times
from simcluster.errors import CalibrationError
from simcluster.validation import explain

__all__ = [
    "COMPOSITION",
    "PHASES",
    "REQUESTS",
    "STEPS",
    "EngineInfo",
    "Recording",
    "RecordingInfo",
    "load_recording",
]

_INT, _FLOAT, _TEXT = pa.int64(), pa.float64(), pa.string()

PHASES = ("warmup", "lone_prefill", "decode", "mixed", "saturation", "served")

COMPOSITION = pa.list_(
    pa.struct(
        [
            ("request_id", _TEXT),
            ("num_tokens", pa.int32()),  # of this step
            ("context", pa.int32()),  # tokens computed before the step
            ("is_decode", pa.bool_()),
            ("produces_token", pa.bool_()),
            ("prompt_tokens", pa.int32()),
        ]
    )
)
STEPS = pa.schema(
    [
        ("step", _INT),
        ("t_sched0", _INT),  # schedule() begins [ns]
        ("t_sched1", _INT),  # schedule() ends
        ("t_upd0", _INT),  # update_from_output() begins: the results are there
        ("t_upd1", _INT),  # update_from_output() ends
        ("t_prev_upd1", _INT),
        ("n_running", _INT),  # after schedule()
        ("n_waiting", _INT),
        ("free_blocks", _INT),
        ("n_preempted", _INT),
        ("n_prefill_reqs", _INT),
        ("prefill_tokens", _INT),
        ("decode_reqs", _INT),
        ("tokens", _INT),  # prefill_tokens + decode_reqs
        ("decode_ctx", _INT),  # sum of the contexts of decodes [tokens]
        ("max_decode_ctx", _INT),
        ("prefill_attn", _FLOAT),  # sum of p*c + p*(p+1)/2 [tokens^2]
        ("n_samples", _INT),  # requests that get a token
        ("comp", COMPOSITION),
        ("exec_ms", _FLOAT),  # t_upd0 - t_sched1
        ("step_ms", _FLOAT),  # t_upd1 - t_sched0
        ("sched_ms", _FLOAT),
        ("upd_ms", _FLOAT),
        ("gap_ms", _FLOAT),  # previous t_upd1 to t_sched0
        ("period_ms", _FLOAT),  # t_upd1 to t_upd1
        ("w_exec_ms", _FLOAT),  # wall time of execute_model in the worker
        ("w_total_ms", _FLOAT),  # and of sample_tokens
        ("w_cpu_ms", _FLOAT),  # CPU time of the worker process
        ("phase", _TEXT),  # one of PHASES
        ("preempted", pa.list_(_TEXT)),
    ]
)
REQUESTS = pa.schema(
    [
        ("request_id", _TEXT),
        ("t_add_ns", _INT),  # add_request() of the engine core
        ("prompt_tokens", _INT),
        ("max_tokens", _INT),
        ("output_tokens", _INT),  # true
        ("phase", _TEXT),
        ("finish_reason", _TEXT),
        ("t_sent_ns", _INT),  # client side, null where unknown
        ("t_first_token_ns", _INT),
        ("t_last_token_ns", _INT),
    ]
)
_OPTIONAL_STEPS = ("t_prev_upd1", "gap_ms", "period_ms", "w_exec_ms", "w_total_ms", "w_cpu_ms", "phase", "preempted")
_OPTIONAL_REQUESTS = ("phase", "finish_reason", "t_sent_ns", "t_first_token_ns", "t_last_token_ns")
_OLD_REQUESTS = {"rid": "request_id", "prompt": "prompt_tokens"}
_OLD_OPTIONS = {
    "async": "async_scheduling",
    "chunked": "enable_chunked_prefill",
    "num_blocks": "num_gpu_blocks",
    "prefix_caching": "enable_prefix_caching",
    "reserve_full_isl": "scheduler_reserve_full_isl",
}

_Count = Annotated[int, Field(ge=1)]


class EngineInfo(BaseModel):
    """What vLLM resolved, by its own names; further options are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    max_num_seqs: _Count
    max_num_batched_tokens: _Count
    max_model_len: _Count
    block_size: _Count
    num_gpu_blocks: Annotated[int, Field(ge=2)]
    enable_prefix_caching: bool
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    long_prefill_token_threshold_adaptive: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    prefill_schedule_interval: _Count = 1
    max_num_active_seqs: int | None = None
    async_scheduling: bool = False
    max_concurrent_batches: _Count = 1
    tensor_parallel_size: _Count = 1


class RecordingInfo(BaseModel):
    """The file recording.json.

    Attributes:
        schema_version: version of this layout.
        simcluster_version: what wrote it.
        vllm_version: the engine's version.
        model: the served model.
        device: kind of device, by the name vLLM or torch gives it.
        loop: the synchronous or the asynchronous engine loop.
        engine: vLLM's resolved options.
        plan: what was run.
        seed: of the plan's random draws.
        started_at: ISO 8601.
        complete: whether the plan ran to its end.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    schema_version: Literal[1]
    simcluster_version: str
    vllm_version: str
    model: str
    device: str
    loop: Literal["sync", "async"]
    engine: EngineInfo
    plan: Any = None
    seed: int | None = None
    started_at: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording in memory.

    Attributes:
        path: the folder, or the steps' file of the older form.
        info: what ran.
        steps: columns of `STEPS`; what was not recorded is null.
        requests: columns of `REQUESTS`, by arrival at the engine.
    """

    path: Path
    info: RecordingInfo
    steps: pl.DataFrame
    requests: pl.DataFrame

    @property
    def name(self) -> str:
        """A short name for tables."""
        return self.path.stem.removeprefix("steps_")

    def step_seconds(self) -> NDArray[np.float64]:
        """Return how long the device worked on each step (n,) [s].

        Synchronous loop: from the end of schedule() to the results. Asynchronous loop: batches queue, so a step
        begins when it is scheduled or when the one before it ends, whichever is later; single values are noisy
        there, their sum is right.
        """
        begin, end = self.steps["t_sched1"].to_numpy(), self.steps["t_upd0"].to_numpy()
        if self.info.loop == "async":
            begin = np.maximum(begin, np.concatenate([begin[:1], end[:-1]]))
        seconds: NDArray[np.float64] = (end - begin) / 1e9
        return seconds

    def compositions(self) -> list[list[tuple[str, int, int]]]:
        """Return the batch of each step: (request id, context before, tokens), in vLLM's order."""
        return [
            [(row["request_id"], row["context"], row["num_tokens"]) for row in rows]
            for rows in self.steps["comp"].to_list()
        ]


def load_recording(path: Path) -> Recording:
    """Read a recording and check that it can be true.

    Args:
        path: the folder, or steps_X.parquet of the older form.

    Raises:
        CalibrationError: a file is missing, unreadable or truncated, a column is missing, times run backwards or
            jump, a step has no length, or a step holds a request that never arrived. One line.
    """
    path = Path(path)
    if path.is_dir():
        info_file, steps_file, requests_file = (
            path / name for name in ("recording.json", "steps.parquet", "requests.parquet")
        )
    elif path.name.startswith("steps_") and path.suffix == ".parquet":
        info_file, steps_file = path.with_suffix(".meta.json"), path
        requests_file = path.with_name(f"reqs_{path.name.removeprefix('steps_')}")
    else:
        raise CalibrationError(
            f"{path}: not a recording; give a folder with recording.json, or a file steps_NAME.parquet with "
            "steps_NAME.meta.json and reqs_NAME.parquet beside it"
        )
    info = _read_info(info_file, old=not path.is_dir())
    steps = _read_steps(steps_file)
    requests = _read_requests(requests_file, steps)
    check_times(steps_file, steps)
    check_requests(requests_file, steps_file, steps, requests)
    return Recording(path, info, steps, requests)


def _read_info(file: Path, *, old: bool) -> RecordingInfo:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CalibrationError(f"{file}: cannot be read ({error.strerror}); every recording has one") from None
    try:
        if not old:
            return RecordingInfo.model_validate_json(text)
        found = json.loads(text)
        if not isinstance(found, dict):
            raise CalibrationError(f"{file}: not a JSON object; it holds the options of the engine")
        options = {_OLD_OPTIONS.get(key, key): value for key, value in found.items()}
        return RecordingInfo(
            schema_version=1,
            simcluster_version="none (prototype)",
            vllm_version=str(found.get("vllm_version", "0.32.0")),
            model=str(found.get("model", "unknown")),
            device=str(found.get("device", "CPU")),
            loop="async" if options.get("async_scheduling") else "sync",
            engine=EngineInfo.model_validate({k: v for k, v in options.items() if k not in ("cls", "model")}),
        )
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{file}: not valid JSON ({error.msg}, line {error.lineno}); correct it") from None
    except ValidationError as error:
        raise CalibrationError(f"{file}: {explain(error, EngineInfo if old else RecordingInfo)}") from None


def _read_table(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except FileNotFoundError:
        raise CalibrationError(f"{file}: no such file; a recording has its steps and its requests") from None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CalibrationError(
            f"{file}: cannot be read ({reason}); it is truncated or not Parquet; record again, or copy it anew"
        ) from None


def _shape(file: Path, table: pa.Table, schema: pa.Schema, optional: tuple[str, ...]) -> pl.DataFrame:
    """Bring a table into the schema's columns; what may be missing becomes null."""
    missing = [name for name in schema.names if name not in table.column_names and name not in optional]
    if missing:
        raise CalibrationError(
            f"{file}: no column {', '.join(missing)}; a recording has {', '.join(schema.names)}; record again"
        )
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        try:
            columns.append(table[field.name].cast(field.type))
        except (pa.ArrowException, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CalibrationError(f"{file}: column {field.name} is not {field.type} ({reason})") from None
        if field.name not in optional and columns[-1].null_count:
            row = int(np.flatnonzero(columns[-1].is_null().to_numpy(zero_copy_only=False))[0])
            raise CalibrationError(f"{file}: row {row}, column {field.name} is empty; record again")
    if not len(table):
        raise CalibrationError(f"{file}: no rows; nothing was recorded")
    frame = pl.from_arrow(pa.table(columns, schema=schema))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _read_steps(file: Path) -> pl.DataFrame:
    table = _read_table(file)
    if "comp" in table.column_names and not pa.types.is_nested(table.schema.field("comp").type):
        names = [field.name for field in COMPOSITION.value_type]
        rows = []
        for number, text in enumerate(table["comp"].to_pylist()):
            try:
                rows.append([dict(zip(names, _typed(entry), strict=True)) for entry in json.loads(text)])
            except (ValueError, TypeError) as error:
                raise CalibrationError(
                    f"{file}: row {number}, column comp is not a list of (request, tokens, context, decode, "
                    f"produces a token, prompt): {error}"
                ) from None
        place = table.column_names.index("comp")
        table = table.set_column(place, "comp", pa.array(rows, COMPOSITION))
    steps = _shape(file, table, STEPS, _OPTIONAL_STEPS)
    totals = steps["comp"].list.eval(pl.element().struct.field("num_tokens")).list.sum().to_numpy()
    wrong = np.flatnonzero(totals != steps["tokens"].to_numpy())
    if wrong.size:
        row = int(wrong[0])
        raise CalibrationError(
            f"{file}: step {steps['step'][row]} has tokens = {steps['tokens'][row]}, but its requests have "
            f"{totals[row]}; the file is damaged or mixed from two runs"
        )
    return steps


def _typed(entry: Any) -> tuple[str, int, int, bool, bool, int]:
    request, tokens, context, decode, produces, prompt = entry
    return str(request), int(tokens), int(context), bool(decode), bool(produces), int(prompt)


def _read_requests(file: Path, steps: pl.DataFrame) -> pl.DataFrame:
    table = _read_table(file)
    table = table.rename_columns([_OLD_REQUESTS.get(name, name) for name in table.column_names])
    if "output_tokens" not in table.column_names and "request_id" in table.column_names:
        # The older form: what was produced is in the steps.
        entries = steps.select(pl.col("comp").explode()).unnest("comp")
        counts = dict(entries.group_by("request_id").agg(pl.col("produces_token").sum()).iter_rows())
        values = [counts.get(request, 0) for request in table["request_id"].to_pylist()]
        table = table.append_column("output_tokens", pa.array(values, _INT))
    if {"arrival_wall", "t_add_wall"} <= set(table.column_names) and "t_sent_ns" not in table.column_names:
        # The older form: when the front end got the request, on the wall clock.
        on_the_way = table["t_add_wall"].to_numpy() - table["arrival_wall"].to_numpy()
        sent = table["t_add_ns"].to_numpy() - np.rint(on_the_way * 1e9).astype(np.int64)
        table = table.append_column("t_sent_ns", pa.array(sent))
    return _shape(file, table, REQUESTS, _OPTIONAL_REQUESTS).sort("t_add_ns", maintain_order=True)
