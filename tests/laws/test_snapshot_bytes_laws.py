"""A snapshot sent as bytes is the snapshot; other bytes are refused in one line and never crash anything."""

import itertools
import os
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_helpers import MS, Ask, config, start
from law_helpers import SCALE, drain, events_of, law, step_ends, stepping_and_fast
from simcluster import _native
from strategies import Instant, World, any_worlds, instants

NUMBERS = itertools.count()
MASK = 2**64 - 1


def facts(snapshot: _native.Snapshot) -> list[object]:
    """Return all that Python sees of a snapshot."""
    return [
        snapshot.taken_at,
        snapshot.boundary,
        snapshot.intake,
        snapshot.left_out,
        snapshot.num_running,
        snapshot.num_free_blocks,
        snapshot.request_ids,
        snapshot.requests.tolist(),
    ]


def counts(view: _native.InstanceView) -> list[float]:
    """Return what policies read of a view."""
    loads = [view.num_running, view.num_waiting, view.num_dispatched_since]
    return [*loads, view.prefill_tokens_left, view.decode_tokens_left, view.kv_usage]


def estimates(view: _native.InstanceView, number: int, at: int) -> list[int]:
    """Return the first token of a short and a long prompt, from the frontier and by simulation."""
    return [
        view.simulate_first_token(number, prompt, 3, at, fast=fast)
        for prompt, fast in ((1, True), (40, True), (40, False))
    ]


@stepping_and_fast
@law(100)
@given(world=any_worlds(), instant=instants())
def test_a_snapshot_comes_back_from_its_bytes(world: World, instant: Instant, loop: bool, fast: bool) -> None:
    world = world.with_options(async_scheduling=loop, enable_prefix_caching=False, track_blocks=False)
    world = world.driven(fast=fast)
    engine = world.engine()
    engine.advance_to(instant.of(step_ends(world)))
    snapshot = _native.Snapshot.capture(engine)
    data = snapshot.to_bytes()
    back = _native.Snapshot.from_bytes(data)
    assert back.to_bytes() == data
    assert facts(back) == facts(snapshot)
    ends = [world.end_of(world.asks[number]) for number in snapshot.request_ids]
    found, true = (one.restore(world.config, world.model, ends) for one in (back, snapshot))
    assert drain(found, world) == drain(true, world)
    assert events_of(found) == events_of(true)


@stepping_and_fast
@law(100)
@given(world=any_worlds(), instant=instants(), delay=st.sampled_from([0, 1, 10, 500]))
def test_estimates_from_the_bytes_are_those_from_the_snapshot(
    world: World, instant: Instant, delay: int, loop: bool, fast: bool
) -> None:
    world = world.without_sharing().with_options(async_scheduling=loop).driven(fast=fast)
    engine = world.engine()
    at = instant.of(step_ends(world))
    engine.advance_to(at)
    snapshot = _native.Snapshot.capture(engine)
    found, true = (_native.InstanceView(world.config, world.model, mean_output=3, overlay=True) for _ in range(2))
    for number, ask in enumerate(world.asks[::2]):  # the others are somebody else's
        for view in (found, true):
            view.record_dispatch(2 * number, ask.prompt, ask.output, round(ask.at * MS))
    found.refresh(_native.Snapshot.from_bytes(snapshot.to_bytes()))
    true.refresh(snapshot)
    assert counts(found) == counts(true)
    asked = len(world.asks), at + delay * MS
    assert estimates(found, *asked) == estimates(true, *asked)


def published(capacity: int) -> _native.Snapshot:
    """Return what a channel with so little room tells of an instance with nine requests."""
    engine = start(config(max_num_seqs=5), *(Ask(at=0, prompt=20, output=30) for _ in range(9)))
    engine.advance_to(200 * MS)
    name = f"test-bytes.{os.getpid()}.{next(NUMBERS)}"
    writer = _native.SnapshotWriter(name, capacity, config())
    writer.publish(engine)
    snapshot, _, _ = _native.SnapshotReader(name).read()
    writer.close()
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("capacity", [1, 3, 6, 9])
def test_what_found_no_room_is_told_in_the_bytes_too(capacity: int) -> None:
    snapshot = published(capacity)
    assert snapshot.left_out[0] + snapshot.left_out[1] == 9 - capacity
    assert facts(_native.Snapshot.from_bytes(snapshot.to_bytes())) == facts(snapshot)


def some_bytes() -> bytes:
    engine = start(config(async_scheduling=True, max_num_seqs=5), *(Ask(at=0, prompt=20, output=30) for _ in range(9)))
    engine.advance_to(200 * MS)
    return engine.snapshot().to_bytes()


GOOD = some_bytes()


def with_checksum(data: bytes) -> bytes:
    """Return the bytes with their last word set to what the others add up to."""
    total = 0
    for (word,) in struct.iter_unpack("<Q", data[:-8]):
        x = ((total ^ word) + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        total = x ^ (x >> 31)
    return data[:-8] + struct.pack("<Q", total)


def assert_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^these bytes are no snapshot: [^\n]+; pass what [^\n]+$"):
        _native.Snapshot.from_bytes(data)


@settings(max_examples=300 * SCALE, deadline=None)
@given(cut=st.integers(0, len(GOOD) - 1), flips=st.lists(st.integers(0, 8 * len(GOOD) - 1), max_size=4, unique=True))
@example(cut=0, flips=[])
def test_damaged_bytes_are_refused(cut: int, flips: list[int]) -> None:
    assert_refused(GOOD[:cut])
    data = bytearray(GOOD)
    for bit in flips:
        data[bit // 8] ^= 1 << bit % 8
    if flips:
        assert_refused(bytes(data))
    assert_refused(GOOD + GOOD[:cut] + b"x")


@settings(max_examples=300 * SCALE, deadline=None)
@given(data=st.binary(max_size=400))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    assert_refused(data)
    assert_refused(GOOD[:8] + data)
    assert_refused(GOOD[:16] + data)


@settings(max_examples=1000 * SCALE, deadline=None)
@given(st.lists(st.tuples(st.integers(2, len(GOOD) // 8 - 2), st.integers(0, MASK)), min_size=1, max_size=3))
@example([(32, 180)])  # joined in a batch that is not there
def test_words_that_somebody_made_up_are_refused_or_make_a_snapshot(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for place, word in changes:
        data[8 * place : 8 * place + 8] = struct.pack("<Q", word)
    forged = with_checksum(bytes(data))
    try:
        snapshot = _native.Snapshot.from_bytes(forged)
    except ValueError:
        assert_refused(forged)
        return
    assert len(snapshot.request_ids) == 9
    assert facts(_native.Snapshot.from_bytes(snapshot.to_bytes())) == facts(snapshot)


def test_the_forger_knows_the_checksum() -> None:
    assert with_checksum(GOOD[:-8] + bytes(8)) == GOOD
