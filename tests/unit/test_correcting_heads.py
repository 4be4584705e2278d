"""Heads that correct task means, and both heads behind one call."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from predictor_tables import answers
from simcluster.errors import PredictorError
from simcluster.predict.apply import predicted_table
from simcluster.predict.evaluate import evaluate
from simcluster.predict.heads import GENTLE, Head, Rounds, train_head
from simcluster.predict.joint import JointHeads
from simcluster.predict.predictor import FEATURES, FEATURES_AND_TASK, load_predictor
from simcluster.predict.table import read_table
from simcluster.predict.train import train_predictor
from simcluster.request import FloatArray
from simcluster.rng import seeded

# ---- both heads behind one call ----------------------------------------------------------------------------------


def rows(n: int = 900) -> FloatArray:
    rng = seeded(4, 0)
    return np.column_stack([rng.standard_normal((n, 4)), rng.integers(0, 5, n)]).astype(np.float64)


def heads(accuracy_trees: int, length_trees: int) -> tuple[Head, Head]:
    matrix = rows()
    quality = np.clip(0.5 + 0.2 * matrix[:, 0] * matrix[:, 4] / 4, 0, 1)
    length = 100 + 50 * matrix[:, 1] + 20 * (matrix[:, 4] == 2)
    names, never = ["a", "b", "c", "d", "model"], np.zeros(len(matrix), bool)
    return (
        train_head("accuracy", names, matrix, quality, never, Rounds(most=accuracy_trees), ["model"]),
        train_head("length", names, matrix, length, never, Rounds(most=length_trees), ["model"]),
    )


@pytest.mark.parametrize(("accuracy_trees", "length_trees"), [(40, 40), (1, 70), (70, 3)])
@pytest.mark.parametrize("by_wrapper", [False, True])
def test_one_call_predicts_bit_for_bit_what_each_head_predicts(
    accuracy_trees: int, length_trees: int, by_wrapper: bool
) -> None:
    each = heads(accuracy_trees, length_trees)
    joint = JointHeads(*each)
    assert joint._call is not None
    if by_wrapper:  # as with a LightGBM whose inside has other names
        joint._call = None
    matrix = rows()
    matrix[::5, 2] = np.nan
    matrix[::7, 4] = np.nan  # a model that was not trained on
    found = joint.predict(matrix)
    assert np.array_equal(found, np.stack([head.predict(matrix) for head in each], axis=1))
    assert len(set(found[:, 1].tolist())) > 10
    start = np.stack([np.full(len(matrix), 0.3), np.full(len(matrix), 250.0)], axis=1)
    expected = [head.predict(matrix, start[:, k]) for k, head in enumerate(each)]
    assert np.array_equal(joint.predict(matrix, start), np.stack(expected, axis=1))
    assert np.array_equal(joint.predict(matrix[::3]), found[::3])  # rows apart in memory


def test_rows_that_lightgbm_refuses_are_an_error_and_not_a_prediction() -> None:
    joint = JointHeads(*heads(3, 3))
    with pytest.raises(PredictorError, match="could not predict"):
        joint.predict(rows()[:, :3])


# ---- heads that correct task means -------------------------------------------------------------------------------


def test_leaves_that_count_prompts_hold_as_many_answers_as_models_gave() -> None:
    rounds = Rounds(min_rows=5, l2=10, per_prompt=True)
    taken = rounds.for_rows(rows=5800, prompts=100)
    assert (taken.min_rows, taken.l2) == (290, 580)
    assert Rounds(min_rows=5, l2=10).for_rows(5800, 100) == Rounds(min_rows=5, l2=10)
    assert GENTLE.per_prompt


def test_answers_of_many_alike_models_are_worth_no_more_than_those_of_one(tmp_path: Path) -> None:
    """Ten times the same answers, under other names, are the same prompts: leaves must not grow finer."""
    one = pl.read_parquet(answers(tmp_path / "one.parquet", models=("m1",), n=400))
    ten = pl.concat(one.with_columns(pl.lit(f"m{k}").alias("model")) for k in range(10))
    ten.write_parquet(tmp_path / "ten.parquet")
    fewest = []
    for name in ("one", "ten"):
        trained = train_predictor(read_table(tmp_path / f"{name}.parquet"), source="a test", start="task_means")
        counts = [line for line in trained.heads["length"].trees.split("\n") if line.startswith("leaf_count=")]
        fewest.append(min(int(count) for line in counts for count in line.split("=")[1].split()))
    assert fewest[1] >= 10 * 5 > fewest[0] >= 5


def test_after_stopping_early_a_refit_uses_the_validation_rows_too() -> None:
    matrix = rows()
    target = matrix[:, 0] + 0.1 * matrix[:, 1]
    validation = np.arange(len(matrix)) % 4 == 0
    names = ["a", "b", "c", "d", "e"]
    once = train_head("length", names, matrix, target, validation, Rounds(most=80))
    again = train_head("length", names, matrix, target, validation, Rounds(most=80, refit=True))
    fixed = Rounds(most=once.best_iteration)
    assert again.best_iteration == once.best_iteration
    assert again.trees == train_head("length", names, matrix, target, np.zeros(len(matrix), bool), fixed).trees
    assert again.trees != once.trees


def task_decides(file: Path) -> Path:
    """Write answers whose length grows with the words of a prompt in one task, and falls with them in the other."""
    rng = seeded(8, 0)
    made = []
    for k in range(600):
        words = int(rng.integers(5, 60))
        task = ("up", "down")[k % 2]
        length = 100 + 4 * words if task == "up" else 400 - 4 * words
        made.append((f"number {k} " + "word " * words, "m1", task, min(1.0, length / 400), length))
    pl.DataFrame(made, schema=["prompt", "model", "task", "score", "output_tokens"], orient="row").write_parquet(file)
    return file


def test_what_a_text_means_may_depend_on_the_task(tmp_path: Path) -> None:
    table = read_table(task_decides(tmp_path / "t.parquet"))
    trained = train_predictor(table, source="a test", start="task_means")
    assert all(head.names == FEATURES_AND_TASK for head in trained.heads.values())
    assert (
        evaluate(trained, table)["heads"]["length"]["overall"]["margin_over_task_mean"]["low"] > 0.5
    )  # blind to the task: 0
    trained.save(tmp_path / "p.json")
    predict = load_predictor(tmp_path / "p.json").for_models(["m1"])
    found = predicted_table(trained, table)
    assert table.task is not None
    for k in (0, 1, 6, 7):
        quality, length = predict(table.prompts[k], table.task[k])
        assert (quality[0], length[0]) == (found["predicted_score"][k], found["predicted_output_tokens"][k])
    longer, shorter = "number 7 " + "word " * 55, "number 8 " + "word " * 8
    assert predict(longer, "up")[1][0] > predict(shorter, "up")[1][0] + 50
    assert predict(longer, "down")[1][0] < predict(shorter, "down")[1][0] - 50
    assert np.isfinite(predict(longer, "a task that is new")[1]).all()


def test_a_predictor_of_before_that_corrects_task_means_without_the_task_as_a_feature_is_still_read(
    tmp_path: Path,
) -> None:
    table = read_table(task_decides(tmp_path / "t.parquet"))
    plain = train_predictor(table, source="a test")
    plain.save(tmp_path / "p.json")
    content: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps(content | {"start": "task_means"}))
    old = load_predictor(tmp_path / "old.json")
    assert old.columns == FEATURES
    added = old.for_models(["m1"])("word " * 20, "up")[1] - plain.for_models(["m1"])("word " * 20, "up")[1]
    assert added[0] == pytest.approx(old.means("length", ["m1"], "up")[0])
    mixed = content | {"features": list(FEATURES_AND_TASK)}
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    with pytest.raises(PredictorError, match="was trained on other features"):
        load_predictor(tmp_path / "mixed.json")
