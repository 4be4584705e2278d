"""How users write a policy down, and how its parameters are read.

    NAME                              shortest_queue
    NAME:key=value,...                power_of_two:load=tokens,d=3
    WRAPPER(POLICY,key=value,...)     epsilon(shortest_queue,p=0.1)   admission(sfs)

NAME is a built-in policy, `file.py:Class`, `module:Class` or an entry point. Inside parentheses everything behind a
colon belongs to the inner policy; the wrapper's own parameters then follow the parenthesis, as in
`epsilon(power_of_two:load=tokens):p=0.1`.
"""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from simcluster.errors import ConfigError

__all__ = [
    "PolicyName",
    "arguments",
    "base_policy",
    "folder_names",
    "located",
    "parameters",
    "parse",
    "split_list",
    "suggestion",
]


@dataclass(frozen=True, slots=True)
class PolicyName:
    """A policy as written, taken apart.

    Attributes:
        text: as written.
        base: the policy's or wrapper's own name.
        given: its parameters, as text.
        inner: the policy inside a wrapper, or None.
    """

    text: str
    base: str
    given: dict[str, str]
    inner: "PolicyName | None"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return what a misspelt name may have meant, or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"


def _outside(text: str, symbol: str) -> list[int]:
    """Return where a symbol stands outside of parentheses."""
    depth, places = 0, []
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == symbol and depth == 0:
            places.append(at)
    return places


def _balanced(text: str) -> bool:
    depths = list(accumulate(((letter == "(") - (letter == ")") for letter in text), initial=0))
    return min(depths) == depths[-1] == 0


def _behind_colon(text: str) -> tuple[str, str]:
    """Split `POLICY:key=value,...` into the policy and its parameters."""
    colons = _outside(text, ":")
    if colons and "=" in text[colons[-1] :]:
        return text[: colons[-1]], text[colons[-1] + 1 :]
    return text, ""


def parse(text: str) -> PolicyName:
    """Take a policy's text apart.

    Raises:
        ConfigError: parentheses or parameters are malformed.
    """
    text = text.strip()
    head, tail = _behind_colon(text)
    if "(" not in head and ")" not in head:
        return PolicyName(text, head.strip(), _pairs(tail, text), None)
    base, _, inside = head.strip().partition("(")
    if not inside.endswith(")") or not _balanced(inside[:-1]):
        raise ConfigError(f"policy {text!r}: parentheses do not match; write WRAPPER(POLICY) or POLICY:key=value")
    inside = inside[:-1].strip()
    first = inside[: min([*_outside(inside, ","), len(inside)])]
    if _behind_colon(first)[1]:  # all that follows belongs to the inner policy
        own, inner = "", inside
    elif "=" in first and "(" not in first and ":" not in first:
        own, inner = inside, ""
    else:
        own, inner = inside[len(first) + 1 :], first
    return PolicyName(text, base.strip(), _pairs(f"{own},{tail}", text), parse(inner) if inner.strip() else None)


def _pairs(text: str, whole: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not (key.isidentifier() and equals and value):
            raise ConfigError(f"policy {whole!r}: found {piece!r}; parameters are key=value, separated by commas")
        if key in given:
            raise ConfigError(f"policy {whole!r}: {key} is given twice")
        given[key] = value
    return given


def split_list(text: str) -> list[str]:
    """Split a list of policies at its commas; one that is named twice is one.

    A comma inside parentheses belongs to a policy, and so does one before `key=value`:
    `sfs,power_of_two:load=tokens,d=3,admission(sfs)` are three policies.
    """
    ends = [*_outside(text, ","), len(text)]
    pieces = [text[start:end].strip() for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    policies: list[str] = []
    for piece in filter(None, pieces):
        if policies and re.match(r"\w+\s*=", piece):
            policies[-1] += f",{piece}"
        else:
            policies.append(piece)
    return list(dict.fromkeys(policies))


def base_policy(text: str) -> str:
    """Return the name of the policy inside all wrappers, without parameters."""
    name = parse(text)
    while name.inner is not None:
        name = name.inner
    return name.base


def located(text: str, beside: Path) -> str:
    """Let a policy in a file be found beside the scenario that names it, if it is not in the current folder."""
    base = base_policy(text)
    file = base.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file() and (beside / file).is_file():
        return text.replace(base, f"{beside / base}")
    return text


def folder_names(policies: Iterable[str]) -> dict[str, str]:
    """Return a folder name for each policy: letters, digits and `._=,+-`, all different."""
    names: dict[str, str] = {}
    for text in policies:
        base = base_policy(text)
        short = text.replace(base, Path(base).name) if "/" in base else text
        safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", short).strip("_.")[:100] or "policy"
        number, name = 1, safe
        while name in names.values():
            number += 1
            name = f"{safe}-{number}"
        names[text] = name
    return names


# Parameters


def parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what users can set of a policy: the parameters of its constructor that have defaults."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # an annotation that only a type checker can resolve
        signature = inspect.signature(factory)
    return {name: p for name, p in signature.parameters.items() if p.default is not p.empty and name != "settings"}


def arguments(factory: Callable[..., Any], name: PolicyName, kind: str = "policy") -> dict[str, Any]:
    """Read the parameters that a user gave.

    Raises:
        ConfigError: the policy has no such parameter, or the value is of another kind.
    """
    known = parameters(factory)
    found = {}
    for key, text in name.given.items():
        if key not in known:
            raise ConfigError(f"{kind} {name.text!r}: {name.base} has no parameter {key!r}; {suggestion(key, known)}")
        try:
            found[key] = _value(text, known[key])
        except ValueError as error:
            raise ConfigError(f"{kind} {name.text!r}: {key} = {text}; must be {error}") from None
    return found


def _value(text: str, parameter: inspect.Parameter) -> Any:
    """Read one value; the error's text is what is allowed."""
    kind = type(parameter.default) if parameter.annotation is parameter.empty else parameter.annotation
    if get_origin(kind) is Literal:
        options = [str(option) for option in get_args(kind)]
        if text not in options:
            raise ValueError(f"one of {', '.join(options)}")
        return get_args(kind)[options.index(text)]
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("true or false")
        return text == "true"
    if kind is int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError("a whole number")
        return int(text)
    if kind is float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError("a number")
        return value
    return text
