"""Tables to train and score predictors on: one row per prompt and model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import PredictorError, TraceError
from simcluster.predict.predictor import ModelInfo
from simcluster.request import FloatArray, IntArray
from simcluster.validation import one_line, shown
from simcluster.workload import Trace, read_trace

__all__ = ["COLUMNS", "Table", "read_table", "table_of_trace"]

COLUMNS = ("prompt", "model", "task", "score", "output_tokens", "prompt_tokens", "parameters_b", "max_model_len")
_REQUIRED = ("prompt", "model")
_MOST_TOKENS = 2.0**31


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """Answers of models to prompts; n rows, u prompts.

    Attributes:
        prompts: the distinct prompts.
        prompt: (n,) index into prompts.
        model: (n,) index into models.
        models: the distinct models, by name.
        task: (n,) task names, Python strings; None without the column.
        score: (n,) qualities 0 to 1, NaN where not known.
        output_tokens: (n,) answer lengths [tokens], NaN where not known.
        prompt_tokens: (n,) prompt lengths [tokens], NaN where not known.
    """

    prompts: tuple[str, ...]
    prompt: IntArray
    model: IntArray
    models: tuple[ModelInfo, ...]
    task: npt.NDArray[np.object_] | None
    score: FloatArray
    output_tokens: FloatArray
    prompt_tokens: FloatArray

    def __len__(self) -> int:
        return len(self.prompt)


def read_table(path: Path, columns: Mapping[str, str] | None = None, score_max: float = 1.0) -> Table:
    """Read a table of prompts, models, scores and output tokens, or a trace with prompts and values by model.

    Args:
        path: Parquet, CSV or JSONL; by its suffix.
        columns: for each of our column names that of the file, where they differ.
        score_max: the score that means quality 1.

    Raises:
        PredictorError: the file is unreadable, lacks a column or holds a value out of range.
    """
    mapping = dict(columns or {})
    unknown = sorted(set(mapping) - set(COLUMNS))
    if unknown:
        raise PredictorError(f"--map {unknown[0]}=...; must be one of {', '.join(COLUMNS)}")
    if path.suffix.lower() == ".parquet" and not mapping and _is_trace(path):
        try:
            return table_of_trace(read_trace(path), str(path))
        except TraceError as error:
            raise PredictorError(str(error)) from None
    frame = _read(path)
    for ours, theirs in mapping.items():
        if theirs not in frame.columns:
            raise PredictorError(f"{path}: no column {theirs}, which --map {ours}={theirs} names; {_has(frame)}")
    frame = frame.select(
        pl.col(mapping.get(name, name)).alias(name) for name in COLUMNS if mapping.get(name, name) in frame.columns
    )
    for name in _REQUIRED:
        if name not in frame.columns:
            raise PredictorError(f"{path}: the column {name} is missing; add it or name it with --map {name}=THEIRS")
    if frame.is_empty():
        raise PredictorError(f"{path}: no rows; give a table with one row per prompt and model")
    return _table(path, frame, score_max)


def _has(frame: pl.DataFrame) -> str:
    return f"the file has {shown(', '.join(frame.columns))}"


def _is_trace(path: Path) -> bool:
    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException):
        return False
    return "model" not in names and bool({"quality_by_model", "output_tokens_by_model"} & set(names))


def _read(path: Path) -> pl.DataFrame:
    readers: dict[str, Any] = {
        ".parquet": pl.read_parquet,
        ".csv": lambda file: pl.read_csv(file, infer_schema_length=None),
        ".jsonl": lambda file: pl.read_ndjson(file, infer_schema_length=None),
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PredictorError(f"{path}: must be a .parquet, .csv or .jsonl file")
    if not path.is_file():
        raise PredictorError(f"{path}: no such file; give a table")
    try:
        frame: pl.DataFrame = reader(path)
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise PredictorError(f"{path}: cannot be read ({one_line(str(error))[:160]}); correct the file") from None
    return frame


def _table(path: Path, frame: pl.DataFrame, score_max: float) -> Table:
    prompts, prompt = _coded(path, frame, "prompt")
    names, model = _coded(path, frame, "model")
    task = None
    if "task" in frame.columns:
        texts = frame["task"].cast(pl.String)
        if texts.null_count():
            raise PredictorError(f"{path}: task, row {_first(texts.is_null())}: is empty; name a task in every row")
        task = texts.to_numpy().astype(object)
    score = _numbers(path, frame, "score", 0, score_max) / score_max
    size = _numbers(path, frame, "parameters_b", 1e-6, 1e6)
    context = _numbers(path, frame, "max_model_len", 1, _MOST_TOKENS)
    order = np.argsort(np.array(names, dtype=object), kind="stable")
    first = np.unique(model, return_index=True)[1]
    infos = [
        ModelInfo.named(
            names[k],
            None if np.isnan(size[first[k]]) else float(size[first[k]]),
            None if np.isnan(context[first[k]]) else int(context[first[k]]),
        )
        for k in order
    ]
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return Table(
        prompts=tuple(prompts),
        prompt=prompt,
        model=position[model],
        models=tuple(infos),
        task=task,
        score=score,
        output_tokens=_numbers(path, frame, "output_tokens", 0, _MOST_TOKENS),
        prompt_tokens=_numbers(path, frame, "prompt_tokens", 0, _MOST_TOKENS),
    )


def _first(mask: pl.Series) -> int:
    """Return the first row that a mask names, from 1."""
    found = mask.arg_max()
    return 1 + (found if found is not None else 0)


def _coded(path: Path, frame: pl.DataFrame, name: str) -> tuple[list[str], IntArray]:
    """Return the distinct texts of a column by first appearance, and each row's index among them."""
    column = frame[name]
    if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
        raise PredictorError(f"{path}: {name} is of type {column.dtype}; must be text")
    column = column.cast(pl.String)
    empty = column.is_null() | (column.str.len_bytes() == 0)
    if empty.any():
        raise PredictorError(f"{path}: {name}, row {_first(empty)}: is empty; must be text in every row")
    texts = column.unique(maintain_order=True)
    codes = {text: number for number, text in enumerate(texts.to_list())}
    return list(codes), np.array([codes[text] for text in column.to_list()], dtype=np.int64)


def _numbers(path: Path, frame: pl.DataFrame, name: str, low: float, high: float) -> FloatArray:
    """Return a column of numbers, NaN where it is null or absent."""
    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    column = frame[name]
    if column.dtype == pl.Boolean:
        column = column.cast(pl.Int8)
    if not column.dtype.is_numeric() and column.dtype != pl.Null:
        raise PredictorError(f"{path}: {name} is of type {column.dtype}; must be numbers")
    values = column.cast(pl.Float64)
    bad = values.is_not_null() & ~values.is_between(low, high).fill_null(False)
    bad |= values.is_nan().fill_null(False)
    if bad.any():
        row = _first(bad)
        hint = "; give --score-max for another scale" if name == "score" else "; correct the value"
        raise PredictorError(f"{path}: {name}, row {row}: {values[row - 1]:g}; must be from {low:g} to {high:g}{hint}")
    return values.fill_null(float("nan")).to_numpy().astype(np.float64)


def table_of_trace(trace: Trace, where: str) -> Table:
    """Return a table with one row per request and model of a trace.

    Args:
        trace: has prompts, and qualities or output tokens by model.
        where: the trace, for messages.

    Raises:
        PredictorError: it has no prompts or no values by model.
    """
    if trace.prompt is None:
        raise PredictorError(f"{where}: the trace has no column prompt; give one with prompt texts")
    names = sorted({*trace.quality_by_model, *trace.output_tokens_by_model})
    if not names:
        raise PredictorError(f"{where}: the trace has neither qualities nor answer lengths by model; add them")
    n, j = len(trace), len(names)
    codes = {text: number for number, text in enumerate(dict.fromkeys(trace.prompt.tolist()))}
    nothing = np.full(n, np.nan)

    def rows(values: Mapping[str, npt.NDArray[Any]]) -> FloatArray:
        return np.stack([values.get(name, nothing) for name in names], axis=1).astype(np.float64).ravel()

    labels = trace.task_labels()
    return Table(
        prompts=tuple(codes),
        prompt=np.repeat(np.array([codes[text] for text in trace.prompt.tolist()], dtype=np.int64), j),
        model=np.tile(np.arange(j), n),
        models=tuple(ModelInfo.named(name) for name in names),
        task=None if labels is None else np.repeat(labels, j),
        score=rows(trace.quality_by_model),
        output_tokens=rows(trace.output_tokens_by_model),
        prompt_tokens=rows({name: trace.prompt_tokens_by_model.get(name, trace.prompt_tokens) for name in names}),
    )
