"""The recording scheduler classes note what vLLM's own schedulers decide, in both loops, without a model."""

import os
from collections import deque
from pathlib import Path

import pytest

from simcluster import _native
from simcluster.backends.vllm_scheduler import VllmBatch, VllmScheduler
from simcluster.backends.vllm_setup import vllm_names
from simcluster.calibrate import recorder
from simcluster.calibrate.collect import collect
from simcluster.calibrate.recording import load_recording

OPTIONS = {
    "policy": "fcfs",
    "async_scheduling": False,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_num_active_seqs": None,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "prefill_schedule_interval": 1,
    "max_model_len": 256,
    "block_size": 16,
    "enable_prefix_caching": False,
    "num_gpu_blocks": 20,
}


def have_vllm_take(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = vllm_names().SchedulerConfig  # first of all, since it quiets what vLLM warns of on import
    kind = getattr(recorder, name)
    monkeypatch.setattr(config, "get_scheduler_cls", lambda _self: kind)


@pytest.mark.parametrize(
    ("name", "under_way"),
    [
        ("RecordingScheduler", 1),
        ("RecordingAsyncScheduler", 2),
        ("RecordingPublishingScheduler", 1),
        ("RecordingPublishingAsyncScheduler", 2),
    ],
)
def test_what_is_recorded_is_what_was_decided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, under_way: int
) -> None:
    monkeypatch.setenv(recorder.FOLDER_VARIABLE, str(tmp_path / "raw"))
    snapshots = f"test-recorder.{os.getpid()}.{under_way}"
    monkeypatch.setenv("SIMCLUSTER_SNAPSHOT", snapshots)
    have_vllm_take(monkeypatch, name)
    scheduler = VllmScheduler(OPTIONS | {"async_scheduling": under_way == 2})
    reader = _native.SnapshotReader(snapshots)
    for number in range(8):
        scheduler.add(number, 40 + number, 30 + number)
    flight: deque[VllmBatch] = deque()
    decided, preempted = [], 0
    published: list[int] = []
    while scheduler.has_requests() or flight:
        batch, victims, _ = scheduler.schedule()
        preempted += len(victims)
        seen = reader.read()[0]
        published += [] if seen is None else [seen.num_running - len(scheduler.running)]
        flight.append(batch)
        decided += [batch.entries] if batch.entries else []
        while flight and (len(flight) == under_way or not batch.entries):
            scheduler.update(flight.popleft())
    assert set(published) == ({0} if "Publishing" in name else set()), "what was decided was published at once"
    scheduler.vllm.tape.flush()
    found = collect(tmp_path)
    recording = load_recording(tmp_path)
    assert [[(int(key), *rest) for key, *rest in batch] for batch in recording.compositions()] == decided
    assert found.preemptions == preempted > 0
    assert recording.requests["output_tokens"].to_list() == [30 + number for number in range(8)]
    assert set(recording.requests["finish_reason"]) == {"length"}
    assert recording.info.loop == ("async" if under_way == 2 else "sync")
    assert recording.info.engine.num_gpu_blocks == 20


@pytest.mark.parametrize(("name", "resolved"), [("{}Scheduler", True), ("{}AsyncScheduler", False)])
@pytest.mark.parametrize("kind", ["Recording", "RecordingPublishing"])
def test_a_class_that_does_not_fit_the_loop_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, kind: str, *, resolved: bool
) -> None:
    name, other = (each.format(kind) for each in (name, "{}AsyncScheduler" if resolved else "{}Scheduler"))
    monkeypatch.setenv("SIMCLUSTER_SNAPSHOT", f"test-recorder.{os.getpid()}.{name}")
    monkeypatch.setenv(recorder.FOLDER_VARIABLE, str(tmp_path / "raw"))
    have_vllm_take(monkeypatch, name)
    with pytest.raises(Exception, match=f"async_scheduling = {resolved}; use simcluster.calibrate.recorder.{other}"):
        VllmScheduler(OPTIONS | {"async_scheduling": resolved})
    assert not (tmp_path / "raw").exists()


def test_a_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recorder.FOLDER_VARIABLE, raising=False)
    have_vllm_take(monkeypatch, "RecordingScheduler")
    with pytest.raises(Exception, match="SIMCLUSTER_RECORD_DIR is not set"):
        VllmScheduler(OPTIONS)
