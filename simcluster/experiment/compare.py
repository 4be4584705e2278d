"""Compare policies: paired runs over seeds or over one trace, and what they show."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simcluster.errors import ConfigError
from simcluster.experiment.cells import CellResult
from simcluster.experiment.executors import Outcome
from simcluster.experiment.plan import Place, Plan, Runner, first_error, new_generator
from simcluster.report.comparison import METRICS, Metric, area_comparison, load_comparison, metric_value
from simcluster.report.paired import BlockValues, SeedValues, Values
from simcluster.report.request_values import MEANS, QUANTILES
from simcluster.report.statistics import (
    FloatArray,
    block_means,
    block_quantiles,
    block_starts,
    memory,
)

__all__ = ["Blocks", "Rules", "compare"]

_FEWEST_BLOCKS = 10


@dataclass(frozen=True, slots=True)
class Rules:
    """How a comparison is decided.

    Attributes:
        metric: what verdicts and winners are about.
        reference: the policy that others are compared with; `best`: the best at each rate.
        until_width: add seeds until no interval of a difference is wider, or None.
        max_seeds: but never more than this.
        block_requests: length of a trace's blocks; None: chosen.
    """

    metric: Metric
    reference: str
    until_width: float | None = None
    max_seeds: int = 100
    block_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one trace was cut.

    Attributes:
        length: requests per block.
        num_requests: requests of the trace.
        memory: for how many requests it can be felt what happened to one, by policy; the longest of all rates.
    """

    length: int
    num_requests: int
    memory: dict[str, int]

    @property
    def text(self) -> str:
        """The blocks, for people."""
        text = f"blocks of {self.length:,} of {self.num_requests:,} requests"
        longer = [f"{policy} ({number:,})" for policy, number in self.memory.items() if number > self.length]
        if not longer:
            return f"{text}, longer than any backlog or 99 of 100 answers last ({max(self.memory.values()):,})"
        return (
            f"{text}; backlogs or answers last longer than a block under {', '.join(longer)}: intervals with these are "
            "too narrow, by far where that is most of the trace"
        )


def compare(plan: Plan, seeds: Sequence[int], runner: Runner, rules: Rules) -> dict[str, Any]:
    """Run every policy at every point and seed and compare them.

    Args:
        plan: points, one per rate, and policies.
        seeds: seeds to begin with.
        runner: runs the cells.
        rules: how to decide.

    Returns:
        Plain data, see docs/compare.md.

    Raises:
        ConfigError: no cell has a result.
    """
    seeds = list(seeds)
    looks: list[int] = []
    while True:
        outcomes = runner.run(plan.cells(seeds))
        error = first_error(outcomes)
        if error is not None:
            raise error
        result = _compare(plan, outcomes, rules)
        looks.append(len(seeds))
        width = _widest(result, rules.metric)
        if rules.until_width is None or width <= rules.until_width or len(seeds) >= rules.max_seeds:
            break
        more = min(max(2, len(seeds) // 4), rules.max_seeds - len(seeds))
        seeds.extend(range(seeds[-1] + 1, seeds[-1] + 1 + more))
    stopping = None
    if rules.until_width is not None:
        reached = width if math.isfinite(width) else None
        stopping = {"until_width": rules.until_width, "looks_at_seeds": looks, "widest_interval": reached}
    return {"seeds": seeds, "stopping": stopping, **result, **_cells(plan, outcomes)}


def _widest(result: Mapping[str, Any], metric: Metric) -> float:
    """Return the width of the widest interval of a difference in the metric; infinite where one is missing."""
    widths = [0.0]
    for load in result["loads"]:
        for pair in load["pairs"]:
            interval = pair["metrics"].get(metric.name, {}).get("interval")
            widths.append(math.inf if interval is None else interval[1] - interval[0])
    return max(widths)


def _compare(plan: Plan, outcomes: Mapping[Place, Outcome], rules: Rules) -> dict[str, Any]:
    results = {place: each for place, each in outcomes.items() if isinstance(each, CellResult)}
    blocks = _choose_blocks(results, rules.block_requests) if plan.keep_requests else None
    starts = None if blocks is None else block_starts(blocks.num_requests, blocks.length, new_generator())
    loads, values_by_load = [], []
    needs_truth = sorted({place.policy for place, each in results.items() if each.summary["needs_truth"]})
    for number, point in enumerate(plan.points):
        values: dict[str, dict[str, Values | None]] = {}
        for policy in plan.policies:
            mine = {p.seed: each for p, each in results.items() if (p.point, p.policy) == (number, policy)}
            if mine:
                values[policy] = (
                    _seed_values(mine) if blocks is None or starts is None else _block_values(mine, starts, blocks)
                )
        loads.append(
            {
                "rate_rps": point.rate_rps,
                "rate_scale": point.scenario.workload.rate_scale,
                "lost": _lost(results, number, plan.policies),
                **load_comparison(values, rules.reference, rules.metric, needs_truth, is_one_trace=plan.keep_requests),
            }
        )
        values_by_load.append(values)
    rates = [point.rate_rps for point in plan.points if point.rate_rps is not None]
    area = None
    if len(rates) == len(plan.points):
        area = area_comparison(
            values_by_load, rates, rules.reference, rules.metric, needs_truth, is_one_trace=plan.keep_requests
        )
    return {
        "metric": rules.metric.name,
        "reference": rules.reference,
        "policies": list(plan.policies),
        "needs_truth": needs_truth,
        "loads": loads,
        "area": area,
        "blocks": None if blocks is None else asdict(blocks) | {"text": blocks.text},
    }


def _lost(results: Mapping[Place, CellResult], number: int, policies: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return how many requests per run did not finish, by policy and what became of them."""
    lost = {}
    for policy in policies:
        counts = [
            each.summary["requests"] | {"not_submitted": each.summary["not_submitted"]}
            for place, each in results.items()
            if (place.point, place.policy) == (number, policy)
        ]
        if counts:
            names = ("rejected", "failed", "unfinished", "not_submitted")
            lost[policy] = {name: sum(count[name] for count in counts) / len(counts) for name in names}
    return lost


def _seed_values(results: Mapping[int, CellResult]) -> dict[str, Values | None]:
    values: dict[str, Values | None] = {}
    for name, metric in METRICS.items():
        found = {seed: metric_value(each.summary, metric) for seed, each in results.items()}
        known = {seed: value for seed, value in found.items() if value is not None}
        values[name] = SeedValues(known, new_generator) if known else None
    return values


def _cells(plan: Plan, outcomes: Mapping[Place, Outcome]) -> dict[str, Any]:
    """Return every cell with its whole summary, and what is to be said about all of them."""
    cells: list[dict[str, Any]] = []
    notes: dict[str, dict[str, None]] = {"assumptions": {}, "warnings": {}, "trace_notes": {}}
    failures = []
    for place, outcome in outcomes.items():
        point = plan.points[place.point]
        cell = {"rate_rps": point.rate_rps, "seed": place.seed, "policy": place.policy}
        if isinstance(outcome, CellResult):
            cells.append(cell | {"summary": outcome.summary})
            for kind, lines in outcome.notes.items():
                notes[kind] |= dict.fromkeys(lines)
        else:
            failures.append(cell | {"error": outcome.message})
    return {"cells": cells, "failures": failures, **{kind: list(lines) for kind, lines in notes.items()}}


# ---- one trace ---------------------------------------------------------------------------------------------------


def _columns(result: CellResult) -> dict[str, FloatArray]:
    assert result.requests is not None  # kept, as the plan asks
    return {name: result.requests[name].to_numpy() for name in result.requests.column_names}


def _choose_blocks(results: Mapping[Place, CellResult], wanted: int | None) -> Blocks:
    """Choose blocks as long as anything lasts, unless fewer than ten would fit."""
    lasting: dict[str, int] = {}
    n = 0
    for place, each in results.items():
        columns = _columns(each)
        n = len(columns["arrival_ns"])
        sent = columns["arrival_ns"] >= 0
        names = ("arrival_ns", "scheduled_ns", "end_ns", "instance")
        found = memory(*(columns[name][sent].astype(np.int64) for name in names))
        lasting[place.policy] = max(lasting.get(place.policy, 0), found)
    if n < 2 * (wanted or 1):
        raise ConfigError(f"--block-requests = {wanted or 1}; at least two blocks must fit into the {n} requests")
    shortest = math.ceil(n ** (1 / 3))
    chosen = wanted or max(1, min(max(shortest, *lasting.values()), n // _FEWEST_BLOCKS))
    return Blocks(chosen, n, lasting)


def _block_values(
    results: Mapping[int, CellResult], starts: np.typing.NDArray[np.int64], blocks: Blocks
) -> dict[str, Values | None]:
    """Return the metrics of one policy and those of every resample of the trace, means over the seeds."""
    sums: dict[str, FloatArray] = {}
    for each in results.values():
        for name, replicates in _replicates(_columns(each), starts, blocks.length):
            sums[name] = sums.get(name, 0.0) + replicates / len(results)
    values: dict[str, Values | None] = {}
    for name, metric in METRICS.items():
        found = [metric_value(each.summary, metric) for each in results.values()]
        known = [value for value in found if value is not None]
        is_known = len(known) == len(found) and not np.isnan(sums[name]).any()
        values[name] = (
            BlockValues(float(np.mean(known)), sums[name], blocks.num_requests // blocks.length) if is_known else None
        )
    return values


def _replicates(
    columns: Mapping[str, FloatArray], starts: np.typing.NDArray[np.int64], block: int
) -> Iterator[tuple[str, FloatArray]]:
    for name, column in MEANS.items():
        yield name, block_means(columns[column], starts, block)
    for name, (column, q) in QUANTILES.items():
        yield name, block_quantiles(columns[column], starts, block, q)
