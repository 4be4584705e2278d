"""Cards against published measurements; the files lie beside the repository."""

import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from shared_data import shared_data
from simcluster.card import Card, load_card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.errors import CalibrationError, ConfigError
from simcluster.shipped import find_file
from simcluster.validate.points import is_points_file, read_points
from simcluster.validate.simulate import Tuning, play_closed
from simcluster.validate.tune import tune_on_points, tuned_card
from simcluster.validate.validate import validate_points

MOST_TOKENS = 200_000  # beyond, the KV cache limits the points, and its size is not known


def card(name: str) -> Card:
    return load_card(find_file(name, "calibration", ".json"))


def file(name: str) -> Path:
    folder = shared_data()
    if folder is None:
        pytest.skip("no shared data")
    return folder / "validation" / name


@pytest.mark.parametrize(("tuned", "scored"), [("1024", "4096"), ("4096", "1024")])
def test_qwen3_32b_on_two_h100_meets_points_of_a_prompt_length_that_it_was_not_tuned_on(
    tuned: str, scored: str
) -> None:
    model = card("qwen3-32b-tp2-h100")
    path = file("aic_silicon_hopper_dense.parquet")
    tuning = tune_on_points(model, read_points(path, model, {"isl": tuned}, MOST_TOKENS), ["scale", "host"], {})
    points = read_points(path, model, {"isl": scored}, MOST_TOKENS)
    verdict = validate_points(model, points, "silicon", tuning, tuned_on=f"isl {tuned}: scale, host")
    sys.stdout.write(f"{(tuning, verdict.validation.text)}\n")
    assert len(points) == 6
    assert verdict.summary["tpot_mape"] <= 0.08
    judged = tuned_card(model, tuning, verdict.validation.tuned_on)
    assert f"tuned on isl {tuned}" in judged.adjustments[-1].reason
    assert judged.step_time.b0_s == pytest.approx(model.step_time.b0_s * tuning.scale)


def test_qwen3_8b_on_an_h100_meets_the_points_that_vllm_served() -> None:
    model = card("qwen3-8b-h100")
    points = read_points(file("gpustack_h100_qwen3.csv"), model)
    verdict = validate_points(model, points, "gpustack")
    sys.stdout.write(f"{verdict.validation.text}\n")
    assert len(points) == 5
    assert verdict.summary["tpot_mape"] <= 0.06
    assert verdict.validation.text.startswith("validated on gpustack (5 points), error TPOT ")


def table(folder: Path) -> Path:
    row = {
        "system": "h100_sxm",
        "backend": "vllm",
        "backend_version": "0.12.0",
        "model_path": "Qwen/Qwen3-8B",
        "gemm_quant": "bf16",
        "tp_size": 1,
        "isl": 100,
        "osl": 10,
        "concurrency": 2,
        "ttft_mean_ms": 10.0,
        "tpot_mean_ms": 7.0,
    }
    path = folder / "points.parquet"
    pl.DataFrame([row, {**row, "tp_size": 2}, {**row, "backend": "sglang"}]).write_parquet(path)
    return path


def test_only_points_of_the_card_s_instance_served_by_vllm_are_read(tmp_path: Path) -> None:
    path = table(tmp_path)
    assert is_points_file(path)
    assert not is_points_file(tmp_path / "missing.parquet")
    assert [point.label for point in read_points(path, card("qwen3-8b-h100"))] == ["100+10 x2"]


def test_requests_that_all_come_at_once_wait_for_each_other_and_none_follows() -> None:
    """Ten prompts of a step each and answers of one token: the k-th first token comes after k steps."""
    model = card("qwen3-8b-h100")
    options = EngineOptions(max_num_batched_tokens=8192, async_scheduling=False, enable_prefix_caching=False)
    config, _ = resolve_engine_options(options, model, "engine")
    played = play_closed(Tuning().model(model), config, model.front_end, 8192, 1, 10, waves=1)
    assert len(played.ttft_s) == 10
    assert played.ttft_s / played.ttft_s[0] == pytest.approx(np.arange(1, 11), rel=1e-6)


def test_a_row_without_a_limit_of_requests_in_flight_sent_all_of_them_at_once(tmp_path: Path) -> None:
    row = {"model": "Qwen/Qwen3-8B", "hardware": "one H100", "engine": "vllm", "version": "v0.11.0"}
    row |= {"serve_cmd": "vllm serve", "n": 50, "input_tokens": 5000, "output_tokens": 500, "tpot_mean_ms": 9.0}
    path = tmp_path / "lab.parquet"
    pl.DataFrame([row | {"max_concurrency": 4}, row | {"max_concurrency": None}]).write_parquet(path)
    loop, burst = read_points(path, card("qwen3-8b-h100"))
    assert (loop.label, loop.concurrency, loop.at_once) == ("100+10 x4", 4, False)
    assert (burst.label, burst.concurrency, burst.at_once) == ("100+10 x50 once", 50, True)


def test_a_selection_without_points_and_an_unknown_column_are_told_of(tmp_path: Path) -> None:
    path = table(tmp_path)
    with pytest.raises(CalibrationError, match=r"no point of Qwen3-0\.6B on 1 H100 served by vLLM"):
        read_points(path, card("qwen3-0.6b-h100"))
    with pytest.raises(ConfigError, match="no column length"):
        read_points(path, card("qwen3-8b-h100"), {"length": "1"})


def test_an_unknown_number_to_tune_is_told_of(tmp_path: Path) -> None:
    model = card("qwen3-8b-h100")
    with pytest.raises(ConfigError, match="allowed are scale, host, b0, b1"):
        tune_on_points(model, read_points(table(tmp_path), model), ["b9"], {})
