"""What the publishing scheduler classes write is what vLLM holds, and the native engine continues it as vLLM does."""

import importlib
import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_helpers import MS, Ask, config, submit, u_step
from law_helpers import law
from simcluster import _native
from simcluster._native import EventKind, SourceState
from simcluster.backends import vllm_publisher
from simcluster.backends.vllm_engine import VllmEngine
from simcluster.backends.vllm_publisher import EnginePublisher, publishing_class
from simcluster.backends.vllm_setup import vllm_version
from simcluster.errors import ConfigError
from strategies import World, worlds

CAPACITY = 64
NUMBERS = itertools.count()
SEEN = (EventKind.scheduled, EventKind.first_token, EventKind.preempted, EventKind.finished)


def fresh_name() -> str:
    return f"test-publisher.{os.getpid()}.{next(NUMBERS)}"


class Published:
    """vLLM's scheduler on the simulated clock, publishing, and a reader beside it."""

    def __init__(self, world: World, capacity: int = CAPACITY, **publisher: Any) -> None:
        name = fresh_name()
        self.engine: VllmEngine | None = None
        self.publisher: Any = None

        def build(scheduler: Any) -> EnginePublisher:
            options = {"clock_ns": self.clock_ns, "wall_offset_ns": 0, "key": int} | publisher
            self.publisher = EnginePublisher(scheduler, name, capacity, **options)
            return self.publisher

        self.engine = VllmEngine(world.config, world.model, derive=lambda base: publishing_class(base, build))
        self.reader = _native.SnapshotReader(name)

    def clock_ns(self) -> int:
        return self.engine.clock // 1000 if self.engine else 0

    def read(self) -> _native.Snapshot:
        assert self.engine
        snapshot, _, state = self.reader.read(self.engine.now // 1000)
        assert state == SourceState.live
        assert snapshot is not None
        return snapshot


def installed() -> _native.VllmVersion:
    return _native.VllmVersion["v" + "_".join(vllm_version().split(".")[:2])]


def that_vllm_would_start(world: World) -> World:
    """Return a world without caching whose instants are whole nanoseconds, as published ones are."""
    options = world.options
    needed = -(-options["max_model_len"] // options["block_size"])
    seats = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    world = world.without_cancels().without_sharing()
    asks = tuple(replace(ask, arrival_time=round(ask.at) if ask.arrival_time else 0) for ask in world.asks)
    step_time = {
        name: value if name == "hinge_tokens" else value // 1000 * 1000 for name, value in world.step_time.items()
    }
    return replace(world, asks=asks, step_time=step_time).with_options(
        usable_blocks=max(world.usable_blocks, needed),
        max_num_seqs=seats,
        max_num_active_seqs=min(options["max_num_active_seqs"], seats),
        vllm_version=installed(),
        enable_prefix_caching=False,
        track_blocks=False,
        shared_prefixes=False,
    )


def events_after(engine: Any) -> list[tuple[int, ...]]:
    rows = [tuple(row) for row in engine.take_events().tolist() if row[3] in SEEN]
    return sorted((at, number, kind, value, reason) for number, at, value, kind, reason in rows)


@law(60)
@given(world=worlds(), looks=st.lists(st.integers(0, 600), min_size=1, max_size=3))
def test_a_published_snapshot_continues_as_vllm_does(world: World, looks: list[int], loop: bool) -> None:
    world = that_vllm_would_start(world).with_options(async_scheduling=loop)
    assume(not world.may_livelock)
    published = Published(world)
    engine = published.engine
    assert engine
    accepted = [submit(engine, number, ask) for number, ask in enumerate(world.asks)]
    ended: set[int] = set()
    for look in sorted(looks):
        engine.advance_to(look * MS)
        ended |= {row[1] for row in events_after(engine) if row[2] == EventKind.finished}
    snapshot, own = published.read(), engine.snapshot()
    rows, of_vllm = snapshot.requests.tolist(), own.requests.tolist()
    for row, expected, number in zip(rows, of_vllm, own.request_ids, strict=True):
        ask = world.asks[number]
        limit = 6 if ask.by_length and ask.max_tokens <= 0 else len(row)  # there vLLM knows more than its client
        assert row[:limit] == expected[:limit]
    assert (snapshot.num_running, snapshot.num_free_blocks) == (own.num_running, own.num_free_blocks)

    ends = [world.end_of(world.asks[number]) for number in own.request_ids]
    future = snapshot.restore(published.reader.config, world.model, ends)
    here = set(own.request_ids) | ended
    for number, ask in enumerate(world.asks):
        if accepted[number] and number not in here:
            late = replace(ask, arrival_time=ask.arrival_time * 10**12)
            submit(future, number, late)
    future.drain()
    engine.drain()
    assert events_after(future) == events_after(engine)


def a_world(*asks: Ask, **options: Any) -> World:
    return World({"usable_blocks": 64, "max_model_len": 400, "vllm_version": installed()} | options, {}, asks)


@pytest.mark.parametrize("loop", [False, True], ids=["sync", "async"])
def test_everything_that_changes_the_engine_is_published(loop: bool) -> None:
    asks = [Ask(at=10 * number, prompt=20, output=30) for number in range(6)]
    published = Published(a_world(*asks, async_scheduling=loop, max_num_seqs=4))
    engine = published.engine
    assert engine
    assert published.read().num_running == published.read().num_waiting == 0
    for number, ask in enumerate(asks):
        submit(engine, number, ask)
    engine.cancel(5, 300 * MS)
    seen = set()
    for look in range(400):
        engine.advance_to(look * 5 * MS)
        snapshot, own = published.read(), engine.snapshot()
        assert snapshot.requests.tolist() == own.requests.tolist()
        assert snapshot.request_ids == own.request_ids
        seen |= set(own.request_ids)
    assert seen == set(range(6))
    assert published.publisher._watch.num_known == 0


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("loop", [False, True], ids=["sync", "async"])
def test_a_preemption_is_noticed_though_its_request_never_had_room_among_the_waiting(loop: bool, caching: bool) -> None:
    asks = [Ask(at=3 * number, prompt=20, output=90) for number in range(6)]
    tight = {"usable_blocks": 26, "max_num_batched_tokens": 24, "max_num_seqs": 6, "async_scheduling": loop}
    published = Published(a_world(*asks, enable_prefix_caching=caching, track_blocks=caching, **tight), capacity=2)
    engine = published.engine
    assert engine
    for number, ask in enumerate(asks):
        submit(engine, number, ask)
    seen = set()
    for look in range(600):
        engine.advance_to(look * 5 * MS)
        snapshot, own = published.read(), engine.snapshot()
        assert snapshot.requests.tolist() == own.requests.tolist()[:2]
        seen |= set(snapshot.request_ids)
    preempted = {row[0] for row in engine.take_events().tolist() if row[3] == EventKind.preempted}
    assert preempted & seen


def test_requests_beyond_the_capacity_are_counted() -> None:
    asks = [Ask(at=0, prompt=10 + number, output=50) for number in range(9)]
    published = Published(a_world(*asks, max_num_seqs=4), capacity=6)
    assert published.engine
    for number, ask in enumerate(asks):
        submit(published.engine, number, ask)
    published.engine.advance_to(100 * MS)
    snapshot = published.read()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.left_out) == (4, 2, (0, 3, 16 + 17 + 18))
    view = _native.InstanceView(published.reader.config, u_step(), 10, True)
    view.refresh(snapshot)
    assert (view.num_waiting, view.num_resident) == (5, 9)


def test_an_engine_whose_publisher_fails_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    asks = [Ask(at=0, prompt=10, output=5), Ask(at=200, prompt=10, output=5)]

    def key(engine_id: str) -> int:
        if int(engine_id) == 1:
            raise RuntimeError("no key for this one")
        return int(engine_id)

    published = Published(a_world(*asks), key=key)
    assert published.engine
    for number, ask in enumerate(asks):
        submit(published.engine, number, ask)
    published.engine.drain()
    finished = [row[0] for row in published.engine.take_events().tolist() if row[3] == EventKind.finished]
    assert finished == [0, 1]
    assert "no longer published" in caplog.text
    assert published.reader.read()[2] in {SourceState.closed, SourceState.missing}


def test_two_engines_cannot_publish_under_one_name() -> None:
    world = a_world(Ask(at=0, prompt=10, output=5))
    name = fresh_name()

    def build(scheduler: Any) -> EnginePublisher:
        return EnginePublisher(scheduler, name, 8)

    engine = VllmEngine(world.config, world.model, derive=lambda base: publishing_class(base, build))
    with pytest.raises(ConfigError, match="another process publishes under this name"):
        VllmEngine(world.config, world.model, derive=lambda base: publishing_class(base, build))
    assert engine.num_running == 0


def test_the_environment_names_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = a_world(Ask(at=0, prompt=10, output=5))
    name = fresh_name()

    def engine() -> VllmEngine:
        return VllmEngine(world.config, world.model, derive=publishing_class)

    monkeypatch.delenv("SIMCLUSTER_SNAPSHOT", raising=False)
    with pytest.raises(ConfigError, match="SIMCLUSTER_SNAPSHOT is not set"):
        engine()
    monkeypatch.setenv("SIMCLUSTER_SNAPSHOT", f"shm:{name}")
    for bad in ("0", "-1", "many", "99999999"):
        monkeypatch.setenv("SIMCLUSTER_SNAPSHOT_CAPACITY", bad)
        with pytest.raises(ConfigError, match=r"SIMCLUSTER_SNAPSHOT_CAPACITY = .*; must be a whole number from 1 to"):
            engine()
    monkeypatch.setenv("SIMCLUSTER_SNAPSHOT_CAPACITY", "16")
    running = engine()
    reader = _native.SnapshotReader(name, _native.monotonic_ns() - 10**9)
    snapshot, age_ns, state = reader.read()
    assert (snapshot is not None, state, running.num_running) == (True, SourceState.live, 0)
    assert age_ns is not None
    assert 0 <= age_ns < 60 * 10**9
    expected = config(usable_blocks=64, max_model_len=400, vllm_version=installed())
    for option in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "block_size", "vllm_version"):
        assert getattr(reader.config, option) == getattr(expected, option), option


def test_the_classes_that_a_user_names_are_those_that_publish() -> None:
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    async_scheduler = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    assert issubclass(vllm_publisher.PublishingAsyncScheduler, async_scheduler)
    assert issubclass(vllm_publisher.PublishingScheduler, scheduler)
    assert not issubclass(vllm_publisher.PublishingScheduler, async_scheduler)
    assert vllm_publisher.PublishingScheduler is vllm_publisher.PublishingScheduler
    with pytest.raises(AttributeError):
        _ = vllm_publisher.OtherScheduler
