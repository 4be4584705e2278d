"""Recordings of a real engine are read whole, and broken ones are told of in one line."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recordings import ENGINE, MS, info, requests, step, steps, write_recording
from shared_data import shared_data
from simcluster.calibrate.recording import STEPS, load_recording
from simcluster.errors import CalibrationError


def message(folder: Path) -> str:
    with pytest.raises(CalibrationError) as caught:
        load_recording(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_gives_steps_requests_and_the_engine_s_options(tmp_path: Path) -> None:
    recording = load_recording(write_recording(tmp_path))
    assert recording.info.engine.max_num_batched_tokens == 8
    assert recording.compositions() == [[("a", 0, 8)], [("a", 8, 4)], [("a", 12, 1)]]
    assert recording.step_seconds().tolist() == [0.01, 0.01, 0.01]
    assert recording.steps["w_cpu_ms"].null_count() == 3


def test_a_step_of_the_asynchronous_loop_begins_when_the_one_before_it_ends(tmp_path: Path) -> None:
    overlapping = [
        step(1, 100 * MS, [("a", 8, 0, False, False, 12)]),
        step(2, 102 * MS, [("a", 4, 8, False, True, 12)], length=20 * MS),
    ]
    recording = load_recording(write_recording(tmp_path, info() | {"loop": "async"}, overlapping))
    assert recording.step_seconds().tolist() == pytest.approx([0.010, 0.012])


def test_the_recordings_of_the_first_exploration_are_read_too() -> None:
    folder = shared_data()
    if folder is None:
        pytest.skip("no shared data")
    recording = load_recording(folder / "vllm_cpu" / "steps_preempt.parquet")
    assert (len(recording.steps), len(recording.requests)) == (453, 27)
    assert recording.info.engine.num_gpu_blocks == 160
    assert recording.steps["n_preempted"].sum() == 11
    assert recording.requests["output_tokens"].to_list() == recording.requests["max_tokens"].to_list()


def test_a_truncated_table_is_told_of(tmp_path: Path) -> None:
    write_recording(tmp_path)
    file = tmp_path / "steps.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    assert message(tmp_path).startswith(f"{file}: cannot be read (")
    assert message(tmp_path).endswith("it is truncated or not Parquet; record again, or copy it anew")


def test_a_missing_file_is_told_of(tmp_path: Path) -> None:
    write_recording(tmp_path)
    (tmp_path / "requests.parquet").unlink()
    assert "requests.parquet: no such file" in message(tmp_path)
    assert "not a recording" in message(tmp_path / "other.json")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write_recording(tmp_path)
    table = pa.Table.from_pylist(steps(), STEPS).drop_columns(["t_upd0", "comp"])
    pq.write_table(table, tmp_path / "steps.parquet")
    assert "no column t_upd0, comp" in message(tmp_path)


def test_a_recording_without_steps_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path)
    pq.write_table(STEPS.empty_table(), tmp_path / "steps.parquet")
    assert "no rows; nothing was recorded" in message(tmp_path)


def changed(row: int, **values: Any) -> list[dict[str, Any]]:
    rows = steps()
    rows[row] |= values
    return rows


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (changed(1, t_upd0=114 * MS), "step 2 has no length"),
        (changed(1, t_upd0=113 * MS), "step 2 has times that run backwards; the clock jumped"),
        (
            [*steps()[:2], step(3, 90 * MS, [("a", 1, 12, True, True, 12)])],
            "step 3 has t_sched0 no later than the step",
        ),
        (changed(2, t_upd0=900_000 * MS, t_upd1=900_001 * MS), "step 3 took over 600 s; the clock jumped"),
        (changed(2, step=5), "step 5 does not follow the step before it"),
        (changed(2, tokens=7), "step 3 has tokens = 7, but its requests have 1"),
        (changed(0, t_sched0=None), "row 0, column t_sched0 is empty"),
    ],
)
def test_steps_that_cannot_be_true_are_told_of(tmp_path: Path, rows: list[dict[str, Any]], told: str) -> None:
    assert told in message(write_recording(tmp_path, steps_=rows))


def test_a_request_that_is_unknown_late_or_doubled_is_told_of(tmp_path: Path) -> None:
    stranger = [{**requests()[0], "request_id": "b"}]
    assert "1 requests of steps.parquet are unknown, the first is a in step 1" in message(
        write_recording(tmp_path, requests_=stranger)
    )
    late = [{**requests()[0], "t_add_ns": 120 * MS}]
    assert "request a arrives after step 1, which computes it" in message(write_recording(tmp_path, requests_=late))
    assert "request a is listed twice" in message(write_recording(tmp_path, requests_=requests() * 2))


def test_an_engine_option_out_of_range_is_named(tmp_path: Path) -> None:
    wrong = info() | {"engine": ENGINE | {"block_size": 0}}
    assert "recording.json: engine.block_size = 0" in message(write_recording(tmp_path, wrong))
