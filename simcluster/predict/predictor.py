"""The predictor: prompt features and both heads, and the file that they are kept in."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simcluster.errors import PredictorError
from simcluster.predict.features import BUCKETS, COMPONENTS, PROMPT_FEATURES, UNIT, Projection, prompt_features
from simcluster.predict.heads import Head, HeadKind
from simcluster.predict.joint import JointHeads
from simcluster.predict.tokens import ESTIMATE, Tokens, load_tokens
from simcluster.records import write_json
from simcluster.request import FloatArray
from simcluster.validation import explain

__all__ = [
    "FEATURES",
    "FEATURES_AND_TASK",
    "Baseline",
    "ModelInfo",
    "Origin",
    "Predictor",
    "Split",
    "Start",
    "load_predictor",
]

FEATURES = (*PROMPT_FEATURES, "model", "log_parameters", "max_model_len")
FEATURES_AND_TASK = (*FEATURES, "task")

_Text = Annotated[str, Field(min_length=1)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Count = Annotated[int, Field(ge=0)]
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![A-Za-z])")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelInfo(_Model):
    """A model that was trained on.

    Attributes:
        name: its name in the table.
        parameters_b: size in billions of parameters, or None: not known.
        max_model_len: longest context [tokens], or None: not known.
    """

    name: _Text
    parameters_b: Annotated[float, Field(gt=0)] | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def named(cls, name: str, parameters_b: float | None = None, max_model_len: int | None = None) -> "ModelInfo":
        """Return a model, its size read from its name (`Qwen3-0.6B`) where it is not given."""
        size = _SIZE.search(name.replace("_", "-"))
        if parameters_b is None and size is not None and float(size.group(1)) > 0:
            parameters_b = float(size.group(1))
        return cls(name=name, parameters_b=parameters_b, max_model_len=max_model_len)


class Baseline(_Model):
    """Means of the training rows of one model, over one task or (task None) over all.

    Attributes:
        model: the model.
        task: the task, or None.
        score: mean score, or None without any.
        output_tokens: mean answer length [tokens], or None without any.
    """

    model: _Text
    task: str | None
    score: float | None
    output_tokens: float | None


Start = Literal["nothing", "task_means"]


class Split(_Model):
    """Which prompts were held out: those whose hash with the seed falls below the share.

    Attributes:
        seed: seed of the hash.
        held_out: share of prompts that training never saw.
        validation: share of the others that decided when to stop.
    """

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    held_out: _Share
    validation: _Share

    def positions(self, prompts: Sequence[str]) -> FloatArray:
        """Return a number in [0, 1) for each prompt, the same for texts that differ in spaces and case alone."""
        key = self.seed.to_bytes(8, "little")
        digests = (
            hashlib.blake2b(" ".join(text.casefold().split()).encode("utf-8", "replace"), digest_size=6, key=key)
            for text in prompts
        )
        return np.array([int.from_bytes(each.digest(), "little") for each in digests], dtype=np.float64) / 2**48


class Origin(_Model):
    """Where a predictor comes from.

    Attributes:
        source: the data, for people.
        licence: of the data.
        prompts, rows: how many were trained on, validation included.
    """

    source: _Text
    licence: str | None = None
    prompts: _Count
    rows: _Count


class _Pca(_Model):
    unit: Literal[1_000_000] = 1_000_000
    components: Annotated[list[str], Field(min_length=BUCKETS, max_length=BUCKETS)]
    offset: Annotated[list[int], Field(min_length=COMPONENTS, max_length=COMPONENTS)]


class _HeadFile(_Model):
    best_iteration: Annotated[int, Field(ge=1)]
    sha256: str
    trees: list[str]


class _File(_Model):
    format: Literal["simcluster predictor"] = "simcluster predictor"
    schema_version: Literal[1] = 1
    origin: Origin
    tokens: _Text
    start: Start
    features: list[str]
    models: Annotated[list[ModelInfo], Field(min_length=1)]
    split: Split
    baselines: list[Baseline]
    pca: _Pca
    heads: dict[HeadKind, _HeadFile]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Predictor:
    """Predicts quality and answer length of a prompt for each model.

    Attributes:
        origin: what it was trained on.
        tokens: cuts prompts into tokens, as in training.
        projection: of the hashed tokens.
        models: what it was trained on; their order is the number of the feature `model`.
        split: which prompts were held out.
        start: what the trees correct: nothing, or the mean of the request's task, which then must be known.
        baselines: means of the training rows.
        columns: the features of the heads: FEATURES, or FEATURES_AND_TASK where they look at the request's task.
        heads: the trained heads; one may be absent.
    """

    origin: Origin
    tokens: Tokens
    projection: Projection
    models: tuple[ModelInfo, ...]
    split: Split
    start: Start = "nothing"
    baselines: tuple[Baseline, ...]
    columns: tuple[str, ...] = FEATURES
    heads: dict[HeadKind, Head]

    def features(self, prompt: str) -> FloatArray:
        """Return the features of a prompt, (k,), in the order of PROMPT_FEATURES."""
        return prompt_features(prompt, self.tokens, self.projection)

    def model_rows(self, models: Sequence[str], allow_unseen: bool = False) -> FloatArray:
        """Return the features of models, (j, 3): number (NaN for one not seen), log of the parameters, context.

        Raises:
            PredictorError: a model was not trained on, and that is not allowed.
        """
        numbers = {each.name: k for k, each in enumerate(self.models)}
        rows = []
        for name in models:
            if name not in numbers and not allow_unseen:
                raise PredictorError(
                    f"the model {name!r} was not in the training table, which has {', '.join(numbers)}; "
                    "train with it, or allow unseen models where offered"
                )
            info = self.models[numbers[name]] if name in numbers else ModelInfo.named(name)
            size, context = info.parameters_b, info.max_model_len
            rows.append([numbers.get(name, np.nan), np.log(size) if size else np.nan, context or np.nan])
        return np.array(rows, dtype=np.float64).reshape(len(models), 3)

    def head(self, kind: HeadKind) -> Head:
        """Return a head.

        Raises:
            PredictorError: the predictor was trained without it.
        """
        if kind not in self.heads:
            column = {"accuracy": "score", "length": "output_tokens"}[kind]
            raise PredictorError(f"the predictor has no {kind} head; train it on a table with the column {column}")
        return self.heads[kind]

    def means(self, kind: HeadKind, models: Sequence[str], task: str | None) -> FloatArray:
        """Return the training mean of a task for each model, (j,): the model's where the task is not known.

        A model that is not known gets the mean over the others.
        """
        found: dict[str, dict[str | None, float]] = {}
        for each in self.baselines:
            value = each.score if kind == "accuracy" else each.output_tokens
            if value is not None:
                found.setdefault(each.model, {})[each.task] = value
        rows = {model: values.get(task, values[None]) for model, values in found.items()}
        others = sum(rows.values()) / len(rows)
        return np.array([rows.get(model, others) for model in models])

    def for_models(
        self, models: Sequence[str], allow_unseen: bool = False
    ) -> Callable[[str, str | None], tuple[FloatArray, FloatArray]]:
        """Return a function from a prompt and its task to the qualities (j,) and answer lengths (j,) [tokens].

        One call predicts all models. The task is looked at only where the heads start from task means.

        Args:
            models: models; replicas of one model need no row of their own.
            allow_unseen: predict models that were not trained on, by their size and context.

        Raises:
            PredictorError: a model was not trained on, or a head is absent.
        """
        kinds: tuple[HeadKind, ...] = ("accuracy", "length")
        joint = JointHeads(*map(self.head, kinds))
        matrix = np.empty((len(models), len(self.columns)))
        matrix[:, len(PROMPT_FEATURES) : len(FEATURES)] = self.model_rows(models, allow_unseen)
        numbers = self.task_numbers()
        starts: dict[str | None, FloatArray] = {}

        def predict(prompt: str, task: str | None) -> tuple[FloatArray, FloatArray]:
            if task not in starts:
                of_kind = [np.broadcast_to(self.starts(kind, models, task), len(models)) for kind in kinds]
                starts[task] = np.stack(of_kind, axis=1)
            matrix[:, : len(PROMPT_FEATURES)] = self.features(prompt)
            matrix[:, len(FEATURES) :] = numbers.get(task, np.nan)
            found = joint.predict(matrix, starts[task])
            return found[:, 0], found[:, 1]

        return predict

    def task_numbers(self) -> dict[str | None, float]:
        """Return the number of each task that was trained on: the feature `task`."""
        tasks = {each.task for each in self.baselines if each.task is not None}
        return {task: float(number) for number, task in enumerate(sorted(tasks))}

    def starts(self, kind: HeadKind, models: Sequence[str], task: str | None) -> FloatArray | float:
        """Return what the trees of a head correct, (j,) or 0."""
        return self.means(kind, models, task) if self.start == "task_means" else 0.0

    def save(self, path: Path) -> None:
        """Write the predictor into a file, in one move.

        Raises:
            PredictorError: the disk refuses.
        """
        content = _File(
            origin=self.origin,
            tokens=self.tokens.name,
            start=self.start,
            features=list(self.columns),
            models=list(self.models),
            split=self.split,
            baselines=list(self.baselines),
            pca=_Pca(
                components=[" ".join(map(str, row)) for row in self.projection.components.tolist()],
                offset=self.projection.offset.tolist(),
            ),
            heads={
                kind: _HeadFile(best_iteration=head.best_iteration, sha256=head.digest, trees=head.trees.split("\n"))
                for kind, head in sorted(self.heads.items())
            },
        )
        try:
            write_json(path, content.model_dump(mode="json"))
        except OSError as error:
            raise PredictorError(f"{path}: cannot be written ({error.strerror}); give another file") from None


def load_predictor(path: Path, tokenizer: Path | None = None) -> Predictor:
    """Read a predictor; it predicts exactly what it did when it was saved.

    Args:
        path: the file.
        tokenizer: the tokenizer file that it was trained with, if it was.

    Raises:
        PredictorError: the file is missing, damaged or of another version, or needs another tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise PredictorError(f"{path}: cannot be read ({reason}); give a predictor file") from None
    try:
        content = _File.model_validate_json(text)
    except ValidationError as error:
        raise PredictorError(f"{path}: {explain(error, _File)}") from None
    columns = tuple(content.features)
    missing = [name for name in FEATURES if name not in columns]
    if missing or columns not in (FEATURES, FEATURES_AND_TASK):
        found = f"the feature {missing[0]} is missing" if missing else "there are unknown features"
        raise PredictorError(f"{path}: {found}; train the predictor again")
    heads: dict[HeadKind, Head] = {}
    for kind, stored in content.heads.items():
        trees = "\n".join(stored.trees)
        if hashlib.sha256(trees.encode()).hexdigest() != stored.sha256:
            raise PredictorError(f"{path}: heads.{kind}.trees is damaged (its hash differs); train the predictor again")
        try:
            heads[kind] = Head(kind, trees, stored.best_iteration)
        except PredictorError as error:
            raise PredictorError(f"{path}: {error}") from None
        if heads[kind].names != columns:
            raise PredictorError(f"{path}: heads.{kind} was trained on other features; train the predictor again")
    return Predictor(
        origin=content.origin,
        tokens=_tokens(path, content.tokens, tokenizer),
        projection=_projection(path, content.pca),
        models=tuple(content.models),
        split=content.split,
        start=content.start,
        baselines=tuple(content.baselines),
        columns=columns,
        heads=heads,
    )


def _tokens(path: Path, wanted: str, tokenizer: Path | None) -> Tokens:
    if wanted != ESTIMATE and tokenizer is None:
        raise PredictorError(f"{path}: was trained with the tokenizer {wanted}; give that file as tokenizer")
    tokens = load_tokens(tokenizer)
    if tokens.name != wanted:
        need = "an estimate of tokens, leave the tokenizer out" if wanted == ESTIMATE else f"the tokenizer {wanted}"
        raise PredictorError(f"{path}: found the tokenizer {tokens.name}; it was trained with {need}")
    return tokens


def _projection(path: Path, pca: _Pca) -> Projection:
    try:
        components = np.array([[int(value) for value in row.split()] for row in pca.components], dtype=np.int64)
    except (ValueError, OverflowError):
        components = np.empty(0, dtype=np.int64)
    if components.shape != (BUCKETS, COMPONENTS) or np.abs(components).max() > UNIT:
        raise PredictorError(
            f"{path}: pca.components; must be {BUCKETS} rows of {COMPONENTS} whole numbers up to {UNIT}; "
            "train the predictor again"
        )
    return Projection.of(components, np.array(pca.offset, dtype=np.int64))
