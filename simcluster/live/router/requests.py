"""From an HTTP request to what a policy is told: prompt length, expected answer, utility and target."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from simcluster.errors import ConfigError
from simcluster.live.openai_api import ApiError, Asked
from simcluster.predict.beliefs import ROOM
from simcluster.predict.cost import expected_cost
from simcluster.predict.predictor import Predictor, load_predictor
from simcluster.predict.tokens import Tokens, load_tokens
from simcluster.request import FloatArray, IntArray, Request
from simcluster.scenario import Scenario
from simcluster.shipped import find_file
from simcluster.units import PS_PER_S
from simcluster.workload.slo import MS_PER_TOKEN
from simcluster.world import World

__all__ = ["SESSION_HEADER", "TPOT_HEADER", "TTFT_HEADER", "PromptRequests", "RequestBuilder", "header_ms"]

TTFT_HEADER, TPOT_HEADER, SESSION_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-session-id"
_SHORT = 4096  # characters that are worth no other thread
_LONGEST_MS = 1e9

Predict = Callable[[str], tuple[FloatArray, FloatArray]]


class RequestBuilder(Protocol):
    """Makes requests as policies see them."""

    async def build(
        self,
        number: int,
        asked: Asked,
        headers: Mapping[str, str],
        request_id: str,
        now_ps: Callable[[], int],
    ) -> Request:
        """Return a request.

        Args:
            number: stands for it in snapshots.
            asked: the body.
            headers: of the HTTP request.
            request_id: the client's, or one that the router made.
            now_ps: the clock; the request has arrived when this was called.

        Raises:
            ApiError: something in it is not allowed.
        """
        ...


def header_ms(headers: Mapping[str, str], name: str) -> float | None:
    """Return a header's number of milliseconds, None without it.

    Raises:
        ApiError: 400, it is not a number above 0.
    """
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_MS:
        raise ApiError(400, f"{name}: {text[:40]}; must be a number of milliseconds above 0", name)
    return value


class PromptRequests:
    """Requests of anybody: tokens are counted, answers are predicted by the scenario's predictor or by its means.

    A target comes from the header `x-slo-ttft-ms`; else it is the scenario's number, else the paper's rule at its
    mean; none if the scenario says so.
    """

    def __init__(self, scenario: Scenario, path: Path, world: World) -> None:
        """Load what the scenario names.

        Raises:
            ConfigError, PredictorError: the predictor or the tokenizer cannot be used.
        """
        routing = scenario.routing
        self._world = world
        self._slo = scenario.slo
        self._cost_weight = routing.cost_weight
        self._groups = world.known.group_of_instance
        first = [int(np.flatnonzero(self._groups == g)[0]) for g in range(int(self._groups.max()) + 1)]
        specs = [world.instances[j] for j in first]
        self._prices = np.array([(spec.price_in, spec.price_out) for spec in world.instances])
        means = (world.known.predicted_output_tokens.mean(axis=0), world.known.predicted_quality.mean(axis=0))
        self._means: tuple[FloatArray, FloatArray] = (means[0][self._groups], means[1][self._groups])
        self._mean_tokens = lru_cache(1024)(partial(_in_tokens, self._means[0]))  # by limit
        self._ones = np.ones(len(world.instances), dtype=np.int64)
        tokenizer = None
        if routing.tokenizer is not None:
            tokenizer = find_file(routing.tokenizer, ROOM, ".json", path.parent, f"{path}: routing.tokenizer")
        self._here: Predict | None = None  # in the event loop's thread
        self._there: Predict | None = None  # in the other one
        self._tokens: Tokens
        if routing.predictor == "means":
            self._tokens = load_tokens(tokenizer)
        else:
            file = find_file(routing.predictor, ROOM, ".json", path.parent, f"{path}: routing.predictor")
            predictor = load_predictor(file, tokenizer)
            if predictor.start == "task_means":
                raise ConfigError(
                    f"{path}: routing.predictor = {routing.predictor}; it needs the task of every request, which no "
                    "client tells; train one without --start task_means"
                )
            models = [spec.model for spec in specs]
            self._tokens = predictor.tokens
            self._here, self._there = (_in_columns(predictor, models) for _ in range(2))
        self._others = ThreadPoolExecutor(1, "tokens")

    async def build(
        self,
        number: int,
        asked: Asked,
        headers: Mapping[str, str],
        request_id: str,  # noqa: ARG002  (others look it up)
        now_ps: Callable[[], int],
    ) -> Request:
        """Return a request; a long text is cut into tokens in another thread."""
        arrival_ps = now_ps()
        target_ms = header_ms(headers, TTFT_HEADER)
        text = asked.text
        if text is None or len(text) <= _SHORT:
            prompt, lengths, quality = self._look(text, asked.token_ids, self._here)
        else:
            look = partial(self._look, text, asked.token_ids, self._there)
            prompt, lengths, quality = await asyncio.get_running_loop().run_in_executor(self._others, look)
        limit = -1 if asked.max_tokens is None else asked.max_tokens
        is_mean = lengths is self._means[0]  # copied, since a policy may write into what it gets
        expected = self._mean_tokens(limit).copy() if is_mean else _in_tokens(lengths, limit)
        utility: FloatArray = quality - self._cost_weight * expected_cost(prompt, expected, self._prices)
        return Request(
            index=number,
            arrival_ps=arrival_ps,
            prompt_tokens=self._ones * prompt,
            max_tokens=limit,
            priority=asked.priority,
            slo_ttft_ps=self._target_ps(prompt, target_ms),
            predicted_output_tokens=expected,
            predicted_utility=utility,
            session_id=headers.get(SESSION_HEADER),
            predicted_quality=quality.copy(),
        )

    def _look(
        self, text: str | None, token_ids: int | None, predict: Predict | None
    ) -> tuple[int, FloatArray, FloatArray]:
        """Return the number of prompt tokens, and answer lengths and qualities, (j,)."""
        prompt = token_ids if token_ids is not None else max(1, len(self._tokens.ids(text or "")))
        if predict is not None and text is not None:
            lengths, quality = predict(text)
            return prompt, lengths[self._groups], quality[self._groups]
        return prompt, *self._means

    def _target_ps(self, prompt_tokens: int, target_ms: float | None) -> int:
        if target_ms is not None:
            return int(target_ms * PS_PER_S / 1e3)
        rule = self._slo.ttft
        if rule == "none":
            return -1
        if isinstance(rule, float):
            seconds = rule
        else:  # its draws at their means: u = 3 ms, v = 1
            seconds = min(1120.0, max(150.0, 158.0 + MS_PER_TOKEN * prompt_tokens)) / 1e3
        return int(seconds * self._slo.ttft_scale * PS_PER_S)


def _in_tokens(lengths: FloatArray, limit: int) -> IntArray:
    """Return expected answers in whole tokens, 1 or more, and not above a limit; -1: there is none."""
    expected: IntArray = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return np.minimum(expected, limit) if limit > 0 else expected


def _in_columns(predictor: Predictor, models: list[str]) -> Predict:
    """Return what predicts lengths and qualities of all models, for one thread."""
    distinct = list(dict.fromkeys(models))
    columns = [distinct.index(model) for model in models]
    of_models = predictor.for_models(distinct)

    def predict(prompt: str) -> tuple[FloatArray, FloatArray]:
        quality, length = of_models(prompt, None)
        return length[columns], quality[columns]

    return predict
