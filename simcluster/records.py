"""Run directories: what a run leaves on disk, and how to read it.

POLICY is the policy's name with `_` for what does not belong into a folder's name; its manifest has the full name.

DIR/summary.json              all policies, as `run --json` prints
DIR/POLICY/manifest.json      resolved scenario, versions, hashes, assumptions
DIR/POLICY/requests.parquet   one row per request
DIR/POLICY/decisions.parquet  one row per decision
DIR/POLICY/estimates.parquet  one row per estimate of a TTFT, if something was estimated
DIR/POLICY/instances.parquet  time series of the instances
DIR/POLICY/summary.json       this policy's metrics
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import ConfigError

__all__ = [
    "DECISIONS",
    "ESTIMATES",
    "INSTANCES",
    "REQUESTS",
    "FolderWriter",
    "MemoryWriter",
    "TableWriter",
    "output_folder",
    "read_frame",
    "write_json",
    "write_run",
    "write_summary",
]

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()

REQUESTS = pa.schema(
    [
        ("request_id", _TEXT),
        ("task", _TEXT),
        ("instance", _TEXT),
        ("model", _TEXT),
        ("arrival_ns", _INT),
        ("scheduled_ns", _INT),
        ("first_token_ns", _INT),
        ("end_ns", _INT),
        ("arrival_s", _FLOAT),
        ("queue_s", _FLOAT),
        ("ttft_s", _FLOAT),
        ("tpot_s", _FLOAT),
        ("e2e_s", _FLOAT),
        ("prompt_tokens", _INT),
        ("output_tokens", _INT),
        ("cached_tokens", _INT),
        ("num_preemptions", _INT),
        ("status", _TEXT),
        ("reason", _TEXT),
        ("slo_ttft_s", _FLOAT),
        ("on_time", pa.bool_()),
        ("quality", _FLOAT),
        ("cost_micro_usd", _FLOAT),
        ("utility", _FLOAT),
    ]
)
DECISIONS = pa.schema(
    [
        ("request_id", _TEXT),
        ("instance", _TEXT),
        ("reason", _TEXT),
        ("num_tied", _INT),
        ("snapshot_age_s", _FLOAT),
        ("predicted_ttft_s", _FLOAT),
        ("predicted_utility", _FLOAT),
        ("score", _FLOAT),
        ("runner_up", _TEXT),
        ("margin", _FLOAT),
        ("candidate_ttft_s", pa.list_(_FLOAT)),
        ("candidate_score", pa.list_(_FLOAT)),
    ]
)
ESTIMATES = pa.schema(
    [
        ("request_id", _TEXT),
        ("estimator", _TEXT),
        ("predicted_ttft_s", _FLOAT),  # null: without bound
    ]
)
INSTANCES = pa.schema(
    [
        ("at_ns", _INT),
        ("at_s", _FLOAT),
        ("instance", _TEXT),
        ("num_running", _INT),
        ("num_waiting", _INT),
        ("kv_cache_usage", _FLOAT),
        ("num_preemptions", _INT),
        ("num_steps", _INT),
        ("busy_s", _FLOAT),
        ("prefix_queries", _INT),
        ("prefix_hits", _INT),
        ("preempted_queries", _INT),
        ("preempted_hits", _INT),
    ]
)
_SCHEMAS = {"requests": REQUESTS, "decisions": DECISIONS, "estimates": ESTIMATES, "instances": INSTANCES}


@contextlib.contextmanager
def output_folder(folder: Path | None) -> Iterator[None]:
    """Make sure that a run directory can be written, before anything is computed.

    A folder that holds something else than an earlier run is left alone. A new one goes away again if the run
    fails before anything is written.

    Args:
        folder: the run directory, or None: nothing will be written.

    Raises:
        ConfigError: it cannot be written or holds other things.
    """
    if folder is None:
        yield
        return
    is_new = not folder.exists()
    _prepare(folder)
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # it holds the results of earlier policies
                folder.rmdir()
        raise


def _prepare(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror}); give another folder") from None
    if any(folder.iterdir()) and not (folder / "summary.json").is_file():
        raise ConfigError(f"--out {folder}: is not empty and no earlier run; give a new folder")


def write_json(path: Path, content: Any) -> None:
    """Write JSON in one move; numbers that JSON cannot hold are an error, never NaN."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_summary(folder: Path, policies: dict[str, dict[str, Any]]) -> None:
    """Write the summary of a run directory, and remove what an earlier run left of policies that are no longer in it.

    Only folders go away whose policy the earlier summary lists.

    Args:
        folder: the run directory.
        policies: metrics by policy.
    """
    path = folder / "summary.json"
    gone = _named(path, "policies") - set(policies)
    write_json(path, {"policies": policies})
    if gone:
        for manifest in sorted(folder.glob("*/manifest.json")):
            if _named(manifest, "policy") & gone:
                shutil.rmtree(manifest.parent)


def _named(path: Path, key: str) -> set[str]:
    """Return the policy or policies that a summary or a manifest names; none if it is neither."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {found} if isinstance(found, str) else set(found) if isinstance(found, dict) else set()


def read_frame(source: Path | pa.Table, columns: Sequence[str]) -> pl.DataFrame:
    """Return columns of a table in one piece, so that sums do not depend on how it was cut."""
    if isinstance(source, Path):  # column by column, so that no more than one is there twice
        return pl.DataFrame([pl.read_parquet(source, columns=[name]).to_series().rechunk() for name in columns])
    found = pl.from_arrow(source.select(list(columns)), rechunk=True)
    assert isinstance(found, pl.DataFrame)
    return found


class TableWriter(Protocol):
    """Takes the tables of one run, chunk by chunk."""

    def write(self, stem: str, chunk: pa.Table) -> None:
        """Add rows to a table, by its file stem."""
        ...

    def close(self) -> None:
        """End all tables."""
        ...

    @property
    def stems(self) -> set[str]:
        """The tables that there are."""
        ...

    def frame(self, stem: str, columns: list[str]) -> pl.DataFrame:
        """Return columns of a table that is complete."""
        ...


class MemoryWriter:
    """Keeps the tables of a run that is not written anywhere.

    Args:
        stems: the tables that there are even without rows.
    """

    def __init__(self, stems: list[str]) -> None:
        self._chunks: dict[str, list[pa.Table]] = {stem: [] for stem in stems}

    def write(self, stem: str, chunk: pa.Table) -> None:
        """Add rows to a table."""
        self._chunks.setdefault(stem, []).append(chunk)

    def close(self) -> None:
        """Nothing to do."""

    @property
    def stems(self) -> set[str]:
        """The tables that there are."""
        return set(self._chunks)

    def tables(self) -> dict[str, pa.Table]:
        """Return all tables by file stem."""
        return {
            stem: pa.concat_tables([_SCHEMAS[stem].empty_table(), *chunks]).combine_chunks()
            for stem, chunks in self._chunks.items()
        }

    def frame(self, stem: str, columns: list[str]) -> pl.DataFrame:
        """Return columns of a table."""
        return read_frame(pa.concat_tables([_SCHEMAS[stem].empty_table(), *self._chunks[stem]]), columns)


class FolderWriter:
    """Writes the directory of one policy: into a temporary one that takes the name when all is there.

    A run that is killed leaves tables without an end, which no reader takes for a table, in a hidden folder. Used as
    a context; what is not finished in it is removed.

    Args:
        folder: the policy's directory; an earlier one is replaced.
        stems: the tables that there are even without rows.

    Raises:
        ConfigError: the disk refuses, here and in every method.
    """

    def __init__(self, folder: Path, stems: list[str]) -> None:
        self._folder = folder
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._wanted, self.stems = stems, set(stems)
        with self._errors():
            self._temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        if self._temporary.exists():
            shutil.rmtree(self._temporary)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--out {self._folder}: cannot be written ({error.strerror})") from None

    def write(self, stem: str, chunk: pa.Table) -> None:
        """Add rows to a table, as one row group."""
        self.stems.add(stem)
        with self._errors():
            if stem not in self._writers:
                path = self._temporary / f"{stem}.parquet"
                self._writers[stem] = pq.ParquetWriter(path, _SCHEMAS[stem], compression="zstd")
            self._writers[stem].write_table(chunk)

    def close(self) -> None:
        """End all tables; they can be read from now on."""
        for stem in self._wanted:
            if stem not in self._writers:
                self.write(stem, _SCHEMAS[stem].empty_table())
        with self._errors():
            while self._writers:
                self._writers.popitem()[1].close()

    def frame(self, stem: str, columns: list[str]) -> pl.DataFrame:
        """Return columns of a table."""
        return read_frame(self._temporary / f"{stem}.parquet", columns)

    def finish(self, manifest: dict[str, Any], summary: dict[str, Any]) -> None:
        """Add what was run and its metrics, and let the directory take its name."""
        with self._errors():
            write_json(self._temporary / "manifest.json", manifest)
            write_json(self._temporary / "summary.json", summary)
            self._temporary.chmod(0o755)
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._temporary.rename(self._folder)


def write_run(folder: Path, manifest: dict[str, Any], tables: dict[str, pa.Table], summary: dict[str, Any]) -> None:
    """Write the directory of one policy from tables in memory.

    Args:
        folder: the policy's directory; an earlier one is replaced.
        manifest: what was run.
        tables: table by file stem.
        summary: metrics.

    Raises:
        ConfigError: the disk refuses.
    """
    with FolderWriter(folder, list(tables)) as writer:
        for stem, table in tables.items():
            writer.write(stem, table)
        writer.close()
        writer.finish(manifest, summary)
