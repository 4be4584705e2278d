"""One clear line for what pydantic finds wrong in a file that a person wrote."""

import difflib
import reprlib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["explain", "join_path", "models_in", "one_line", "shown"]

Location = tuple[int | str, ...]


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Say what is wrong in one line: where, what was found, what is allowed, the fix; and how many more.

    Args:
        error: what validation raised.
        model: the model of the whole file, to suggest names for unknown keys.
    """
    details = error.errors(include_url=False)
    first = details[0]
    location, owner = _walk(first["loc"], first["type"], model)
    where = join_path(location)
    # One for each branch of a union.
    same = [each for each in details if _walk(each["loc"], each["type"], model)[0] == location]
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
            line = f"{where} = {shown(first['input'])}; unknown key; {_suggestion(location, owner)}"
        case "union_tag_invalid":
            context = first["ctx"]
            key = join_path((*location, context["discriminator"].strip("'")))
            line = f"{key} = {shown(context['tag'])}; must be one of {context['expected_tags']}; correct the value"
        case "union_tag_not_found":
            key = join_path((*location, first["ctx"]["discriminator"].strip("'")))
            line = f"{key} is missing; it is required; add it"
        case _:
            allowed = " or ".join(
                "a mapping" if each["type"] == "model_type" else each["msg"].removeprefix("Input should be ")
                for each in same
            )
            must = "must be " if first["msg"].startswith("Input should be ") else ""
            line = f"{where} = {shown(first['input'])}; {must}{allowed}; correct the value"
    more = len(details) - len(same)
    return one_line(line) + (f" (and {more} more)" if more else "")


def _is_branch(part: int | str) -> bool:
    """Tell the markers that pydantic puts into a path for unions, keys and validators from real keys."""
    return isinstance(part, str) and (
        part == "[key]"
        or "[" in part
        or part.removeprefix("constrained-") in {"float", "int", "str", "bool", "NoneType"}
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


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Find the models inside an annotation such as `tuple[Instance, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.GenericAlias | types.UnionType) or typing.get_origin(annotation):
        return [model for argument in typing.get_args(annotation) for model in models_in(argument)]
    return []


def _walk(location: Location, kind: str, model: type[BaseModel]) -> tuple[Location, type[BaseModel] | None]:
    """Return a location without pydantic's markers of union branches, and the model that its last key is in.

    Args:
        location: where an error is.
        kind: its type; an unknown key is one of the file, whatever it looks like.
        model: the model of the whole file.
    """
    last = len(location) - 1 if kind == "extra_forbidden" else None
    clean: list[int | str] = []
    owner: type[BaseModel] | None = model
    models = [model]
    for place, part in enumerate(location):
        if _is_branch(part) and place != last:
            continue
        branch = [each for each in models if part in _tags(each)] if len(models) > 1 else []
        if branch:
            models = branch
            continue
        clean.append(part)
        owner = models[0] if models else None
        field = owner.model_fields.get(part) if owner is not None and isinstance(part, str) else None
        if field is not None:
            models = models_in(field.annotation)
    return tuple(clean), owner


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    """Return what a model of a tagged union allows as its `kind`."""
    field = model.model_fields.get("kind")
    return typing.get_args(field.annotation) if field is not None else ()


def _suggestion(location: Location, owner: type[BaseModel] | None) -> str:
    names = sorted(owner.model_fields) if owner is not None else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"allowed here: {', '.join(names)}" if names else "remove it"


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < 10**80 else "a huge number"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def shown(value: Any) -> str:
    """Write a value so that it fits in a line; neither a huge number nor lists within lists take long."""
    text = one_line(_SHORT.repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(text: str) -> str:
    """Put a text on one line."""
    return " ".join(text.split())
