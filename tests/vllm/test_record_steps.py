"""A recording of the installed vLLM on a CPU: it is whole, it is consistent, and nobody outlives it."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from record_processes import group_of, nobody_is_left, recording, steps_written, wait_until
from simcluster.calibrate.collect import collect
from simcluster.calibrate.dummy_model import own_shape, write_model
from simcluster.calibrate.plan import PHASES
from simcluster.calibrate.recording import Recording, load_recording

START_S, RUN_S = 600.0, 900.0  # generous: other jobs may hold the cores
TIGHT = (  # float32, since vLLM's bfloat16 dies of an illegal instruction on machines that claim to have AMX and do not
    *(
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "8",
    ),
    *("--max-num-batched-tokens", "128", "--block-size", "32", "--engine-arg", "num_gpu_blocks_override=17"),
    *("--kv-cache-memory-bytes", "64M"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "small", own_shape(layers=1, hidden=128, vocabulary=512)))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, str]:
    """A plan that was run to its end, and what the command printed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with recording(out, "--model", model, "--minutes", "0.4", "--name", "small", *TIGHT) as command:
        wait_until(lambda: group_of(command), START_S, "the engine's process is there")
        group = group_of(command)
        printed, errors = command.communicate(timeout=RUN_S)
        assert command.returncode == 0, errors
    assert nobody_is_left(group)
    return load_recording(out), printed


def entries(found: Recording) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each request, with the step's row number."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, batch in enumerate(found.steps["comp"].to_list()):
        for row in batch:
            rows.setdefault(row["request_id"], []).append(row | {"row": number})
    return rows


def test_every_phase_of_the_plan_is_there_in_its_order(whole: tuple[Recording, str]) -> None:
    found, printed = whole
    assert found.steps["phase"].unique(maintain_order=True).to_list() == list(PHASES)
    assert f"{len(found.steps):,} steps (warmup " in printed


def test_the_recording_says_what_ran(whole: tuple[Recording, str]) -> None:
    info = whole[0].info
    assert (info.model, info.loop, info.complete, info.seed) == ("small", "sync", True, 0)
    engine = info.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len) == (8, 128, 256)
    assert (engine.num_gpu_blocks, engine.block_size, engine.enable_prefix_caching) == (17, 32, False)
    assert info.device.endswith("(CPU)")
    assert info.vllm_version.startswith("0.")


def test_a_request_is_computed_token_by_token_and_anew_after_a_preemption(whole: tuple[Recording, str]) -> None:
    found = whole[0]
    preempted = found.steps["preempted"].to_list()
    assert sum(map(len, preempted)) > 0, "sixteen blocks are too few for eight requests"
    for key, rows in entries(found).items():
        assert rows[0]["context"] == 0
        for one, two in pairwise(rows):
            again = any(key in preempted[number] for number in range(one["row"] + 1, two["row"] + 1))
            assert two["context"] == (0 if again else one["context"] + one["num_tokens"])


def test_a_request_gets_its_tokens_and_ends_with_the_last_one(whole: tuple[Recording, str]) -> None:
    found = whole[0]
    produced = {key: sum(row["produces_token"] for row in rows) for key, rows in entries(found).items()}
    requests = found.requests
    assert produced == dict(zip(requests["request_id"], requests["output_tokens"], strict=True))
    assert requests["output_tokens"].to_list() == requests["max_tokens"].to_list()
    assert set(requests["finish_reason"]) == {"length"}


def test_no_batch_exceeds_the_engine(whole: tuple[Recording, str]) -> None:
    steps = whole[0].steps
    assert steps["tokens"].max() <= 128  # type: ignore[operator]
    assert steps["n_running"].max() == 8
    assert steps.filter(pl.col("phase") == "saturation")["n_waiting"].max() > 0  # type: ignore[operator]
    assert 0 <= steps["free_blocks"].min() < 4  # type: ignore[operator]


def test_the_clients_times_enclose_the_engines(whole: tuple[Recording, str]) -> None:
    times = ["t_sent_ns", "t_add_ns", "t_first_token_ns", "t_last_token_ns"]
    for row in whole[0].requests.select(times).rows():
        assert list(row) == sorted(row)


def test_the_worker_is_timed_in_every_step_and_lies_within_it(whole: tuple[Recording, str]) -> None:
    steps = whole[0].steps
    assert steps["w_cpu_ms"].null_count() == 0
    assert (steps["w_total_ms"] <= steps["exec_ms"]).all()
    assert (steps["w_exec_ms"] <= steps["w_total_ms"]).all()
    assert steps["w_cpu_ms"].min() > 0  # type: ignore[operator]


def test_decodes_of_the_grid_run_in_full_batches(whole: tuple[Recording, str]) -> None:
    decode = whole[0].steps.filter((pl.col("phase") == "decode") & (pl.col("n_prefill_reqs") == 0))
    assert decode["decode_reqs"].n_unique() > 2


def test_the_asynchronous_loop_is_refused_where_vllm_does_not_have_it(model: str, tmp_path: Path) -> None:
    with recording(tmp_path / "out", "--model", model, "--loop", "async", *TIGHT) as command:
        _, errors = command.communicate(timeout=START_S)
    assert command.returncode == 2
    assert errors.startswith("error: loop async: vLLM resolved async_scheduling = False")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--max-num-seqz", "8"),
            "engine option --max-num-seqz: vLLM has no such option; did you mean --max-num-seqs?",
        ),
        (("--max-num-seqs", "many"), "engine option: argument --max-num-seqs"),
    ],
)
def test_an_option_that_vllm_refuses_is_one_line(
    model: str, tmp_path: Path, words: tuple[str, str], message: str
) -> None:
    with recording(tmp_path / "out", "--model", model, *words) as command:
        _, errors = command.communicate(timeout=START_S)
    assert command.returncode == 2
    assert errors.startswith(f"error: {message}"), errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_recording_that_is_stopped_in_the_middle_leaves_no_process_and_keeps_its_steps(
    model: str, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    with recording(out, "--model", model, "--minutes", "20", *TIGHT) as command:
        wait_until(lambda: group_of(command), START_S, "the engine's process is there")
        group = group_of(command)
        wait_until(lambda: steps_written(out) or command.poll() is not None, START_S, "the first steps are written")
        assert command.poll() is None, (out / "engine.log").read_text()[-2000:]
        command.send_signal(number)
        command.communicate(timeout=START_S)
    wait_until(lambda: nobody_is_left(group), 20, "the group is gone")
    if number == signal.SIGKILL:
        assert not (out / "recording.json").exists()
        collect(out)
    else:
        assert command.returncode == 130
    found = load_recording(out)
    assert len(found.steps) > 0
    assert not found.info.complete


def test_the_script_for_a_machine_without_our_package_leaves_what_becomes_a_recording(tmp_path: Path) -> None:
    """On a CPU, with the vLLM that is here in place of the unpacked one."""
    script = Path(__file__).resolve().parents[2] / "calibration" / "on_gpu" / "record.sh"
    small = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8"
    small += " --kv-cache-memory-bytes 64M --block-size 32"
    settings = {"OPTIONS": small, "MINUTES": "0.2", "LOOPS": "sync", "LIMIT": "600", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(script), "-", str(tmp_path), "tiny"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S + RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"OK   {tmp_path}/tiny-sync in " in done.stdout
    assert collect(tmp_path / "tiny-sync").complete
    assert load_recording(tmp_path / "tiny-sync").info.model == "tiny"
