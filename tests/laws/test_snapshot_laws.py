"""A snapshot with the true ends is the engine itself: continuation and estimates are exact."""

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_helpers import MS, Ask, submit
from law_helpers import Row, drain, ended_ids, events_of, law, of_kind, step_ends, stepping_and_fast, steps_of
from simcluster import _native
from simcluster._native import NEVER, EventKind
from strategies import Instant, World, any_worlds, asks, instants


def continued(world: World, snapshot: _native.Snapshot, ended: list[int]) -> _native.Engine:
    """Return an engine restored with the true ends, and with what had not reached the original."""
    ids = snapshot.request_ids
    ends = [world.end_of(world.asks[number]) for number in ids]
    engine = snapshot.restore(world.config, world.model, ends)
    for number, ask in enumerate(world.asks):
        if number in ended:
            continue
        if number not in ids:
            submit(engine, number, ask)
        elif ask.cancel is not None and ask.cancel * MS > snapshot.intake:
            engine.cancel(number, round(ask.cancel * MS))
    return engine


def assert_same(found: list[Row], true: list[Row], ends: bool) -> None:
    """Compare all, or if the run goes on for ever, what both tell before they are stopped."""
    shorter = None if ends else min(len(found), len(true))
    assert found[:shorter] == true[:shorter]


@stepping_and_fast
@law(150)
@given(world=any_worlds(), instant=instants())
def test_a_restored_snapshot_continues_exactly(world: World, instant: Instant, loop: bool, fast: bool) -> None:
    world = world.with_options(async_scheduling=loop, enable_prefix_caching=False, track_blocks=False)
    world = world.driven(fast=fast)
    engine = world.engine()
    engine.advance_to(instant.of(step_ends(world)))
    ended = ended_ids(events_of(engine))
    steps_of(engine)
    snapshot = _native.Snapshot.capture(engine)
    copy = continued(world, snapshot, ended)
    assert copy.running_ids + copy.waiting_ids == snapshot.request_ids
    ends = drain(engine, world)
    assert drain(copy, world) == ends
    told = [event for event in events_of(copy) if event[3] != EventKind.token or not fast]
    assert_same(told, events_of(engine), ends)
    if not fast:
        steps = [[row[1:] for row in steps_of(one)] for one in (copy, engine)]
        assert_same(steps[0], steps[1], ends)


def first_token_in_fork(engine: _native.Engine, world: World, candidate: Ask) -> tuple[int, bool]:
    """Return when the candidate gets its first token, and whether anybody was ever preempted by then."""
    fork = engine.fork()
    number = len(world.asks)
    submit(fork, number, candidate)
    drain(fork, replace(world, asks=(*world.asks, candidate)))
    preempted = engine.num_preemptions > 0
    for event in events_of(fork):
        preempted |= event[3] == EventKind.preempted
        if event[0] == number and event[3] == EventKind.first_token:
            return event[1], preempted
    return NEVER, preempted


def estimate(view: _native.InstanceView, world: World, candidate: Ask) -> int:
    predicted, by_length = world.end_of(candidate)
    (found,) = _native.estimate_first_token(
        [view],
        len(world.asks),
        np.array([candidate.prompt]),
        np.array([predicted]),
        np.array([round(candidate.at * MS)]),
        max_tokens=candidate.max_tokens,
        ends_by_length=by_length,
        priority=candidate.priority,
        arrival_time=candidate.arrival_time,
    ).tolist()
    return int(found)


@stepping_and_fast
@law(150)
@given(
    world=any_worlds(),
    looks=st.lists(instants(), min_size=1, max_size=3),
    extra=asks(),
    delay=st.sampled_from([0, 0, 1, 10, 500]),
)
def test_the_estimate_is_exact_for_a_fresh_view_and_true_beliefs(
    world: World, looks: list[Instant], extra: Ask, delay: int, loop: bool, fast: bool
) -> None:
    world = world.without_cancels().without_sharing().with_options(async_scheduling=loop)
    world = world.driven(fast=fast)
    ends = step_ends(world)
    engine = world.engine()
    view = _native.InstanceView(world.config, world.model, mean_output=3, overlay=True)
    for number, ask in enumerate(world.asks):
        view.record_dispatch(
            number,
            ask.prompt,
            ask.output,
            round(ask.at * MS),
            max_tokens=ask.max_tokens,
            ends_by_length=ask.by_length,
            priority=ask.priority,
            arrival_time=ask.arrival_time,
        )
    for look in sorted(instant.of(ends) for instant in looks):
        engine.advance_to(look)
        view.refresh(_native.Snapshot.capture(engine))
    snapshot = _native.Snapshot.capture(engine)
    refused = of_kind(events_of(engine), EventKind.rejected)
    to_come = engine.num_pending + sum(event[1] > snapshot.intake for event in refused)
    assert view.num_dispatched_since == to_come
    assert (view.num_running, view.num_waiting) == (engine.num_running, engine.num_waiting + to_come)
    at = look / MS + delay
    candidate = replace(extra, at=at, cancel=None, runs=(), arrival_time=look if extra.priority else 0)
    true, preempted = first_token_in_fork(engine, world, candidate)
    assume(not (preempted and world.options["enable_prefix_caching"]))
    assert estimate(view, world, candidate) == true
