"""Read files of recorded scheduler scenarios."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simcluster.conformance.replay import Difference, compare
from simcluster.errors import ConformanceError

__all__ = ["check_file", "scenario_files"]

_SUFFIXES = (".json", ".json.gz")


def scenario_files(paths: list[Path]) -> list[Path]:
    """List the scenario files among the paths, folders searched, each once and in order.

    Raises:
        ConformanceError: a path does not exist, or no file was found.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(sorted(p for p in path.rglob("*") if p.name.endswith(_SUFFIXES))))
        elif path.exists():
            found[path] = None
        else:
            raise ConformanceError(f"{path}: no such file or folder; give recorded .json or .json.gz files")
    if not found:
        names = ", ".join(map(str, paths))
        raise ConformanceError(f"{names}: holds no .json or .json.gz file of recorded scenarios")
    return list(found)


def _load(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise ConformanceError(f"{path}: not a readable JSON file of scenarios ({error})") from None
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise ConformanceError(f"{path}: found {type(data).__name__}; must be a JSON list of scenarios")
    return data


def check_file(path: Path) -> Iterator[tuple[str, Difference | None]]:
    """Replay the scenarios of one file, yielding each one's name and first difference.

    Raises:
        ConformanceError: the file is not a list of scenarios in the recorded format.
    """
    for number, scenario in enumerate(_load(path)):
        name = str(scenario.get("id", number))
        try:
            difference = compare(scenario)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConformanceError(
                f"{path}: scenario {name} does not follow the format ({type(error).__name__}: {error})"
            ) from None
        yield name, difference
