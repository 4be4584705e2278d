"""Sweep scenario fields: a tidy table of cells and a summary with intervals."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from simcluster.experiment.cells import CellResult
from simcluster.experiment.executors import Outcome
from simcluster.experiment.plan import Place, Plan, Runner, first_error, new_generator
from simcluster.report.comparison import METRICS, metric_value
from simcluster.report.statistics import mean_interval

__all__ = ["cells_table", "summary_rows", "sweep", "tidy_table"]


def sweep(plan: Plan, seeds: Sequence[int], runner: Runner) -> dict[Place, Outcome]:
    """Run every policy at every point and seed.

    Raises:
        ConfigError: no cell has a result.
    """
    outcomes = runner.run(plan.cells(seeds))
    error = first_error(outcomes)
    if error is not None:
        raise error
    return outcomes


def _labels(plan: Plan, place: Place) -> dict[str, Any]:
    point = plan.points[place.point]
    return {"point": place.point, **point.fields, "rate_rps": point.rate_rps, "policy": place.policy}


def cells_table(plan: Plan, outcomes: Mapping[Place, Outcome]) -> pa.Table:
    """Return one row per point, policy and seed: what was set, then the whole summary under dotted names.

    A cell that failed has its reason in `error` and nulls otherwise.
    """
    rows = []
    for place, outcome in outcomes.items():
        row = _labels(plan, place) | {"seed": place.seed}
        if isinstance(outcome, CellResult):
            row |= {"error": None, **_flat(outcome.summary)}
        else:
            row["error"] = outcome.message
        rows.append(row)
    return tidy_table(rows)


def summary_rows(plan: Plan, outcomes: Mapping[Place, Outcome]) -> list[dict[str, Any]]:
    """Return one row per point and policy: number of seeds, and the mean of each metric with its interval."""
    groups: dict[tuple[int, str], list[CellResult]] = {}
    for place, outcome in outcomes.items():
        group = groups.setdefault((place.point, place.policy), [])
        if isinstance(outcome, CellResult):
            group.append(outcome)
    rows = []
    for (number, policy), results in groups.items():
        row = _labels(plan, Place(number, 0, policy)) | {"seeds": len(results)}
        for name, metric in METRICS.items():
            found = [metric_value(each.summary, metric) for each in results]
            values = np.array([value for value in found if value is not None], dtype=np.float64)
            interval = mean_interval(values, new_generator())
            row[name] = float(values.mean()) if len(values) else None
            row[f"{name}_low"], row[f"{name}_high"] = interval or (None, None)
        for name in ("rejected", "failed", "unfinished"):
            counts = [each.summary["requests"][name] for each in results]
            row[name] = sum(counts) / len(counts) if counts else None
        rows.append(row)
    return rows


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Write nested keys as `ttft_s.p99`, and lists by their places."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, each in items:
        flat |= _flat(each, f"{prefix}.{key}" if prefix else str(key))
    return flat


def tidy_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table: every key a column, in order of first appearance; whole numbers stay whole.

    A column of mixed kinds, such as null, text and lists, is text: JSON where it is no string.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool} or kinds <= {int} or kinds <= {str}:
        return pa.array(values, {bool: pa.bool_(), int: pa.int64()}.get(next(iter(kinds), str), pa.string()))
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])
