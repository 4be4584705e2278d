"""Data files that come with the package: calibration cards, traces, scenarios."""

import difflib
from importlib.resources import files
from pathlib import Path

from simcluster.errors import ConfigError

__all__ = ["find_file", "shipped_names"]


def _room(room: str) -> Path:
    """Return the folder of shipped files; the build installs it beside the compiled module."""
    return Path(str(files("simcluster").joinpath("data").joinpath(room)))


def shipped_names(room: str, suffix: str) -> list[str]:
    """List what is shipped in a room (`calibration`, `traces`, `scenarios`), without the suffix."""
    folder = _room(room)
    if not folder.is_dir():
        return []
    return sorted(str(path.relative_to(folder)).removesuffix(suffix) for path in folder.rglob(f"*{suffix}"))


def find_file(name: str, room: str, suffix: str, beside: Path | None = None, where: str = "") -> Path:
    """Find a file by path, beside another file, or among the shipped ones by name.

    Args:
        name: a path, or the name of a shipped file with or without its suffix.
        room: where shipped files of this kind are.
        suffix: `.yaml`, `.json` or `.parquet`.
        beside: folder that relative paths are also looked up in.
        where: who names the file, for messages.

    Raises:
        ConfigError: nothing was found; the message lists what is shipped.
    """
    path = Path(name)
    candidates = [path] if beside is None or path.is_absolute() else [beside / path, path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    stem = name.removesuffix(suffix)
    shipped = shipped_names(room, suffix)
    if stem in shipped:
        return _room(room) / f"{stem}{suffix}"
    found = f"{where} = {name!r};" if where else f"{name}:"
    for candidate in candidates:
        if candidate.is_dir():
            raise ConfigError(f"{found} is a folder; give a {suffix} file")
    near = difflib.get_close_matches(stem, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped: {', '.join(shipped) or 'none'}"
    raise ConfigError(f"{found} no such file and no shipped one of that name; {hint}")
