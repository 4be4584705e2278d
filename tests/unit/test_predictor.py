"""Heads and predictors: training, files, unseen models, held-out prompts, costs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from predictor_tables import answers, predictor
from simcluster.errors import PredictorError
from simcluster.predict.apply import predicted_table
from simcluster.predict.cost import expected_cost, prices_of
from simcluster.predict.evaluate import evaluate
from simcluster.predict.heads import Head, Rounds, train_head
from simcluster.predict.predictor import FEATURES, ModelInfo, Predictor, Split, load_predictor
from simcluster.predict.table import Table, read_table
from simcluster.predict.train import target_of, train_predictor
from simcluster.request import FloatArray
from simcluster.rng import seeded

ROOT = Path(__file__).resolve().parents[2]


def rows(n: int = 600) -> tuple[FloatArray, FloatArray]:
    rng = seeded(3, 0)
    matrix = np.column_stack([rng.integers(1, 500, n), rng.integers(1, 2000, n)]).astype(np.float64)
    return matrix, np.clip(matrix[:, 0] / 600 + 0.1 * rng.standard_normal(n), 0, 1)


def small_head(names: tuple[str, ...] = ("prompt_tokens", "chars")) -> Head:
    matrix, target = rows()
    return train_head("accuracy", names, matrix, target, np.arange(600) % 5 == 0, Rounds(most=400))


# ---- C067: a model that was not trained on ---------------------------------------------------------------------


def test_a_model_that_was_not_trained_on_is_an_error_that_names_it(tmp_path: Path) -> None:
    table = read_table(answers(tmp_path / "t.parquet", models=("m1", "m2")))
    trained = train_predictor(table, source="a test")
    asked = read_table(answers(tmp_path / "u.parquet", models=("m1", "m2", "m3")))
    known = predicted_table(trained, table)
    with pytest.raises(PredictorError, match=r"the model 'm3' was not in the training table, which has m1, m2"):
        predicted_table(trained, asked)
    found = predicted_table(trained, asked, allow_unseen=True)
    assert found.filter(pl.col("model") == "m3")["unseen"].to_list() == [1] * 120
    assert found.filter(pl.col("model") == "m3")["predicted_score"].is_between(0, 1).all()
    seen = found.filter(pl.col("model") != "m3")
    assert seen.equals(known.select(found.columns))
    assert seen["unseen"].sum() == 0


def test_the_size_of_a_model_is_read_from_its_name_unless_given() -> None:
    sizes = {"Qwen3-0.6B": 0.6, "llama-3.1-70b-instruct": 70, "gpt4": None, "v2.0b1x": None, "model_8b": 8, "0b": None}
    assert {name: ModelInfo.named(name).parameters_b for name in sizes} == sizes
    assert ModelInfo.named("Qwen3-0.6B", 9.0, 4096) == ModelInfo(name="Qwen3-0.6B", parameters_b=9, max_model_len=4096)


# ---- C068: what is saved is what predicts ----------------------------------------------------------------------


def test_a_reloaded_predictor_predicts_the_same_in_a_new_process(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    assert any(head.best_iteration < Rounds().most for head in trained.heads.values())  # training stopped early
    trained.save(tmp_path / "p.json")
    program = (
        "import sys, json; from pathlib import Path; from simcluster.predict.predictor import load_predictor\n"
        "p = load_predictor(Path(sys.argv[1])); f = p.for_models(['m1', 'm2'])\n"
        "print(json.dumps([[a.tolist() for a in f(x, None)] for x in json.load(sys.stdin)]))"
    )
    prompts = list(table.prompts[:100])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "p.json")],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    predict = trained.for_models(["m1", "m2"])
    assert json.loads(done.stdout) == [[a.tolist() for a in predict(text, None)] for text in prompts]


def test_early_stopping_keeps_only_the_best_trees() -> None:
    head = small_head()
    matrix, target = rows()
    longer = train_head("accuracy", head.names, matrix, target, np.zeros(600, bool), Rounds(most=400))
    assert head.best_iteration < 400 == longer.best_iteration
    again = Head("accuracy", head.trees, head.best_iteration)
    assert np.array_equal(again.predict(matrix), head.predict(matrix))


def test_equal_tables_give_equal_files(tmp_path: Path) -> None:
    table = read_table(answers(tmp_path / "t.parquet"))
    for name in ("a.json", "b.json"):
        train_predictor(table, source="a test").save(tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(each.name for each in tmp_path.glob("*.json")) == ["a.json", "b.json"]


def test_a_prompt_alone_gets_what_it_gets_in_a_table(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    found = predicted_table(trained, table)
    predict = trained.for_models(["m1"])
    for k in (0, 7, 31):
        row = found.filter((pl.col("prompt") == table.prompts[k]) & (pl.col("model") == "m1"))
        quality, length = predict(table.prompts[k], None)
        assert (quality[0], length[0]) == (row["predicted_score"][0], row["predicted_output_tokens"][0])


# ---- C069: columns by name -------------------------------------------------------------------------------------


def test_feature_columns_are_matched_by_name_and_a_missing_one_is_named() -> None:
    head = small_head()
    matrix, _ = rows()
    swapped = {"chars": matrix[:, 1], "prompt_tokens": matrix[:, 0], "more": matrix[:, 0]}
    assert np.array_equal(head.predict_columns(swapped), head.predict(matrix))
    with pytest.raises(PredictorError, match="the column chars is missing"):
        head.predict_columns({"prompt_tokens": matrix[:, 0]})


def test_table_columns_may_stand_in_any_order_and_a_missing_one_is_named(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    frame = pl.read_parquet(tmp_path / "t.parquet")
    frame.select(reversed(frame.columns)).write_parquet(tmp_path / "r.parquet")
    turned = read_table(tmp_path / "r.parquet")
    assert predicted_table(trained, turned).equals(predicted_table(trained, table))
    frame.drop("prompt").write_parquet(tmp_path / "n.parquet")
    with pytest.raises(
        PredictorError, match="the column prompt is missing; add it or name it with --map prompt=THEIRS"
    ):
        read_table(tmp_path / "n.parquet")


# ---- C070: cost ------------------------------------------------------------------------------------------------


def test_cost_is_in_micro_dollars_and_a_missing_price_is_an_error() -> None:
    prices = {"priced": (0.10, 0.40)}
    assert expected_cost([[1000]], [[500]], prices_of(["priced"], prices)).tolist() == [[pytest.approx(300)]]
    with pytest.raises(
        PredictorError, match=r"no price for the model 'other', only for priced; give --price other=IN/"
    ):
        prices_of(["priced", "other"], prices)


def test_predicted_costs_follow_from_prompt_tokens_and_predicted_lengths(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    prices = {"m1": (0.1, 0.4), "m2": (1.0, 2.0)}
    found = predicted_table(trained, table, prices=prices)
    for row in found.head(20).iter_rows(named=True):
        price_in, price_out = prices[row["model"]]
        tokens = len(trained.tokens.ids(row["prompt"]))
        expected = tokens * price_in + row["predicted_output_tokens"] * price_out
        assert row["cost_micro_usd"] == pytest.approx(expected)
    with pytest.raises(PredictorError, match="no price for the model 'm2'"):
        predicted_table(trained, table, prices={"m1": (0.1, 0.4)})


# ---- predictions -----------------------------------------------------------------------------------------------


def test_accuracies_stay_within_0_and_1_and_lengths_at_1_or_more() -> None:
    matrix, target = rows()
    for kind, low, high in (("accuracy", 0.0, 1.0), ("length", 1.0, np.inf)):
        scale = 3 * target - 1  # beyond both ends
        head = train_head(kind, ["a", "b"], matrix, scale, np.zeros(600, bool), Rounds(most=200))  # type: ignore[arg-type]
        found = head.predict(matrix)
        assert found.min() == low
        assert found.max() <= high


def test_heads_that_start_from_task_means_correct_them(tmp_path: Path) -> None:
    table = read_table(answers(tmp_path / "t.parquet"))
    trained = train_predictor(
        table,
        source="a test",
        split=Split(seed=1, held_out=0.2, validation=0),
        start="task_means",
        rounds=Rounds(most=1, learning_rate=1e-9),
    )
    trained.save(tmp_path / "p.json")
    predict = load_predictor(tmp_path / "p.json").for_models(["m1", "m2"])
    used = trained.split.positions(table.prompts)[table.prompt] >= trained.split.held_out
    for task in ("easy", "hard"):
        quality, length = predict("anything", task)
        assert table.task is not None
        for k in (0, 1):
            inside = used & (table.task == task) & (table.model == k)
            assert quality[k] == pytest.approx(table.score[inside].mean(), abs=1e-6)
            assert length[k] == pytest.approx(table.output_tokens[inside].mean(), rel=1e-6)
    quality, _ = predict("anything", "a task that is new")
    assert quality[0] == pytest.approx(table.score[used & (table.model == 0)].mean(), abs=1e-6)


def test_heads_that_start_from_task_means_need_the_task(tmp_path: Path) -> None:
    table = read_table(answers(tmp_path / "t.parquet"))
    trained = train_predictor(table, source="a test", start="task_means", rounds=Rounds(most=2))
    frame = pl.read_parquet(tmp_path / "t.parquet").drop("task")
    frame.write_parquet(tmp_path / "n.parquet")
    nameless = read_table(tmp_path / "n.parquet")
    with pytest.raises(PredictorError, match="no column task; add it"):
        predicted_table(trained, nameless)
    with pytest.raises(PredictorError, match="no column task; add it"):
        evaluate(trained, nameless)
    with pytest.raises(PredictorError, match="no column task, whose means"):
        train_predictor(nameless, source="a test", start="task_means")


def test_a_table_without_lengths_gives_a_predictor_that_says_it_has_no_length_head(tmp_path: Path) -> None:
    file = answers(tmp_path / "t.parquet")
    pl.read_parquet(file).drop("output_tokens").write_parquet(file)
    trained = train_predictor(read_table(file), source="a test")
    assert list(trained.heads) == ["accuracy"]
    with pytest.raises(PredictorError, match="no length head; train it on a table with the column output_tokens"):
        trained.for_models(["m1"])


# ---- held-out prompts ------------------------------------------------------------------------------------------


def test_no_prompt_is_on_both_sides_however_often_and_in_whatever_case_it_comes() -> None:
    split = Split(seed=1, held_out=0.5, validation=0.1)
    place = split.positions(["Say  hello", "say hello\n", "SAY HELLO", "say goodbye"])
    assert place[0] == place[1] == place[2] != place[3]
    many = split.positions([f"prompt {k}" for k in range(4000)])
    assert abs((many < 0.5).mean() - 0.5) < 0.03
    other = Split(seed=2, held_out=0.5, validation=0.1).positions([f"prompt {k}" for k in range(4000)])
    assert abs(np.corrcoef(many, other)[0, 1]) < 0.06


def test_what_is_held_out_has_no_influence_on_training(tmp_path: Path) -> None:
    table = read_table(answers(tmp_path / "t.parquet"))
    trained = train_predictor(table, source="a test")
    held = (trained.split.positions(table.prompts) < trained.split.held_out)[table.prompt]
    assert 0 < held.sum() < len(table)
    spoiled = changed(
        table, score=np.where(held, 0.123, table.score), output_tokens=np.where(held, 9e6, table.output_tokens)
    )
    again = train_predictor(spoiled, source="a test")
    for name, item in (("a", trained), ("b", again)):
        item.save(tmp_path / f"{name}.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def changed(table: Table, **columns: FloatArray) -> Table:
    names = ("prompts", "prompt", "model", "models", "task", "score", "output_tokens", "prompt_tokens")
    return Table(**{name: getattr(table, name) for name in names} | columns)


def test_errors_and_margins_are_those_of_the_held_out_rows(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    found = evaluate(trained, table)
    held = (trained.split.positions(table.prompts) < trained.split.held_out)[table.prompt]
    predictions = predicted_table(trained, table)
    for kind, column in (("accuracy", "predicted_score"), ("length", "predicted_output_tokens")):
        error = predictions[column].to_numpy()[held] - target_of(table, kind)[held]  # type: ignore[arg-type]
        overall = found["heads"][kind]["overall"]
        assert overall["rows"] == held.sum()
        assert overall["head"]["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)))
        assert overall["head"]["mae"] == pytest.approx(np.abs(error).mean())
        assert overall["bias"] == pytest.approx(error.mean())
        used = ~held
        means = np.empty(len(table))
        for task in ("easy", "hard"):
            for model in (0, 1):
                here = (table.task == task) & (table.model == model)
                means[here] = target_of(table, kind)[here & used].mean()  # type: ignore[arg-type]
        squares = np.mean((means - target_of(table, kind))[held] ** 2)  # type: ignore[arg-type]
        margin = overall["margin_over_task_mean"]
        assert margin["value"] == pytest.approx(1 - np.mean(error**2) / squares)
        assert margin["low"] < margin["value"] < margin["high"]
        parts = found["heads"][kind]["by_model"].values()
        assert sum(part["rows"] for part in parts) == held.sum()
        assert set(found["heads"][kind]["by_task"]) == {"easy", "hard"}


def test_a_predictor_that_knows_more_than_the_means_shows_a_margin_and_one_that_knows_nothing_shows_none(
    tmp_path: Path,
) -> None:
    trained, table = predictor(tmp_path)
    margin = evaluate(trained, table)["heads"]["length"]["overall"]["margin_over_task_mean"]
    assert margin["low"] > 0.5  # the prompts state their answers' lengths
    rng = seeded(5, 0)
    noise = changed(table, output_tokens=rng.integers(1, 500, len(table)).astype(np.float64))
    nothing = evaluate(train_predictor(noise, source="noise"), noise)["heads"]["length"]["overall"]
    assert nothing["margin_over_task_mean"]["low"] < 0


def test_the_reliability_table_adds_up(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    found = evaluate(trained, table)["heads"]["accuracy"]
    bins = found["calibration"]["bins"]
    assert sum(each["rows"] for each in bins) == found["overall"]["rows"]
    assert all(each["from"] <= each["predicted"] <= each["to"] for each in bins)
    gap = sum(each["rows"] * (each["predicted"] - each["observed"]) for each in bins) / found["overall"]["rows"]
    assert gap == pytest.approx(found["overall"]["bias"])
    assert found["calibration"]["expected_calibration_error"] >= abs(gap)


# ---- files that cannot be used ---------------------------------------------------------------------------------


def damaged(text: str) -> dict[str, str]:
    content: dict[str, Any] = json.loads(text)
    short = content | {"pca": content["pca"] | {"components": ["1 2"] * 512}}
    trees = content["heads"]["length"]["trees"]
    cut = content | {"heads": content["heads"] | {"length": content["heads"]["length"] | {"trees": trees[:-3]}}}
    fewer = content["heads"]["length"] | {"best_iteration": 2}
    return {
        "": "Invalid JSON|not valid JSON",
        "{}": "is missing; it is required",
        text[:-400]: "not valid JSON",
        json.dumps(content | {"schema_version": 2}): r"schema_version = 2; must be 1",
        json.dumps(content | {"features": content["features"][:-1]}): "the feature max_model_len is missing",
        json.dumps(content | {"features": [*content["features"], "more"]}): "unknown features",
        json.dumps(short): "pca.components; must be 512 rows",
        json.dumps(cut): "heads.length.trees is damaged",
        json.dumps(content | {"heads": content["heads"] | {"length": fewer}}): "best_iteration = 2",
        json.dumps(content | {"tokens": "sha256:ab"}): "give that file as tokenizer",
    }


def test_a_missing_or_damaged_file_is_an_error_and_never_a_new_fit(tmp_path: Path) -> None:
    predictor(tmp_path)[0].save(tmp_path / "p.json")
    bad = tmp_path / "bad.json"
    for content, reason in damaged((tmp_path / "p.json").read_text()).items():
        bad.write_text(content)
        with pytest.raises(PredictorError) as caught:
            load_predictor(bad)
        assert re.search(reason, str(caught.value)), str(caught.value)
        assert str(caught.value).startswith(f"{bad}: ")
    with pytest.raises(PredictorError, match="cannot be read"):
        load_predictor(tmp_path / "missing.json")


def test_a_predictor_remembers_its_tokenizer(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    for number in (1, 2):
        made = library.Tokenizer(library.models.WordLevel({"the": number, "?": 0}, unk_token="?"))
        made.pre_tokenizer = library.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / f"{number}.json"))
    table = read_table(answers(tmp_path / "t.parquet"))
    trained = train_predictor(table, source="a test", tokenizer=tmp_path / "1.json")
    trained.save(tmp_path / "p.json")
    again = load_predictor(tmp_path / "p.json", tmp_path / "1.json")
    assert predicted_table(again, table).equals(predicted_table(trained, table))
    for other in (None, tmp_path / "2.json"):
        with pytest.raises(PredictorError, match="tokenizer"):
            load_predictor(tmp_path / "p.json", other)
    predictor(tmp_path)[0].save(tmp_path / "e.json")
    with pytest.raises(PredictorError, match="an estimate of tokens, leave the tokenizer out"):
        load_predictor(tmp_path / "e.json", tmp_path / "1.json")


def test_features_are_the_columns_of_both_heads(tmp_path: Path) -> None:
    trained: Predictor = predictor(tmp_path)[0]
    assert all(head.names == FEATURES for head in trained.heads.values())


def test_too_few_prompts_and_a_table_without_targets_are_errors(tmp_path: Path) -> None:
    few = read_table(answers(tmp_path / "t.parquet", n=12))
    with pytest.raises(PredictorError, match=r"prompts to train on.*at least 20 are needed"):
        train_predictor(few, source="a test")
    table = read_table(answers(tmp_path / "t.parquet"))
    nothing = np.full(len(table), np.nan)
    with pytest.raises(PredictorError, match="neither score nor output_tokens"):
        train_predictor(changed(table, score=nothing, output_tokens=nothing), source="a test")
    with pytest.raises(PredictorError, match="none of the table's 120 prompts is held out"):
        evaluate(train_predictor(table, source="a test", split=Split(seed=1, held_out=0, validation=0)), table)
