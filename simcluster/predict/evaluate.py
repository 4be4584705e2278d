"""Score a predictor on prompts that its training never saw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simcluster.errors import PredictorError
from simcluster.predict.features import PROMPT_FEATURES
from simcluster.predict.heads import HeadKind
from simcluster.predict.predictor import Predictor
from simcluster.predict.table import Table
from simcluster.predict.train import matrix_of, means_of, starts_of, target_of
from simcluster.request import FloatArray, IntArray
from simcluster.rng import seeded

__all__ = ["evaluate"]

_RESAMPLES = 1000
_BLOCK = 100
_BINS = 10


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Held-out rows of one head.

    Attributes:
        prompt: (n,) index of each row's prompt.
        errors: (n, 3) predicted less true: of the head, of task means, of global means.
    """

    prompt: IntArray
    errors: FloatArray

    def where(self, mask: npt.NDArray[np.bool_]) -> "_Rows":
        return _Rows(self.prompt[mask], self.errors[mask])


def evaluate(
    predictor: Predictor,
    table: Table,
    *,
    allow_unseen: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare the heads with the training means of each model, by task and over all, on held-out prompts.

    A margin is 1 - (squared error of the head) / (that of the means), with a 95 % bootstrap interval over prompts.

    Args:
        predictor: what is scored.
        table: answers of models to prompts; only prompts that the predictor's split holds out are used.
        allow_unseen: also score models that were not trained on; `unseen` flags them.
        progress: told the share that is done.

    Raises:
        PredictorError: no held-out prompts, a model that was not trained on, nothing to compare with.
    """
    held = predictor.split.positions(table.prompts) < predictor.split.held_out
    if not held.any():
        raise PredictorError(
            f"none of the table's {len(table.prompts)} prompts is held out (share {predictor.split.held_out:g}); "
            "give a larger table, or train with a larger --held-out"
        )
    names = [each.name for each in table.models]
    of_model = predictor.model_rows(names, allow_unseen)
    of_prompt = np.full((len(table.prompts), len(PROMPT_FEATURES)), np.nan)
    for number, k in enumerate(np.flatnonzero(held)):
        of_prompt[k] = predictor.features(table.prompts[k])
        if number % 256 == 0:
            progress(0.5 * number / held.sum())
    matrix = matrix_of(predictor, table, of_prompt, of_model)
    heads: dict[str, Any] = {}
    for kind, head in predictor.heads.items():
        target = target_of(table, kind)
        rows = held[table.prompt] & ~np.isnan(target)
        if rows.any():
            found = np.full(len(table), np.nan)
            found[rows] = head.predict(matrix[rows], starts_of(predictor, table, kind)[rows])
            heads[kind] = _scores(predictor, table, kind, rows, found, target)
        progress(0.5 + 0.5 * len(heads) / len(predictor.heads))
    if not heads:
        raise PredictorError(
            f"the table has no values for the predictor's heads ({', '.join(predictor.heads)}) on held-out prompts; "
            "add the column score or output_tokens"
        )
    return {
        "held_out_prompts": int(held.sum()),
        "trained_on": predictor.origin.model_dump(),
        "tokens": predictor.tokens.name,
        "start": predictor.start,
        "unseen_models": [name for name, row in zip(names, of_model, strict=True) if np.isnan(row[0])],
        "heads": heads,
    }


def _scores(
    predictor: Predictor,
    table: Table,
    kind: HeadKind,
    rows: npt.NDArray[np.bool_],
    found: FloatArray,
    target: FloatArray,
) -> dict[str, Any]:
    guesses = [found, *(means_of(predictor, table, kind, by_task=by_task) for by_task in (True, False))]
    each = _Rows(table.prompt[rows], np.stack([guess[rows] - target[rows] for guess in guesses], axis=1))
    model = np.array([info.name for info in table.models], dtype=object)[table.model[rows]]
    result = {
        "overall": _compare(each),
        "by_model": {name: _compare(each.where(model == name)) for name in sorted(set(model.tolist()))},
    }
    if table.task is not None:
        task = table.task[rows]
        result["by_task"] = {name: _compare(each.where(task == name)) for name in sorted(set(task.tolist()))}
    if kind == "accuracy":
        result["calibration"] = _calibration(found[rows], target[rows])
    return result


def _compare(rows: _Rows) -> dict[str, Any]:
    """Return the errors of the head and of both means, and the margins with their intervals."""
    result: dict[str, Any] = {"rows": len(rows.prompt), "bias": float(rows.errors[:, 0].mean())}
    for number, name in enumerate(("head", "task_mean", "global_mean")):
        error = rows.errors[:, number]
        result[name] = {"rmse": float(np.sqrt(np.mean(error**2))), "mae": float(np.abs(error).mean())}
    draws = _resampled(rows)
    for number, name in enumerate(("task_mean", "global_mean"), start=1):
        result[f"margin_over_{name}"] = _margin(rows.errors, draws, number)
    return result


def _margin(errors: FloatArray, draws: FloatArray, number: int) -> dict[str, Any] | None:
    """Return the margin over one kind of means; None where those are without error."""
    total = (errors**2).sum(axis=0)
    if total[number] <= 0 or not (draws[:, number] > 0).all():
        return None
    low, high = np.percentile(1 - draws[:, 0] / draws[:, number], [2.5, 97.5])
    return {"value": float(1 - total[0] / total[number]), "low": float(low), "high": float(high)}


def _resampled(rows: _Rows) -> FloatArray:
    """Return the sums of squared errors of resampled prompts, (1000, 3)."""
    _, prompt = np.unique(rows.prompt, return_inverse=True)
    u = int(prompt.max()) + 1
    sums = np.stack([np.bincount(prompt, weights=rows.errors[:, k] ** 2, minlength=u) for k in range(3)], axis=1)
    rng = seeded(1, 1)
    blocks = [rng.integers(u, size=(_BLOCK, u)) for _ in range(_RESAMPLES // _BLOCK)]
    return np.concatenate([sums[block].sum(axis=1) for block in blocks])


def _calibration(found: FloatArray, target: FloatArray) -> dict[str, Any]:
    """Return the reliability table: predictions in tenths, their mean and that of the scores."""
    place = np.minimum((found * _BINS).astype(np.int64), _BINS - 1)
    table = []
    for k in range(_BINS):
        inside = place == k
        if inside.any():
            table.append(
                {
                    "from": k / _BINS,
                    "to": (k + 1) / _BINS,
                    "rows": int(inside.sum()),
                    "predicted": float(found[inside].mean()),
                    "observed": float(target[inside].mean()),
                }
            )
    error = sum(each["rows"] * abs(each["predicted"] - each["observed"]) for each in table) / len(found)
    return {"expected_calibration_error": float(error), "bins": table}
