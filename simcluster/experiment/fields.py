"""Scenario fields by their dotted path: `routing.refresh_interval_s`, `cluster.instances[0].replicas`."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import BaseModel, ValidationError

from simcluster.errors import ConfigError
from simcluster.scenario import NO_RECIPE, Scenario
from simcluster.validation import explain, models_in
from simcluster.yaml_files import parse_yaml

__all__ = ["Axis", "combine", "parse_axis", "with_fields"]

_ELSEWHERE = {"seed": "--seeds and --seed", "routing.policies": "--policies or -p"}
_REPLACES = {
    "workload.trace": {f"workload.{name}": value for name, value in NO_RECIPE.items()},
    "workload.recipe": {"workload.trace": None},
}


@dataclass(frozen=True, slots=True)
class Axis:
    """A field and the values that it takes.

    Attributes:
        path: dotted path; `[*]` stands for every element of a list.
        values: plain data.
    """

    path: str
    values: tuple[Any, ...]


def parse_axis(text: str, scenario: Scenario) -> Axis:
    """Read `FIELD=VALUE,VALUE,...`; values are written as in a scenario file.

    Args:
        text: as written; commas inside brackets, braces or quotes belong to a value.
        scenario: the scenario whose field it is.

    Raises:
        ConfigError: there is no such field, or no value.
    """
    path, equals, values = (part.strip() for part in text.partition("="))
    if not (path and equals and values):
        raise ConfigError(f"--set {text!r}: must be FIELD=VALUE,VALUE,..., as in routing.refresh_interval_s=0,0.05")
    if path in _ELSEWHERE:
        raise ConfigError(f"--set {path}: is set by {_ELSEWHERE[path]}")
    _check_path(path, scenario)
    return Axis(path, tuple(parse_yaml(piece, f"--set {path}") for piece in _pieces(values)))


def combine(axes: list[Axis], *, zipped: bool) -> list[dict[str, Any]]:
    """Return the points of a sweep: every combination of values, or the first of each, the second of each, ...

    Raises:
        ConfigError: a field is given twice, or zipped fields have different numbers of values.
    """
    paths = [axis.path for axis in axes]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"--set {path}: is given twice; give all its values at once")
    sizes = {axis.path: len(axis.values) for axis in axes}
    if zipped and len(set(sizes.values())) > 1:
        found = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise ConfigError(f"--zip: {found} values; must be equally many")
    rows = zip(*(axis.values for axis in axes), strict=True) if zipped else product(*(axis.values for axis in axes))
    return [dict(zip(paths, row, strict=True)) for row in rows] if axes else [{}]


def with_fields(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    """Return a scenario with some fields replaced, under the rules of scenario files.

    Raises:
        ConfigError: there is no such field, or a value is not allowed; one line.
    """
    data = scenario.model_dump()
    for path, value in values.items():
        _check_path(path, scenario)
        for concrete in _expand(path, data):
            _assign(data, concrete, value)
        for other, without in _REPLACES.get(path, {}).items() if value is not None else ():
            if other not in values:
                _assign(data, other, without)
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        given = ", ".join(f"{path}={value}" for path, value in values.items())
        raise ConfigError(f"--set {given}: {explain(error, Scenario)}") from None


# ---- paths -------------------------------------------------------------------------------------------------------


def _keys(path: str) -> list[str | int]:
    """Take `a.b[2].c` apart."""
    return [int(name[1:-1]) if name[0] == "[" else name for name in re.findall(r"\[\d+\]|[^.\[\]]+", path)]


def _check_path(path: str, scenario: Scenario) -> None:
    data = scenario.model_dump()
    known = list(_known_paths(Scenario, data, ""))
    if _expand(path, data) and set(_expand(path, data)) <= set(known):
        return
    same_end = [each for each in known if each.endswith(f".{path}")]
    near = same_end[:1] or difflib.get_close_matches(path, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "see `simcluster scenario show`"
    raise ConfigError(f"--set {path}: the scenario has no such field; {hint}")


def _known_paths(model: type[BaseModel], data: Any, prefix: str) -> Iterator[str]:
    """Yield every path that a scenario has, inside of what is null too."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        value = data.get(name) if isinstance(data, dict) else None
        yield path
        for inner in models_in(field.annotation):
            if isinstance(value, list):
                for number, item in enumerate(value):
                    yield f"{path}[{number}]"
                    yield from _known_paths(inner, item, f"{path}[{number}].")
            else:
                yield from _known_paths(inner, value, f"{path}.")


def _expand(path: str, data: Any) -> list[str]:
    """Replace `[*]` by every index."""
    head, star, tail = path.partition("[*]")
    if not star:
        return [path]
    items = data
    for key in _keys(head):
        items = items[key] if isinstance(key, int) else items.get(key) if isinstance(items, dict) else None
    number = len(items) if isinstance(items, list) else 0
    return [each for k in range(number) for each in _expand(f"{head}[{k}]{tail}", data)]


def _assign(data: Any, path: str, value: Any) -> None:
    """Set a known path; what is null on the way becomes a mapping."""
    *way, last = _keys(path)
    for key in way:
        if data[key] is None:
            data[key] = {}
        data = data[key]
    data[last] = value


def _pieces(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets, braces and quotes."""
    depth, quote, start = 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        else:
            depth += (letter in "[{(") - (letter in "]})")
    yield text[start:]
