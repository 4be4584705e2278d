"""The prompts that are sent to every model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from simcluster.errors import CalibrationError
from simcluster.validation import one_line, shown

__all__ = ["COLUMNS", "Prompt", "read_prompts"]

COLUMNS = ("prompt", "prompt_id", "task", "reference")
_READERS: dict[str, Any] = {
    ".parquet": pl.read_parquet,
    ".csv": lambda file: pl.read_csv(file, infer_schema=False),  # an id such as 007 stays as it is
    ".jsonl": lambda file: pl.read_ndjson(file, infer_schema_length=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
        id: names it in the journal and the table; unique.
        text: what the models are sent.
        task: its task, or None.
        reference: a good answer for the judge to compare with, or None.
    """

    id: str
    text: str
    task: str | None = None
    reference: str | None = None


def read_prompts(path: Path, columns: Mapping[str, str] | None = None, limit: int | None = None) -> list[Prompt]:
    """Read prompts from Parquet, CSV or JSONL, by the suffix.

    Args:
        path: a table with the column prompt, and optionally prompt_id, task and reference. Without prompt_id,
            a hash of the text stands for it.
        columns: for each of our column names that of the file, where they differ.
        limit: the first so many rows only.

    Raises:
        CalibrationError: the file cannot be read, lacks the column, or holds an empty or a repeated prompt.
    """
    mapping = {**{name: name for name in COLUMNS}, **(columns or {})}
    unknown = sorted(set(mapping) - set(COLUMNS))
    if unknown:
        raise CalibrationError(f"--map {unknown[0]}=...; must be one of {', '.join(COLUMNS)}")
    frame = _read(path)
    for ours, theirs in mapping.items():
        if theirs not in frame.columns and (ours == "prompt" or ours in (columns or {})):
            has = shown(", ".join(frame.columns))
            raise CalibrationError(f"{path}: no column {theirs}; the file has {has}; name it with --map {ours}=...")
    rows = frame.head(limit) if limit is not None else frame
    if rows.is_empty():
        raise CalibrationError(f"{path}: no rows; give a table with one row per prompt")
    found = {ours: _texts(rows[theirs]) for ours, theirs in mapping.items() if theirs in rows.columns}
    prompts: dict[str, Prompt] = {}
    nothing: list[str | None] = [None] * len(rows)
    columns_of = (found["prompt"], *(found.get(name, nothing) for name in COLUMNS[1:]))
    for number, (text, name, task, reference) in enumerate(zip(*columns_of, strict=True), start=1):
        if not text:
            raise CalibrationError(f"{path}: {mapping['prompt']}, row {number}: is empty; must be text in every row")
        key = name or hashlib.sha256(text.encode()).hexdigest()[:16]
        if key in prompts:
            what = f"prompt_id {shown(key)} is there already" if name else "the same prompt is there already"
            raise CalibrationError(f"{path}: row {number}: {what}; must be unique, since answers are kept by it")
        prompts[key] = Prompt(id=key, text=text, task=task, reference=reference or None)
    return list(prompts.values())


def _read(path: Path) -> pl.DataFrame:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CalibrationError(f"{path}: must be a .parquet, .csv or .jsonl file")
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file; give a table of prompts")
    try:
        frame: pl.DataFrame = reader(path)
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read ({one_line(str(error))[:160]}); correct the file") from None
    return frame


def _texts(column: pl.Series) -> list[str | None]:
    values: list[str | None] = column.cast(pl.String, strict=False).to_list()
    return values
