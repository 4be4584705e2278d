"""Task mixes: what kinds of requests there are, how long they are and how well models answer them.

All numbers of a mix are in its recipe file. Whatever belongs to a request is drawn per row of one
matrix, so a longer trace with the same seed begins with the same requests.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simcluster.rng import Stream, generator
from simcluster.workload.recipe import LengthPrediction, Lengths, Mix
from simcluster.workload.trace_columns import FloatArray, IntArray, MapArrays

__all__ = ["DEFAULT_QUALITY", "TaskMix", "clipped_lengths", "draw_mix"]

DEFAULT_QUALITY: dict[str, float] = {
    "Qwen3-0.6B": 0.405,
    "Qwen3-8B": 0.69,
    "Qwen3-32B": 0.78,
}
"""Quality per model for traces without one: the means over the four tasks of the quickstart recipe.

Synthetic: the paper's quality scores are not public.
"""


@dataclass(frozen=True, slots=True)
class TaskMix:
    """What was drawn for n requests.

    Attributes:
        task: index into task_names, int32, shape (n,).
        task_names: names of the tasks, sorted.
        prompt_tokens: prompt lengths [tokens], shape (n,).
        output_tokens: answer lengths [tokens] per model, shape (n,) each.
        quality: quality per model, 0 to 1 in steps of 0.0001, shape (n,) each.
        predicted_output_tokens: what routers expect [tokens] per model, shape (n,) each; empty without predictions.
        predicted_quality: what routers expect per model, 0 to 1 in steps of 0.0001; empty without predictions.
    """

    task: npt.NDArray[np.int32]
    task_names: tuple[str, ...]
    prompt_tokens: IntArray
    output_tokens: MapArrays
    quality: MapArrays
    predicted_output_tokens: MapArrays
    predicted_quality: MapArrays


def draw_mix(mix: Mix, n: int, seed: int, replication: int = 0, owner: IntArray | None = None) -> TaskMix:
    """Draw tasks, lengths and qualities of n requests.

    Args:
        mix: the kinds of requests.
        n: number of requests.
        seed: seed of the streams.
        replication: replication of that seed.
        owner: conversation of each request, from 0, shape (n,): all its requests have one task.
    """
    names = tuple(sorted(mix.tasks))
    tasks = [mix.tasks[name] for name in names]
    models = list(mix.length_factor)
    weights = np.array([task.weight for task in tasks])
    rng = generator(seed, Stream.TASKS, replication)
    draws = n if owner is None else int(owner.max()) + 1
    task = rng.choice(len(names), size=draws, p=weights / weights.sum()).astype(np.int32)
    if owner is not None:
        task = task[owner]

    # Columns: the prompt, the part of the answer that all models share, each model's own part.
    lengths = generator(seed, Stream.LENGTHS, replication).standard_normal((n, 2 + len(models)))
    difficulty = generator(seed, Stream.QUALITY, replication).standard_normal((n, 1 + len(models)))
    prompts = [each.prompt for each in tasks]
    answers = [each.answer for each in tasks]
    noise = generator(seed, Stream.PREDICTIONS, replication).standard_normal((n, 2 * len(models)))
    output_tokens: MapArrays = {}
    quality: MapArrays = {}
    predicted_output_tokens: MapArrays = {}
    predicted_quality: MapArrays = {}
    for column, model in enumerate(models):
        deviation = mix.length_spread.shared * lengths[:, 1] + mix.length_spread.own * lengths[:, 2 + column]
        scale = mix.outscale * mix.length_factor[model]
        output_tokens[model] = clipped_lengths(answers, task, deviation, scale)
        mean = np.array([each.quality[model] for each in tasks])[task]
        shared = mix.quality_spread.shared * difficulty[:, 0]
        own = mix.quality_spread.own * difficulty[:, 1 + column]
        quality[model] = _judged(mean + shared + own)
        if mix.predictions is not None:
            error = noise[:, 2 * column : 2 * column + 2]
            rule = mix.predictions.length
            predicted_output_tokens[model] = _foreseen_lengths(answers, task, deviation, error[:, 0], scale, rule)
            known = mix.predictions.quality
            foreseen = mean + known.known_shared * shared + known.known_own * own + known.noise * error[:, 1]
            predicted_quality[model] = _judged(foreseen)
    return TaskMix(
        task=task,
        task_names=names,
        prompt_tokens=clipped_lengths(prompts, task, lengths[:, 0], 1.0),
        output_tokens=output_tokens,
        quality=quality,
        predicted_output_tokens=predicted_output_tokens,
        predicted_quality=predicted_quality,
    )


def _judged(quality: FloatArray) -> FloatArray:
    # A judge's score has no more than a few digits; the file is half the size.
    return np.asarray(np.round(np.clip(quality, 0.0, 1.0), 4), dtype=np.float64)


def _foreseen_lengths(
    rules: list[Lengths],
    task: npt.NDArray[np.int32],
    deviation: FloatArray,
    error: FloatArray,
    scale: float,
    prediction: LengthPrediction,
) -> IntArray:
    """Return predicted lengths [tokens], shape (n,); arguments as in `clipped_lengths`, errors standard normal."""
    sigma = np.array([rule.sigma for rule in rules])
    # Half the variance of the logarithm that the prediction lacks, so that its mean is that of the lengths.
    correction = ((1 - prediction.known**2) * sigma**2 - prediction.noise**2) / 2
    foreseen = prediction.known * deviation
    exact = [rule.model_copy(update={"sigma": 1.0}) for rule in rules]
    return clipped_lengths(exact, task, sigma[task] * foreseen + prediction.noise * error + correction[task], scale)


def clipped_lengths(
    rules: list[Lengths],
    task: npt.NDArray[np.int32],
    deviation: npt.NDArray[np.float64],
    scale: float,
) -> IntArray:
    """Return log-normal lengths [tokens], shape (n,).

    Args:
        rules: one rule per task.
        task: task of each request, shape (n,).
        deviation: standard normal draws, shape (n,).
        scale: factor on the medians.
    """
    median = np.array([rule.median * scale for rule in rules])[task]
    sigma = np.array([rule.sigma for rule in rules])[task]
    low = np.array([rule.low for rule in rules])[task]
    high = np.array([2**31 if rule.high is None else rule.high for rule in rules])[task]
    with np.errstate(over="ignore"):  # an infinite length is clipped like any other
        lengths: IntArray = np.clip(np.rint(median * np.exp(sigma * deviation)), low, high).astype(np.int64)
    return lengths
