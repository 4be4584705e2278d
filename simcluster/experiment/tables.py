"""From what a run leaves behind to the tables of a run directory, chunk by chunk."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simcluster.backends.ledger import NEVER, STATUSES, DecisionRows, RequestRows
from simcluster.backends.predictions import Predictions
from simcluster.records import DECISIONS, ESTIMATES, INSTANCES, REQUESTS, TableWriter
from simcluster.request import FloatArray, IntArray
from simcluster.routers.base import SHED
from simcluster.units import PS_PER_NS, PS_PER_S
from simcluster.world import World

__all__ = ["TableRecorder"]

_FINISHED = STATUSES.index("finished")


def _ns(ps: IntArray) -> pa.Array:
    rounded = (ps + PS_PER_NS // 2) // PS_PER_NS
    return pa.array(rounded, mask=ps == NEVER)


def _seconds(ps: IntArray, missing: Any) -> pa.Array:
    return pa.array(ps / PS_PER_S, mask=missing)


def _numbers(values: FloatArray) -> pa.Array:
    """Return numbers; what is not finite is missing."""
    return pa.array(values, mask=~np.isfinite(values))


def _texts(names: tuple[str, ...], place: IntArray) -> pa.Array:
    """Return names by place; a negative place has none."""
    return pa.array(names, pa.string()).take(pa.array(place, mask=place < 0))


class TableRecorder:
    """Makes tables of what a run leaves behind and hands them to a writer."""

    def __init__(self, world: World, writer: TableWriter) -> None:
        self._world, self._writer = world, writer
        self._names = tuple(spec.name for spec in world.instances)
        self._models = tuple(spec.model for spec in world.instances)
        self._price_in = np.array([spec.price_in for spec in world.instances])
        self._price_out = np.array([spec.price_out for spec in world.instances])
        self._blocks = np.array([spec.engine.num_gpu_blocks - 1 for spec in world.instances], dtype=np.int64)

    def requests(self, rows: RequestRows) -> None:
        """Write one row per request that was sent, by arrival."""
        world, known = self._world, self._world.known
        request, at = rows.request, rows.instance
        group = known.group_of_instance[at]
        first, end, arrival = rows.first_token_ps, rows.end_ps, rows.arrival_ps
        no_token, unfinished = first == NEVER, rows.status != _FINISHED
        nowhere = at < 0  # turned away
        target_ps, prompt = known.slo_ttft_ps[request], known.prompt_tokens[request, group]
        if rows.prompt_tokens is not None:
            prompt = rows.prompt_tokens
        # A rejected request costs nothing; others pay their prompt once it was scheduled, which the client of a real
        # server is not told: there the first token tells. Source: paper eq. 2.
        paid = np.where((rows.scheduled_ps != NEVER) | ~no_token, prompt, 0)
        cost = paid * self._price_in[at] + rows.output_tokens * self._price_out[at]
        quality = np.where(nowhere, np.nan, world.truth.quality[request, group])
        columns = {
            "request_id": pa.array(world.request_id[request], pa.string()),
            "task": _labels(world.task, request),
            "instance": _texts(self._names, at),
            "model": _texts(self._models, at),
            "arrival_ns": _ns(arrival),
            "scheduled_ns": _ns(rows.scheduled_ps),
            "first_token_ns": _ns(first),
            "end_ns": _ns(end),
            "arrival_s": pa.array(arrival / PS_PER_S),
            "queue_s": _seconds(rows.scheduled_ps - arrival, rows.scheduled_ps == NEVER),
            "ttft_s": _seconds(first - arrival, no_token),
            "tpot_s": pa.array(
                (end - first) / np.maximum(rows.output_tokens - 1, 1) / PS_PER_S,
                mask=unfinished | (rows.output_tokens < 2),
            ),
            "e2e_s": _seconds(end - arrival, unfinished),
            "prompt_tokens": pa.array(prompt, mask=nowhere),
            "output_tokens": pa.array(rows.output_tokens),
            "cached_tokens": pa.array(rows.cached_tokens),
            "num_preemptions": pa.array(rows.preemptions),
            "status": _texts(STATUSES, rows.status),
            "reason": _texts(rows.reasons, rows.reason),
            "slo_ttft_s": _seconds(target_ps, target_ps < 0),
            "on_time": pa.array(~unfinished & ((target_ps < 0) | (first - arrival <= target_ps))),
            "quality": _numbers(quality),
            "cost_micro_usd": pa.array(cost),
            "utility": _numbers(np.where(unfinished, np.nan, quality - world.cost_weight * cost)),
        }
        self._writer.write("requests", pa.table(columns, schema=REQUESTS))

    def decisions(self, rows: DecisionRows) -> None:
        """Write one row per decision; candidates only where they were kept."""
        world, known, chosen = self._world, self._world.known, rows.instance
        utility = known.predicted_utility[rows.request, known.group_of_instance[chosen]]
        count = len(rows.request)
        columns = {
            "request_id": pa.array(world.request_id[rows.request], pa.string()),
            "instance": _texts(self._names, chosen),
            "reason": _texts(rows.reasons, rows.reason),
            "num_tied": pa.array(rows.num_tied),
            "snapshot_age_s": _seconds(rows.snapshot_age_ps, rows.snapshot_age_ps == NEVER),
            "predicted_ttft_s": _numbers(rows.predicted_ttft_s),
            "predicted_utility": pa.array(utility, mask=chosen == SHED),
            "score": _numbers(rows.score),
            "runner_up": _texts(self._names, rows.runner_up),
            "margin": _numbers(rows.margin),
            "candidate_ttft_s": _lists(rows.candidate_ttft_s, count),
            "candidate_score": _lists(rows.candidate_score, count),
        }
        self._writer.write("decisions", pa.table(columns, schema=DECISIONS))

    def samples(self, rows: IntArray) -> None:
        """Write one row per instance and sample."""
        index = rows[:, 1]
        columns = {
            "at_ns": _ns(rows[:, 0]),
            "at_s": pa.array(rows[:, 0] / PS_PER_S),
            "instance": _texts(self._names, index),
            "num_running": pa.array(rows[:, 2]),
            "num_waiting": pa.array(rows[:, 3]),
            "kv_cache_usage": pa.array(1 - rows[:, 4] / self._blocks[index]),
            "num_preemptions": pa.array(rows[:, 5]),
            "num_steps": pa.array(rows[:, 6]),
            "busy_s": pa.array(rows[:, 7] / PS_PER_S),
            "prefix_queries": pa.array(rows[:, 8]),
            "prefix_hits": pa.array(rows[:, 9]),
            "preempted_queries": pa.array(rows[:, 10]),
            "preempted_hits": pa.array(rows[:, 11]),
        }
        self._writer.write("instances", pa.table(columns, schema=INSTANCES))

    def estimates(self, predictions: Predictions) -> None:
        """Write one row per estimator and request that it predicted, by estimator; nothing without any."""
        parts = []
        for name, column in predictions.columns.items():
            rows = np.flatnonzero(~np.isnan(column))
            if len(rows):
                values = column[rows]
                ids = pa.array(self._world.request_id[rows], pa.string())
                names = pa.repeat(pa.scalar(name, pa.string()), len(rows))
                predicted = pa.array(values, mask=np.isinf(values))
                parts.append(pa.table([ids, names, predicted], schema=ESTIMATES))
        if parts:
            self._writer.write("estimates", pa.concat_tables(parts).combine_chunks())


def _labels(labels: npt.NDArray[np.object_] | None, rows: IntArray) -> pa.Array:
    return pa.nulls(len(rows), pa.string()) if labels is None else pa.array(labels[rows], pa.string())


def _lists(values: list[FloatArray | None], count: int) -> pa.Array:
    """Return lists of numbers, what is not finite missing; a missing list for None."""
    if not values:
        return pa.nulls(count, DECISIONS.field("candidate_score").type)
    found = [None if each is None else [float(v) if np.isfinite(v) else None for v in each] for each in values]
    return pa.array(found, DECISIONS.field("candidate_score").type)
