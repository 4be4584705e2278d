"""Policies of users: found in a file, a module or an entry point, and asked with their answers checked."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import operator
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from simcluster.errors import ConfigError, PolicyError
from simcluster.request import FloatArray, Request
from simcluster.routers.base import SHED, ClusterView, Decision
from simcluster.routers.names import suggestion
from simcluster.routers.settings import RouterSettings

__all__ = ["ENTRY_POINTS", "UserPolicy", "entry_point_names", "load_class", "takes_settings"]

ENTRY_POINTS = "simcluster.policies"


def entry_point_names() -> list[str]:
    """Return the names of the policies that installed packages offer."""
    return sorted(point.name for point in entry_points(group=ENTRY_POINTS))


def load_class(name: str) -> Callable[..., Any] | None:
    """Find a user's policy.

    Args:
        name: `file.py:Class`, `module:Class` or the name of an entry point.

    Returns:
        The class, or None if the name is neither written like one nor an entry point.

    Raises:
        ConfigError: the file, module or class cannot be loaded.
    """
    place, colon, class_name = name.rpartition(":")
    if name.endswith(".py"):
        raise ConfigError(f"policy {name!r}: name the class too, as in {name}:MyRouter")
    if colon:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        found = getattr(module, class_name, None)
        if found is None:
            classes = [key for key, value in vars(module).items() if hasattr(value, "route")]
            raise ConfigError(f"policy {name!r}: {place} has no {class_name!r}; {suggestion(class_name, classes)}")
    else:
        points = entry_points(group=ENTRY_POINTS, name=name)
        if not points:
            return None
        found = _loading(name, next(iter(points)).load)
    if not callable(found) or not hasattr(found, "route"):
        raise ConfigError(f"policy {name!r}: has no route(request, view); give a class that has")
    loaded: Callable[..., Any] = found
    return loaded


def _loading(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"policy: {name} cannot be loaded: {_said(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"policy: {path}: no such file; give its path from the current folder")
    where = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"simcluster_policy_{where}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        _loading(str(path), functools.partial(spec.loader.exec_module, module))
    except ConfigError:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        module: ModuleType = _loading(name, functools.partial(importlib.import_module, name))
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
    return module


def takes_settings(factory: Callable[..., Any]) -> bool:
    """Whether a user's class wants the router's settings: its first parameter has no default or is so named."""
    try:
        given = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (positional[0].default is inspect.Parameter.empty or positional[0].name == "settings")


def _said(error: BaseException) -> str:
    """Return an exception in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename or '').name}:{error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


class UserPolicy:
    """A user's policy behind the contract of a router: anything but a fitting answer is an error in one line."""

    def __init__(self, factory: Callable[..., Any], name: str, settings: RouterSettings, given: dict[str, Any]) -> None:
        self._name = name
        self._count = settings.num_instances
        try:
            self._inner = factory(settings, **given) if takes_settings(factory) else factory(**given)
        except Exception as error:
            raise PolicyError(f"policy {name}: cannot be built: {_said(error)}") from error
        self._route = self._inner.route

    @property
    def needs_view(self) -> bool:
        """Whether it looks at what instances publish; yes, unless it says no."""
        return bool(getattr(self._inner, "needs_view", True))

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Ask the user's policy.

        Raises:
            PolicyError: it raised an exception, or its answer is no instance.
        """
        try:
            answer = self._route(request, view)
        except Exception as error:
            self._fail(request.index, f"route raised {_said(error)}", error)
        if not isinstance(answer, Decision):
            answer = Decision(self._instance(answer, request.index))
        elif answer.instance != SHED:
            answer.instance = self._instance(answer.instance, request.index)
        answer.score = self._column("score", answer.score, request.index)
        answer.predicted_ttft_s = self._column("predicted_ttft_s", answer.predicted_ttft_s, request.index)
        return answer

    def _instance(self, answer: Any, request: int) -> int:
        try:
            chosen = operator.index(answer)
        except TypeError:
            chosen = -1
        if isinstance(answer, bool | np.bool_) or not 0 <= chosen < self._count:
            allowed = f"an instance from 0 to {self._count - 1}" if self._count > 1 else "instance 0"
            self._fail(request, f"route returned {answer!r:.80}; must be {allowed}, or a Decision")
        return chosen

    def _column(self, name: str, values: Any, request: int) -> FloatArray | None:
        if values is None:
            return None
        try:
            column: FloatArray = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            column = np.empty(0)
        if column.shape != (self._count,):
            self._fail(request, f"{name} of its decision is {values!r:.80}; must be {self._count} numbers or None")
        return column

    def _report(self) -> dict[str, Any]:
        """Ask the user's policy what it tells about the run; it must be what JSON can hold."""
        try:
            found = self._inner.report()
            told: Any = json.loads(json.dumps(found, allow_nan=False))
        except Exception as error:
            raise PolicyError(f"policy {self._name}: report failed: {_said(error)}") from error
        if not isinstance(told, dict):
            raise PolicyError(f"policy {self._name}: report returned {found!r:.80}; must be a dict for the summary")
        return told

    def _fail(self, request: int, what: str, error: Exception | None = None) -> NoReturn:
        raise PolicyError(f"policy {self._name}: request {request}: {what}") from error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "report":
            getattr(self._inner, name)  # an AttributeError if it has none
            return self._report
        if not name.startswith("observe_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        method = getattr(self._inner, name)

        def observe(request: Request | int, *rest: Any) -> None:
            try:
                method(request, *rest)
            except Exception as error:
                index = request.index if isinstance(request, Request) else request
                self._fail(index, f"{name} raised {_said(error)}", error)

        return observe
