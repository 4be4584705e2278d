"""Gradient-boosted heads: what LightGBM is asked, and how its answer is kept.

Training runs on one thread with fixed seeds, so equal rows give equal trees. A head keeps only the trees up to the
best iteration, as LightGBM's own text, so that a reloaded head predicts exactly what the trained one did.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from simcluster.errors import PredictorError
from simcluster.request import FloatArray
from simcluster.validation import one_line

__all__ = ["GENTLE", "Head", "HeadKind", "Rounds", "train_head"]

HeadKind = Literal["accuracy", "length"]

_OBJECTIVES: dict[HeadKind, dict[str, Any]] = {
    "accuracy": {"objective": "huber", "alpha": 0.9},
    "length": {"objective": "regression"},
}
_BOUNDS: dict[HeadKind, tuple[float, float]] = {"accuracy": (0.0, 1.0), "length": (1.0, 2.0**31)}
_FIXED: dict[str, Any] = {
    "seed": 1,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
    "metric": "l2",
}


@dataclass(frozen=True, slots=True)
class Rounds:
    """How long and how finely to train.

    Attributes:
        most: trees at most.
        patience: stop after so many trees without a smaller error on the validation rows.
        num_leaves: leaves of a tree.
        learning_rate: share of a tree's correction that is taken.
        min_rows: training rows of a leaf at least.
        l2: pull of leaves towards 0.
        share: share of the rows that a tree sees.
        feature_share: share of the features that a tree sees.
        random_cuts: draw one cut per feature at each split, and take the best of these (extremely randomised trees).
        per_prompt: min_rows and l2 count prompts, however many models answered each.
        refit: train again for as long on all rows, validation included.
    """

    most: int = 300
    patience: int = 30
    num_leaves: int = 15
    learning_rate: float = 0.06
    min_rows: int = 20
    l2: float = 0.0
    share: float = 1.0
    feature_share: float = 1.0
    random_cuts: bool = False
    per_prompt: bool = False
    refit: bool = False

    def settings(self) -> dict[str, Any]:
        """Return them by LightGBM's names."""
        part = {"bagging_fraction": self.share, "bagging_freq": 1}
        return {
            "num_leaves": self.num_leaves,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": self.min_rows,
            "lambda_l2": self.l2,
            **(part if self.share < 1 else {}),
            **({"feature_fraction": self.feature_share} if self.feature_share < 1 else {}),
            **({"extra_trees": True} if self.random_cuts else {}),
        }

    def for_rows(self, rows: int, prompts: int) -> "Rounds":
        """Return them with min_rows and l2 in rows, if they count prompts, for so many answers to so many prompts."""
        if not self.per_prompt:
            return self
        times = rows / prompts
        return replace(self, min_rows=max(1, round(self.min_rows * times)), l2=self.l2 * times, per_prompt=False)


GENTLE = Rounds(
    most=200,
    min_rows=5,
    l2=10.0,
    share=0.5,
    feature_share=0.3,
    random_cuts=True,
    per_prompt=True,
    refit=True,
)
"""For corrections of means that are nearly right: chosen by cross-validation inside of training prompts alone.

Twice as many trees at half the rate, or of twice as many leaves, predict no better there, and cost more.
"""


class Head:
    """Trained trees for one quantity.

    Attributes:
        kind: what is predicted; accuracies lie in [0, 1], lengths are 1 or more.
        trees: LightGBM's text of the trees.
        best_iteration: number of trees.
        names: the features, in the order of a matrix's columns.

    Raises:
        PredictorError: the text holds no such trees.
    """

    def __init__(self, kind: HeadKind, trees: str, best_iteration: int) -> None:
        import lightgbm  # noqa: PLC0415  (takes a second)

        try:
            self._booster = lightgbm.Booster(model_str=trees)
        except lightgbm.basic.LightGBMError as error:
            raise PredictorError(f"{kind} head: no trees ({one_line(str(error))[:120]}); train it again") from None
        if self._booster.num_trees() != best_iteration:
            raise PredictorError(
                f"{kind} head: found {self._booster.num_trees()} trees, best_iteration = {best_iteration}; "
                "train it again"
            )
        self.kind, self.trees, self.best_iteration = kind, trees, best_iteration
        self.names: tuple[str, ...] = tuple(self._booster.feature_name())
        self.low, self.high = _BOUNDS[kind]

    @property
    def digest(self) -> str:
        """SHA-256 of the trees' text."""
        return hashlib.sha256(self.trees.encode()).hexdigest()

    def predict(self, matrix: FloatArray, start: FloatArray | float = 0.0) -> FloatArray:
        """Predict rows whose columns are in the order of `names`.

        Args:
            matrix: (n, k) features; NaN where not known.
            start: (n,) what the trees correct, as in training.

        Returns:
            (n,) qualities 0 to 1, or lengths [tokens], 1 or more.
        """
        found: Any = self._booster.predict(matrix, num_threads=1)  # more threads cost more than they bring
        values: FloatArray = np.minimum(np.maximum(found + start, self.low), self.high)
        return values

    def predict_columns(self, columns: Mapping[str, npt.ArrayLike]) -> FloatArray:
        """Predict rows given as columns, matched by name; further columns are ignored.

        Args:
            columns: (n,) each.

        Raises:
            PredictorError: a feature is missing.
        """
        missing = [name for name in self.names if name not in columns]
        if missing:
            raise PredictorError(
                f"{self.kind} head: the column {missing[0]} is missing ({len(missing)} of {len(self.names)} are); "
                "it was trained with it; add it"
            )
        return self.predict(np.column_stack([np.asarray(columns[name], dtype=np.float64) for name in self.names]))


def train_head(
    kind: HeadKind,
    names: Sequence[str],
    matrix: FloatArray,
    target: FloatArray,
    validation: npt.NDArray[np.bool_],
    rounds: Rounds | None = None,
    categorical: Sequence[str] = (),
) -> Head:
    """Train a head: Huber loss for accuracies, squared error for the mean of lengths.

    Args:
        kind: what is predicted.
        names: the features.
        matrix: (n, k) features.
        target: (n,) qualities 0 to 1, or lengths [tokens]; less what the trees are to correct.
        validation: (n,) rows that decide when to stop; without any, all rounds are taken.
        rounds: how long to train, by rows.
        categorical: features that are numbers of a category.

    Source: paper B.4.
    """
    import lightgbm  # noqa: PLC0415

    rounds = rounds or Rounds()
    settings = _FIXED | _OBJECTIVES[kind] | rounds.settings()
    data = lightgbm.Dataset(
        matrix[~validation],
        target[~validation],
        feature_name=list(names),
        categorical_feature=list(categorical),
        params=settings,
    )
    stops = bool(validation.any())
    booster = lightgbm.train(
        settings,
        data,
        num_boost_round=rounds.most,
        valid_sets=[data.create_valid(matrix[validation], target[validation])] if stops else None,
        callbacks=[lightgbm.early_stopping(rounds.patience, verbose=False)] if stops else None,
    )
    best = booster.best_iteration if stops else rounds.most
    if stops and rounds.refit:
        data = lightgbm.Dataset(
            matrix, target, feature_name=list(names), categorical_feature=list(categorical), params=settings
        )
        booster = lightgbm.train(settings, data, num_boost_round=best)
    best = max(1, min(best, booster.num_trees()))
    return Head(kind, _without_settings(booster.model_to_string(num_iteration=best)), best)


def _without_settings(text: str) -> str:
    """Leave out the list of training options: predictions do not need it, and it changes with LightGBM's version."""
    start, end = text.find("\nparameters:\n"), text.find("end of parameters\n")
    if start < 0 or end < 0:
        return text
    return text[: start + 1] + text[end + len("end of parameters\n") :]
