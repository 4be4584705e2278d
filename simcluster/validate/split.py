"""Where an error comes from: scheduling, step time, or the front end."""

from typing import Any

import numpy as np
import polars as pl

from simcluster.calibrate.fit import error_by_kind, error_summary, predict, step_kinds
from simcluster.calibrate.recording import Recording
from simcluster.card import Card
from simcluster.request import FloatArray
from simcluster.units import PS_PER_S
from simcluster.validate.compare import relative_errors
from simcluster.validate.estimators import NO_FRONT_END
from simcluster.validate.runs import Requests
from simcluster.validate.scheduling import Replay, scheduler_config
from simcluster.validate.simulate import Tuning, play

__all__ = ["split_error", "step_points", "step_table"]


def step_table(recording: Recording) -> pl.DataFrame:
    """Return the recorded steps with the columns of `calibrate.fit.STEP_COLUMNS`."""
    return recording.steps.select(
        n_tokens="tokens",
        sum_decode_context="decode_ctx",
        prefill_attention="prefill_attn",
        has_prefill=pl.col("n_prefill_reqs") > 0,
        num_prefill_requests="n_prefill_reqs",
        step_s=pl.Series(recording.step_seconds()),
    )


def step_points(card: Card, recording: Recording, tuning: Tuning) -> pl.DataFrame:
    """Return each recorded step beside what the card says: step, kind, observed_s, predicted_s."""
    table = step_table(recording)
    return pl.DataFrame(
        {
            "step": recording.steps["step"],
            "kind": step_kinds(table),
            "observed_s": table["step_s"],
            "predicted_s": predict(tuning.fit(card), table),
        }
    )


def split_error(card: Card, recording: Recording, replay: Replay, tuning: Tuning) -> dict[str, Any]:
    """Split the error of a card on a recording.

    Returns:
        * `scheduling`: the scheduler free, recorded steps as clock (`Replay.summary`);
        * `step_time`: MAPE by kind of step on the recorded batches, `bias` of their sum, and the TTFT, TPOT and E2E
          errors of the card's steps for requests handed to the engine when they were;
        * `front_end`: from the sending to the engine where it is idle, and from the engine to the client, measured
          and the card's; the loop's own time per step likewise [s].
    """
    return {
        "scheduling": replay.summary(),
        "step_time": _step_time(card, recording, replay, tuning),
        "front_end": _front_end(card, recording, tuning),
    }


def _step_time(card: Card, recording: Recording, replay: Replay, tuning: Tuning) -> dict[str, Any]:
    table = step_table(recording)
    actual = table["step_s"].to_numpy()
    predicted = predict(tuning.fit(card), table)
    result: dict[str, Any] = {
        "steps": len(table),
        "mape": dict(error_by_kind(table, predicted)),
        "median_ape": float(np.median(np.abs(predicted / actual - 1))),
        "bias": float(predicted.sum() / actual.sum() - 1),
        "mape_eq9": None,
    }
    if "eq9" in card.fits:
        result["mape_eq9"] = error_summary(actual, predict(card.fits["eq9"], table)).mape
    clock = replay.clock
    if clock is None:
        return result
    info, requests = recording.info, recording.requests
    config = scheduler_config(info.engine, info.vllm_version, asynchronous=info.loop == "async")
    lengths = [requests[name].to_numpy().astype(np.int64) for name in ("prompt_tokens", "output_tokens")]
    arrival = clock.arrival_ps / PS_PER_S
    ends: list[FloatArray] = []
    for places in (replay.first_token_step, replay.last_token_step):
        at = np.full(len(requests), np.nan)
        for request, place in places.items():
            at[request] = clock.end_ps[place] / PS_PER_S
        ends.append(at - arrival)
    real = Requests(arrival, lengths[0], np.maximum(lengths[1], 1), ends[0], ends[1])
    played, _ = play(tuning.model(card), config, NO_FRONT_END, real)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        result[name] = relative_errors(getattr(real, name), getattr(played, name))
    return result


def _front_end(card: Card, recording: Recording, tuning: Tuning) -> dict[str, Any]:
    requests, steps = recording.requests, recording.steps
    sent, added = (requests[name].cast(pl.Float64).to_numpy() for name in ("t_sent_ns", "t_add_ns"))
    begin, end = steps["t_sched0"].to_numpy(), steps["t_upd1"].to_numpy()
    place = np.searchsorted(begin, sent, side="right") - 1
    busy = (place >= 0) & (sent < end[np.maximum(place, 0)])
    way = (added - sent)[~busy & np.isfinite(sent)] / 1e9
    prompt = requests["prompt_tokens"].to_numpy()
    says = card.front_end.request_s + card.front_end.per_prompt_token_s * prompt
    host = (steps["t_sched1"].to_numpy()[1:] - steps["t_upd0"].to_numpy()[:-1]) / 1e9
    in_a_row = steps["t_sched0"].to_numpy()[1:] - end[:-1] < 1_000_000  # no idle time between them [ns]
    first = requests["t_first_token_ns"].cast(pl.Float64).to_numpy()
    tokens = (
        steps.select("t_upd1", "comp")
        .explode("comp")
        .unnest("comp")
        .filter(pl.col("produces_token"))
        .group_by("request_id")
        .agg(pl.col("t_upd1").min())
    )
    out = requests.select("request_id").join(tokens, on="request_id", how="left", maintain_order="left")["t_upd1"]
    hop = (first - out.cast(pl.Float64).to_numpy()) / 1e9
    sync = recording.info.loop == "sync" and in_a_row.any()
    return {
        "request_s": {"measured": _median(way), "card": float(np.median(says)), "idle_arrivals": len(way)},
        "output_s": {"measured": _median(hop[np.isfinite(hop)]), "card": card.front_end.output_s},
        "host_s": {
            "measured": _median(host[in_a_row]) if sync else None,
            "card": card.host_time_s if tuning.host_s is None else tuning.host_s,
        },
    }


def _median(values: FloatArray) -> float | None:
    return float(np.median(values)) if len(values) else None
