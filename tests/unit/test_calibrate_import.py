"""`simcluster calibrate import`: steps from logs, kernel tables and layer profiles."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from command_line import run_command
from shared_data import shared_data
from simcluster.calibrate.composed import read_composed
from simcluster.calibrate.fit import fit_step_time
from simcluster.calibrate.importing.kernels import compose, read_kernels, step_grid
from simcluster.calibrate.importing.models import KNOWN_MODELS
from simcluster.card import load_card

LOG = """INFO 12-01 10:00:00 [loggers.py:214] Engine 000: {line}
WARNING something else
"""
LINE = (
    "Iteration({}): {} context requests, {} context tokens, {} generation requests, {} generation tokens, "
    "iteration elapsed time: {:.2f} ms{}, GPU KV cache usage: 1.0%"
)
TOLERANCE = 0.03  # mean difference from the composed table, whose recipe left parts to choose


def data() -> Path:
    folder = shared_data()
    if folder is None:
        pytest.skip("kernel tables are not in the repository; set SIMCLUSTER_SHARED")
    return folder / "calibration"


def imported(*arguments: object) -> dict[str, Any]:
    code, out, err = run_command("calibrate", "import", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def refusal(*arguments: object) -> str:
    code, out, err = run_command("calibrate", "import", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def log(*rows: tuple[int, int, int, int, int, float, str]) -> str:
    return "".join(LOG.format(line=LINE.format(*row)) for row in rows)


# ---- iteration logs ---------------------------------------------------------------------------------------------


def test_an_iteration_log_gives_counts_and_times_and_says_what_is_missing(tmp_path: Path) -> None:
    file, out = tmp_path / "vllm.log", tmp_path / "steps.parquet"
    file.write_text(log((0, 1, 100, 0, 0, 11.0, ""), (1, 0, 0, 0, 0, 5.0, " (dummy)"), (2, 2, 30, 4, 4, 10.34, "")))
    found = imported("iteration-log", file, "--out", out)
    steps = pl.read_parquet(out)
    assert steps.select("n_tokens", "num_prefill_requests", "n_decode").rows() == [(100, 1, 0), (34, 2, 4)]
    assert steps["step_s"].to_list() == pytest.approx([0.011, 0.01034])
    assert "no contexts in the log: b2 and b3 cannot be fitted" in found["notes"][0]
    assert found["notes"][1] == "1 dummy steps are left out"


def test_of_an_iteration_log_b0_and_b1_are_fitted_and_the_rest_is_flagged(tmp_path: Path) -> None:
    file, out = tmp_path / "vllm.log", tmp_path / "steps.parquet"
    rows = [(n, 1, 10 * n + 1, n % 3, n % 3, 10 + 0.1 * (10 * n + 1 + n % 3), "") for n in range(20)]
    file.write_text(log(*rows))
    imported("iteration-log", file, "--out", out)
    code, text, err = run_command("calibrate", "fit", out, "--allow-partial", "--json", "--quiet")
    assert code == 0, err
    found = json.loads(text)
    fitted = {row["term"]: row["value"] for row in found["coefficients"]}
    assert 1e3 * fitted["b0_s"] == pytest.approx(10, abs=0.02)
    assert 1e3 * fitted["b1_s"] == pytest.approx(0.1, rel=0.01)
    assert any("contexts are not in this source" in warning for warning in found["warnings"])
    assert "2 of 4 coefficients" in run_command("calibrate", "fit", out)[2]


def test_a_log_without_such_lines_is_refused_with_the_option_to_use(tmp_path: Path) -> None:
    file = tmp_path / "vllm.log"
    file.write_text("INFO hello\n")
    assert "--enable-logging-iteration-details" in refusal("iteration-log", file, "--out", tmp_path / "s.parquet")
    assert not (tmp_path / "s.parquet").exists()


# ---- kernel tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "num_gpus"), [("Qwen3-0.6B", 1), ("Qwen3-8B", 1), ("Qwen3-32B", 2)])
def test_composed_steps_agree_with_the_composed_table(model: str, num_gpus: int) -> None:
    table = pl.read_parquet(data() / "composed_h100_steps.parquet").filter(pl.col("model") == model)
    chunk = pl.col("prefill_tokens")
    before = pl.col("prefill_attn_pairs") / chunk - (chunk + 1) / 2
    table = table.filter((pl.col("kind") != "prefill") | (before <= 8192))  # beyond, the table's own times fall
    columns = ("kind", "n_prefill_seqs", "prefill_tokens", "n_decode", "sum_decode_ctx", "prefill_attn_pairs")
    kernels = read_kernels(sorted(data().glob("h100_*.parquet")))
    made = compose(kernels, KNOWN_MODELS[model], num_gpus, table.select(columns))
    difference = (made["step_ms"] / table["step_ms"] - 1).abs().to_numpy()
    for kind in ("decode", "prefill", "mixed"):
        assert difference[(table["kind"] == kind).to_numpy()].mean() <= TOLERANCE, kind


def test_imported_kernels_are_a_table_that_fit_takes(tmp_path: Path) -> None:
    out = tmp_path / "steps.parquet"
    found = imported("kernels", *sorted(data().glob("h100_*.parquet")), "--model", "Llama-3.1-8B", "--out", out)
    assert found["notes"] == ["composed from measured kernels; norms, activation and rotary embedding are estimated"]
    steps = read_composed(out)
    assert set(steps["model"]) == {"Llama-3.1-8B"}
    fit = fit_step_time(steps, "eq9")
    assert 1e3 * fit.b0_s == pytest.approx(5.7, rel=0.15)  # of the composed table: 5.70 ms
    assert 1e6 * fit.b1_s == pytest.approx(17.7, rel=0.15)


def test_a_model_that_is_not_known_asks_for_its_config(tmp_path: Path) -> None:
    message = refusal("kernels", tmp_path / "x.parquet", "--model", "Other", "--out", tmp_path / "s.parquet")
    assert "--config with the model's config.json" in message


def test_a_mixture_of_experts_is_not_composed(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 99, "num_experts": 8}))
    arguments = (
        "kernels",
        tmp_path / "x.parquet",
        "--config",
        tmp_path / "config.json",
        "--out",
        tmp_path / "s.parquet",
    )
    assert "a mixture of experts" in refusal(*arguments)


def test_a_missing_kernel_table_is_named(tmp_path: Path) -> None:
    gemm = tmp_path / "gemm.parquet"
    pl.DataFrame({"m": [1], "n": [256], "k": [256], "latency_ms": [0.1]}).write_parquet(gemm)
    message = refusal("kernels", gemm, "--model", "Qwen3-8B", "--out", tmp_path / "s.parquet")
    assert "no table of prefill attention, decode attention" in message


# ---- layer profiles ---------------------------------------------------------------------------------------------


def profile(folder: Path) -> list[Path]:
    """Write a profile of round numbers: a dense layer of 1 us per token, attention 10 us, a head of 100 us."""
    tokens = [1, 2048]
    dense = pl.DataFrame({"layer": ["qkv_proj"] * 2 + ["layernorm"] * 2, "tokens": tokens * 2})
    dense = dense.with_columns(time_us=pl.col("tokens").cast(pl.Float64))
    attention = pl.DataFrame(
        {
            "prefill_chunk": [0, 16, 16, 2048],
            "kv_prefill": [0, 32, 0, 0],
            "n_decode": [4, 0, 2, 8],
            "kv_decode": [64, 0, 128, 16],
            "time_us": [10.0] * 4,
        }
    )
    head = pl.DataFrame({"layer": ["lm_head"] * 2, "sequences": [1, 256], "time_us": [100.0, 100.0]})
    paths = []
    for name, table in (("dense", dense), ("attention", attention), ("per_sequence", head)):
        paths.append(folder / f"{name}.parquet")
        table.write_parquet(paths[-1])
    return paths


def test_a_profile_is_summed_over_layers(tmp_path: Path) -> None:
    out = tmp_path / "steps.parquet"
    found = imported("llmservingsim", *profile(tmp_path), "--model", "Llama-3.1-8B", "--out", out)
    steps = pl.read_parquet(out)
    assert steps["kind"].to_list() == ["decode", "mixed", "prefill"]
    # 32 layers of 10 us attention, a projection and two norms of 1 us per token; 100 us for the head.
    assert steps["step_ms"].to_list() == pytest.approx([(32 * (10 + 3 * n) + 100) / 1e3 for n in (4, 18, 16)])
    assert steps["sum_decode_ctx"].to_list() == [256, 256, 0]
    assert steps["prefill_attn_pairs"].to_list() == [0, 136, 16 * 32 + 136]
    assert "1 batches beyond 2048 tokens are left out" in found["notes"]


def test_a_card_has_the_gpus_of_its_steps_and_says_that_the_kv_cache_is_another_s(tmp_path: Path) -> None:
    out, card = tmp_path / "steps.parquet", tmp_path / "card.json"
    tokens = pl.col("prefill_tokens") + pl.col("n_decode")
    step_ms = 6 + 0.01 * tokens + 5e-5 * pl.col("sum_decode_ctx") + 1e-6 * pl.col("prefill_attn_pairs")
    steps = step_grid(1024).with_columns(model=pl.lit("Qwen3-32B"), tp=pl.lit(4), step_ms=step_ms)
    steps.write_parquet(out)
    arguments = ("calibrate", "fit", out, "--base", "qwen3-32b-tp2-h100", "--out", card, "-q")
    code, _, err = run_command(*arguments)
    assert code == 0, err
    made = load_card(card)
    assert made.num_gpus == 4
    assert any("whose 2 GPUs hold another number" in each.note for each in made.assumptions)
    pl.concat([steps, steps.with_columns(tp=pl.lit(8))]).write_parquet(out)
    code, _, err = run_command(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "steps of Qwen3-32B on 4, 8 GPUs" in err


def test_measured_profiles_give_the_coefficients_that_others_found(tmp_path: Path) -> None:
    files = sorted(data().glob("rtxpro6000_vllm0.19_Llama-3.1-8B_tp1_*.parquet"))
    out = tmp_path / "steps.parquet"
    imported("llmservingsim", *files, "--model", "Llama-3.1-8B", "--out", out)
    fit = fit_step_time(read_composed(out), "eq9")
    found = np.array([1e3 * fit.b0_s, 1e6 * fit.b1_s, 1e9 * fit.b2_s, 1e9 * fit.b3_s])
    assert found == pytest.approx(np.array([11.27, 28.5, 150, 2.49]), rel=0.15)
