"""What routers believe about the answers of a run: means or a predictor, and errors on purpose."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from simcluster.errors import PredictorError
from simcluster.predict.means import task_means
from simcluster.predict.predictor import Predictor, load_predictor
from simcluster.request import FloatArray, IntArray
from simcluster.rng import Stream, seeded
from simcluster.scenario import PredictionError, Scenario
from simcluster.shipped import find_file
from simcluster.workload import Trace

__all__ = ["beliefs"]

ROOM = "traces/predictors"
_TOLD_EVERY = 256  # requests


def beliefs(
    scenario: Scenario,
    path: Path,
    trace: Trace,
    models: list[str],
    output: IntArray,
    quality: FloatArray,
    notes: list[str],
    inputs: dict[str, Any],
    on_predicted: Callable[[int, int], None] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return expected answer lengths [tokens] and qualities, (n, j) each.

    Args:
        scenario: says which predictor, and what errors its lengths have.
        path: where it was read.
        trace: the requests.
        models: (j,) the model of each column.
        output: (n, j) true answer lengths, for means.
        quality: (n, j) true qualities, for means.
        notes: told what results rest on.
        inputs: told names and hashes of the files that went in.
        on_predicted: told how many requests a predictor is done with, and of how many.

    Raises:
        ConfigError: there is no such predictor.
        PredictorError: it does not fit the trace or the models.
    """
    routing = scenario.routing
    if routing.predictor == "means":
        lengths, qualities = _of_trace(trace, models, output, quality, notes)
    else:
        where = f"{path}: routing.predictor"
        file = find_file(routing.predictor, ROOM, ".json", path.parent, where)
        tokenizer = None
        if routing.tokenizer is not None:
            tokenizer = find_file(routing.tokenizer, ROOM, ".json", path.parent, f"{path}: routing.tokenizer")
        predictor = load_predictor(file, tokenizer)
        inputs |= {"predictor": file.name, "predictor_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        notes.append(f"routers predict answer length and quality by {file.name}, trained on {predictor.origin.source}")
        lengths, qualities = _predicted(predictor, f"{where} = {routing.predictor!r}", trace, models, on_predicted)
    error = routing.prediction_error
    if error != PredictionError():
        notes.append(
            f"predicted answer lengths are wrong on purpose: times {error.length_bias:g}, log-normal "
            f"{error.length_sigma:g}"
        )
        lengths = lengths * _factors(error, scenario.seed, len(trace), models)
    return lengths, qualities


def _of_trace(
    trace: Trace, models: list[str], output: IntArray, quality: FloatArray, notes: list[str]
) -> tuple[FloatArray, FloatArray]:
    """Return what the trace itself predicts, else its means."""
    lengths, qualities = task_means(output.astype(np.float64), trace.task), task_means(quality, trace.task)
    by_means = "per task and model" if trace.task is not None else "per model"
    for what, values, given in (
        ("answer length", lengths, trace.predicted_output_tokens_by_model),
        ("quality", qualities, trace.predicted_quality_by_model),
    ):
        for column, model in enumerate(models):
            if model in given:
                values[:, column] = given[model]
                notes.append(f"routers know the {what} as the trace predicts it per request")
            else:
                notes.append(f"routers predict the {what} by the trace's own means {by_means}")
    return lengths, qualities


def _predicted(
    predictor: Predictor,
    where: str,
    trace: Trace,
    models: list[str],
    on_predicted: Callable[[int, int], None] | None,
) -> tuple[FloatArray, FloatArray]:
    if trace.prompt is None:
        raise PredictorError(
            f"{where}; the trace has no column prompt to predict from; give a trace with prompts, or predictor: means"
        )
    if predictor.start == "task_means" and trace.task is None:
        raise PredictorError(
            f"{where}; it corrects task means, and the trace has no column task; add it, or train one without "
            "--start task_means"
        )
    distinct = list(dict.fromkeys(models))
    try:
        predict = predictor.for_models(distinct)
    except PredictorError as error:
        raise PredictorError(f"{where}; {error}") from None
    labels = trace.task_labels()
    tasks = [None] * len(trace) if labels is None else labels.tolist()
    rows = []
    for k, (prompt, task) in enumerate(zip(trace.prompt.tolist(), tasks, strict=True)):
        rows.append(predict(prompt, task))
        if on_predicted is not None and k % _TOLD_EVERY == 0:
            on_predicted(k + 1, len(trace))
    columns = [distinct.index(model) for model in models]
    return (
        np.stack([length for _, length in rows])[:, columns],
        np.stack([quality for quality, _ in rows])[:, columns],
    )


def _factors(error: PredictionError, seed: int, n: int, models: list[str]) -> FloatArray:
    """Return a factor per request and model with mean `length_bias`, (n, j); replicas of a model share theirs."""
    columns = []
    for model in models:  # a stream of its own, so that it does not depend on the other models
        z = seeded(seed, 0, int(Stream.PREDICTION_ERRORS), crc32(model.encode())).standard_normal(n)
        columns.append(error.length_bias * np.exp(error.length_sigma * z - error.length_sigma**2 / 2))
    return np.stack(columns, axis=1)
