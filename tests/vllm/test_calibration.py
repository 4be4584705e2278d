"""From a recording of the installed vLLM on a CPU to a card, and from the card back to what was recorded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from record_processes import group_of, nobody_is_left, recording, wait_until
from simcluster.card import load_card

START_S, RUN_S = 600.0, 900.0  # generous: other jobs may hold the cores
ENGINE = (
    *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
    *(
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "256",
        "--kv-cache-memory-bytes",
        "256M",
        "--block-size",
        "32",
    ),
)


def command(*words: object) -> str:
    """Run a command; return what it prints."""
    parts = [sys.executable, "-P", "-m", "simcluster", *map(str, words)]
    done = subprocess.run(parts, capture_output=True, text=True, check=False, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of Qwen3's shape with random weights, a recording of it and a card fitted to that."""
    made = tmp_path_factory.mktemp("calibration")
    command("calibrate", "dummy-model", made / "model", "--layers", 4, "--hidden", 512)
    with recording(made / "run", "--model", str(made / "model"), "--quick", "--name", "small", *ENGINE) as process:
        wait_until(lambda: group_of(process), START_S, "the engine's process is there")
        group = group_of(process)
        _, errors = process.communicate(timeout=RUN_S)
        assert process.returncode == 0, errors
    assert nobody_is_left(group)
    (made / "fit.json").write_text(command("calibrate", "fit", made / "run", "--out", made / "card.json", "--json"))
    found = command("validate", made / "card.json", made / "run", "--write", "--json")
    (made / "validate.json").write_text(found)
    return made


@pytest.fixture(scope="module")
def validated(folder: Path) -> Any:
    return json.loads((folder / "validate.json").read_text())


def test_the_scheduler_running_free_repeats_what_vllm_did(validated: Any) -> None:
    scheduling = validated["split"]["scheduling"]
    assert scheduling["steps"] > 500
    assert scheduling["same_composition"] >= 0.995
    assert scheduling["first_token_in_recorded_step"] >= 0.995


def test_a_card_says_what_was_measured_and_how_well_it_fits(folder: Path) -> None:
    card = load_card(folder / "card.json")
    assert card.measured
    assert card.model == "small"
    assert card.engine_version.startswith("0.")
    assert card.step_time.held_out_mape is not None
    assert card.step_time.held_out_mape["all"] < 0.4, "loose, since other jobs share the cores"
    assert card.service_rates is not None
    assert card.host_time_s > 0
    assert card.validations is not None
    assert {"ttft_mape", "tpot_mape", "e2e_mape"} == set(card.validations[0].errors)


def test_simulated_latencies_are_those_of_the_recorded_requests(validated: Any) -> None:
    assert validated["not_served"] == 0
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert validated[name]["count"] > 50
        assert validated[name]["median_ape"] < 0.5, "loose, since other jobs share the cores"


def test_with_recorded_step_times_sfs_errs_by_the_front_end_alone(validated: Any) -> None:
    measured = validated["estimators"]["sfs_measured"]
    assert measured["count"] == validated["requests"]
    assert measured["max_error_s"] == 0
    assert measured["front_end_s"]["p50"] >= 0


def test_with_the_fitted_card_sfs_is_nearer_than_rates_alone(validated: Any) -> None:
    found = validated["estimators"]
    assert found["sfs"]["mape"] < found["lps"]["mape"]
    assert len(found["sfs"]["by_resident"]) > 1
