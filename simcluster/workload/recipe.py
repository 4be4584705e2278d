"""Recipe files: what a synthetic trace is drawn from. `traces/README.md` shows one of every kind."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from simcluster.errors import ConfigError
from simcluster.validation import explain
from simcluster.yaml_files import load_yaml

__all__ = [
    "Arrivals",
    "LengthPrediction",
    "Lengths",
    "Mix",
    "Predictions",
    "Recipe",
    "Sessions",
    "Spread",
    "TaskRecipe",
    "load_recipe",
]

Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# ---- when requests arrive ------------------------------------------------------------------------


class Poisson(_Strict):
    """Independent arrivals."""

    kind: Literal["poisson"]
    rate_rps: Positive = Field(description="mean rate [1/s]")


class Gamma(_Strict):
    """Gamma-distributed gaps, as `vllm bench serve` draws them."""

    kind: Literal["gamma"]
    rate_rps: Positive = Field(description="mean rate [1/s]")
    burstiness: Positive = Field(description="shape of the gaps; 1: Poisson, below: burstier; CV = 1/sqrt(shape)")


class Constant(_Strict):
    """Equal gaps."""

    kind: Literal["constant"]
    rate_rps: Positive = Field(description="rate [1/s]")


class Mmpp2(_Strict):
    """Poisson arrivals whose rate jumps between two levels. Source: paper, MMPP-2."""

    kind: Literal["mmpp2"]
    rate_rps: Positive = Field(description="mean rate [1/s]")
    ratio: Annotated[float, Field(ge=1, le=1e6)] = Field(description="high rate over low rate")
    high_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="share of the time in the high state")
    correlation_s: Positive = Field(2.0, description="correlation time of the rate [s]")


class Replay(_Strict):
    """The arrivals of a trace file."""

    kind: Literal["trace"]
    file: Text = Field(description="trace file, beside the recipe")
    rate_scale: Positive = Field(1.0, description="intervals are divided by this")


class ServeGen(_Strict):
    """ServeGen's rates per client and window of 600 s."""

    kind: Literal["servegen"]
    rates: Text = Field(description="table (client, t_s, rate_rps, cv, pattern, p1), or a folder of chunk-*-trace.csv")
    window_s: Annotated[list[NotNegative], Field(min_length=2, max_length=2)] = Field(
        description="from, to [s, in the time of the table]"
    )
    rate_scale: Positive = Field(1.0, description="factor on every rate")

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.window_s[1] <= self.window_s[0]:
            raise ValueError(f"window_s = {self.window_s}; must end after it starts")
        return self


class Closed(_Strict):
    """Users who send their next request when the last one has ended."""

    kind: Literal["closed"]
    concurrency: Count = Field(description="users; requests are dealt to them in turn")
    think_s: NotNegative = Field(0.0, description="from the end of a request to the user's next one [s]")


Arrivals = Poisson | Gamma | Constant | Mmpp2 | Replay | ServeGen | Closed


# ---- how long they are ---------------------------------------------------------------------------


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
    low: int = Field(default=1, ge=1, le=2**31)
    high: int | None = Field(default=None, ge=1, le=2**31)

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.high is not None and self.high < self.low:
            raise ValueError(f"high = {self.high} is below low = {self.low}")
        return self


class DrawnLengths(_Strict):
    """Prompt and answer drawn independently."""

    kind: Literal["drawn"]
    prompt: Lengths
    answer: Lengths


class FileLengths(_Strict):
    """Pairs of lengths from the rows of a file: a trace, or any file that `simcluster trace import` knows."""

    kind: Literal["file"]
    file: Text = Field(description="file with prompt and output tokens, beside the recipe")
    order: Literal["drawn", "file"] = Field("drawn", description="drawn: rows at random; file: rows in turn")


class ServeGenLengths(_Strict):
    """ServeGen's histograms of lengths per client and window."""

    kind: Literal["servegen"]
    lengths: Text = Field(description="table (client, window_s, field, tokens, prob), or a folder of chunk-*.json")
    without_lengths: Literal["drop", "pool"] = Field(
        "drop", description="requests of clients without histograms: leave them out, or draw from all clients"
    )


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


class LengthPrediction(_Strict):
    """How well routers know answer lengths: `median * exp(known * d + noise * z)`, rounded, at least 1.

    d is the answer's own deviation of the log length and z standard normal, for each model. A factor keeps the
    mean of the predictions where that of the answers is.

    Attributes:
        known: share of the deviation that is foreseen.
        noise: standard deviation of the logarithm.
    """

    known: Share
    noise: NotNegative


class QualityPrediction(_Strict):
    """How well routers know qualities: `mean + known_shared * s + known_own * o + noise * z`, clipped to [0, 1].

    s and o are the two parts of the quality's own deviation and z standard normal, for each model.

    Attributes:
        known_shared: share of the part that all models have in common that is foreseen.
        known_own: share of each model's own part that is foreseen.
        noise: standard deviation of the error.
    """

    known_shared: Share
    known_own: Share
    noise: NotNegative


class Predictions(_Strict):
    """What routers are told about each request; noisy, and never the truth."""

    length: LengthPrediction
    quality: QualityPrediction


class Mix(NamedTuple):
    """The part of a recipe that draws tasks, lengths and qualities; see `Recipe`."""

    outscale: float
    length_factor: dict[str, float]
    output_tokens_of: str
    length_spread: Spread
    quality_spread: Spread
    tasks: dict[str, TaskRecipe]
    predictions: Predictions | None = None


# ---- conversations -------------------------------------------------------------------------------


class Seconds(_Strict):
    """A log-normal time [s]."""

    median: NotNegative
    sigma: NotNegative = 0.0


class Sessions(_Strict):
    """Conversations: a turn's prompt is the last prompt, its answer and new tokens.

    The recipe's arrivals are those of first turns, its prompt lengths those of new tokens.

    Attributes:
        turns: turns per conversation.
        think_s: time before each turn but the first [s].
        mode: `closed`: a turn comes when the last one has ended and the think time has passed; `open`: when the
            think time has passed since the last turn came.
        prefix_tokens: tokens before the first turn's new ones, shared by conversations [tokens].
        prefixes: number of different shared prefixes.
        hash_block: prompt tokens that one prefix hash covers [tokens].
    """

    turns: Lengths
    think_s: Seconds = Seconds(median=0.0)
    mode: Literal["closed", "open"] = "closed"
    prefix_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    prefixes: Count = 1
    hash_block: Count = 16


# ---- the whole -----------------------------------------------------------------------------------


class Recipe(_Strict):
    """A synthetic trace, as its recipe file describes it.

    Attributes:
        name: name of the trace.
        seed: seed of all random streams.
        requests: number of requests; left out, as many as there are arrivals (trace, servegen).
        rate_rps: rate of Poisson arrivals [1/s]; short for `arrivals: {kind: poisson, rate_rps: ...}`.
        outscale: factor on all median answer lengths of tasks.
        slo_scale: factor on the TTFT targets of paper B.2.
        slo_ms_per_token: their slope over the prompt instead of the paper's 0.0035 [ms/token].
        length_factor: factor on the median answer length of each model.
        output_tokens_of: the model whose answer lengths fill the column output_tokens.
        length_spread: the answer's log length deviates by sigma * (shared * z + own * z_model),
            z standard normal; the squares add up to 1, so that sigma is its deviation.
        quality_spread: quality deviates by shared * z + own * z_model, then is clipped to [0, 1].
        tasks: the kinds of requests by name.
        predictions: what routers are told about requests of tasks; left out, they take the trace's means.
        arrivals: when requests arrive.
        lengths: how long they are, instead of tasks.
        sessions: conversations of several turns.
        prompts: `synthetic`: make prompt texts that fit tasks and lengths.
    """

    name: Text
    seed: int = Field(ge=0, le=2**63 - 1)
    requests: Annotated[int, Field(ge=1, le=20_000_000)] | None = None
    rate_rps: Positive | None = None
    outscale: Positive = 1.0
    slo_scale: Positive = 1.0
    slo_ms_per_token: NotNegative | None = None
    length_factor: Annotated[dict[str, Positive], Field(min_length=1)] | None = None
    output_tokens_of: str | None = None
    length_spread: Spread | None = None
    quality_spread: Spread | None = None
    tasks: Annotated[dict[str, TaskRecipe], Field(min_length=1)] | None = None
    predictions: Predictions | None = None
    arrivals: Annotated[Arrivals, Field(discriminator="kind")] | None = None
    lengths: Annotated[DrawnLengths | FileLengths | ServeGenLengths, Field(discriminator="kind")] | None = None
    sessions: Sessions | None = None
    prompts: Literal["synthetic"] | None = None
    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def process(self) -> Arrivals:
        """When requests arrive."""
        if self.arrivals is not None:
            return self.arrivals
        assert self.rate_rps is not None  # validated: one of the two is given
        return Poisson(kind="poisson", rate_rps=self.rate_rps)

    @property
    def mix(self) -> Mix | None:
        """The task mix; None if lengths are given instead."""
        parts = (self.length_factor, self.output_tokens_of, self.length_spread, self.quality_spread, self.tasks)
        factor, of, length_spread, quality_spread, tasks = parts
        if factor is None or of is None or length_spread is None or quality_spread is None or tasks is None:
            return None
        return Mix(self.outscale, factor, of, length_spread, quality_spread, tasks, self.predictions)

    def find(self, name: str) -> Path:
        """Return where a file that the recipe names is: beside the recipe."""
        return self._folder / name

    @model_validator(mode="after")
    def _check_arrivals(self) -> Self:
        if (self.rate_rps is None) == (self.arrivals is None):
            raise ValueError("give exactly one of rate_rps and arrivals")
        kind = self.process.kind
        if self.requests is None and kind not in ("trace", "servegen"):
            raise ValueError("requests is missing; it is required; add the number of requests")
        if self.sessions is not None and kind in ("closed", "servegen"):
            raise ValueError(f"sessions; arrivals of kind {kind} have no conversations; remove one of them")
        if isinstance(self.lengths, ServeGenLengths) and self.sessions is not None:
            raise ValueError("sessions; lengths of kind servegen are those of whole requests; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        names = ("length_factor", "output_tokens_of", "length_spread", "quality_spread", "tasks")
        given = [name for name in names if getattr(self, name) is not None]
        if self.lengths is not None and self.predictions is not None:
            given.append("predictions")
        if self.lengths is not None and given:
            raise ValueError(f"{given[0]} belongs to tasks; give either tasks or lengths")
        if self.prompts is not None and (self.lengths is not None or self.sessions is not None):
            raise ValueError("prompts; texts are made for tasks without sessions; remove one of them")
        if self.lengths is None and len(given) < len(names):
            missing = next(name for name in names if name not in given)
            raise ValueError(f"{missing} is missing; it is required without lengths; add it")
        mix = self.mix
        if mix is not None:
            _check_mix(mix)
        return self


def _check_mix(mix: Mix) -> None:
    models = set(mix.length_factor)
    if mix.output_tokens_of not in models:
        raise ValueError(f"output_tokens_of = {mix.output_tokens_of!r}; must be one of {sorted(models)}")
    for name, task in mix.tasks.items():
        if set(task.quality) != models:
            raise ValueError(
                f"tasks.{name}.quality names {sorted(task.quality)};"
                f" must name the models of length_factor, {sorted(models)}"
            )
    variance = mix.length_spread.shared**2 + mix.length_spread.own**2
    if not math.isclose(variance, 1.0, abs_tol=1e-6):
        raise ValueError(f"length_spread: shared^2 + own^2 = {variance:g}; must be 1")


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe file (YAML); files that it names are beside it.

    Raises:
        ConfigError: the file is unreadable or breaks the recipe's rules; one line that says where.
    """
    where = Path(path)
    data: Any = load_yaml(where)
    if not isinstance(data, dict):
        found = "an empty file" if data is None else type(data).__name__
        raise ConfigError(f"{where}: found {found}; must be a mapping with name, seed, requests and more")
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, Recipe)}") from None
    recipe._folder = where.parent
    return recipe
