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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import ConfigError

__all__ = ["DECISIONS", "ESTIMATES", "INSTANCES", "REQUESTS", "output_folder", "write_json", "write_run"]

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


def write_run(folder: Path, manifest: dict[str, Any], tables: dict[str, pa.Table], summary: dict[str, Any]) -> None:
    """Write the directory of one policy: into a temporary one that then takes the name.

    Args:
        folder: the policy's directory; an earlier one is replaced.
        manifest: what was run.
        tables: table by file stem.
        summary: metrics.

    Raises:
        ConfigError: the disk refuses.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for stem, table in tables.items():
            pq.write_table(table, temporary / f"{stem}.parquet", compression="zstd")
        write_json(temporary / "manifest.json", manifest)
        write_json(temporary / "summary.json", summary)
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror})") from None
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
