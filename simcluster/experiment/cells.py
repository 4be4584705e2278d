"""Cells: one policy in one world, the unit that experiments run, store and resume by."""

import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

import simcluster
from simcluster import _native
from simcluster.errors import SimclusterError
from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.predict.beliefs import ROOM
from simcluster.report.metrics import Window
from simcluster.report.request_values import request_values
from simcluster.routers import POLICIES, base_policy
from simcluster.routers.user import load_class
from simcluster.scenario import Scenario
from simcluster.shipped import find_file
from simcluster.workload.recipe import load_recipe
from simcluster.world import World

__all__ = ["Cell", "CellFailure", "CellResult", "make_cell", "run_cell"]

_FORMAT = 1  # of stored results; raise it when their meaning changes
_WALL_TIMES = ("mean_decision_us",)  # measured by a clock, so no part of a result that must repeat


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy in one world.

    Attributes:
        scenario: everything that is fixed, seed and rate included.
        path: where the scenario was read.
        policy: who routes.
        keep_requests: whether the result holds values of single requests.
        key: hash of all that the result depends on.
    """

    scenario: Scenario
    path: Path
    policy: str
    keep_requests: bool
    key: str

    @property
    def name(self) -> str:
        """The cell, for people."""
        scale = self.scenario.workload.rate_scale
        return f"{self.policy}, seed {self.scenario.seed}, rate_scale {scale:g}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell computed.

    Attributes:
        summary: metrics as `run --json` prints them, without wall times.
        notes: assumptions, warnings and what the trace reader did, for people.
        requests: values of single requests, or None.
    """

    summary: dict[str, Any]
    notes: dict[str, list[str]]
    requests: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class CellFailure:
    """Why a cell has no result, in one line."""

    message: str


def make_cell(scenario: Scenario, path: Path, policy: str, *, keep_requests: bool = False) -> Cell:
    """Name a cell by the hash of everything that its result depends on.

    Raises:
        ConfigError: a file that the scenario names is missing.
    """
    data = scenario.resolved()
    data["routing"]["policies"] = [policy]
    depends = {
        "format": _FORMAT,
        "scenario": data,
        "inputs": _inputs(json.dumps(data | {"seed": 0}), path, policy),
        "code": _code_digest(),
        "keep_requests": keep_requests,
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return Cell(Scenario.model_validate_json(json.dumps(data)), path, policy, keep_requests, key)


def run_cell(cell: Cell) -> CellResult | CellFailure:
    """Run a cell; an error of the simulation is a result too."""
    world_data = cell.scenario.model_dump(mode="json")
    world_data["routing"]["policies"] = ["none"]  # a world does not depend on who routes
    try:
        world = _world(json.dumps(world_data), cell.path)
        run = run_policy(cell.scenario, world, cell.policy)
    except SimclusterError as error:
        return CellFailure(str(error))
    if run.summary["interrupted"]:
        return CellFailure("interrupted")
    summary = {name: value for name, value in run.summary.items() if name not in _WALL_TIMES}
    notes = {
        "assumptions": list(world.assumptions),
        "warnings": list(world.warnings),
        "trace_notes": list(world.notes),
    }
    requests = None
    if cell.keep_requests:
        table = pl.from_arrow(run.tables["requests"])
        assert isinstance(table, pl.DataFrame)
        window = Window(*run.summary["window_s"])
        requests = request_values(table, window, world.request_id.tolist(), cell.scenario.slo.tpot_s)
    return CellResult(json.loads(json.dumps(summary, allow_nan=False)), notes, requests)


@functools.lru_cache(maxsize=2)
def _world(scenario: str, path: Path) -> World:
    """Build a world once for all policies that meet it."""
    return build_world(Scenario.model_validate_json(scenario), path)


# ---- what a result depends on ------------------------------------------------------------------------------------


@functools.cache
def _file_digest(path: Path) -> str:
    """Return the hash of a file, or of the files in a folder; read once per command."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    return digest.hexdigest()


@functools.cache
def _code_digest() -> str:
    """Return the hash of the package: version, Python sources, native module."""
    package = Path(simcluster.__file__).parent
    digest = hashlib.sha256(simcluster.__version__.encode())
    for path in [*sorted(package.rglob("*.py")), Path(_native.__file__)]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def _inputs(data: str, path: Path, policy: str) -> dict[str, str]:
    """Return the hashes of all files that a cell reads, by the name that it knows them by; a seed reads no other."""
    scenario = Scenario.model_validate_json(data)
    return {name: _file_digest(file) for name, file in sorted(_input_files(scenario, path, policy))}


def _input_files(scenario: Scenario, path: Path, policy: str) -> Iterator[tuple[str, Path]]:
    workload, beside = scenario.workload, path.parent
    for number, item in enumerate(scenario.cluster.instances):
        where = f"{path}: cluster.instances[{number}].card"
        yield item.card, find_file(item.card, "calibration", ".json", beside, where)
    if workload.trace is not None:
        yield workload.trace, find_file(workload.trace, "traces", ".parquet", beside, f"{path}: workload.trace")
    if workload.recipe is not None:
        where = f"{path}: workload.recipe"
        recipe = find_file(workload.recipe, "traces/recipes", ".yaml", beside, where)
        yield workload.recipe, recipe
        yield from _recipe_files(recipe)
    for name in (scenario.routing.predictor, scenario.routing.tokenizer):
        if name not in ("means", None):
            yield name, find_file(name, ROOM, ".json", beside, f"{path}: routing")
    for text in _texts(scenario.resolved()):  # whatever else names a file
        for candidate in (beside / text, Path(text)):
            if len(text) < 1000 and candidate.is_file():
                yield text, candidate
                break
    base = base_policy(policy)
    file, _, _ = base.rpartition(":")
    if file.endswith(".py"):
        yield base, Path(file)
    elif base not in POLICIES and (found := load_class(base)) is not None:
        module = sys.modules.get(found.__module__)
        if module is not None and module.__file__ is not None:
            yield base, Path(module.__file__)


@functools.cache
def _recipe_files(path: Path) -> list[tuple[str, Path]]:
    """Return the files that a recipe names."""
    recipe = load_recipe(path)
    found = []
    for part in (recipe.arrivals, recipe.lengths):
        for field in ("file", "rates", "lengths"):
            name = getattr(part, field, None)
            if isinstance(name, str):
                found.append((name, recipe.find(name)))
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
