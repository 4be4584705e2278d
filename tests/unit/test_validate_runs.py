"""Real runs of every kind are read into one form, compared with a card, and split into causes."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recordings import MS, requests, write_recording
from shared_data import shared_data
from simcluster.calibrate.fit import fit_step_time, step_kinds
from simcluster.calibrate.recording import load_recording
from simcluster.card import Card, FrontEnd, KvCache, StepTimeFit, load_card, write_card
from simcluster.errors import CalibrationError, ConfigError
from simcluster.shipped import find_file
from simcluster.validate.runs import read_run, recorded_run
from simcluster.validate.scheduling import replay_scheduling
from simcluster.validate.simulate import Tuning
from simcluster.validate.split import step_table
from simcluster.validate.tune import tune_on_run
from simcluster.validate.validate import validate_run

BENCH = Path(__file__).resolve().parents[1] / "data" / "bench"
"""A real result and the card of the server; see the README there."""


def plain_card(fit: StepTimeFit, **changes: Any) -> Card:
    """Return a shipped card with another fit and no time outside of the steps."""
    shipped = load_card(find_file("qwen3-8b-h100", "calibration", ".json"))
    values: dict[str, Any] = {
        "fits": {"hinge": fit},
        "chosen_fit": "hinge",
        "host_time_s": 0.0,
        "service_rates": None,
        "front_end": FrontEnd(request_s=0.0, per_prompt_token_s=0.0, output_s=0.0),
    }
    return shipped.model_copy(update=values | changes)


def exact_card() -> Card:
    """Return a card whose steps take the 10 ms of the small recording, with its 2 and 1 ms around them."""
    fit = StepTimeFit(b0_s=0.010, b1_s=0.0, b2_s=0.0, b3_s=0.0)
    return plain_card(fit, host_time_s=0.003)


def shared(*parts: str) -> Path:
    folder = shared_data()
    if folder is None:
        pytest.skip("no shared data")
    return folder.joinpath(*parts)


# ---- reading ---------------------------------------------------------------------------------------------------


def test_a_recording_counts_from_the_client_where_it_was_recorded(tmp_path: Path) -> None:
    seen = {"t_sent_ns": 90 * MS, "t_first_token_ns": 130 * MS, "t_last_token_ns": 145 * MS}
    run = recorded_run(load_recording(write_recording(tmp_path, requests_=[{**requests()[0], **seen}])))
    assert run.requests.ttft_s.tolist() == pytest.approx([0.040])
    assert run.requests.e2e_s.tolist() == pytest.approx([0.055])
    assert run.notes == ()


def test_a_recording_without_a_client_counts_in_the_engine_and_says_so(tmp_path: Path) -> None:
    run = recorded_run(load_recording(write_recording(tmp_path)))
    assert run.requests.ttft_s.tolist() == pytest.approx([0.026])  # arrives at 99, the second step is done at 125 ms
    assert run.requests.tpot_s.tolist() == pytest.approx([0.013])
    assert "no client was recorded" in run.notes[0]


def bench_result(**changes: Any) -> dict[str, Any]:
    found = {
        "input_lens": [10, 20, 30],
        "output_lens": [3, 1, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.03], [], []],
        "start_times": [101.0, 100.0, 102.0],
    }
    return found | changes


def test_a_result_of_vllm_s_benchmark_gives_its_requests_by_start(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench_result()))
    run = read_run(file)
    assert run.requests.arrival_s.tolist() == [0, 1]
    assert run.requests.prompt_tokens.tolist() == [20, 10]
    assert run.requests.e2e_s.tolist() == pytest.approx([0.2, 0.14])
    assert run.requests.tpot_s[1] == pytest.approx(0.02)
    assert np.isnan(run.requests.tpot_s[0])
    assert run.notes == ("1 failed requests are left out",)


def test_a_real_result_of_vllm_s_benchmark_is_read_as_the_benchmark_itself_sums_it_up() -> None:
    file = BENCH / "vllm_bench_serve.json"
    told, run = json.loads(file.read_bytes()), read_run(file)
    found = run.requests
    assert (len(found.arrival_s), run.notes) == (told["completed"], ())
    assert (found.prompt_tokens.sum(), found.output_tokens.sum()) == (
        told["total_input_tokens"],
        told["total_output_tokens"],
    )
    for measured_s, name in ((found.ttft_s, "ttft"), (found.tpot_s, "tpot")):
        assert 1e3 * np.mean(measured_s) == pytest.approx(told[f"mean_{name}_ms"])
        assert 1e3 * np.median(measured_s) == pytest.approx(told[f"median_{name}_ms"])
    assert sorted(found.e2e_s) == pytest.approx(sorted(told["latencies"]), rel=0.01)
    assert found.duration_s == pytest.approx(told["duration"], rel=0.02)


def test_a_real_result_of_vllm_s_benchmark_is_compared_with_the_card_of_its_server() -> None:
    run, card = read_run(BENCH / "vllm_bench_serve.json"), load_card(BENCH / "large.json")
    found = validate_run(card, run, options={"max_num_seqs": 8, "max_num_batched_tokens": 256}).summary
    assert (found["requests"], found["not_served"], found["loop"]) == (24, 0, "sync")
    assert all(found[name]["count"] == 24 for name in ("ttft_s", "tpot_s", "e2e_s"))
    assert found["ttft_s"]["mean"]["observed"] == pytest.approx(float(run.requests.ttft_s.mean()))
    assert found["e2e_s"]["mape"] < 0.15, "0.085 when it was made: the card was recorded some minutes before"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not valid JSON"),
        (json.dumps({"input_lens": []}), "no output_lens, ttfts, itls, start_times; run `vllm bench serve`"),
        (json.dumps(bench_result(ttfts=[1.0])), "lists of different lengths"),
        (json.dumps(bench_result(output_lens=[0, 0, 0])), "no request was served"),
        (json.dumps(bench_result(ttfts=["a", 1, 2])), "something else than numbers"),
    ],
)
def test_a_broken_result_is_told_of_in_one_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(content)
    with pytest.raises(CalibrationError, match=told) as caught:
        read_run(file)
    assert "\n" not in str(caught.value)


def test_a_table_of_several_runs_asks_which_one(tmp_path: Path) -> None:
    columns = {"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1, "first_token_s": 1.0, "last_token_s": 1.0}
    file = tmp_path / "x_runs.parquet"
    pl.DataFrame([{"run": "a", **columns}, {"run": "b", **columns}]).write_parquet(file)
    with pytest.raises(ConfigError, match="holds the runs a, b; name one with --run"):
        read_run(file)
    with pytest.raises(ConfigError, match="no run c; it holds a, b"):
        read_run(file, "c")
    assert read_run(file, "b").requests.ttft_s.tolist() == [1.0]
    with pytest.raises(CalibrationError, match="not a run"):
        read_run(tmp_path / "x.txt")


# ---- comparing -------------------------------------------------------------------------------------------------


def test_a_card_that_is_right_has_no_error_and_one_that_is_slow_shows_it_in_its_step_time(tmp_path: Path) -> None:
    run = recorded_run(load_recording(write_recording(tmp_path)))
    right = validate_run(exact_card(), run).summary
    assert right["split"]["scheduling"]["same_composition"] == 1
    assert right["split"]["step_time"]["mape"]["all"] == pytest.approx(0, abs=1e-9)
    assert right["ttft_s"]["mape"] == pytest.approx(0, abs=1e-3)
    assert right["tpot_s"]["mape"] == pytest.approx(0, abs=1e-3)
    slow = validate_run(exact_card(), run, Tuning(scale=1.5)).summary
    assert slow["split"]["scheduling"]["same_composition"] == 1
    assert slow["split"]["step_time"]["mape"]["all"] == pytest.approx(0.5)
    assert slow["tpot_s"]["bias"] == pytest.approx(5 / 13, rel=1e-2)
    assert slow["tuned"] == {"scale": 1.5}
    assert slow["over_time"]["running"]["mean"]["observed"] > 0


def test_what_was_changed_for_a_comparison_is_told_with_its_result(tmp_path: Path) -> None:
    run = recorded_run(load_recording(write_recording(tmp_path)))
    verdict = validate_run(exact_card(), run, Tuning(scale=2.0), tuned_on="first=10: scale")
    assert verdict.validation.tuned == {"scale": 2.0}
    assert ", tuned on first=10: scale), error E2E " in verdict.validation.text


# ---- public runs -----------------------------------------------------------------------------------------------


def profiled_card() -> Card:
    """Return a card of Qwen3-32B on two RTX PRO 6000 from their layer profiles, which know no all-reduce."""
    module = pytest.importorskip("simcluster.calibrate.importing.llmservingsim")
    models = pytest.importorskip("simcluster.calibrate.importing.models")
    files = sorted(shared("calibration").glob("rtxpro6000_vllm0.19_Qwen3-32B_tp2_*.parquet"))
    composed, _ = module.compose_profile(files, models.model_shape("Qwen3-32B", None), 2)
    return composed_profile_card(composed)


def composed_profile_card(composed: pl.DataFrame) -> Card:
    """Fit the steps of a profile, half of the weight on decode steps, and on contexts as ShareGPT has them."""
    numbers = {"n_tokens": pl.col("prefill_tokens") + pl.col("n_decode"), "num_prefill_requests": "n_prefill_seqs"}
    steps = composed.select(
        "n_decode",
        **numbers,  # type: ignore[arg-type]
        sum_decode_context="sum_decode_ctx",
        prefill_attention="prefill_attn_pairs",
        has_prefill=pl.col("n_prefill_seqs") > 0,
        step_s=pl.col("step_ms") / 1e3,
    )
    decodes = step_kinds(steps) == "decode"
    context = steps["sum_decode_context"].to_numpy() / np.maximum(steps["n_decode"].to_numpy(), 1)
    served = (context <= 4096) & (steps["n_decode"].to_numpy() <= 128)
    weights = np.where(decodes, 0.5 / decodes.sum(), 0.5 / (~decodes).sum()) * np.where(served, 1, 0.05)
    fit = fit_step_time(steps, "hinge", weights, extra_terms=("b4_s", "b5_s"), allow_partial=True)
    return plain_card(
        fit,
        name="qwen3-32b-tp2-rtxpro6000",
        model="Qwen3-32B",
        device="RTXPRO6000",
        num_gpus=2,
        kv_cache=KvCache(num_gpu_blocks=24_000, block_size=16),
    )


def test_qwen3_32b_on_two_rtx_pro_6000_meets_the_requests_that_it_was_not_tuned_on() -> None:
    """The profiles lack the all-reduce: its time per step and per token is tuned on the first 100 of 300 requests."""
    card = profiled_card()
    run = read_run(shared("validation", "llmservingsim_vllm_runs.parquet"), "RTXPRO6000_Qwen3-32B")
    tuning = tune_on_run(card, run, 100, ["b0", "b1"], {})
    verdict = validate_run(card, run, tuning, skip=100, tuned_on="first=100: b0, b1")
    sys.stdout.write(f"{(tuning, verdict.validation.text, verdict.summary['over_time'])}\n")
    assert verdict.summary["tpot_s"]["mape"] <= 0.06
    assert verdict.summary["e2e_s"]["mape"] <= 0.06
    assert verdict.summary["ttft_s"]["mape"] <= 0.12
    assert verdict.summary["over_time"]["running"] is not None


# ---- estimators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["server_tightkv", "preempt"])
def test_sfs_with_recorded_step_times_misses_the_front_end_alone(name: str) -> None:
    recording = load_recording(shared("vllm_cpu", f"steps_{name}.parquet"))
    steps = step_table(recording)
    card = plain_card(fit_step_time(steps, "eq9"), max_model_len=4608)
    verdict = validate_run(card, recorded_run(recording))
    scores = verdict.summary["estimators"]
    sys.stdout.write(f"{(name, {key: (value['mape'], value.get('by_resident')) for key, value in scores.items()})}\n")
    assert scores["sfs_measured"]["max_error_s"] < 1e-9
    assert scores["sfs_measured"]["count"] == len(recording.requests)
    front = scores["sfs_measured"]["front_end_s"]
    assert 0 <= front["p50"] <= front["p90"] < 0.1
    assert {"sfs", "throughput", "lps"} <= set(scores)
    points = verdict.tables["estimates"]
    assert points.group_by("estimator").len()["len"].to_list() == [len(recording.requests)] * 4
    replay = replay_scheduling(recording)
    assert replay.first_token_share == 1


# ---- the badge -------------------------------------------------------------------------------------------------


def test_a_card_that_nobody_validated_says_so_and_one_that_was_says_on_what(tmp_path: Path) -> None:
    shipped = find_file("qwen3-8b-h100", "calibration", ".json")
    card = load_card(shipped)
    assert card.badge == "uncalibrated preset"
    assert card.model_copy(update={"measured": True}).badge == "calibrated, not validated"
    run = recorded_run(load_recording(write_recording(tmp_path / "run")))
    judged = card.model_copy(update={"validations": [validate_run(exact_card(), run).validation]})
    file = tmp_path / "card.json"
    write_card(judged, file)
    assert load_card(file).badge.startswith("validated on run (1 requests), error E2E 0.")
    write_card(card, file)
    assert file.read_bytes() == shipped.read_bytes()  # a card without a validation keeps its bytes
