"""Play the requests of a real run on a card."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from simcluster import _native
from simcluster.card import Card, FrontEnd, StepTimeFit
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.errors import CalibrationError
from simcluster.instance import step_time_model
from simcluster.request import FloatArray
from simcluster.units import PS_PER_S, ps_from_seconds
from simcluster.validate.runs import RealRun, Requests, Series
from simcluster.validate.scheduling import scheduler_config

__all__ = ["TUNABLE", "WAVES", "Tuning", "engine_config", "play", "play_closed"]

TUNABLE = ("scale", "host", "b0", "b1")
_KINDS = _native.EventKind
_OPTION_NAMES = {"num_gpu_blocks": "num_gpu_blocks_override"}
WAVES = 10  # of a closed loop: few enough that its beginning shows, as in the benchmarks it stands for
_SYNCHRONOUS_BEFORE = (0, 14)  # vLLM's asynchronous loop is the default from here on


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is changed about a card before it is used.

    Attributes:
        scale: factor on all coefficients of the step time.
        host_s: host time per step instead of the card's [s]; None: the card's.
        b0_s: added to each step [s].
        b1_s: added per token of a step [s/token].
    """

    scale: float = 1.0
    host_s: float | None = None
    b0_s: float = 0.0
    b1_s: float = 0.0

    def fit(self, card: Card) -> StepTimeFit:
        """Return the card's chosen fit with the changes."""
        terms = ("b0_s", "b1_s", "b2_s", "b3_s", "b1x_s", "b4_s", "b5_s")
        values = {term: self.scale * getattr(card.step_time, term) for term in terms}
        values["b0_s"] += self.b0_s
        values["b1_s"] += self.b1_s
        return card.step_time.model_copy(update=values)

    def model(self, card: Card) -> _native.StepTimeModel:
        """Return the step-time model with the changes."""
        return step_time_model(self.fit(card), card.host_time_s if self.host_s is None else self.host_s)

    def as_dict(self) -> dict[str, float]:
        """Return what differs from the card, as plain data."""
        values = {"scale": self.scale, "host_s": self.host_s, "b0_s": self.b0_s, "b1_s": self.b1_s}
        plain = {"scale": 1.0, "host_s": None, "b0_s": 0.0, "b1_s": 0.0}
        return {name: float(value) for name, value in values.items() if value is not None and value != plain[name]}


def engine_config(card: Card, run: RealRun, options: dict[str, Any] | None = None) -> _native.SchedulerConfig:
    """Return the scheduler's options: the user's, else the run's, else vLLM's defaults for the card.

    Raises:
        ConfigError, CalibrationError: an option is wrong.
    """
    if run.recording is not None and not options:
        info = run.recording.info
        return scheduler_config(info.engine, info.vllm_version, asynchronous=info.loop == "async")
    known = {_OPTION_NAMES.get(name, name): value for name, value in run.engine.items()}
    allowed = {name: value for name, value in known.items() if name in EngineOptions.model_fields}
    if run.recording is not None:
        allowed["async_scheduling"] = run.recording.info.loop == "async"
    elif is_synchronous(run.vllm_version):
        allowed["async_scheduling"] = False
    merged = EngineOptions.model_validate(allowed | (options or {}))
    native, _ = resolve_engine_options(merged, card, "engine")
    native.shared_prefixes = False
    fault = native.validate()
    if fault:
        raise CalibrationError(f"engine: {fault}")
    return native


def is_synchronous(vllm_version: str) -> bool:
    """Tell whether a version of vLLM runs the synchronous loop by default."""
    parts = vllm_version.lstrip("v").split(".")
    try:
        return (int(parts[0]), int(parts[1])) < _SYNCHRONOUS_BEFORE
    except (ValueError, IndexError):
        return False


def play(
    model: _native.StepTimeModel,
    config: _native.SchedulerConfig,
    front_end: FrontEnd,
    requests: Requests,
    *,
    with_series: bool = False,
) -> tuple[Requests, Series | None]:
    """Send requests at the times of a real run and return what they meet in the simulation.

    Args:
        model: step times.
        config: scheduler options.
        front_end: time outside of the engine.
        requests: arrivals and lengths; what they met is not looked at.
        with_series: also return the load over time.
    """
    engine = _native.Engine(config, model, None, record_steps=with_series)
    sent = np.rint(requests.arrival_s * PS_PER_S).astype(np.int64)
    delay = front_end.request_s + front_end.per_prompt_token_s * requests.prompt_tokens
    at = sent + np.rint(delay * PS_PER_S).astype(np.int64)
    for index in np.argsort(at, kind="stable").tolist():
        tokens = int(requests.output_tokens[index])
        engine.submit(index, int(requests.prompt_tokens[index]), tokens, int(at[index]), tokens, ends_by_length=True)
    engine.drain()
    hop = ps_from_seconds(front_end.output_s)
    ttft, e2e = _times(engine.take_events(), sent, hop)
    played = Requests(requests.arrival_s, requests.prompt_tokens, requests.output_tokens, ttft, e2e)
    if not with_series:
        return played, None
    _, start, end, *_, running, waiting, free = engine.take_steps().T
    usage = 1 - free / (config.num_gpu_blocks - 1)
    counts = running.astype(np.float64), waiting.astype(np.float64)
    return played, Series.of_steps(start / PS_PER_S, end / PS_PER_S, *counts, usage)


def _times(events: Any, sent: Any, hop: int) -> tuple[FloatArray, FloatArray]:
    ttft, e2e = np.full(len(sent), np.nan), np.full(len(sent), np.nan)
    for kind, out in ((_KINDS.first_token, ttft), (_KINDS.finished, e2e)):
        rows = events[events[:, 3] == int(kind)]
        out[rows[:, 0]] = (rows[:, 1] + hop - sent[rows[:, 0]]) / PS_PER_S
    return ttft, e2e


def play_closed(
    model: _native.StepTimeModel,
    config: _native.SchedulerConfig,
    front_end: FrontEnd,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    waves: int = WAVES,
) -> Requests:
    """Keep so many equal requests in flight, as benchmarks do: all begin at once, and each end brings the next.

    Args:
        model: step times.
        config: scheduler options.
        front_end: time outside of the engine.
        prompt_tokens: of each request [tokens].
        output_tokens: of each request [tokens].
        concurrency: requests in flight.
        waves: requests for each one in flight; 1: all are sent at once and none follows.

    Returns:
        The requests, from the first to the last.

    Raises:
        CalibrationError: such a request does not fit into the engine.
    """
    engine = _native.Engine(config, model, None)
    way = ps_from_seconds(front_end.request_s + front_end.per_prompt_token_s * prompt_tokens)
    hop = ps_from_seconds(front_end.output_s)
    total = waves * concurrency
    sent = np.zeros(total, dtype=np.int64)
    first, end = np.full(total, np.nan), np.full(total, np.nan)
    for index in range(concurrency):
        _submit(engine, index, prompt_tokens, output_tokens, way)
    next_index = concurrency
    while (now := engine.next_end()) != _native.NEVER:
        engine.advance_to(now)
        for request, at, _, kind, _ in engine.take_events().tolist():
            if kind == int(_KINDS.first_token):
                first[request] = (at + hop - sent[request]) / PS_PER_S
            elif kind == int(_KINDS.finished):
                end[request] = (at + hop - sent[request]) / PS_PER_S
                if next_index < total:
                    sent[next_index] = max(at + hop, engine.now)
                    _submit(engine, next_index, prompt_tokens, output_tokens, int(sent[next_index]) + way)
                    next_index += 1
    lengths = np.full((2, total), [[prompt_tokens], [output_tokens]], dtype=np.int64)
    return Requests(sent / PS_PER_S, lengths[0], lengths[1], first, end)


def _submit(engine: _native.Engine, index: int, prompt: int, output: int, at: int) -> None:
    if not engine.submit(index, prompt, output, at, output, ends_by_length=True):
        raise CalibrationError(
            f"a request of {prompt} + {output} tokens does not fit into the engine; its context limit or KV cache is "
            "too small: give --engine options as the run had them"
        )
