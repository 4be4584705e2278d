"""Files of a log: each is written under a hidden name, and takes its own when it is whole."""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import ConfigError
from simcluster.live.router.log.columns import DECISIONS, EVENTS, Event, EventRows, Row
from simcluster.live.router.log.manifest import MANIFEST
from simcluster.records import write_json

__all__ = ["META", "LogFiles", "event_files", "prepare_folder", "remove_folder", "unfinished_files"]

META: Final = b"simcluster"  # key of a file's own description
_STEMS: Final = {"events": EVENTS, "decisions": DECISIONS}
_EVENTS_NAME: Final = re.compile(r"events-(\d{5,})\.parquet")
_PAGE_BYTES: Final = 8 * 2**20  # so that zstd sees several snapshots of one instance together
_BREATH: Final = 32  # rows between two chances for the event loop's thread
_TEXT_COLUMNS: Final = ["kind", "source", "reason", "fallback", "options"]


def prepare_folder(folder: Path, manifest: dict[str, Any]) -> str:
    """Make the folder of a log and write its manifest; return the manifest's hash.

    Raises:
        ConfigError: the folder is not empty or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--log {folder}: is not empty; give a new folder for each start of the router")
        write_json(folder / MANIFEST, manifest)
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--log {folder}: cannot be written ({error.strerror}); give another folder") from None


def remove_folder(folder: Path) -> None:
    """Remove the folder of a log that has only its manifest, as far as the disk lets us."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
        folder.rmdir()


def event_files(folder: Path) -> dict[int, Path]:
    """Return the whole files of events by number, in order."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _EVENTS_NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def unfinished_files(folder: Path) -> list[Path]:
    """Return files of events that are being written, or never got whole."""
    return sorted(folder.glob(".events-*.tmp"))


@dataclass(slots=True)
class LogFiles:
    """Writes one pair of files after the other; for one thread.

    Attributes:
        folder: where.
        digest: hash of the manifest.
        encode: makes rows of events.
        keep: so many of the newest pairs stay.
        number: of the pair that is being written, from 1.
        written: events in whole files.
    """

    folder: Path
    digest: str
    encode: EventRows
    keep: int
    number: int = 1
    written: int = 0
    _seq: int = 0
    _first: int = 0  # number of the first event of the pair
    _writers: dict[str, pq.ParquetWriter] = field(default_factory=dict)

    def write(self, events: Sequence[Event], decisions: Sequence[Row]) -> None:
        """Add rows to both files, as a row group each.

        Raises:
            OSError: the disk refuses.
            ValueError: a snapshot cannot be written.
        """
        rows = []
        for count, event in enumerate(events):
            rows.append({"seq": self._seq + count, **self.encode.row(event)})
            if count % _BREATH == _BREATH - 1:
                time.sleep(0)  # the event loop may go on
        self._seq += len(rows)
        rows.sort(key=lambda row: row["instance"] if row.get("snapshot") else -1)
        self._add("events", rows)
        self._add("decisions", decisions)

    def _add(self, stem: str, rows: Sequence[Row]) -> None:
        writer = self._writers.get(stem) or self._open(stem)
        parts = []
        for first in range(0, len(rows), _BREATH):
            parts.append(pa.Table.from_pylist(rows[first : first + _BREATH], writer.schema))
            time.sleep(0)
        if parts:
            writer.write_table(pa.concat_tables(parts))

    def _open(self, stem: str) -> pq.ParquetWriter:
        about = {"table": stem, "number": self.number, "first_event": self._first, "manifest_sha256": self.digest}
        schema = _STEMS[stem].with_metadata({META: json.dumps(about).encode()})
        self._writers[stem] = writer = pq.ParquetWriter(
            self._hidden(stem),
            schema,
            compression="zstd",
            use_dictionary=_TEXT_COLUMNS if stem == "events" else True,
            data_page_size=_PAGE_BYTES,
            write_page_checksum=True,
            write_statistics=False,
        )
        return writer

    def finish(self) -> None:
        """Let both files take their names, and remove the oldest ones.

        Raises:
            OSError: the disk refuses.
        """
        for stem in reversed(_STEMS):  # events last: they are what a replay needs
            (self._writers.get(stem) or self._open(stem)).close()
            hidden = self._hidden(stem)
            with hidden.open("rb") as file:
                os.fsync(file.fileno())
            hidden.rename(self._named(stem, self.number))
        self._writers.clear()
        self.written = self._first = self._seq
        for stem in _STEMS:
            self._named(stem, self.number - self.keep).unlink(missing_ok=True)
        self.number += 1

    def abandon(self) -> None:
        """Remove what is not whole."""
        for stem, writer in self._writers.items():
            with contextlib.suppress(OSError, ValueError):
                writer.close()
            with contextlib.suppress(OSError):
                self._hidden(stem).unlink(missing_ok=True)
        self._writers.clear()

    def _named(self, stem: str, number: int) -> Path:
        return self.folder / f"{stem}-{number:05d}.parquet"

    def _hidden(self, stem: str) -> Path:
        return self.folder / f".{self._named(stem, self.number).name}.tmp"
