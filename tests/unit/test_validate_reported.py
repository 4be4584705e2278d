"""Real runs that are reported, not gated: what docs/validation.md tells of them must not get worse unnoticed.

The bounds lie a quarter or more above what was measured. Cards that are not shipped are made by the commands of
that page.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from command_line import run_command
from shared_data import shared_data

KERNELS = (
    "h100_sxm_vllm0.25_gemm_bf16",
    "h100_sxm_vllm0.25_context_attention_bf16_hd128",
    "h100_sxm_vllm0.25_generation_attention_bf16_hd128",
    "h100_sxm_vllm0.24_allreduce",
)
RUNS, SILICON, LAB = "llmservingsim_vllm_runs.parquet", "aic_silicon_hopper_dense.parquet", "gpustack_h100_qwen3.csv"
EXPERTS = "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507"
COMPOSED = {  # card: model, GPUs, base card, blocks of KV cache
    "qwen3-32b-tp4": ("Qwen3-32B", 4, "qwen3-32b-tp2-h100", 50_000),
    "qwen3-32b-tp8": ("Qwen3-32B", 8, "qwen3-32b-tp2-h100", 110_000),
    "qwen3-14b": ("Qwen3-14B", 1, "qwen3-8b-h100", 16_800),
    "qwen3-32b-tp1": ("Qwen3-32B", 1, "qwen3-32b-tp2-h100", 2_700),
}


def told(*arguments: object) -> dict[str, Any]:
    code, out, err = run_command(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a card from the kernel tables, once."""
    folder = tmp_path_factory.mktemp("cards")

    @cache
    def card(name: str) -> Path:
        shared = shared_data()
        assert shared is not None
        model, gpus, base, _ = COMPOSED[name]
        steps, out = folder / f"{name}.parquet", folder / f"{name}.json"
        files = [shared / "calibration" / f"{each}.parquet" for each in KERNELS]
        told("calibrate", "import", "kernels", *files, "--model", model, "--tp", gpus, "--out", steps)
        fitted = ("calibrate", "fit", steps, "--base", base, "--model", model, "--out", out, "--quiet")
        told(*fitted)
        assert json.loads(out.read_bytes())["num_gpus"] == gpus
        return out

    return card


def found_by(composed: Callable[[str], Path], card: str, file: str, options: str) -> dict[str, Any]:
    shared = shared_data()
    if shared is None:
        pytest.skip("no shared data")
    arguments: list[object] = [card, shared / "validation" / file, *options.split()]
    if card in COMPOSED:
        arguments[0] = composed(card)
        arguments += ["--engine", f"num_gpu_blocks_override={COMPOSED[card][3]}"]
    found = told("validate", *arguments)
    sys.stdout.write(f"{found['badge']}\n")
    return found


@pytest.mark.parametrize(
    ("card", "options", "most"),
    [
        ("llama-3.1-8b-h100", "--run RTX4090_Llama-3.1-8B --tune scale,host,b1", (0.04, 0.10, 0.03)),
        (
            "qwen3-8b-h100",
            f"--run {EXPERTS} --tune scale,b0,b1 --engine max_num_seqs=256 --engine max_num_batched_tokens=4096",
            (0.22, 0.02, 0.02),
        ),
    ],
)
def test_a_run_of_another_device_is_met_after_its_first_third(
    composed: Callable[[str], Path], card: str, options: str, most: tuple[float, float, float]
) -> None:
    found = found_by(composed, card, RUNS, f"{options} --on first=100")
    assert found["requests"] == 200
    assert found["not_served"] == 0
    errors = tuple(found[name]["mape"] for name in ("ttft_s", "tpot_s", "e2e_s"))
    assert all(error <= bound for error, bound in zip(errors, most, strict=True)), errors


@pytest.mark.parametrize(
    ("card", "file", "options", "count", "most"),
    [
        ("qwen3-32b-tp2-h100", SILICON, "", 16, 0.09),
        ("qwen3-32b-tp4", SILICON, "", 18, 0.18),
        ("qwen3-32b-tp4", SILICON, "--tune scale,host --on isl=1024", 8, 0.15),
        ("qwen3-32b-tp4", SILICON, "--tune scale,host --on isl=4096", 10, 0.14),
        ("qwen3-32b-tp8", SILICON, "", 17, 0.22),
        ("qwen3-32b-tp8", SILICON, "--tune scale,host --on isl=1024", 9, 0.20),
        ("qwen3-32b-tp8", SILICON, "--tune scale,host --on isl=4096", 8, 0.17),
        ("qwen3-14b", LAB, "", 5, 0.62),
        ("qwen3-14b", LAB, "--tune scale,b1 --on workload=sharegpt", 4, 0.56),
        ("qwen3-32b-tp1", LAB, "", 5, 0.47),
        ("qwen3-32b-tp1", LAB, "--tune scale,b1 --on workload=sharegpt", 4, 0.10),
    ],
)
def test_points_are_met_as_well_as_reported(
    composed: Callable[[str], Path], card: str, file: str, options: str, count: int, most: float
) -> None:
    found = found_by(composed, card, file, options)
    assert len(found["points"]) == count
    assert found["tpot_mape"] <= most
