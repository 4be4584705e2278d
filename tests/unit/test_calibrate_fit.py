"""`simcluster calibrate fit`: what it accepts, what it refuses, and the figures it must reach."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from command_line import run_command
from recordings import MS, info, step, write_recording
from shared_data import shared_data
from simcluster.calibrate.choose import capture_sizes, padded
from simcluster.calibrate.measured import contention
from simcluster.calibrate.step_tables import FitOptions, load_table
from simcluster.card import load_card
from step_tables import DECODES_OF_FOUR, HINGE, PLAIN, SIX, Batch, drawn_steps, table

MILLI = 1e3


def written(folder: Path, steps: pl.DataFrame, name: str = "steps.parquet") -> Path:
    path = folder / name
    steps.write_parquet(path)
    return path


def report(*arguments: object) -> dict[str, Any]:
    """Run the command with --json; return its report."""
    code, out, err = run_command("calibrate", "fit", *arguments, "--json", "--quiet")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def refusal(*arguments: object) -> str:
    """Run the command; return the one line with which it refuses."""
    code, out, err = run_command("calibrate", "fit", *arguments, "--quiet")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    return err


def values(found: dict[str, Any]) -> dict[str, float]:
    return {row["term"]: row["value"] for row in found["coefficients"]}


def data() -> Path:
    folder = shared_data()
    if folder is None:
        pytest.skip("the recordings and composed steps are not in the repository; set SIMCLUSTER_SHARED")
    return folder


# ---- the cases of the collection --------------------------------------------------------------------------------


def test_six_exact_batches_give_back_their_coefficients_through_the_command(tmp_path: Path) -> None:
    found = report(written(tmp_path, table(SIX)))  # case C062
    assert [MILLI * value for value in values(found).values()] == pytest.approx([10, 0.2, 0.01, 0.002], rel=1e-9)
    assert found["errors"][0]["in_sample"] == pytest.approx(0, abs=1e-9)
    assert found["residuals"]["mean_absolute_error_s"] < 1e-9
    assert any("6 steps are too few" in warning for warning in found["warnings"])


def test_one_batch_size_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, table(DECODES_OF_FOUR)))  # case C064
    assert "2 of 4 coefficients" in message
    assert "b1_s: it cannot be told apart from b0_s, missing are steps with other numbers of tokens" in message
    assert "b3_s: its feature is 0 in every step, missing are steps that prefill" in message
    assert "--allow-partial" in message


def test_a_partial_fit_warns_and_flags_what_it_cannot_tell(tmp_path: Path) -> None:
    found = report(written(tmp_path, table(DECODES_OF_FOUR)), "--allow-partial")
    flags = {row["term"]: row["identified"] for row in found["coefficients"]}
    assert flags == {"b0_s": True, "b1_s": False, "b2_s": True, "b3_s": False}
    assert any("not identified, held at 0: b1_s" in warning for warning in found["warnings"])


def test_a_cold_first_step_is_named_and_skip_steps_leaves_it_out(tmp_path: Path) -> None:
    path = written(tmp_path, table((Batch(((10, 0),), (), 9000.0), *SIX)))  # case C066
    found = report(path)
    assert any("row 0 of steps: over 100 times the median error" in warning for warning in found["warnings"])
    assert MILLI * values(found)["b0_s"] == pytest.approx(10, rel=0.05)
    skipped = report(path, "--skip-steps", 1)
    assert MILLI * values(skipped)["b0_s"] == pytest.approx(10, rel=1e-9)
    assert skipped["sources"] == [{"name": "steps", "steps": 7, "fitted": 6, "left_out": {"skipped": 1}}]
    assert not any("over 100 times" in warning for warning in skipped["warnings"])


# ---- the choice -------------------------------------------------------------------------------------------------


def test_plain_steps_are_fitted_by_plain_eq_9_and_the_choice_says_so(tmp_path: Path) -> None:
    found = report(written(tmp_path, drawn_steps(PLAIN, rows=200)))
    assert found["chosen"] == "eq9"
    assert found["choice"]["reason"].startswith("chosen is eq. 9: held-out error")
    assert [row["chosen"] for row in found["choice"]["candidates"]] == [True] + [False] * 7


def test_steps_with_a_hinge_are_fitted_with_it(tmp_path: Path) -> None:
    found = report(written(tmp_path, drawn_steps(HINGE, rows=300)))
    assert found["chosen"] == "hinge"
    assert "plain eq. 9 has" in found["choice"]["reason"]
    all_kinds = found["errors"][0]
    assert all_kinds["held_out"] < 0.7 * all_kinds["eq9_held_out"]
    assert all(row["interval"][0] <= row["value"] <= row["interval"][1] for row in found["coefficients"][:4])


def test_runs_that_the_fit_has_not_seen_are_scored_apart(tmp_path: Path) -> None:
    slow = PLAIN.model_copy(update={"b0_s": 1.5 * PLAIN.b0_s, "b1_s": 1.5 * PLAIN.b1_s})
    paths = [
        written(tmp_path, drawn_steps(truth, rows=100), f"{name}.parquet")
        for name, truth in (("one", PLAIN), ("two", slow))
    ]
    plain = report(*paths)["choice"]["candidates"][0]
    assert plain["other_runs"]["all"] > 1.2 * plain["held_out"]["all"]


# ---- the card ---------------------------------------------------------------------------------------------------


def test_a_table_needs_a_base_card_for_what_steps_do_not_say(tmp_path: Path) -> None:
    path, out = written(tmp_path, drawn_steps(PLAIN, rows=60)), tmp_path / "mine.json"
    assert "give --base CARD" in refusal(path, "--out", out)
    assert not out.exists()
    report(path, "--out", out, "--base", "qwen3-8b-h100", "--model", "Mine")
    card = load_card(out)
    assert (card.name, card.model, card.measured, card.kv_cache.block_size) == ("mine", "Mine", False, 16)
    assert {each.field for each in card.assumptions} >= {"fits", "kv_cache.num_gpu_blocks", "host_time_s", "front_end"}
    residuals = card.step_time.residuals
    assert residuals is not None
    assert np.median(residuals) == pytest.approx(1, abs=0.02)
    assert card.coverage.map is not None
    assert sum(map(sum, card.coverage.map.steps)) <= 60


def alternating(count: int, length: int = 10 * MS) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return steps of `count` requests, one after the other: a prompt of one to eight tokens, then three decodes."""
    rows, requests, at = [], [], 100 * MS
    for number in range(count):
        prompt, name = 1 + number % 8, f"r{number}"
        at += 20 * MS  # nothing runs while a request is on its way
        requests.append({"request_id": name, "t_add_ns": at - 1, "prompt_tokens": prompt, "max_tokens": 4})
        requests[-1] |= {"output_tokens": 4, "phase": "served", "t_sent_ns": at - 1 - (2 + prompt) * MS}
        for turn in range(4):
            batch = (name, 1, prompt + turn - 1, True, True, prompt) if turn else (name, prompt, 0, False, True, prompt)
            took = length + (prompt if turn == 0 else 1) * MS + (prompt + turn) * MS // 10 * (turn > 0)
            rows.append(step(len(rows) + 1, at, [batch], took))
            at += took + 4 * MS
    return rows, requests


def test_a_recording_gives_a_measured_card_with_host_time_and_front_end(tmp_path: Path) -> None:
    rows, requests = alternating(40)
    for row in rows:
        row["gap_ms"] = 2.0
    out = tmp_path / "card.json"
    found = report(write_recording(tmp_path / "run", None, rows, requests), "--out", out, "--allow-partial")
    card = load_card(out)
    assert card.measured
    assert card.provenance == "recorded from vLLM 0.32.0 on CPU, sync loop"
    assert card.target == "wall"
    assert card.host_time_s == pytest.approx(4e-3)  # schedule 1 ms, update 1 ms, gap 2 ms
    assert card.front_end.request_s == pytest.approx(2e-3, rel=1e-6)
    assert card.front_end.per_prompt_token_s == pytest.approx(1e-3, rel=1e-6)
    assert "served phase" in found["weights"]
    assert found["sources"][0]["left_out"] == {"first-seen": 8}  # prompts of one to eight tokens


# ---- bad recordings ---------------------------------------------------------------------------------------------


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    assert "the table is empty" in refusal(written(tmp_path, table(SIX)[:0]))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, table(SIX))
    path.write_bytes(path.read_bytes()[:-20])
    assert "it is truncated or not Parquet" in refusal(path)


def test_a_zero_length_step_is_refused_by_its_row(tmp_path: Path) -> None:
    steps = table(SIX).with_columns(step_s=pl.Series([0.01, 0.0, 0.01, 0.01, 0.01, 0.01]))
    assert "row 1: step_s = 0.0; must be finite and > 0" in refusal(written(tmp_path, steps))


def test_text_in_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    steps = table(SIX).with_columns(n_tokens=pl.lit("many"))
    assert "column n_tokens is String; must be a number" in refusal(written(tmp_path, steps))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.parquet")


def test_a_clock_that_jumps_back_is_refused(tmp_path: Path) -> None:
    rows, requests = alternating(4)
    rows[5]["t_upd0"] = rows[5]["t_sched1"] - 3 * MS
    assert "clock jumped" in refusal(write_recording(tmp_path / "run", None, rows, requests))


@pytest.mark.parametrize(
    ("field", "value"), [("model", "other"), ("vllm_version", "0.33.0"), ("device", "H100"), ("block_size", 8)]
)
def test_recordings_of_different_things_are_not_fitted_together(tmp_path: Path, field: str, value: object) -> None:
    rows, requests = alternating(10)
    other = info()
    (other["engine"] if field == "block_size" else other)[field] = value
    paths = [write_recording(tmp_path / name, about, rows, requests) for name, about in (("one", None), ("two", other))]
    message = refusal(*paths)
    assert f"{field} = {value!r}" in message
    assert "fit them apart" in message


def test_the_cpu_time_of_the_worker_must_be_recorded_to_be_fitted(tmp_path: Path) -> None:
    rows, requests = alternating(10)
    path = write_recording(tmp_path / "run", None, rows, requests)
    assert "no CPU time of the worker" in refusal(path, "--target", "worker-cpu")
    assert "no CPU time of the worker" in refusal(path, "--exclude-disturbed")


def test_leaving_out_every_step_is_refused(tmp_path: Path) -> None:
    assert "no step is left of 6 (6 skipped)" in refusal(written(tmp_path, table(SIX)), "--skip-steps", 6)


def test_the_report_is_shown_as_tables_with_the_warnings_last(tmp_path: Path) -> None:
    code, out, _ = run_command("calibrate", "fit", written(tmp_path, table(SIX)), "--quiet")
    assert code == 0
    assert out.startswith("step time, eq9 fit to 6 steps")
    assert out.rstrip().splitlines()[-1].endswith("plain eq. 9")


# ---- the figures ------------------------------------------------------------------------------------------------


def test_held_out_steps_of_the_mid_size_recording_are_met_within_5_percent() -> None:
    path = data() / "vllm_cpu/steps_mid_calib.parquet"
    found = report(path, "--target", "worker-cpu", "--exclude-disturbed")
    assert found["blocks"] == "blocks of 50 steps, alternating"
    everything = found["errors"][0]
    sys.stdout.write(
        f"mid-size, worker CPU time: held out {everything['held_out']:.2%}, eq. 9 {everything['eq9_held_out']:.2%}\n"
    )
    assert everything["held_out"] <= 0.05
    assert everything["steps"] > 1000
    assert found["contention"]["excluded"]


@pytest.mark.parametrize(("model", "limit"), [("Qwen3-0.6B", 0.04), ("Qwen3-8B", 0.03), ("Qwen3-32B", 0.03)])
def test_held_out_composed_steps_are_met(model: str, limit: float) -> None:
    found = report(data() / "calibration/composed_h100_steps.parquet", "--model", model)
    everything = found["errors"][0]
    sys.stdout.write(f"{model}: held out {everything['held_out']:.2%}, plain eq. 9 {everything['eq9_held_out']:.2%}\n")
    assert everything["held_out"] <= limit
    assert everything["held_out"] < everything["eq9_held_out"]


def test_a_table_of_several_models_asks_which() -> None:
    assert "give --model, one of" in refusal(data() / "calibration/composed_h100_steps.parquet")


def test_contention_is_measured_before_steps_are_left_out_and_they_are_only_when_asked() -> None:
    path = data() / "vllm_cpu/steps_calib.parquet"
    kept, out = (load_table(path, FitOptions(exclude_disturbed=each)) for each in (False, True))
    assert "disturbed" not in kept.left_out
    assert out.left_out["disturbed"] > 400
    found = contention([out], excluded=True)
    assert found is not None
    assert found == contention([kept], excluded=True)
    assert found.wall_over_cpu > 1
    assert found.disturbed_share > 0.2


def test_padding_to_captured_sizes_is_a_candidate_for_decode_steps() -> None:
    assert capture_sizes(8) == [1, 2, 4, 8, 16]
    decodes = tuple(Batch((), (9,) * number, 10.0) for number in (3, 5, 40))
    steps = table((*decodes, Batch(((3, 0),), (), 10.0)))
    assert padded(steps, capture_sizes(8))["n_tokens"].to_list() == [4, 8, 40, 3]
