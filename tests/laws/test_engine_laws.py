"""What holds for every engine, whatever its options and its requests."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from engine_helpers import MS, Ask, submit
from law_helpers import (
    LAST,
    Row,
    drain,
    ended_ids,
    events_of,
    history,
    law,
    of_kind,
    step_ends,
    stepping_and_fast,
    steps_of,
)
from simcluster import _native
from simcluster._native import NEVER, EndReason, EventKind, Policy
from strategies import Instant, World, any_worlds, asks, instants, tight_worlds, worlds

# Requests


@law()
@given(world=worlds())
def test_every_request_ends_exactly_once(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    engine, events, _ = history(world)
    assert sorted(ended_ids(events)) == list(range(len(world.asks)))
    assert (engine.num_running, engine.num_waiting, engine.num_pending) == (0, 0, 0)
    assert engine.num_free_blocks == world.usable_blocks
    assert engine.next_event() == NEVER


@law()
@given(world=worlds(), instant=instants())
def test_at_any_time_every_request_has_ended_or_is_at_one_place(world: World, instant: Instant, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    cut = instant.of(step_ends(world))
    engine = world.engine()
    engine.advance_to(cut)
    ended = ended_ids(events_of(engine))
    here = engine.running_ids + engine.waiting_ids
    assert len(set(ended + here)) == len(ended) + len(here)
    pending = set(range(len(world.asks))) - set(ended + here)
    assert engine.num_pending == len(pending)
    assert engine.now == cut


@law()
@given(world=worlds())
def test_a_request_delivers_the_tokens_it_should_one_after_another(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    _, events, _ = history(world)
    for number, ask in enumerate(world.asks):
        own = [event for event in events if event[0] == number]
        values = [event[2] for event in of_kind(own, EventKind.token)]
        (last,) = of_kind(own, *LAST)
        assert values == list(range(1, last[2] + 1))
        first = of_kind(own, EventKind.first_token)
        assert [event[1] for event in first] == [e[1] for e in of_kind(own, EventKind.token)[:1]]
        length, stops = world.options["max_model_len"], EndReason.length
        room = length - ask.prompt
        limit = min(ask.max_tokens if ask.max_tokens > 0 else room, room)
        expected, known = world.end_of(ask)
        if expected <= limit and not known:
            stops = EndReason.stop
        if last[3] == EventKind.finished:
            assert (last[2], last[4]) == (min(expected, limit), stops)
        elif last[3] == EventKind.rejected:
            assert last[4] in (EndReason.exceeds_context, EndReason.kv_capacity)
            assert (last[1], len(own)) == (ask.at * MS, 1)
        else:
            assert last[4] in (EndReason.abort, EndReason.kv_capacity)
            assert last[2] < min(expected, limit)


@law()
@given(world=worlds())
def test_only_a_request_that_cannot_fit_the_pool_fails_for_its_size(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    _, events, _ = history(world)
    size, pool = world.options["block_size"], world.usable_blocks
    for number, _, value, kind, reason in events:
        if reason != EndReason.kv_capacity:
            continue
        prompt = world.asks[number].prompt
        assert -(-(prompt + value) // size) > pool
        assert (kind == EventKind.rejected) == (-(-prompt // size) > pool)


# Time


@law()
@given(world=worlds())
def test_causes_come_before_effects(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    _, events, _ = history(world)
    for number, ask in enumerate(world.asks):
        times = {kind: [e[1] for e in events if e[0] == number and e[3] == kind] for kind in EventKind}
        for kind in set(EventKind) - {EventKind.token, EventKind.preempted}:
            assert len(times[kind]) <= 1
        tokens = times[EventKind.token]
        assert all(a < b for a, b in pairwise(tokens))
        if tokens:
            assert ask.at * MS <= times[EventKind.scheduled][0] < tokens[0]
            assert tokens[-1] <= (times[EventKind.finished] or times[EventKind.failed])[0]
        if times[EventKind.finished]:
            assert times[EventKind.finished] == tokens[-1:]
        if times[EventKind.failed] and ask.cancel is not None:
            assert times[EventKind.failed][0] >= min(ask.cancel * MS, ask.at * MS)


@law()
@given(world=worlds())
def test_the_clock_never_runs_backwards(world: World, loop: bool) -> None:
    """A batch may be announced, and a rejection told, before their time; nothing else may."""
    world = world.with_options(async_scheduling=loop)
    _, events, steps = history(world)
    told = [e[1] for e in events if e[3] not in (EventKind.scheduled, EventKind.rejected)]
    assert told == sorted(told)
    starts = [e[1] for e in of_kind(events, EventKind.scheduled)]
    assert starts == sorted(starts)
    assert [row[0] for row in steps] == list(range(len(steps)))
    assert all(start < end for _, start, end, *_ in steps)
    assert all(a[2] <= b[1] for a, b in pairwise(steps))


@law()
@given(world=worlds())
def test_an_engine_never_rests_while_something_is_resident(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    engine, events, steps = history(world)
    end_of = {event[0]: event[1] for event in of_kind(events, *LAST)}
    gaps = [(a[2], b[1]) for a, b in pairwise(steps) if a[2] < b[1]]
    for rest, resume in gaps:
        for number, ask in enumerate(world.asks):
            assert min(end_of[number], resume) <= max(ask.at * MS, rest)
    assert engine.busy_time == sum(row[2] - row[1] for row in steps)


@law()
@given(world=worlds())
def test_a_step_takes_the_time_that_its_content_implies(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    _, _, steps = history(world)
    b = {"b1x": 0, "hinge_tokens": 0, "b2": 0, "b3": 0, "b4": 0, "b5": 0, "host": 0} | world.step_time
    for _, start, end, tokens, _, context, attention, prefills, *_ in steps:
        device = 10 * MS + MS * tokens + b["b1x"] * max(0, tokens - b["hinge_tokens"])
        device += b["b2"] * context + b["b3"] * attention + b["b5"] * prefills
        device += b["b4"] * context if prefills else 0
        assert end - start == (max(device, b["host"]) if loop else device + b["host"])


# Limits


@law()
@given(world=worlds())
def test_no_step_exceeds_the_token_budget_the_seats_or_the_pool(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    _, _, steps = history(world)
    for _, _, _, tokens, decodes, _, _, prefills, running, _, free in steps:
        assert 1 <= decodes + prefills <= tokens <= world.options["max_num_batched_tokens"]
        assert decodes + prefills <= running <= world.seats
        assert 0 <= free < world.usable_blocks


@law()
@given(world=worlds(), instant=instants())
def test_blocks_are_held_by_the_running_and_by_nobody_else(world: World, instant: Instant, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    cut = instant.of(step_ends(world))
    engine = world.engine()
    engine.advance_to(cut)
    snapshot = _native.Snapshot.capture(engine)
    held = 0
    for place, row in enumerate(snapshot.requests.tolist()):
        _, _, _, computed, _, blocks, _, _ = row
        assert blocks == -(-computed // world.options["block_size"])
        assert blocks == 0 or place < snapshot.num_running
        held += blocks
    free = engine.num_free_blocks
    assert 0 <= free <= world.usable_blocks
    if world.options["enable_prefix_caching"]:  # a shared block is held more than once
        assert held >= world.usable_blocks - free
    else:
        assert held == world.usable_blocks - free


@law()
@given(world=worlds())
def test_without_preemption_no_token_is_computed_twice(world: World, loop: bool) -> None:
    world = world.without_cancels().without_sharing().with_options(async_scheduling=loop)
    _, events, steps = history(world)
    assume(not of_kind(events, EventKind.preempted))
    finished = of_kind(events, EventKind.finished)
    needed = sum(world.asks[number].prompt + value - 1 for number, _, value, _, _ in finished)
    surprises = sum(reason == EndReason.stop for *_, reason in finished)
    computed = sum(row[3] for row in steps)
    assert needed <= computed <= needed + (surprises if loop else 0)


@law()
@given(world=worlds())
def test_under_fcfs_requests_are_first_admitted_in_order_of_arrival(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop, policy=Policy.fcfs)
    _, events, _ = history(world)
    admitted = [event[0] for event in of_kind(events, EventKind.scheduled)]
    assert admitted == sorted(admitted, key=lambda number: (world.asks[number].at, number))


def passes(world: World) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Drive the scheduler without a clock: (waiting before, batch, preempted) of each pass."""
    scheduler = _native.Scheduler(world.config)
    fitting = [ask for ask in world.asks if ask.prompt < world.options["max_model_len"]]
    for number, ask in enumerate(fitting):
        scheduler.add(number, ask.prompt, 30, ask.output, ask.priority, number)
    in_flight: deque[_native.Batch] = deque()
    while scheduler.has_requests() or in_flight:
        if scheduler.has_requests():
            before = scheduler.waiting
            batch, preempted, _ = scheduler.schedule()
            in_flight.append(batch)
            yield before, [entry[0] for entry in batch.entries], preempted
            room = len(in_flight) < (2 if world.options["async_scheduling"] else 1)
            if room and (batch.entries or scheduler.has_requests()):
                continue
        scheduler.update(in_flight.popleft())


@law()
@given(world=worlds())
def test_no_waiting_request_is_admitted_in_a_pass_that_preempts(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    for waiting, batch, preempted in passes(world):
        assert len(set(batch)) == len(batch)
        assert not set(preempted) & set(batch)
        assert not preempted or not set(waiting) & set(batch)


# One run, driven in different ways


@stepping_and_fast
@law()
@given(world=any_worlds(), cuts=st.lists(instants(), max_size=4))
def test_advancing_in_pieces_is_advancing_at_once(world: World, cuts: list[Instant], loop: bool, fast: bool) -> None:
    world = world.with_options(async_scheduling=loop).driven(fast=fast)
    _, events, steps = history(world)
    ends = step_ends(world)
    engine = world.engine()
    pieces: list[Row] = []
    for cut in sorted(instant.of(ends) for instant in cuts):
        engine.advance_to(cut)
        pieces += events_of(engine)
    engine.drain()
    assert pieces + events_of(engine) == events
    assert steps_of(engine) == steps


@stepping_and_fast
@law()
@given(world=any_worlds())
def test_handing_over_at_the_time_of_arrival_is_handing_over_before(world: World, loop: bool, fast: bool) -> None:
    world = world.with_options(async_scheduling=loop).driven(fast=fast)
    _, events, steps = history(world)
    engine = world.new_engine()
    for number, ask in enumerate(world.asks):
        if ask.cancel is not None:  # among those at one time the order of handing over counts
            engine.cancel(number, round(ask.cancel * MS))
    order = sorted(range(len(world.asks)), key=lambda n: (world.asks[n].at, n))
    for number in order:
        ask = replace(world.asks[number], cancel=None)
        engine.advance_to(round(ask.at * MS))
        submit(engine, number, ask)
    engine.drain()
    late = events_of(engine)
    rejected = EventKind.rejected
    assert sorted(of_kind(late, rejected)) == sorted(of_kind(events, rejected))
    assert [e for e in late if e[3] != rejected] == [e for e in events if e[3] != rejected]
    assert steps_of(engine) == steps


@stepping_and_fast
@law()
@given(world=any_worlds(), instant=instants())
def test_the_next_event_is_the_first_one_seen_if_nothing_arrives(
    world: World, instant: Instant, loop: bool, fast: bool
) -> None:
    world = world.with_options(async_scheduling=loop).driven(fast=fast)
    _, events, _ = history(world)
    engine = world.engine()
    engine.advance_to(instant.of(step_ends(world)))
    seen = events_of(engine)
    predicted = engine.next_event()
    assert events_of(engine) == []
    engine.drain()
    rest = events_of(engine)
    assert predicted == min((event[1] for event in rest), default=NEVER)
    assert seen + rest == events


@stepping_and_fast
@law()
@given(world=any_worlds(), instant=instants(), extra=asks())
def test_a_fork_and_its_origin_do_not_touch_each_other(
    world: World, instant: Instant, extra: Ask, loop: bool, fast: bool
) -> None:
    world = world.with_options(async_scheduling=loop).driven(fast=fast)
    _, events, _ = history(world)
    cut = instant.of(step_ends(world))
    engine = world.engine()
    engine.advance_to(cut)
    seen = events_of(engine)
    for fork in (engine.fork(), engine.fork()):
        other = replace(extra, at=cut / MS + extra.at, cancel=None, runs=())
        submit(fork, len(world.asks), other)
        for number in range(len(world.asks)):
            fork.cancel(number, cut + 1)
        drain(fork, world)
    same = engine.fork()
    engine.drain()
    assert seen + events_of(engine) == events
    same.drain()
    assert seen + events_of(same) == events


# Jumps


def state_of(engine: _native.Engine) -> list[object]:
    """Return everything that can be seen of an engine but its single tokens and steps."""
    snapshot = engine.snapshot()
    return [
        [event for event in events_of(engine) if event[3] != EventKind.token],
        engine.running_ids,
        engine.waiting_ids,
        engine.num_pending,
        engine.num_free_blocks,
        engine.num_steps,
        engine.busy_time,
        engine.num_preemptions,
        engine.prefix_stats,
        snapshot.requests.tolist(),
        (snapshot.taken_at, snapshot.boundary, snapshot.intake),
    ]


@law(200)
@given(world=st.one_of(worlds(lasting=True), tight_worlds()), cuts=st.lists(instants(), max_size=4))
def test_jumping_is_stepping(world: World, cuts: list[Instant], loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    stepping, jumping = (world.driven(fast=fast).engine() for fast in (False, True))
    for cut in sorted(instant.of(step_ends(world)) for instant in cuts):
        stepping.advance_to(cut)
        jumping.advance_to(cut)
        assert state_of(jumping) == state_of(stepping)
    assert drain(jumping, world) == drain(stepping, world)
    assert state_of(jumping) == state_of(stepping)


@law()
@given(world=any_worlds())
def test_decoding_in_lockstep_takes_the_same_steps(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop)
    _, _, steps = history(world)
    engine = _native.Engine(world.config, world.model, record_steps=True, fast=True)
    for number, ask in enumerate(world.asks):
        submit(engine, number, ask)
    engine.drain()
    assert steps_of(engine) == steps


# Caching and counting


@law()
@given(world=worlds())
def test_without_caching_it_does_not_matter_which_block_is_which(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop, enable_prefix_caching=False)
    _, *counted = history(world.with_options(track_blocks=False))
    _, *tracked = history(world.with_options(track_blocks=True))
    assert counted == tracked


@law(200)
@given(world=st.one_of(worlds(), tight_worlds()))
def test_where_prompts_share_nothing_counting_blocks_is_tracking_them(world: World, loop: bool) -> None:
    """With prefix caching a preempted request then finds as many of its own blocks either way."""
    world = world.without_sharing().with_options(async_scheduling=loop, enable_prefix_caching=True)
    runs = [history(world.with_options(shared_prefixes=shared)) for shared in (False, True)]
    assert runs[0][1:] == runs[1][1:]
    assert runs[0][0].prefix_stats == runs[1][0].prefix_stats


@law()
@given(world=worlds())
def test_caching_changes_nothing_where_nothing_is_shared_or_evicted(world: World, loop: bool) -> None:
    world = world.without_sharing().with_options(async_scheduling=loop)
    _, *plain = history(world.with_options(enable_prefix_caching=False))
    assume(not of_kind(plain[0], EventKind.preempted))
    _, *cached = history(world.with_options(enable_prefix_caching=True))
    assert plain == cached


@law()
@given(world=worlds())
def test_a_prefix_hit_is_whole_blocks_and_less_than_the_prompt(world: World, loop: bool) -> None:
    world = world.with_options(async_scheduling=loop, enable_prefix_caching=True)
    engine, events, _ = history(world)
    size = world.options["block_size"]
    admitted = of_kind(events, EventKind.scheduled)
    for number, _, hit, _, _ in admitted:
        assert hit % size == 0
        assert 0 <= hit < world.asks[number].prompt
    queries, hits, again, found = engine.prefix_stats
    assert (queries, hits) == (sum(world.asks[e[0]].prompt for e in admitted), sum(e[2] for e in admitted))
    assert found <= again
    assert again == 0 or of_kind(events, EventKind.preempted)
