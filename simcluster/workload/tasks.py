"""Task mixes: what kinds of requests there are, how long they are and how well models answer them.

All numbers of a mix are in its recipe file. Whatever belongs to a request is drawn per row of one
matrix, so a longer trace with the same seed begins with the same requests.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simcluster.rng import Stream, generator
from simcluster.workload.trace_columns import IntArray, MapArrays

__all__ = ["DEFAULT_QUALITY", "Lengths", "Recipe", "Spread", "TaskMix", "TaskRecipe", "draw_mix"]

DEFAULT_QUALITY: dict[str, float] = {
    "Qwen3-0.6B": 0.405,
    "Qwen3-8B": 0.69,
    "Qwen3-32B": 0.78,
}
"""Quality per model for traces without one: the means over the four tasks of the quickstart recipe.

Synthetic: the paper's quality scores are not public.
"""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(_Strict):
    """A log-normal length, rounded to whole tokens and clipped.

    Attributes:
        median: median before clipping [tokens].
        sigma: standard deviation of the logarithm.
        low: smallest length [tokens].
        high: largest length [tokens]; None for no limit.
    """

    median: Positive
    sigma: NotNegative
    low: int = Field(default=1, ge=1)
    high: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.high is not None and self.high < self.low:
            raise ValueError(f"high = {self.high} is below low = {self.low}")
        return self


class Spread(_Strict):
    """How a deviation splits into a part that all models share and one of each model's own."""

    shared: NotNegative
    own: NotNegative


class TaskRecipe(_Strict):
    """One kind of request.

    Attributes:
        weight: share of the requests, relative to the other weights.
        prompt: prompt length.
        answer: answer length before `outscale` and the models' factors.
        quality: mean quality of each model's answers, 0 to 1.
    """

    weight: Positive
    prompt: Lengths
    answer: Lengths
    quality: dict[str, Share]


class Recipe(_Strict):
    """A synthetic trace, as its recipe file describes it.

    Attributes:
        name: name of the trace.
        seed: seed of all random streams.
        requests: number of requests.
        rate_rps: rate of the Poisson arrivals [1/s].
        outscale: factor on all median answer lengths.
        slo_scale: factor on the TTFT targets of paper B.2.
        length_factor: factor on the median answer length of each model.
        output_tokens_of: the model whose answer lengths fill the column output_tokens.
        length_spread: the answer's log length deviates by sigma * (shared * z + own * z_model),
            z standard normal; the squares add up to 1, so that sigma is its deviation.
        quality_spread: quality deviates by shared * z + own * z_model, then is clipped to [0, 1].
        tasks: the kinds of requests by name.
    """

    name: str = Field(min_length=1)
    seed: int = Field(ge=0)
    requests: int = Field(ge=1)
    rate_rps: Positive
    outscale: Positive = 1.0
    slo_scale: Positive = 1.0
    length_factor: dict[str, Positive] = Field(min_length=1)
    output_tokens_of: str
    length_spread: Spread
    quality_spread: Spread
    tasks: dict[str, TaskRecipe] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        models = set(self.length_factor)
        if self.output_tokens_of not in models:
            raise ValueError(f"output_tokens_of = {self.output_tokens_of!r}; must be one of {sorted(models)}")
        for name, task in self.tasks.items():
            if set(task.quality) != models:
                raise ValueError(
                    f"tasks.{name}.quality names {sorted(task.quality)};"
                    f" must name the models of length_factor, {sorted(models)}"
                )
        variance = self.length_spread.shared**2 + self.length_spread.own**2
        if not math.isclose(variance, 1.0, abs_tol=1e-6):
            raise ValueError(f"length_spread: shared^2 + own^2 = {variance:g}; must be 1")
        return self


@dataclass(frozen=True, slots=True)
class TaskMix:
    """What was drawn for n requests.

    Attributes:
        task: index into task_names, int32, shape (n,).
        task_names: names of the tasks, sorted.
        prompt_tokens: prompt lengths [tokens], shape (n,).
        output_tokens: answer lengths [tokens] per model, shape (n,) each.
        quality: quality per model, 0 to 1 in steps of 0.0001, shape (n,) each.
    """

    task: npt.NDArray[np.int32]
    task_names: tuple[str, ...]
    prompt_tokens: IntArray
    output_tokens: MapArrays
    quality: MapArrays


def draw_mix(recipe: Recipe, n: int, replication: int = 0) -> TaskMix:
    """Draw tasks, lengths and qualities of n requests from the recipe's seed.

    Args:
        recipe: the mix.
        n: number of requests.
        replication: replication of the recipe's seed.
    """
    names = tuple(sorted(recipe.tasks))
    tasks = [recipe.tasks[name] for name in names]
    models = list(recipe.length_factor)
    weights = np.array([task.weight for task in tasks])
    rng = generator(recipe.seed, Stream.TASKS, replication)
    task = rng.choice(len(names), size=n, p=weights / weights.sum()).astype(np.int32)

    # Columns: the prompt, the part of the answer that all models share, each model's own part.
    lengths = generator(recipe.seed, Stream.LENGTHS, replication).standard_normal((n, 2 + len(models)))
    difficulty = generator(recipe.seed, Stream.QUALITY, replication).standard_normal((n, 1 + len(models)))
    prompts = [each.prompt for each in tasks]
    answers = [each.answer for each in tasks]
    output_tokens: MapArrays = {}
    quality: MapArrays = {}
    for column, model in enumerate(models):
        deviation = recipe.length_spread.shared * lengths[:, 1] + recipe.length_spread.own * lengths[:, 2 + column]
        scale = recipe.outscale * recipe.length_factor[model]
        output_tokens[model] = _lengths(answers, task, deviation, scale)
        accuracy = (
            np.array([each.quality[model] for each in tasks])[task]
            + recipe.quality_spread.shared * difficulty[:, 0]
            + recipe.quality_spread.own * difficulty[:, 1 + column]
        )
        # A judge's score has no more than a few digits; the file is half the size.
        quality[model] = np.round(np.clip(accuracy, 0.0, 1.0), 4)
    return TaskMix(
        task=task,
        task_names=names,
        prompt_tokens=_lengths(prompts, task, lengths[:, 0], 1.0),
        output_tokens=output_tokens,
        quality=quality,
    )


def _lengths(
    rules: list[Lengths],
    task: npt.NDArray[np.int32],
    deviation: npt.NDArray[np.float64],
    scale: float,
) -> IntArray:
    median = np.array([rule.median * scale for rule in rules])[task]
    sigma = np.array([rule.sigma for rule in rules])[task]
    low = np.array([rule.low for rule in rules])[task]
    high = np.array([2**31 if rule.high is None else rule.high for rule in rules])[task]
    lengths: IntArray = np.clip(np.rint(median * np.exp(sigma * deviation)), low, high).astype(np.int64)
    return lengths
