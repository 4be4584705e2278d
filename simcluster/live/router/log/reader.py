"""Reads a log: what is damaged, missing or of another log is one clear error."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.errors import ConfigError
from simcluster.live.router.log.columns import EVENTS, Row
from simcluster.live.router.log.files import META, event_files, unfinished_files
from simcluster.live.router.log.manifest import MANIFEST

__all__ = ["Log", "open_log"]


@dataclass(slots=True)
class Log:
    """A log on disk.

    Attributes:
        folder: where.
        manifest: what the router was made of.
        digest: hash of the manifest's file.
        files: files of events by number, without a gap, from the first that is read.
        unfinished: names of files that are not whole.
    """

    folder: Path
    manifest: dict[str, Any]
    digest: str
    files: dict[int, Path]
    unfinished: list[str]

    def rows(self) -> Iterator[tuple[Path, Row]]:
        """Yield every event with its file, in order.

        Raises:
            ConfigError: a file is damaged, of another log, or events are missing.
        """
        due: int | None = None
        for number, path in self.files.items():
            try:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    first = self._check(file, number, path)
                    if due is not None and first != due:
                        raise ConfigError(f"{path}: begins with event {first}; event {due} comes next; it was changed")
                    due = first
                    for group in range(file.num_row_groups):
                        for row in sorted(file.read_row_group(group).to_pylist(), key=lambda row: row["seq"]):
                            if row["seq"] != due:
                                raise ConfigError(f"{path}: event {due} is missing; it was changed")
                            due += 1
                            yield path, row
            except (OSError, pa.ArrowException) as error:
                reason = str(error).splitlines()[0].rstrip(".")
                raise ConfigError(
                    f"{path}: is damaged or no Parquet file ({reason}); restore it, or leave it out"
                ) from None

    def _check(self, file: pq.ParquetFile, number: int, path: Path) -> int:
        """Return the number of the first event of a file that belongs here."""
        about: dict[str, Any] = {}
        with contextlib.suppress(KeyError, ValueError):
            about = json.loads((file.schema_arrow.metadata or {})[META])
        if about.get("table") != "events" or not file.schema_arrow.equals(EVENTS):
            raise ConfigError(f"{path}: is no file of events of this version; remove it")
        if about["manifest_sha256"] != self.digest:
            raise ConfigError(f"{path}: belongs to another log, or {MANIFEST} was changed; restore it")
        if about["number"] != number:
            raise ConfigError(f"{path}: was number {about['number']} of its log; give it its name back")
        return int(about["first_event"])


def open_log(folder: Path, start: int | None = None) -> Log:
    """Open a log.

    Args:
        folder: as it was given to `router --log`.
        start: number of the first file to read; None: the first that is there.

    Raises:
        ConfigError: it is no log, or files are missing.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
        files = event_files(folder)
        unfinished = [each.name.removeprefix(".").removesuffix(".tmp") for each in unfinished_files(folder)]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder of `router --log`") from None
    except ValueError:
        raise ConfigError(f"{path}: is not JSON; restore it") from None
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path}: is not the manifest of a decision log; give the folder of `router --log`")
    if not files:
        raise ConfigError(
            f"{folder}: has no whole file of events; files get whole when they are full or the router stops"
        )
    first = min(files) if start is None else start
    if first not in files:
        raise ConfigError(f"{folder}: has no file of events number {first}; there are {min(files)} to {max(files)}")
    files = {number: each for number, each in files.items() if number >= first}
    for number in range(first, max(files)):
        if number not in files:
            raise ConfigError(f"{folder}: events-{number:05d}.parquet is missing between others; restore it")
    return Log(folder, manifest, hashlib.sha256(content).hexdigest(), files, unfinished)
