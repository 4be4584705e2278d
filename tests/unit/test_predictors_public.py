"""Predictors on answers of real models: what they add to means."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from predictor_margins import TABLES, held_out_errors
from predictor_margins import margin as pooled_margin
from shared_data import shared_data
from simcluster.predict.evaluate import evaluate
from simcluster.predict.predictor import Predictor, Start
from simcluster.predict.table import Table, read_table
from simcluster.predict.train import train_predictor


def quality_folder() -> Path:
    data = shared_data()
    if data is None:
        pytest.skip("no shared data")
    return data / "quality"


@cache
def table_of(folder: Path, cache_folder: Path, name: str) -> Table:
    file = cache_folder / f"{name}.parquet"
    TABLES[name](folder).write_parquet(file)
    return read_table(file)


@cache
def scored(folder: Path, cache_folder: Path, name: str, start: Start) -> tuple[Predictor, dict[str, Any]]:
    table = table_of(folder, cache_folder, name)
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


def test_predictions_that_correct_task_means_beat_them(tables: Path) -> None:
    for name, kind, least in (
        ("routellm", "accuracy", 0.015),
        ("llmrouter", "accuracy", 0.002),
        ("routellm", "length", 0.10),
        ("alpaca_eval", "length", 0.03),
    ):
        found = margin(tables, name, kind, "task_means", "task_mean")
        assert found["low"] > least, (name, kind, found)


def test_predicted_qualities_of_few_prompts_beat_task_means_over_several_splits(tables: Path) -> None:
    table = table_of(quality_folder(), tables, "alpaca_eval")
    errors = [held_out_errors(table, "alpaca_eval", seed)["accuracy"] for seed in (1, 2, 3)]
    found = pooled_margin(errors)
    assert found["value"] > 0.002, found
    assert found["low"] > -0.005, found


def test_qualities_are_calibrated(tables: Path) -> None:
    for name in ("llmrouter", "routellm"):
        found = scored(quality_folder(), tables, name, "nothing")[1]
        assert found["heads"]["accuracy"]["calibration"]["expected_calibration_error"] < 0.03
