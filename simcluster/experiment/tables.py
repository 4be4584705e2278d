"""From the ledger of a run to the tables of a run directory."""

from typing import Any

import numpy as np
import pyarrow as pa

from simcluster.backends.ledger import NEVER, Ledger, Status
from simcluster.backends.predictions import Predictions
from simcluster.records import DECISIONS, ESTIMATES, INSTANCES, REQUESTS
from simcluster.request import FloatArray, IntArray
from simcluster.routers.base import SHED
from simcluster.units import PS_PER_NS, PS_PER_S

__all__ = ["decisions_table", "estimates_table", "instances_table", "requests_table"]


def _ns(ps: IntArray) -> pa.Array:
    rounded = (ps + PS_PER_NS // 2) // PS_PER_NS
    return pa.array(rounded, mask=ps == NEVER)


def _seconds(ps: IntArray, missing: Any) -> pa.Array:
    return pa.array(ps / PS_PER_S, mask=missing)


def _numbers(values: FloatArray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def requests_table(ledger: Ledger) -> pa.Table:
    """Return one row per request that was sent, in order of arrival."""
    world, known = ledger.world, ledger.world.known
    names = np.array([spec.name for spec in world.instances], dtype=object)
    models = np.array([spec.model for spec in world.instances], dtype=object)
    at = ledger.instance
    first, end, arrival = ledger.first_token_ps, ledger.end_ps, ledger.arrival_ps
    no_token, unfinished = first == NEVER, ledger.status != Status.FINISHED
    nowhere = at < 0  # turned away
    steps = np.maximum(ledger.output_tokens - 1, 1)
    prompt = known.prompt_tokens[np.arange(len(known)), ledger.group()]
    no_target = known.slo_ttft_ps < 0
    met = ~unfinished & (no_target | (first - arrival <= known.slo_ttft_ps))
    columns = {
        "request_id": pa.array(world.request_id, pa.string()),
        "task": pa.array(world.task if world.task is not None else [None] * len(known), pa.string()),
        "instance": pa.array(names[at], pa.string(), mask=nowhere),
        "model": pa.array(models[at], pa.string(), mask=nowhere),
        "arrival_ns": _ns(arrival),
        "scheduled_ns": _ns(ledger.scheduled_ps),
        "first_token_ns": _ns(first),
        "end_ns": _ns(end),
        "arrival_s": pa.array(arrival / PS_PER_S),
        "queue_s": _seconds(ledger.scheduled_ps - arrival, ledger.scheduled_ps == NEVER),
        "ttft_s": _seconds(first - arrival, no_token),
        "tpot_s": pa.array((end - first) / steps / PS_PER_S, mask=unfinished | (ledger.output_tokens < 2)),
        "e2e_s": _seconds(end - arrival, unfinished),
        "prompt_tokens": pa.array(prompt, mask=nowhere),
        "output_tokens": pa.array(ledger.output_tokens),
        "cached_tokens": pa.array(ledger.cached_tokens),
        "num_preemptions": pa.array(ledger.preemptions),
        "status": pa.array(np.array(Status.NAMES, dtype=object)[ledger.status], pa.string()),
        "reason": pa.array(ledger.reason, pa.string()),
        "slo_ttft_s": _seconds(known.slo_ttft_ps, no_target),
        "on_time": pa.array(met),
        "quality": _numbers(ledger.quality()),
        "cost_micro_usd": pa.array(ledger.cost()),
        "utility": _numbers(ledger.utility()),
    }
    sent = np.flatnonzero(arrival != NEVER)
    return pa.table(columns, schema=REQUESTS).take(sent[np.argsort(arrival[sent], kind="stable")])


def decisions_table(ledger: Ledger) -> pa.Table:
    """Return one row per decision; candidates only at level `full`."""
    names = [spec.name for spec in ledger.world.instances]
    full = ledger.decision_level == "full"
    utility, group = ledger.world.known.predicted_utility, ledger.world.known.group_of_instance.tolist()
    rows: list[dict[str, Any]] = []
    for index, decision, age_ps in ledger.decisions:
        j, ttft, score = decision.instance, decision.predicted_ttft_s, decision.score
        row: dict[str, Any] = {
            "request_id": ledger.world.request_id[index],
            "instance": None if j == SHED else names[j],
            "reason": decision.reason,
            "num_tied": decision.num_tied,
            "snapshot_age_s": None if age_ps == NEVER else age_ps / PS_PER_S,
            "predicted_ttft_s": _finite(ttft, j),
            "predicted_utility": None if j == SHED else float(utility[index, group[j]]),
            "score": _finite(score, j),
        }
        if score is not None and len(score) > 1 and j != SHED:
            others = np.where(np.arange(len(score)) == j, -np.inf, score)
            runner_up = int(np.argmax(others))
            if np.isfinite(others[runner_up]):  # else nobody else could have been chosen
                row["runner_up"] = names[runner_up]
                row["margin"] = _value(score[j] - score[runner_up])
        if full:
            row["candidate_ttft_s"] = None if ttft is None else [_value(v) for v in ttft]
            row["candidate_score"] = None if score is None else [_value(v) for v in score]
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=DECISIONS)


def _value(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _finite(values: FloatArray | None, j: int) -> float | None:
    """Return a candidate's value; None where there is none."""
    return None if values is None or j == SHED else _value(values[j])


def estimates_table(ledger: Ledger, predictions: Predictions) -> pa.Table | None:
    """Return one row per estimator and request that it predicted, by estimator; None without any."""
    ids: list[Any] = []
    names: list[str] = []
    values: list[FloatArray] = []
    for name, column in predictions.columns.items():
        rows = np.flatnonzero(~np.isnan(column))
        ids += ledger.world.request_id[rows].tolist()
        names += [name] * len(rows)
        values.append(column[rows])
    if not names:
        return None
    predicted = np.concatenate(values)
    columns = [ids, names, pa.array(predicted, mask=np.isinf(predicted))]
    return pa.table(columns, schema=ESTIMATES)


def instances_table(ledger: Ledger) -> pa.Table:
    """Return one row per instance and sample."""
    specs = ledger.world.instances
    rows = np.array(ledger.samples, dtype=np.int64).reshape(-1, 12)
    index = rows[:, 1]
    usable = np.array([spec.engine.num_gpu_blocks - 1 for spec in specs], dtype=np.int64)[index]
    names = np.array([spec.name for spec in specs], dtype=object)[index]
    columns = {
        "at_ns": _ns(rows[:, 0]),
        "at_s": pa.array(rows[:, 0] / PS_PER_S),
        "instance": pa.array(names, pa.string()),
        "num_running": pa.array(rows[:, 2]),
        "num_waiting": pa.array(rows[:, 3]),
        "kv_cache_usage": pa.array(1 - rows[:, 4] / usable),
        "num_preemptions": pa.array(rows[:, 5]),
        "num_steps": pa.array(rows[:, 6]),
        "busy_s": pa.array(rows[:, 7] / PS_PER_S),
        "prefix_queries": pa.array(rows[:, 8]),
        "prefix_hits": pa.array(rows[:, 9]),
        "preempted_queries": pa.array(rows[:, 10]),
        "preempted_hits": pa.array(rows[:, 11]),
    }
    return pa.table(columns, schema=INSTANCES)
