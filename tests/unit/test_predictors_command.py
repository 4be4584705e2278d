"""`simcluster predictors` from the command line."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from command_line import run_command
from predictor_tables import answers
from simcluster.predict.predictor import load_predictor

SHORT = ("--trees", "20")


def trained(folder: Path) -> Path:
    code, _, errors = run_command(
        "predictors", "train", answers(folder / "t.parquet"), "--out", folder / "p.json", *SHORT
    )
    assert (code, errors) == (0, "")
    return folder / "p.json"


def test_train_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    table = answers(tmp_path / "t.parquet")
    code, text, _ = run_command("predictors", "train", table, "--out", tmp_path / "p.json", *SHORT)
    assert code == 0
    assert "accuracy head of" in text
    assert "length head of 20 trees" in text
    assert "held out" in text
    code, text, _ = run_command(
        "predictors", "train", table, "--out", tmp_path / "q.json", *SHORT, "--json", "--source", "x", "--licence", "y"
    )
    found = json.loads(text)
    assert found["models"] == ["m1", "m2"]
    assert found["prompts"] + found["held_out_prompts"] == 120
    origin = load_predictor(tmp_path / "q.json").origin
    assert (origin.source, origin.licence, origin.prompts) == ("x", "y", found["prompts"])


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_tables_of_other_formats_names_and_scales_train_the_same(suffix: str, tmp_path: Path) -> None:
    file = trained(tmp_path)
    frame = pl.read_parquet(tmp_path / "t.parquet").with_columns(pl.col("score") * 4)
    frame = frame.rename({"score": "judge", "output_tokens": "n_out"})
    other = tmp_path / f"other{suffix}"
    (frame.write_csv if suffix == ".csv" else frame.write_ndjson)(other)
    more = ("--map", "score=judge", "--map", "output_tokens=n_out", "--score-max", "4", "--source", "t.parquet")
    code, _, errors = run_command("predictors", "train", other, "--out", tmp_path / "o.json", *SHORT, *more)
    assert (code, errors) == (0, "")
    assert (tmp_path / "o.json").read_bytes() == file.read_bytes()


def test_evaluate_prints_errors_beside_those_of_means_and_the_calibration(tmp_path: Path) -> None:
    file = trained(tmp_path)
    code, text, _ = run_command("predictors", "evaluate", file, tmp_path / "t.parquet")
    assert code == 0
    for part in ("margin over", "task mean", "accuracy, by model", "length, by task", "calibration, mean gap", "easy"):
        assert part in text
    assert "…" not in text
    code, text, _ = run_command("predictors", "evaluate", file, tmp_path / "t.parquet", "--json")
    found: dict[str, Any] = json.loads(text)
    assert set(found["heads"]) == {"accuracy", "length"}
    assert found["start"] == "nothing"
    assert found["held_out_prompts"] == 120 - found["trained_on"]["prompts"]


def test_predict_writes_predictions_and_costs(tmp_path: Path) -> None:
    file = trained(tmp_path)
    asked = pl.DataFrame({"model": ["m2", "m1"], "prompt": ["List facts. Use 90 words.", "Explain it."]})
    asked.write_csv(tmp_path / "asked.csv")
    command = ("predictors", "predict", file, tmp_path / "asked.csv", "--out", tmp_path / "told.csv")
    code, text, errors = run_command(*command, "--price", "m1=0.1/0.4", "--price", "m2=1/2")
    assert (code, errors) == (0, "")
    assert "2 rows" in text
    told = pl.read_csv(tmp_path / "told.csv")
    assert told["prompt"].to_list() == asked["prompt"].to_list()
    assert set(told.columns) >= {"predicted_score", "predicted_output_tokens", "cost_micro_usd", "unseen"}
    code, _, errors = run_command(*command, "--price", "m1=0.1/0.4")
    assert code == 2
    assert "no price for the model 'm2'" in errors


def test_an_unseen_model_is_named_unless_allowed(tmp_path: Path) -> None:
    file = trained(tmp_path)
    answers(tmp_path / "u.parquet", models=("m1", "m2", "m3"))
    code, _, errors = run_command("predictors", "evaluate", file, tmp_path / "u.parquet")
    assert code == 2
    assert "the model 'm3' was not in the training table" in errors
    code, text, _ = run_command("predictors", "evaluate", file, tmp_path / "u.parquet", "--allow-unseen")
    assert code == 0
    assert "m3 (unseen)" in text
    out = tmp_path / "told.parquet"
    code, _, _ = run_command("predictors", "predict", file, tmp_path / "u.parquet", "--out", out, "--allow-unseen")
    assert code == 0
    assert pl.read_parquet(out).group_by("model").agg(pl.col("unseen").sum()).sort("model")["unseen"].to_list() == [
        0,
        0,
        120,
    ]


TRAIN = ("train", "t.parquet", "--out", "o.json")
BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no table": (("train", "none.csv", "--out", "o.json"), "none.csv: no such file"),
    "a table of another kind": (("train", "t.txt", "--out", "o.json"), "must be a .parquet, .csv or .jsonl file"),
    "a column that is not there": (
        ("train", "t.parquet", "--out", "o.json", "--map", "score=judge"),
        "no column judge",
    ),
    "a mapping of nothing": ((*TRAIN, "--map", "score"), "must be OURS=THEIRS"),
    "a mapping of another name": (
        ("train", "t.parquet", "--out", "o.json", "--map", "x=score"),
        "must be one of prompt",
    ),
    "no folder": (("train", "t.parquet", "--out", "none/o.json"), "cannot be written there"),
    "a scale of nothing": ((*TRAIN, "--score-max", "0"), "must be above 0"),
    "a score beyond the scale": (("train", "big.csv", "--out", "o.json"), "score, row 2: 7; must be from 0 to 1"),
    "an empty prompt": (("train", "empty.csv", "--out", "o.json"), "prompt, row 1: is empty"),
    "words as scores": (("train", "words.csv", "--out", "o.json"), "score is of type String; must be numbers"),
    "no rows": (("train", "none_in.csv", "--out", "o.json"), "no rows"),
    "no predictor": (("evaluate", "none.json", "t.parquet"), "none.json: no such file"),
    "no predictor file": (("evaluate", "t.parquet", "t.parquet"), "t.parquet: cannot be read (no text)"),
    "a price without a model": (
        ("predict", "p.json", "t.parquet", "--out", "o.csv", "--price", "0.1/0.2"),
        "must be MODEL=IN/OUT",
    ),
    "another kind of output": (("predict", "p.json", "t.parquet", "--out", "o.xls"), "must be a .parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_one_line_and_nothing_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    answers(Path("t.parquet"))
    if "p.json" in arguments:
        trained(tmp_path)
    Path("t.txt").write_text("x")
    Path("big.csv").write_text("prompt,model,score\na,m,0.5\nb,m,7\n")
    Path("empty.csv").write_text("prompt,model,score\n,m,0.5\nb,m,0.7\n")
    Path("words.csv").write_text("prompt,model,score\na,m,good\nb,m,bad\n")
    Path("none_in.csv").write_text("prompt,model,score\n")
    before = set(Path().iterdir())
    code, text, errors = run_command("predictors", *arguments)
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert text == ""
    assert set(Path().iterdir()) == before
