"""With a recording's steps as clock, the scheduler by itself makes the recorded batches."""

import sys
from pathlib import Path

import numpy as np
import pytest

from recordings import MS, info, requests, step, write_recording
from shared_data import shared_data
from simcluster import _native
from simcluster.calibrate.recording import Recording, load_recording
from simcluster.validate.scheduling import replay_scheduling, scheduler_config

NAMES = (
    *("async", "calib", "calib2", "hold", "mid_calib"),
    *("preempt", "server", "server_tightkv", "srv_a"),
)
GOAL = 0.995


def real(name: str) -> Recording:
    folder = shared_data()
    if folder is None:
        pytest.skip("no shared data")
    return load_recording(folder / "vllm_cpu" / f"steps_{name}.parquet")


@pytest.mark.parametrize("name", NAMES)
def test_the_scheduler_running_free_makes_the_recorded_batches(name: str) -> None:
    recording = real(name)
    replay = replay_scheduling(recording)
    found = replay.summary()
    sys.stdout.write(f"{(name, found)}\n")
    assert replay.step_share >= GOAL
    assert replay.first_token_share >= GOAL
    assert found["requests"] == len(recording.requests)
    assert not found["other_state_differs"]
    assert found["preemptions"]["recorded"] == found["preemptions"]["replayed"] == recording.steps["n_preempted"].sum()
    assert sum(found["misses_by_cause"].values()) == len(replay.misses)  # each one is explained


@pytest.mark.parametrize("name", ["async", "preempt", "srv_a"])
def test_an_engine_whose_steps_take_what_was_recorded_delivers_every_first_token_when_it_came(name: str) -> None:
    recording = real(name)
    replay = replay_scheduling(recording)
    clock, told = replay.clock, recording.info
    assert clock is not None
    config = scheduler_config(told.engine, told.vllm_version, asynchronous=told.loop == "async")
    engine = _native.Engine(config, _native.StepTimeModel(), _native.StepNoise.recorded(clock.duration_ps))
    lengths = recording.requests.select("prompt_tokens", "output_tokens").iter_rows()
    for index, (prompt, output) in enumerate(lengths):
        engine.submit(index, prompt, output, int(clock.arrival_ps[index]), output, ends_by_length=True)
    engine.drain()
    events = engine.take_events()
    first = events[events[:, 3] == int(_native.EventKind.first_token)]
    came = dict(zip(first[:, 0].tolist(), first[:, 1].tolist(), strict=True))
    assert came == {request: int(clock.end_ps[place]) for request, place in replay.first_token_step.items()}
    assert engine.num_steps == len(recording.steps)


def test_a_recorded_batch_that_the_scheduler_would_not_make_is_a_miss_with_a_cause(tmp_path: Path) -> None:
    wrong = [
        step(1, 100 * MS, [("a", 6, 0, False, False, 12)]),  # there was room for 8
        step(2, 113 * MS, [("a", 6, 6, False, True, 12)]),
        step(3, 126 * MS, [("a", 1, 12, True, True, 12)]),
    ]
    replay = replay_scheduling(load_recording(write_recording(tmp_path, steps_=wrong)))
    assert [miss.step for miss in replay.misses] == [0, 1]
    assert replay.summary()["misses_by_cause"] == {"other tokens": 1, "follows an earlier difference": 1}
    assert replay.first_token_share == 1
    assert replay.clock is None


def test_a_request_that_arrives_as_the_pass_begins_is_named_as_the_cause(tmp_path: Path) -> None:
    asked = [*requests(), {**requests()[0], "request_id": "b", "prompt_tokens": 3, "output_tokens": 1, "max_tokens": 1}]
    asked[1]["t_add_ns"] = 113 * MS - 1000
    entries = [
        step(1, 100 * MS, [("a", 8, 0, False, False, 12)]),
        step(2, 113 * MS, [("a", 4, 8, False, True, 12)]),  # b came a microsecond before
        step(3, 126 * MS, [("a", 1, 12, True, True, 12), ("b", 3, 0, False, True, 3)]),
    ]
    replay = replay_scheduling(load_recording(write_recording(tmp_path, info(), entries, asked)))
    causes = replay.summary()["misses_by_cause"]
    assert causes == {"an arrival within 1 ms of the pass": 1, "follows an earlier difference": 1}
    assert replay.late == [("b", "follows an earlier difference")]


def test_arrivals_stay_inside_of_the_step_during_which_they_came() -> None:
    recording = real("srv_a")
    replay = replay_scheduling(recording)
    assert replay.clock is not None
    added = recording.requests["t_add_ns"].to_numpy()
    at = replay.clock.origin_ns + replay.clock.arrival_ps // 1000
    assert (at <= added).all()
    assert (np.diff(at) >= 0).all()
