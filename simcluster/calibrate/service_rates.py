"""Service rates of a card: what a run of the engine on its step-time model gives for a mix of requests.

    python -m simcluster.calibrate.service_rates calibration/qwen3-8b-h100.json

Two runs on the card's chosen fit, with the engine's default options and without noise:

* **Saturation.** Every request of the mix is there from the start. From the end of the first quarter of them until
  nobody waits, `service_rate_rps` is the output throughput over the mean answer length, and `parallelism` the mean
  number of running requests.
* **Service.** The same requests come in the rhythm of their trace, at half that rate: what one of several equal
  instances sees under round robin. `prefill_throughput_tps` is the prefill tokens over the time of all steps that
  contain a prefill, `mean_decode_step_s` the mean time of the other steps.

A server that is measured under a mix of its own gives better numbers; these are simulated and say so.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from simcluster import _native
from simcluster.card import Card, ServiceRates, load_card, write_card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.errors import CalibrationError, SimclusterError
from simcluster.instance import step_time_model
from simcluster.request import IntArray
from simcluster.shipped import find_file
from simcluster.units import PS_PER_NS, PS_PER_S
from simcluster.workload import Trace, read_trace

__all__ = ["UTILISATION", "main", "service_rates"]

UTILISATION = 0.5
_WARMUP = 0.25  # share of the requests that must have ended before the saturated engine is looked at
_DIGITS = 5


def service_rates(card: Card, trace: Trace, name: str) -> ServiceRates:
    """Find the service rates of a card under the requests of a trace.

    Args:
        card: the card; its chosen fit is used.
        trace: the mix of requests.
        name: the trace's name, for `method`.

    Raises:
        CalibrationError: the trace is too short to saturate the instance, or a run has no step of some kind.
    """
    prompts = trace.prompt_tokens_by_model.get(card.model, trace.prompt_tokens)
    outputs = trace.output_tokens_by_model.get(card.model, trace.output_tokens)
    rate, parallelism = _saturate(card, prompts, outputs)
    span_s = float(trace.arrival_ns[-1] - trace.arrival_ns[0]) / 1e9
    stretch = (len(trace) - 1) / span_s / (UTILISATION * rate) if span_s > 0 else 0.0
    arrivals = np.rint((trace.arrival_ns - trace.arrival_ns[0]) * stretch).astype(np.int64) * PS_PER_NS
    engine = _play(card, prompts, outputs, arrivals)
    _, start, end, tokens, decodes, _, _, prefills, *_ = engine.take_steps().T
    with_prefill, time_s = prefills > 0, (end - start) / PS_PER_S
    if not with_prefill.any() or with_prefill.all():
        raise CalibrationError(f"card {card.name}: {name}: every step is of one kind; give a trace of more requests")
    found = {
        "prefill_throughput_tps": float((tokens - decodes)[with_prefill].sum() / time_s[with_prefill].sum()),
        "mean_decode_step_s": float(time_s[~with_prefill].mean()),
        "service_rate_rps": rate,
        "parallelism": parallelism,
    }
    return ServiceRates(
        **{key: float(f"{value:.{_DIGITS}g}") for key, value in found.items()},
        utilisation=UTILISATION,
        method=f"simulated from the {card.chosen_fit} fit under the requests of {name}",
    )


def _play(card: Card, prompts: IntArray, outputs: IntArray, arrivals_ps: IntArray) -> _native.Engine:
    """Run an engine on requests, (n,) each, until all have ended."""
    config, _ = resolve_engine_options(EngineOptions(), card, f"card {card.name}")
    config.shared_prefixes = False
    model = step_time_model(card.step_time, card.host_time_s)
    engine = _native.Engine(config, model, None, record_tokens=True, record_steps=True)
    for index in range(len(prompts)):
        engine.submit(index, int(prompts[index]), int(outputs[index]), int(arrivals_ps[index]))
    engine.drain()
    return engine


def _saturate(card: Card, prompts: IntArray, outputs: IntArray) -> tuple[float, float]:
    """Return mu [requests/s] and k of an engine that always has requests waiting."""
    engine = _play(card, prompts, outputs, np.zeros(len(prompts), dtype=np.int64))
    steps, events = engine.take_steps(), engine.take_events()
    start, end, running, waiting = steps.T[[1, 2, 8, 9]]
    ends = np.sort(events[events[:, 3] == int(_native.EventKind.finished), 1])
    token_at = events[events[:, 3] == int(_native.EventKind.token), 1]
    first = int(ends[int(_WARMUP * len(ends))]) if len(ends) else 0
    saturated = (waiting > 0) & (start >= first)
    if not saturated.any():
        raise CalibrationError(
            f"card {card.name}: {len(prompts)} requests do not keep the instance saturated; give a trace of more"
        )
    begin, last = int(start[saturated][0]), int(end[saturated][-1])
    inside = (start >= begin) & (end <= last)
    time = (end - start)[inside]
    tokens = np.count_nonzero((token_at > begin) & (token_at <= last))
    rate = tokens * PS_PER_S / (last - begin) / float(outputs.mean())
    return rate, float((running[inside] * time).sum() / time.sum())


def main(arguments: list[str] | None = None) -> int:
    """Add service rates to cards; return the exit code, 2 after a mistake told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m simcluster.calibrate.service_rates",
        description="Find the service rates of calibration cards by simulation, and store them there.",
    )
    parser.add_argument("cards", type=Path, nargs="+", help="calibration cards; they are written anew")
    parser.add_argument("--trace", default="quickstart", help="mix of requests: a trace file or a shipped one's name")
    options = parser.parse_args(arguments)
    try:
        source = find_file(options.trace, "traces", ".parquet")
        trace = read_trace(source)
        cards = [(path, load_card(path)) for path in options.cards]
        for path, card in cards:
            rates = service_rates(card, trace, source.name)
            write_card(card.model_copy(update={"service_rates": rates}), path)
            sys.stdout.write(f"{path}: {rates.model_dump_json()}\n")
    except SimclusterError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
