"""What the recorder writes is what the engine did, also when it is cut off in the middle."""

import json
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from simcluster.calibrate.collect import collect
from simcluster.calibrate.raw import read_engine
from simcluster.calibrate.recorder import Tape
from simcluster.calibrate.recording import load_recording
from simcluster.errors import CalibrationError

RESOLVED = {
    "vllm_version": "0.32.0",
    "model": "m",
    "device": "a device",
    "loop": "sync",
    "started_at": "2026-12-01T00:00:00Z",
    "engine": {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "block_size": 16,
        "num_gpu_blocks": 5,
        "enable_prefix_caching": False,
    },
}


class Request(SimpleNamespace):
    """As much of vLLM's request as the recorder looks at."""

    def get_finished_reason(self) -> str:
        return str(self.reason)


class Engine:
    """Plays a scheduler of vLLM by hand, under a tape."""

    def __init__(self, folder: Path) -> None:
        pool = SimpleNamespace(get_num_free_blocks=lambda: 3)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.tape = Tape(folder, self, RESOLVED)

    def add(self, key: str, prompt: int, outputs: int) -> None:
        request = Request(
            request_id=key,
            num_prompt_tokens=prompt,
            max_tokens=outputs,
            num_computed_tokens=0,
            num_output_tokens=0,
            is_prefill_chunk=False,
            reason="length",
        )
        self.requests[key] = request
        self.running.append(request)
        self.tape.added(request)

    def schedule(self, preempted: tuple[str, ...] = (), **tokens: int) -> Any:
        for key in preempted:
            self.requests[key].num_computed_tokens = 0
        for key, number in tokens.items():
            request = self.requests[key]
            request.num_computed_tokens += number
            known = request.num_prompt_tokens + request.num_output_tokens
            request.is_prefill_chunk = request.num_computed_tokens < known
        total = sum(tokens.values())
        output = SimpleNamespace(
            total_num_scheduled_tokens=total, num_scheduled_tokens=tokens, preempted_req_ids=set(preempted)
        )
        self.tape.scheduled(output, time.monotonic_ns())
        return output

    def update(self, output: Any) -> None:
        begin = time.monotonic_ns()
        self.finished_req_ids = set()
        for key in output.num_scheduled_tokens:
            request = self.requests[key]
            request.num_output_tokens += not request.is_prefill_chunk
            if request.num_output_tokens == request.max_tokens:
                self.finished_req_ids.add(key)
                self.running.remove(self.requests.pop(key))
        self.tape.updated(output, begin)

    def step(self, preempted: tuple[str, ...] = (), **tokens: int) -> None:
        self.update(self.schedule(preempted, **tokens))


def play(folder: Path) -> Engine:
    """One request in two chunks beside another that is preempted, computed anew, and ends."""
    engine = Engine(folder)
    engine.add("a", 20, 2)
    engine.add("b", 4, 3)
    engine.step(b=4, a=12)
    engine.step(b=1, a=8)
    engine.step(preempted=("b",), a=1)
    engine.step(b=6)
    return engine


def test_a_step_is_stored_with_its_batch_as_it_was_before_the_step(tmp_path: Path) -> None:
    play(tmp_path / "raw")
    found = collect(tmp_path)
    steps = load_recording(tmp_path).steps
    keys = ("request_id", "num_tokens", "context", "is_decode", "produces_token", "prompt_tokens")
    assert [[tuple(row[key] for key in keys) for row in rows] for rows in steps["comp"].to_list()] == [
        [("b", 4, 0, False, True, 4), ("a", 12, 0, False, False, 20)],
        [("b", 1, 4, True, True, 4), ("a", 8, 12, False, True, 20)],
        [("a", 1, 20, True, True, 20)],
        [("b", 6, 0, False, True, 4)],
    ]
    assert steps["preempted"].to_list() == [[], [], ["b"], []]
    sums = ["tokens", "prefill_tokens", "decode_reqs", "decode_ctx", "n_samples"]
    assert steps.select(sums).rows() == [(16, 16, 0, 0, 1), (9, 8, 1, 4, 2), (1, 0, 1, 20, 1), (6, 6, 0, 0, 1)]
    assert steps["prefill_attn"].to_list() == [10 + 78, 8 * 12 + 36, 0, 21]
    assert (found.steps, found.requests, found.preemptions, found.complete) == (4, 2, 1, True)


def test_requests_are_stored_with_their_true_ends(tmp_path: Path) -> None:
    play(tmp_path / "raw")
    collect(tmp_path)
    requests = load_recording(tmp_path).requests
    columns = ["request_id", "prompt_tokens", "max_tokens", "output_tokens", "finish_reason", "phase", "t_sent_ns"]
    assert requests.select(columns).rows() == [
        ("a", 20, 2, 2, "length", "served", None),
        ("b", 4, 3, 3, "length", "served", None),
    ]


def test_an_asynchronous_loop_has_two_batches_under_way_and_keeps_both(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "raw")
    engine.add("a", 8, 3)
    first = engine.schedule(a=8)
    second = engine.schedule(a=1)
    engine.update(first)
    engine.update(second)
    engine.tape.flush()
    batches = [step.entries for step in read_engine(tmp_path / "raw").steps]
    assert batches == [[(0, 8, 0, 2)], [(0, 1, 8, 3)]]


def test_the_phase_is_read_from_the_ids_and_the_clients_times_are_joined(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "raw")
    engine.add("decode:7-1234abcd", 4, 1)
    engine.step(**{"decode:7-1234abcd": 4})
    (tmp_path / "raw" / "client.jsonl").write_text('["decode:7", 5, 6, 7]\n["decode:8", 9', encoding="utf-8")
    collect(tmp_path)
    recording = load_recording(tmp_path)
    assert recording.steps["phase"].to_list() == ["decode"]
    times = ["phase", "t_sent_ns", "t_first_token_ns", "t_last_token_ns"]
    assert recording.requests.select(times).rows() == [("decode", 5, 6, 7)]


@pytest.mark.parametrize("lost", [1, 8, 9, 200, 300])
def test_a_file_that_is_cut_off_keeps_its_whole_steps(tmp_path: Path, lost: int) -> None:
    play(tmp_path / "raw")
    (file,) = (tmp_path / "raw").glob("steps_*.bin")
    whole = read_engine(tmp_path / "raw").steps
    file.write_bytes(file.read_bytes()[:-lost])
    kept = read_engine(tmp_path / "raw").steps
    assert len(kept) < len(whole)
    assert kept == whole[: len(kept)]
    collect(tmp_path)
    assert len(load_recording(tmp_path).steps) == len(kept)


def test_a_request_that_had_not_ended_has_what_it_had_produced(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "raw")
    engine.add("a", 8, 10)
    engine.step(a=8)
    engine.step(a=1)
    engine.tape.aborted(everything=True)
    collect(tmp_path)
    assert load_recording(tmp_path).requests.select("output_tokens", "finish_reason").rows() == [(2, None)]


def test_the_times_inside_of_the_worker_go_to_their_steps(tmp_path: Path) -> None:
    play(tmp_path / "raw")
    engine = read_engine(tmp_path / "raw")
    rows = []
    for step in engine.steps[:1] + engine.steps[2:]:  # the worker's file may lack one
        begin = step.header[1]
        rows += [sum(entry[1] for entry in step.entries), begin, begin + 1000, begin + 1000, begin + 3000, 5, 2005]
    pid = next((tmp_path / "raw").glob("engine_*.json")).stem.removeprefix("engine_")
    (tmp_path / "raw" / f"worker_{pid}_0.bin").write_bytes(array("q", rows).tobytes())
    assert collect(tmp_path).worker_steps == 3
    times = load_recording(tmp_path).steps.select("w_exec_ms", "w_total_ms", "w_cpu_ms").rows()
    assert times == [(0.001, 0.003, 0.002), (None, None, None), (0.001, 0.003, 0.002), (0.001, 0.003, 0.002)]


def test_a_plan_that_was_not_completed_says_so(tmp_path: Path) -> None:
    play(tmp_path / "raw")
    (tmp_path / "job.json").write_text(json.dumps({"plan": {"seed": 4}, "name": "mine"}), encoding="utf-8")
    assert not collect(tmp_path).complete
    info = load_recording(tmp_path).info
    assert (info.complete, info.seed, info.model) == (False, 4, "mine")
    (tmp_path / "raw" / "complete").touch()
    assert collect(tmp_path).complete


def test_two_engines_in_one_folder_are_no_recording(tmp_path: Path) -> None:
    play(tmp_path / "raw")
    (tmp_path / "raw" / "engine_1.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CalibrationError, match="2 engines recorded here"):
        collect(tmp_path)


def test_an_engine_without_steps_is_no_recording(tmp_path: Path) -> None:
    Engine(tmp_path / "raw")
    with pytest.raises(CalibrationError, match="the engine ran no step"):
        collect(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_what_a_recorder_costs_is_stored(tmp_path: Path) -> None:
    play(tmp_path / "raw")
    assert 0 < collect(tmp_path).recording_us < 10_000
    assert pl.read_parquet(tmp_path / "steps.parquet")["sched_ms"].min() >= 0  # type: ignore[operator]
