"""One clear line for what pydantic finds wrong in a file that a person wrote."""

import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["explain", "join_path", "one_line", "shown"]

Location = tuple[int | str, ...]


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Say what is wrong in one line: where, what was found, what is allowed, the fix; and how many more.

    Args:
        error: what validation raised.
        model: the model of the whole file, to suggest names for unknown keys.
    """
    details = error.errors(include_url=False)
    first = details[0]
    location = tuple(part for part in first["loc"] if not _is_branch(part))
    where = join_path(location)
    match first["type"]:
        case "json_invalid":
            reason = str(first.get("ctx", {}).get("error", first["msg"]))
            line = f"not valid JSON ({one_line(reason)}); correct the file"
        case "value_error":
            text = str(first["ctx"]["error"])
            line = f"{where}: {text}" if location else text
        case "missing":
            line = f"{where} is missing; it is required; add it"
        case "extra_forbidden":
            line = f"{where} = {shown(first['input'])}; unknown key; {_suggestion(location, model)}"
        case _:
            allowed = first["msg"].replace("Input should be ", "must be ")
            line = f"{where} = {shown(first['input'])}; {allowed}; correct the value"
    more = len(details) - 1
    return one_line(line) + (f" (and {more} more)" if more else "")


def _is_branch(part: int | str) -> bool:
    """Tell the markers that pydantic puts into a path for unions, keys and validators from real keys."""
    return isinstance(part, str) and (
        part == "[key]" or "[" in part or part in {"float", "int", "str", "bool", "NoneType"}
    )


def join_path(location: Location) -> str:
    """Write a location as `cluster.instances[2].engine`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else str(part)
    return path or "the file"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Find the model inside an annotation such as `tuple[Instance, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.GenericAlias | types.UnionType) or typing.get_origin(annotation):
        for argument in typing.get_args(annotation):
            found = _model_in(argument)
            if found is not None:
                return found
    return None


def _suggestion(location: Location, model: type[BaseModel]) -> str:
    owner: type[BaseModel] | None = model
    for part in location[:-1]:
        if isinstance(part, int) or owner is None:
            continue
        field = owner.model_fields.get(part)
        owner = _model_in(field.annotation) if field is not None else owner
    names = sorted(owner.model_fields) if owner is not None else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"allowed here: {', '.join(names)}" if names else "remove it"


def shown(value: Any) -> str:
    """Write a value so that it fits in a line."""
    text = one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(text: str) -> str:
    """Put a text on one line."""
    return " ".join(text.split())
