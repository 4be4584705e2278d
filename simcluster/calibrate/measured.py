"""What a recording says beside step times: host time, front end, contention and the rates of eqs. 6 and 10."""

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from simcluster.calibrate.recording import Recording
from simcluster.calibrate.step_tables import StepTable, disturbed
from simcluster.card import Contention, FrontEnd, ServiceRates

__all__ = ["contention", "front_end", "host_time_s", "service_rates"]

Array = NDArray[np.float64]

_LEAST_REQUESTS = 20  # for a front-end time
_LEAST_STEPS = 50  # with requests waiting, for the rates under saturation


def host_time_s(tables: Sequence[StepTable], target: str) -> tuple[float, str] | None:
    """Return the median time of the synchronous loop beside a step [s], and what it is; None if nobody recorded it.

    It is the time of schedule() and update_from_output(), the gap to the next step while requests run and, where the
    fit is to the worker's CPU time, the way to the worker and back.
    """
    steps = pl.concat([table.steps for table in tables])
    known = steps.filter(pl.col("host_s").is_not_null())
    if known.is_empty():
        return None
    host = known["host_s"]
    text = "schedule(), update_from_output() and the gap between steps"
    if target == "worker-cpu" and not known["worker_wall_s"].null_count():
        host = host + (known["wall_s"] - known["worker_wall_s"])
        text += ", and the way to the worker and back"
    values = host.to_numpy()
    return max(float(np.median(values)), 0.0), f"median of {len(values):,} steps of the synchronous loop: {text}"


def contention(tables: Sequence[StepTable], *, excluded: bool) -> Contention | None:
    """Return what other work did to the recorded steps, before any was left out; None without the worker's CPU time."""
    walls, cpus, bad = [], [], []
    for table in tables:
        if table.recording is None or table.recording.steps["w_cpu_ms"].null_count():
            continue
        steps = table.recording.steps
        pair = pl.DataFrame(
            {"wall_s": table.recording.step_seconds(), "worker_cpu_s": steps["w_cpu_ms"].cast(pl.Float64) / 1e3}
        )
        walls.append(pair["wall_s"].to_numpy())
        cpus.append(pair["worker_cpu_s"].to_numpy())
        bad.append(disturbed(pair))
    if not walls or sum(float(each.sum()) for each in cpus) <= 0:
        return None
    share = float(np.concatenate(bad).mean())
    ratio = float(np.concatenate(walls).sum() / np.concatenate(cpus).sum())
    return Contention(wall_over_cpu=ratio, disturbed_share=share, excluded=excluded)


def front_end(recordings: Sequence[Recording]) -> tuple[FrontEnd, str] | None:
    """Return the time outside the engine, from requests whose client times are known; None without any.

    Sending to arrival at the engine is fitted as a constant and a part per prompt token, both at least 0, by least
    absolute error, over requests that met no running step: others wait for its end before the engine sees them. The
    way out is the median from the end of the step that made the first token to the client.
    """
    delays, prompts, outs = [], [], []
    for recording in recordings:
        known = _met_idle(recording)
        delays.append((known["t_add_ns"] - known["t_sent_ns"]).to_numpy() / 1e9)
        prompts.append(known["prompt_tokens"].to_numpy().astype(np.float64))
        outs.append(_way_out(recording))
    delay, prompt, out = (np.concatenate(each) if each else np.empty(0) for each in (delays, prompts, outs))
    good = delay >= 0
    if good.sum() < _LEAST_REQUESTS:
        return None
    constant, slope = _least_absolute(prompt[good], delay[good])
    output = max(float(np.median(out)), 0.0) if out.size else 0.0
    text = f"fitted to {int(good.sum()):,} requests with client times that met no running step"
    if not out.size:
        text += "; the way out is not measured, 0 means unknown"
    return FrontEnd(request_s=constant, per_prompt_token_s=slope, output_s=output), text


def _met_idle(recording: Recording) -> pl.DataFrame:
    """Return the requests with a time of sending that no step ran beside on their way to the engine."""
    known = recording.requests.filter(pl.col("t_sent_ns").is_not_null())
    begin, end = (recording.steps[name].to_numpy() for name in ("t_sched0", "t_upd1"))
    before = np.searchsorted(begin, known["t_add_ns"].to_numpy()) - 1  # the last step that began before the arrival
    idle = (before < 0) | (end[np.maximum(before, 0)] <= known["t_sent_ns"].to_numpy())
    return known.filter(idle)


def _way_out(recording: Recording) -> Array:
    """Return the time from the end of the step with the first token to the client (n,) [s]."""
    seen = recording.requests.filter(pl.col("t_first_token_ns").is_not_null())
    if seen.is_empty():
        return np.empty(0)
    produced = (
        recording.steps.select("t_upd1", "comp")
        .explode("comp")
        .unnest("comp")
        .filter(pl.col("produces_token"))
        .group_by("request_id")
        .agg(pl.col("t_upd1").min())
    )
    both = seen.join(produced, on="request_id", how="inner")
    way: Array = (both["t_first_token_ns"] - both["t_upd1"]).to_numpy() / 1e9
    return way[way >= 0]


def _least_absolute(x: Array, y: Array) -> tuple[float, float]:
    """Fit y = a + b*x with a, b >= 0 and the least sum of absolute errors (a linear program)."""
    number = len(x)
    scale = max(float(x.max()), 1.0)
    unknown = sparse.csr_array(np.stack([np.ones(number), x / scale], axis=1))
    identity = sparse.csr_array(sparse.eye_array(number))
    equal = sparse.hstack([unknown, identity, -identity], format="csr")
    cost = np.concatenate([np.zeros(2), np.ones(2 * number)])
    found = linprog(cost, A_eq=equal, b_eq=y, bounds=(0, None), method="highs")
    if found.x is None:  # the solver gave up: a constant alone
        return float(np.median(y)), 0.0
    return float(found.x[0]), float(found.x[1]) / scale


def service_rates(tables: Sequence[StepTable], host_s: float) -> tuple[ServiceRates | None, str]:
    """Return theta_pre, Tbar_dec, mu and k of recorded steps, or None and why not.

    The first two come from the phase `served`, else from all steps; the last two from the phase `saturation`, else
    from steps while requests wait. Source: paper eqs. 6, 10.
    """
    recorded = [table for table in tables if table.recording is not None]
    if not recorded:
        return None, "no recording"
    steps = pl.concat([table.steps for table in recorded])
    served = steps.filter(pl.col("phase").fill_null("") == "served")
    base, where = (steps, "all steps") if served.is_empty() else (served, "the served phase")
    prefilling = base["has_prefill"].to_numpy()
    if not prefilling.any() or prefilling.all():
        return None, f"{where} has steps of one kind only"
    period = base["step_s"].to_numpy() + host_s
    prefill_tokens = (base["n_tokens"] - base["n_decode"].fill_null(0)).to_numpy()[prefilling]
    found = [each for table in recorded if (each := _saturated(table.recording)) is not None]
    if not found:
        return None, f"no saturation: fewer than {_LEAST_STEPS} steps with requests waiting and answers ending"
    rate, parallelism, which = max(found)
    utilisation = _served_rate(recorded[0].recording) / rate
    return ServiceRates(
        prefill_throughput_tps=float(prefill_tokens.sum() / period[prefilling].sum()),
        mean_decode_step_s=float(period[~prefilling].mean()),
        service_rate_rps=rate,
        parallelism=max(parallelism, 1.0),
        utilisation=utilisation if utilisation > 0 else 1.0,
        method=f"measured: prefill throughput and decode step over {where}, the rest over {which}",
    ), ""


def _saturated(recording: Recording | None) -> tuple[float, float, str] | None:
    """Return mu [requests/s] and k of a recording, and over what."""
    assert recording is not None
    steps, phase = recording.steps, recording.steps["phase"].cast(pl.String).fill_null("")
    rows, which = (phase == "saturation").to_numpy(), "the saturation phase"
    waiting = (steps["n_waiting"] > 0).to_numpy()
    if (rows & waiting).sum() < _LEAST_STEPS:
        rows, which = waiting, "steps with requests waiting"
    rows &= waiting
    outputs = recording.requests["output_tokens"].cast(pl.Float64).to_numpy()
    if rows.sum() < _LEAST_STEPS or not outputs.size or outputs.mean() <= 0:
        return None
    ends = steps["t_upd1"].to_numpy()
    length = ends - steps["t_sched0"].to_numpy()
    follows = np.concatenate([[False], rows[:-1]])  # then the gap before the step belongs to the saturated time too
    length = np.where(follows, np.diff(ends, prepend=ends[0]), length)[rows] / 1e9
    tokens = float(steps["n_samples"].to_numpy()[rows].sum())
    running = steps["n_running"].to_numpy()[rows]
    phases = recording.requests["phase"].cast(pl.String).fill_null("")
    same = outputs[(phases == "saturation").to_numpy()] if which.startswith("the sat") else outputs
    mean = float(same.mean()) if same.size else float(outputs.mean())
    if tokens <= 0 or mean <= 0:
        return None
    return tokens / float(length.sum()) / mean, float((running * length).sum() / length.sum()), which


def _served_rate(recording: Recording | None) -> float:
    """Return the arrival rate of the served requests [requests/s], of all where no phase is known."""
    assert recording is not None
    phase = recording.requests["phase"].cast(pl.String).fill_null("")
    requests = recording.requests.filter(phase == "served")
    if len(requests) < 2:
        requests = recording.requests
    span = float(requests["t_add_ns"].to_numpy()[-1] - requests["t_add_ns"].to_numpy()[0]) / 1e9
    return (len(requests) - 1) / span if span > 0 else 0.0
