"""What the TTFT estimators would have said at each arrival of a recording, against what happened.

The recording is played on an engine whose steps take what was recorded, so that its state at every arrival is the
recorded one. An estimator sees the snapshot of the last step boundary and the true ends, and predicts with the card's
step times, or, for `sfs_measured`, with the recorded ones: what it then misses is not the engine's.
"""

from typing import Any

import numpy as np
import polars as pl

from simcluster import _native
from simcluster.calibrate.recording import Recording
from simcluster.card import Card, FrontEnd, ServiceRates
from simcluster.experiment.run import run_policy
from simcluster.instance import InstanceSpec, TrueModel
from simcluster.request import FloatArray, RequestColumns, RequestTruth
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S
from simcluster.validate.runs import Requests, observed_times
from simcluster.validate.scheduling import Clock, Replay, scheduler_config
from simcluster.validate.simulate import Tuning, play
from simcluster.world import World

__all__ = ["compare_estimators", "measured_service_rates", "sfs_with_measured_steps"]

NO_FRONT_END = FrontEnd(request_s=0.0, per_prompt_token_s=0.0, output_s=0.0)


def compare_estimators(
    card: Card, recording: Recording, replay: Replay, tuning: Tuning
) -> tuple[dict[str, Any], pl.DataFrame] | None:
    """Score SFS, eq. 6 and LPS at each arrival of a recording.

    Returns:
        Scores by estimator (as `run --estimators` has them, by load too; `sfs_measured` beside them), and the points:
        estimator, request_id, predicted_s, observed_s; TTFT from the arrival at the engine [s]. None where the
        scheduler does not follow the recording, so that its state is not known.
    """
    clock = replay.clock
    if clock is None:
        return None
    world_run = _run(card, recording, clock, tuning)
    observed = pl.DataFrame(pl.from_arrow(world_run.tables["requests"])).select("request_id", observed_s="ttft_s")
    estimates = pl.DataFrame(pl.from_arrow(world_run.tables["estimates"]))
    points = estimates.join(observed, on="request_id", maintain_order="left").select(
        "estimator", "request_id", "observed_s", predicted_s="predicted_ttft_s"
    )
    measured, rows = sfs_with_measured_steps(recording, replay)
    scores = {"sfs_measured": measured, **(world_run.summary["estimators"] or {})}
    return scores, pl.concat([points, rows])


def _run(card: Card, recording: Recording, clock: Clock, tuning: Tuning) -> Any:
    """Play the recording under SFS on one instance whose steps take what was recorded."""
    info, table = recording.info, recording.requests
    n = len(table)
    prompt, output = (table[name].to_numpy().astype(np.int64)[:, None] for name in ("prompt_tokens", "output_tokens"))
    output = np.maximum(output, 1)
    config = scheduler_config(info.engine, info.vllm_version, asynchronous=info.loop == "async")
    spec = InstanceSpec(
        index=0,
        name=card.name,
        model=card.model,
        card=card.name,
        price_in=0.0,
        price_out=0.0,
        engine=config,
        believed=tuning.model(card),
        front_end=NO_FRONT_END,
        service_rates=card.service_rates or measured_service_rates(card, recording, tuning),
    )
    truth = TrueModel(
        step_time=_native.StepTimeModel(),
        noise=_native.StepNoise.recorded(clock.duration_ps),
        description="recorded steps",
    )
    ones = np.ones((n, 1))
    known = RequestColumns(
        group_of_instance=np.zeros(1, dtype=np.int64),
        arrival_ps=clock.arrival_ps,
        prompt_tokens=prompt,
        max_tokens=output[:, 0].copy(),
        priority=np.zeros(n, dtype=np.int64),
        slo_ttft_ps=np.full(n, -1, dtype=np.int64),
        predicted_output_tokens=output,
        predicted_quality=ones,
        predicted_utility=ones,
    )
    world = _world(spec, truth, known, output, table["request_id"].to_list())
    return run_policy(_SCENARIO, world, "sfs")


def _world(spec: InstanceSpec, truth: TrueModel, known: RequestColumns, output: Any, names: list[str]) -> World:
    n = len(known)
    return World(
        instances=(spec,),
        true_models=(truth,),
        num_gpus=(1,),
        request_id=np.array(names, dtype=object),
        task=None,
        known=known,
        truth=RequestTruth(
            output_tokens=output,
            quality=np.ones((n, 1)),
            ends_by_length=np.ones(n, dtype=bool),
            cancel_after_ps=np.full(n, -1, dtype=np.int64),
        ),
        cost_weight=0.0,
        assumptions=(),
        warnings=(),
        notes=(),
        inputs={},
    )


_SCENARIO = Scenario.model_validate(
    {
        "name": "validate",
        "workload": {"trace": "recording"},
        "cluster": {"instances": [{"card": "card", "price": {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0}}]},
        "slo": {"ttft": "none"},
        "output": {"decisions": "off", "estimators": ["throughput", "lps"], "sample_interval_s": 1e6},
    }
)


def sfs_with_measured_steps(recording: Recording, replay: Replay) -> tuple[dict[str, Any], pl.DataFrame]:
    """Predict each TTFT by simulating forward with the recorded step times, without any later arrival.

    Returns:
        `mape`, `max_error_s` against what the engine did, counted from the arrival at the engine; and what remains
        between the client and the engine, `front_end_s` (mean, p50, p90 [s]), with `mape_with_front_end`, the error
        against the TTFT from the sending. And the points.
    """
    clock, info, table = replay.clock, recording.info, recording.requests
    assert clock is not None  # the caller has looked
    config = scheduler_config(info.engine, info.vllm_version, asynchronous=info.loop == "async")
    engine = _native.Engine(config, _native.StepTimeModel(), _native.StepNoise.recorded(clock.duration_ps))
    prompt, output = table["prompt_tokens"].to_list(), table["output_tokens"].to_list()
    predicted = np.full(len(table), np.nan)
    for index, at in enumerate(clock.arrival_ps.tolist()):
        engine.advance_to(at)
        engine.take_events()
        tokens = max(output[index], 1)
        ahead = engine.fork()
        if ahead.submit(index, prompt[index], tokens, at, tokens, ends_by_length=True):
            first = ahead.run_to_first_token(index)
            predicted[index] = (first - at) / PS_PER_S if first != _native.NEVER else np.nan
        engine.submit(index, prompt[index], tokens, at, tokens, ends_by_length=True)
    observed = np.full(len(table), np.nan)
    for request, place in replay.first_token_step.items():
        observed[request] = (clock.end_ps[place] - clock.arrival_ps[request]) / PS_PER_S
    known = np.isfinite(observed) & np.isfinite(predicted)
    error = np.abs(predicted - observed)[known]
    scores: dict[str, Any] = {
        "count": int(known.sum()),
        "mape": float((error / observed[known]).mean()),
        "max_error_s": float(error.max()),
        **_front_end(observed_times(recording)[1], predicted),
    }
    points = pl.DataFrame(
        {
            "estimator": ["sfs_measured"] * int(known.sum()),
            "request_id": [name for name, given in zip(table["request_id"], known, strict=True) if given],
            "observed_s": observed[known],
            "predicted_s": predicted[known],
        }
    )
    return scores, points


def _front_end(observed: FloatArray, predicted: FloatArray) -> dict[str, Any]:
    """Return what lies between the TTFT from the sending and the one that the engine accounts for."""
    known = np.isfinite(observed) & np.isfinite(predicted)
    if not known.any():
        return {"front_end_s": None, "mape_with_front_end": None}
    rest = (observed - predicted)[known]
    return {
        "front_end_s": {
            "mean": float(rest.mean()),
            "p50": float(np.median(rest)),
            "p90": float(np.quantile(rest, 0.9)),
        },
        "mape_with_front_end": float(np.abs(rest / observed[known]).mean()),
    }


def measured_service_rates(card: Card, recording: Recording, tuning: Tuning) -> ServiceRates:
    """Return the mean rates of a recorded engine.

    theta_pre and Tbar_dec are those of its steps; mu and k come from the card under all of its requests at once.
    """
    steps, seconds = recording.steps, recording.step_seconds()
    prefills = steps["n_prefill_reqs"].to_numpy() > 0
    info, table = recording.info, recording.requests
    config = scheduler_config(info.engine, info.vllm_version, asynchronous=info.loop == "async")
    lengths = [table[name].to_numpy().astype(np.int64) for name in ("prompt_tokens", "output_tokens")]
    none = np.full(len(table), np.nan)
    at_once = Requests(np.zeros(len(table)), lengths[0], np.maximum(lengths[1], 1), none, none)
    played, series = play(tuning.model(card), config, NO_FRONT_END, at_once, with_series=True)
    assert series is not None
    saturated = series.running[series.waiting > 0]
    decode = seconds[~prefills]
    prefill_tokens = float(steps["prefill_tokens"].to_numpy()[prefills].sum())
    return ServiceRates(
        prefill_throughput_tps=prefill_tokens / max(float(seconds[prefills].sum()), 1e-9),
        mean_decode_step_s=float(decode.mean()) if len(decode) else float(seconds.mean()),
        service_rate_rps=len(table) / played.duration_s,
        parallelism=max(float((saturated if len(saturated) else series.running).mean()), 1.0),
        utilisation=1.0,
        method="theta_pre and Tbar_dec from the recorded steps, mu and k from the card with all requests at once",
    )
