"""Results of cells on disk, by their content hash.

DIR/cells/HASH.json        summary and notes; it appears in one move, so it is whole or absent
DIR/cells/HASH.parquet     values of single requests, where they are kept; written before
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import ConfigError
from simcluster.experiment.cells import Cell, CellResult
from simcluster.records import write_json

__all__ = ["CellStore", "open_store", "write_table"]

_MARK = "experiment.json"  # a folder with this is ours


class CellStore:
    """The cells of an experiment's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cells"
        self.folder.mkdir(exist_ok=True)

    def load(self, cell: Cell) -> CellResult | None:
        """Return a stored result; None where there is none that can be read."""
        path = self.folder / f"{cell.key}.json"
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            requests = pq.read_table(path.with_suffix(".parquet")) if cell.keep_requests else None
            return CellResult(content["summary"], content["notes"], requests)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid):
            return None

    def save(self, cell: Cell, result: CellResult) -> None:
        """Store a result.

        Raises:
            ConfigError: the disk refuses.
        """
        path = self.folder / f"{cell.key}.json"
        content = {
            "cell": {"policy": cell.policy, "seed": cell.scenario.seed, "scenario": cell.scenario.resolved()},
            "summary": result.summary,
            "notes": result.notes,
        }
        try:
            if result.requests is not None:
                write_table(path.with_suffix(".parquet"), result.requests)
            write_json(path, content)
        except OSError as error:
            raise ConfigError(f"--out {self.folder}: cannot be written ({error.strerror})") from None


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file in one move."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        pq.write_table(table, temporary, compression="zstd")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def open_store(folder: Path, what: dict[str, Any]) -> CellStore:
    """Open an experiment's folder, new or from before; cells of other experiments in it stay and are found again.

    Args:
        folder: where to.
        what: what is run, for people.

    Raises:
        ConfigError: it cannot be written or holds other things.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _MARK).is_file():
            raise ConfigError(f"--out {folder}: is not empty and no earlier experiment; give a new folder")
        write_json(folder / _MARK, what)
        return CellStore(folder)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror}); give another folder") from None
