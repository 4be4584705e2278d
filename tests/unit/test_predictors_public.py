"""Predictors on answers of real models: what they add to means, and what a prediction costs."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from shared_data import shared_data
from simcluster.predict.evaluate import evaluate
from simcluster.predict.predictor import Predictor, Start
from simcluster.predict.table import read_table
from simcluster.predict.train import train_predictor


def quality_folder() -> Path:
    data = shared_data()
    if data is None:
        pytest.skip("no shared data")
    return data / "quality"


def llmrouter(folder: Path) -> pl.DataFrame:
    prompts = pl.read_parquet(folder / "llmrouter_prompts.parquet")
    scores = pl.read_parquet(folder / "llmrouter_scores.parquet").with_columns(pl.col("model").cast(pl.String))
    return scores.join(prompts, on="prompt_id").select("prompt", "model", "task", "score")


def routellm(folder: Path) -> pl.DataFrame:
    table = pl.read_parquet(folder / "routellm_gsm8k_mmlu.parquet")
    task = pl.concat_str(pl.col("benchmark").cast(pl.String), pl.col("subject").cast(pl.String), separator="/")
    return pl.concat(
        table.select(
            "prompt",
            pl.lit(model).alias("model"),
            task.alias("task"),
            pl.col(f"{model}_correct").alias("score"),
            pl.col(f"{model}_output_tokens").alias("output_tokens"),
        )
        for model in ("mixtral_8x7b", "gpt4")
    )


def alpaca_eval(folder: Path) -> pl.DataFrame:
    """Return the answers that were judged: 58 models."""
    prompts = pl.read_parquet(folder / "alpaca_eval_prompts.parquet")
    scores = pl.read_parquet(folder / "alpaca_eval_scores.parquet").filter(pl.col("win_gpt4turbo").is_not_null())
    return scores.join(prompts, on="prompt_id").select(
        "prompt",
        pl.col("model").cast(pl.String),
        pl.col("dataset").cast(pl.String).alias("task"),
        pl.col("win_gpt4turbo").alias("score"),
        pl.col("output_tokens_qwen").alias("output_tokens"),
    )


TABLES = {"llmrouter": llmrouter, "routellm": routellm, "alpaca_eval": alpaca_eval}


@cache
def scored(folder: Path, cache_folder: Path, name: str, start: Start) -> tuple[Predictor, dict[str, Any]]:
    file = cache_folder / f"{name}.parquet"
    if not file.exists():
        TABLES[name](folder).write_parquet(file)
    table = read_table(file)
    trained = train_predictor(table, source=name, start=start)
    return trained, evaluate(trained, table)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def margin(tables: Path, name: str, kind: str, start: Start, over: str) -> dict[str, float]:
    found = scored(quality_folder(), tables, name, start)[1]
    result: dict[str, float] = found["heads"][kind]["overall"][f"margin_over_{over}"]
    return result


def test_predicted_lengths_beat_task_means_on_held_out_prompts_of_real_models(tables: Path) -> None:
    for name, least in (("routellm", 0.10), ("alpaca_eval", 0.01)):
        found = margin(tables, name, "length", "nothing", "task_mean")
        assert found["low"] > least, (name, found)


def test_predicted_qualities_beat_the_models_means_without_being_told_the_task(tables: Path) -> None:
    for name, least in (("llmrouter", 0.12), ("routellm", 0.11)):
        found = margin(tables, name, "accuracy", "nothing", "global_mean")
        assert found["low"] > least, (name, found)


def test_predicted_qualities_beat_task_means_where_the_task_is_told(tables: Path) -> None:
    found = margin(tables, "routellm", "accuracy", "task_means", "task_mean")
    assert found["low"] > 0, found
    found = margin(tables, "routellm", "length", "task_means", "task_mean")
    assert found["low"] > 0.10, found
    found = margin(tables, "alpaca_eval", "length", "task_means", "task_mean")
    assert found["low"] > 0.01, found


def test_qualities_are_calibrated(tables: Path) -> None:
    for name in ("llmrouter", "routellm"):
        found = scored(quality_folder(), tables, name, "nothing")[1]
        assert found["heads"]["accuracy"]["calibration"]["expected_calibration_error"] < 0.03


def test_one_request_is_predicted_for_all_models_in_well_under_a_millisecond_of_cpu(tables: Path) -> None:
    trained, _ = scored(quality_folder(), tables, "alpaca_eval", "nothing")
    prompts = [
        text for text in pl.read_parquet(tables / "alpaca_eval.parquet")["prompt"].unique().sort() if len(text) > 400
    ]
    prompts = [text[:400] for text in prompts[:20]]
    predict = trained.for_models([each.name for each in trained.models[:3]])
    least = float("inf")
    for _ in range(30):
        start = time.process_time_ns()
        for text in prompts:
            predict(text, None)
        least = min(least, (time.process_time_ns() - start) / len(prompts))
    assert least < 1e6, f"{least / 1e3:.0f} us"  # the goal is 0.3: 0.2 on one machine, 0.31 to 0.47 on a slower one
