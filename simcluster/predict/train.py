"""Train a predictor on a table of answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from simcluster.errors import PredictorError
from simcluster.predict.features import PROMPT_FEATURES, fit_projection, prompt_features
from simcluster.predict.heads import GENTLE, HeadKind, Rounds, train_head
from simcluster.predict.predictor import FEATURES, FEATURES_AND_TASK, Baseline, Origin, Predictor, Split, Start
from simcluster.predict.table import Table
from simcluster.predict.tokens import load_tokens
from simcluster.request import FloatArray
from simcluster.rng import seeded

__all__ = ["matrix_of", "means_of", "starts_of", "target_of", "train_predictor"]

_FEWEST_PROMPTS = 20


def target_of(table: Table, kind: HeadKind) -> FloatArray:
    """Return what a head predicts, (n,), NaN where the table does not say."""
    return table.score if kind == "accuracy" else table.output_tokens


def train_predictor(
    table: Table,
    *,
    source: str,
    licence: str | None = None,
    split: Split | None = None,
    start: Start = "nothing",
    tokenizer: Path | None = None,
    rounds: Rounds | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Predictor:
    """Train the heads that the table has values for: accuracy from score, length from output_tokens.

    Prompts that the split holds out are not looked at. The components of the features come from the rest.

    Args:
        table: answers of models to prompts.
        source: the data, for people.
        licence: of the data.
        split: which prompts are held out; default: a fifth, and an eighth of the others for validation.
        start: what the heads correct: nothing, or the means of the table's tasks.
        tokenizer: a `tokenizer.json`, or None: estimate.
        rounds: how long to train; default: long, or gently where task means are corrected.
        progress: told the share that is done.

    Raises:
        PredictorError: the table has too few prompts or neither scores nor output tokens.
    """
    if start == "task_means" and table.task is None:
        raise PredictorError("the table has no column task, whose means were to be corrected; add it")
    rounds = rounds or (Rounds() if start == "nothing" else GENTLE)
    split = split or Split(seed=1, held_out=0.2, validation=0.125)
    tokens = load_tokens(tokenizer)
    place = split.positions(table.prompts)
    trained = np.flatnonzero(place >= split.held_out)
    if len(trained) < _FEWEST_PROMPTS:
        raise PredictorError(
            f"{len(trained)} prompts to train on, {len(table.prompts) - len(trained)} held out; "
            f"at least {_FEWEST_PROMPTS} are needed; give a larger table or hold out fewer"
        )
    projection = fit_projection([tokens.ids(table.prompts[k]) for k in trained], seeded(split.seed, 0))
    progress(0.2)
    of_prompt = np.full((len(table.prompts), len(PROMPT_FEATURES)), np.nan)
    for k in trained:
        of_prompt[k] = prompt_features(table.prompts[k], tokens, projection)
    progress(0.4)
    used = place[table.prompt] >= split.held_out
    predictor = Predictor(
        origin=Origin(source=source, licence=licence, prompts=len(trained), rows=int(used.sum())),
        tokens=tokens,
        projection=projection,
        models=table.models,
        split=split,
        start=start,
        baselines=_baselines(table, used),
        columns=FEATURES if start == "nothing" else FEATURES_AND_TASK,
        heads={},
    )
    matrix = matrix_of(predictor, table, of_prompt, predictor.model_rows([each.name for each in table.models]))
    categorical = [name for name in ("model", "task") if name in predictor.columns]
    stop = split.held_out + split.validation * (1 - split.held_out)
    validation = place[table.prompt] < stop
    kinds: tuple[HeadKind, ...] = ("accuracy", "length")
    for number, kind in enumerate(kinds):
        target = target_of(table, kind)
        rows = used & ~np.isnan(target)
        if (rows & ~validation).any():
            target = target - starts_of(predictor, table, kind)
            taken = rounds.for_rows(int(rows.sum()), len(np.unique(table.prompt[rows])))
            predictor.heads[kind] = train_head(
                kind, predictor.columns, matrix[rows], target[rows], validation[rows], taken, categorical
            )
        progress(0.7 + 0.3 * number)
    if not predictor.heads:
        raise PredictorError("the table has neither score nor output_tokens in its training rows; add one of them")
    return predictor


def matrix_of(predictor: Predictor, table: Table, of_prompt: FloatArray, of_model: FloatArray) -> FloatArray:
    """Return the features of each row, (n, k), in the order of the predictor's columns.

    Args:
        predictor: says which.
        table: n rows; its tasks are looked at where they are a feature, NaN for one that was not trained on.
        of_prompt: features of the table's prompts.
        of_model: features of the table's models, (m, 3).
    """
    parts = [of_prompt[table.prompt], of_model[table.model]]
    if "task" in predictor.columns:
        numbers = predictor.task_numbers()
        tasks = [None] * len(table) if table.task is None else table.task.tolist()
        parts.append(np.array([[numbers.get(task, np.nan)] for task in tasks]))
    return np.concatenate(parts, axis=1)


def starts_of(predictor: Predictor, table: Table, kind: HeadKind) -> FloatArray:
    """Return what the trees of a head correct in each row, (n,).

    Raises:
        PredictorError: it is the mean of a task, and the table does not say which.
    """
    if predictor.start == "nothing":
        return np.zeros(len(table))
    if table.task is None:
        raise PredictorError("the predictor corrects task means, and there is no column task; add it")
    return means_of(predictor, table, kind, by_task=True)


def means_of(predictor: Predictor, table: Table, kind: HeadKind, *, by_task: bool) -> FloatArray:
    """Return the training mean of each row's model, (n,), over its task or over all."""
    names = [each.name for each in table.models]
    if not by_task or table.task is None:
        return predictor.means(kind, names, None)[table.model]
    found = np.empty(len(table))
    for task in sorted(set(table.task.tolist())):
        rows = table.task == task
        found[rows] = predictor.means(kind, names, task)[table.model[rows]]
    return found


def _baselines(table: Table, used: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[Baseline, ...]:
    """Return the means of each model over all training rows, then over those of each task."""
    found = []
    tasks = [] if table.task is None else sorted(set(table.task.tolist()))
    for task in [None, *tasks]:
        inside = used if task is None or table.task is None else used & (table.task == task)
        for k, info in enumerate(table.models):
            rows = inside & (table.model == k)
            if rows.any():
                found.append(
                    Baseline(
                        model=info.name,
                        task=task,
                        score=_mean(table.score[rows]),
                        output_tokens=_mean(table.output_tokens[rows]),
                    )
                )
    return tuple(found)


def _mean(values: FloatArray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
