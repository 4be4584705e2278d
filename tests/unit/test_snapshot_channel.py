"""Snapshots through shared memory from Python: what a router reads, and what it learns of the writer."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from engine_helpers import MS, Ask, config, start, u_step
from simcluster import _native
from simcluster._native import SourceState
from simcluster.backends.vllm_publisher import engine_request_key, request_key

NUMBERS = itertools.count()
WRITER = """
import sys
from simcluster import _native
config = _native.SchedulerConfig()
config.num_gpu_blocks = int(sys.argv[2])
engine = _native.Engine(config, _native.StepTimeModel())
for number in range(20):
    engine.submit(number, 100, 100, 0)
writer = _native.SnapshotWriter(sys.argv[1], 64, config)
while True:
    writer.publish(engine)
"""


def fresh_name() -> str:
    return f"test-channel.{os.getpid()}.{next(NUMBERS)}"


def wait_for(reader: _native.SnapshotReader, state: SourceState, generation: int = 0) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        snapshot, _, found = reader.read()
        if found == state and reader.generation >= generation and snapshot is not None:
            return
    pytest.fail(f"the writer never was {state.name}: {reader.state.name}, generation {reader.generation}")


@pytest.mark.parametrize("loop", [False, True], ids=["sync", "async"])
def test_a_view_estimates_from_shared_memory_as_from_the_engine(loop: bool) -> None:
    asks = [Ask(at=7 * number, prompt=20 + number, output=20) for number in range(12)]
    options = config(async_scheduling=loop, max_num_seqs=6)
    engine = start(options, *asks)
    writer = _native.SnapshotWriter(fresh := fresh_name(), 32, options)
    origin = 10**12
    reader = _native.SnapshotReader(fresh, origin)
    near, far = (_native.InstanceView(options, u_step(), 20, True) for _ in range(2))
    compared = 0
    for look in range(0, 900, 13):
        engine.advance_to(look * MS)
        writer.publish(engine, origin, now_ns=origin + look * 10**6)
        near.refresh(engine.snapshot())
        reader.refresh(far, origin + look * 10**6)
        arrival = look * MS + MS // 2
        if all(ask.at < look for ask in asks):  # before, requests on their way are in no snapshot
            first = [view.simulate_first_token(99, 30, 10, arrival) for view in (near, far)]
            assert first[0] == first[1]
            compared += 1
        assert far.num_running == near.num_running
    assert compared > 40


def test_an_instance_that_runs_faster_than_the_clock_is_told_in_the_clocks_time() -> None:
    engine = start(config(), Ask(at=0, prompt=20, output=30))
    engine.advance_to(100 * MS)
    writer = _native.SnapshotWriter(fresh := fresh_name(), 4, config())
    writer.publish(engine, 5 * 10**9, speed=10.0, now_ns=5 * 10**9 + 10**7)
    snapshot, age_ns, state = _native.SnapshotReader(fresh, 5 * 10**9).read(5 * 10**9 + 11 * 10**6)
    assert snapshot is not None
    assert (snapshot.boundary, age_ns, state) == (engine.snapshot().boundary // 10, 10**6, SourceState.live)


@pytest.mark.parametrize("speed", [0.25, 1.0, 7.3, 60.0, 1000.0])
def test_a_reader_as_fast_as_the_instance_tells_the_instances_own_time(speed: float) -> None:
    asks = [Ask(at=7 * number, prompt=20 + number, output=20) for number in range(12)]
    options = config(async_scheduling=True, max_num_seqs=6)
    engine = start(options, *asks)
    origin = 10**15
    writer = _native.SnapshotWriter(fresh := fresh_name(), 16, options)
    reader = _native.SnapshotReader(fresh, origin, speed)
    assert reader.speed == speed
    near, far = (_native.InstanceView(options, u_step(), 20, True) for _ in range(2))
    exact_ps = 1000 if speed <= 1 else round(1000 * speed / 2)  # a nanosecond of the clock, to be rounded to
    assert exact_ps < 10**6
    in_flight = 0
    for look in range(90, 700, 13):
        engine.advance_to(look * MS + look)
        now = origin + round(look * 10**6 / speed)
        writer.publish(engine, origin, speed, now_ns=now)
        snapshot, age_ns, _ = reader.read(now)
        true = engine.snapshot()
        assert snapshot is not None
        assert age_ns == 0
        assert abs(snapshot.boundary - true.boundary) <= exact_ps
        assert abs(snapshot.taken_at - true.taken_at) <= exact_ps + look
        near.refresh(true)
        reader.refresh(far, now)
        arrival = (look + 1) * MS
        first = [view.simulate_first_token(99, 30, 10, arrival) for view in (near, far)]
        assert abs(first[0] - first[1]) <= exact_ps
        in_flight += true.boundary < true.taken_at
    assert in_flight > 10


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_does_not_run_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed must be above 0 and finite"):
        _native.SnapshotReader(fresh_name(), 0, speed)


def test_a_killed_writer_is_noticed_and_its_successor_met() -> None:
    name = fresh_name()
    reader = _native.SnapshotReader(name)
    assert reader.read() == (None, None, SourceState.missing)
    for generation, blocks in ((1, 1000), (2, 2000)):
        with subprocess.Popen([sys.executable, "-P", "-c", WRITER, name, str(blocks)]) as writer:
            try:
                wait_for(reader, SourceState.live, generation)
                assert reader.config.num_gpu_blocks == blocks
                assert reader.writer_pid == writer.pid
            finally:
                writer.send_signal(signal.SIGKILL)
        wait_for(reader, SourceState.dead)
        snapshot, age_ns, _ = reader.read()
        assert snapshot is not None
        assert age_ns is not None
        assert snapshot.num_waiting == 0
    own = _native.SnapshotWriter(name, 1, config())  # takes over what the last one left
    own.close()
    assert not os.path.exists(f"/dev/shm/simcluster.{name}")


def test_a_writer_that_ends_in_good_order_is_closed() -> None:
    engine = start(config(), Ask(at=0, prompt=20, output=30))
    writer = _native.SnapshotWriter(fresh := fresh_name(), 4, config())
    reader = _native.SnapshotReader(fresh)
    writer.publish(engine)
    assert reader.read()[2] == SourceState.live
    writer.close()
    assert reader.read()[2] == SourceState.closed
    with pytest.raises(RuntimeError, match="was closed"):
        writer.publish(engine)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "n" * 101])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 100 letters"):
        _native.SnapshotReader(name)
    with pytest.raises(ValueError, match="1 to 100 letters"):
        _native.SnapshotWriter(name, 4, config())


def test_a_request_is_known_by_the_id_that_its_client_gave() -> None:
    key = request_key("abc-1")
    assert engine_request_key("cmpl-abc-1-0-0123abcd") == engine_request_key("chatcmpl-abc-1-0123abcd") == key
    assert engine_request_key("chatcmpl-abc-1", randomized=False) == key
    assert engine_request_key("cmpl-abc-1-0", randomized=False) == key
    others = ["cmpl-abc-1-1-0123abcd", "1_chatcmpl-abc-1-0123abcd", "abc-1", "chatcmpl-abc-1-xyz"]
    keys = {engine_request_key(one) for one in others}
    assert key not in keys - {request_key("abc-1")}
    assert len(keys) == len(others)
    assert 0 <= key < 2**63


def test_many_views_are_refreshed_in_one_call() -> None:
    engine = start(config(), *(Ask(at=0, prompt=20, output=30) for _ in range(4)))
    engine.advance_to(100 * MS)
    names = [fresh_name() for _ in range(5)]
    writers = [_native.SnapshotWriter(name, 8, config()) for name in names]
    readers = [_native.SnapshotReader(name) for name in names]
    views = [_native.InstanceView(config(), u_step(), 10, True) for _ in names]
    for writer in writers[:4]:
        writer.publish(engine)
    together = _native.SnapshotReaders(readers, views)
    together.refresh(_native.monotonic_ns(), 10**12)
    assert together.num_writers == 0, "nobody was asked who writes"
    together.ask(_native.monotonic_ns())
    together.refresh(_native.monotonic_ns(), 10**12)
    assert [view.num_running for view in views] == [4, 4, 4, 4, 0]
    assert readers[4].state == SourceState.live  # it has said nothing yet
    assert together.num_writers == 5
    with pytest.raises(ValueError, match="one reader per view"):
        _native.SnapshotReaders(readers, views[1:])


def test_refreshing_many_views_tells_which_are_late() -> None:
    busy, idle = start(config(), Ask(at=0, prompt=20, output=30)), start(config())
    busy.advance_to(MS)
    names = [fresh_name() for _ in range(5)]
    writers = [_native.SnapshotWriter(name, 8, config()) for name in names[:4]]  # the last has none yet
    for writer, engine, at_ns in zip(writers, (busy, busy, idle), (100, 950, 100), strict=False):
        writer.publish(engine, now_ns=at_ns)
    readers = [_native.SnapshotReader(name) for name in names]
    views = [_native.InstanceView(config(), u_step(), 10, True) for _ in names]
    together = _native.SnapshotReaders(readers, views)
    together.ask(1000)
    assert together.refresh(1000, 100) == [0, 4]  # 2 is idle, and 3 has told nothing, as an engine that never worked
    assert [each.age_ns for each in readers[:3]] == [900, 50, 900]
    views[2].record_dispatch(7, 10, 10, 0)
    assert together.refresh(1000, 100) == [0, 4], "what the router sent since is no work that the engine should tell of"
    assert together.refresh(2000, 10_000) == [4]
    writers[2].close()
    assert together.refresh(3000, 100) == [0, 1, 2, 4]
    assert together.num_writers == 4


def test_views_and_readers_live_as_long_as_they_are_read_together() -> None:
    name = fresh_name()
    writer = _native.SnapshotWriter(name, 8, config())
    writer.publish(start(config()), now_ns=5)
    together = _native.SnapshotReaders(
        [_native.SnapshotReader(name)], [_native.InstanceView(config(), u_step(), 10, True)]
    )
    gc.collect()
    together.ask(10)
    assert together.refresh(10, 5) == []


def test_a_silent_writer_that_is_gone_is_known_when_it_was_asked_for() -> None:
    name = fresh_name()
    reader, view = _native.SnapshotReader(name), _native.InstanceView(config(), u_step(), 10, True)
    together = _native.SnapshotReaders([reader], [view])
    with subprocess.Popen([sys.executable, "-P", "-c", WRITER, name, "1000"]) as process:
        while reader.state != SourceState.live or not reader.num_published:
            together.ask(_native.monotonic_ns())
        process.kill()
    together.refresh(_native.monotonic_ns(), 10**12)  # its last word
    later = _native.monotonic_ns() + 10**9
    assert together.refresh(later, 10**12) == []
    assert reader.state == SourceState.live
    together.ask(later)
    assert reader.state == SourceState.dead
    assert together.refresh(later, 10**12) == []  # its last word is young
    assert together.refresh(later + 10**13, 10**12) == [0]
