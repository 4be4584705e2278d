"""Limits of context and KV cache, clients that leave, livelock, and misuse of the engine."""

import numpy as np
import pytest

from engine_helpers import MS, Ask, config, simulate, start, steps, stories, submit, u_step
from simcluster import _native
from simcluster._native import NEVER, EndReason, EventKind, Policy

both_loops = pytest.mark.parametrize("asynchronous", [False, True])


@both_loops
def test_a_request_that_outgrows_the_whole_pool_ends_as_failed(asynchronous: bool) -> None:
    # 8 tokens have room: 4 of the prompt and 4 outputs; the fifth output would need a third block
    options = config(block_size=4, usable_blocks=2, async_scheduling=asynchronous)
    asks = (Ask(0, 4, 10), Ask(1, 4, 1))
    engine = start(options, *asks)
    engine.drain()
    alone, behind = stories(engine, asks)
    assert len(alone.tokens) == 5
    assert (alone.kind, alone.reason) == (EventKind.failed, EndReason.kv_capacity)
    assert len(alone.preempted) == 1
    assert alone.end == alone.tokens[-1]
    assert behind.kind == EventKind.finished
    assert engine.num_free_blocks == 2


@both_loops
def test_a_request_that_fills_the_pool_exactly_finishes(asynchronous: bool) -> None:
    options = config(block_size=4, usable_blocks=2, async_scheduling=asynchronous)
    (story,) = simulate(options, Ask(0, 4, 5))
    assert (story.kind, story.reason) == (EventKind.finished, EndReason.stop)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(64, -1), (64, 1), (65, -1), (4, 65)])
def test_what_cannot_fit_the_context_is_rejected_on_arrival(prompt: int, max_tokens: int) -> None:
    options = config(max_model_len=64)
    (story,) = simulate(options, Ask(7, prompt, 3, max_tokens=max_tokens))
    assert (story.kind, story.reason) == (EventKind.rejected, EndReason.exceeds_context)
    assert (story.end, story.tokens) == (7, [])


@both_loops
@pytest.mark.parametrize(
    ("ask", "tokens", "reason"),
    [
        (Ask(0, 60, 10), 4, EndReason.length),
        (Ask(0, 60, 4), 4, EndReason.stop),
        (Ask(0, 60, 3), 3, EndReason.stop),
        (Ask(0, 60, 99, max_tokens=10), 4, EndReason.length),
        (Ask(0, 60, 99, max_tokens=64), 4, EndReason.length),
        (Ask(0, 60, 99, max_tokens=2), 2, EndReason.length),
        (Ask(0, 60, 99, max_tokens=2, by_length=True), 2, EndReason.length),
        (Ask(0, 60, 99, by_length=True), 4, EndReason.length),
        (Ask(0, 60, 3, by_length=True), 3, EndReason.length),
        (Ask(0, 60, 1, max_tokens=3, by_length=True), 3, EndReason.length),
        (Ask(0, 63, 5), 1, EndReason.length),
    ],
)
def test_a_request_ends_at_its_eos_its_max_tokens_or_the_context_limit(
    ask: Ask, tokens: int, reason: EndReason, asynchronous: bool
) -> None:
    (story,) = simulate(config(max_model_len=64, async_scheduling=asynchronous), ask)
    assert (len(story.tokens), story.kind, story.reason) == (tokens, EventKind.finished, reason)


def test_in_the_asynchronous_loop_only_an_unforeseen_end_wastes_a_token() -> None:
    for by_length, executed in ((True, [4, 1, 1]), (False, [4, 1, 1, 1])):
        engine = start(config(async_scheduling=True), Ask(0, 4, 3, by_length=by_length))
        engine.drain()
        assert [tokens for _, _, tokens in steps(engine)] == executed


def test_an_arrival_in_the_asynchronous_loop_misses_the_batch_that_is_already_queued() -> None:
    asks = (Ask(0, 4, 9), Ask(1, 4, 1))
    assert simulate(config(async_scheduling=True), *asks)[1].scheduled == 25
    assert simulate(config(), *asks)[1].scheduled == 14


def test_a_client_may_leave_before_its_request_arrives_or_while_it_waits() -> None:
    asks = (
        Ask(0, 4, 5),
        Ask(30, 4, 5, cancel=20),
        Ask(30, 4, 5, cancel=30),
        Ask(1, 4, 5, cancel=3),
    )
    first, early, at_once, waiting = simulate(config(max_num_seqs=1), *asks)
    assert first.kind == EventKind.finished
    for story, end in ((early, 20), (at_once, 30), (waiting, 3)):
        assert (story.kind, story.reason, story.end) == (EventKind.failed, EndReason.abort, end)
        assert (story.scheduled, story.tokens) == (None, [])


def test_a_cancellation_after_the_end_or_of_an_unknown_request_does_nothing() -> None:
    engine = start(config(), Ask(0, 4, 2, cancel=25))
    engine.cancel(99, 10 * MS)
    engine.drain()
    (story,) = stories(engine, (Ask(0, 4, 2),))
    assert (story.kind, story.end) == (EventKind.finished, 25)


def test_many_clients_that_leave_before_their_first_token_are_no_livelock() -> None:
    asks = [Ask(20 * i, 4, 2, cancel=20 * i + 5) for i in range(1500)]
    assert all(story.kind == EventKind.failed for story in simulate(config(), *asks))


def test_two_prompts_that_evict_each_other_for_ever_are_named() -> None:
    # 5 blocks of one token; both prompts grow by one token a step, and whoever stands first in the
    # running list is evicted on a full tie. The real scheduler never ends here either.
    options = config(
        policy=Policy.priority,
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold=1,
        max_num_batched_tokens=2,
        block_size=1,
        usable_blocks=5,
    )
    engine = start(options, Ask(0, 4, 1), Ask(0, 5, 1))
    with pytest.raises(_native.LivelockError, match=r"without progress: (0, 1|1, 0)$"):
        engine.drain()
    for cure in (
        {"scheduler_reserve_full_isl": True},
        {"policy": Policy.fcfs},
        {"long_prefill_token_threshold": 0},
    ):
        for name, value in cure.items():
            before = getattr(options, name)
            setattr(options, name, value)
            ends = [story.kind for story in simulate(options, Ask(0, 4, 1), Ask(0, 5, 1))]
            assert ends == [EventKind.finished] * 2
            setattr(options, name, before)
    ends = [s.kind for s in simulate(options, Ask(0, 4, 1), Ask(0, 5, 1, arrival_time=1))]
    assert ends == [EventKind.finished] * 2


def test_the_next_event_may_be_a_client_that_leaves_during_a_step() -> None:
    asks = (Ask(0, 4, 20), Ask(5, 4, 2, cancel=20))
    engine = start(config(async_scheduling=True), *asks)
    engine.advance_to(14 * MS)
    engine.take_events()
    assert engine.next_event() == 20 * MS


def test_misuse_of_the_engine_is_refused() -> None:
    engine = start(config())
    engine.advance_to(10 * MS)
    with pytest.raises(ValueError, match="in the past"):
        submit(engine, 0, Ask(9, 4, 2))
    with pytest.raises(ValueError, match="in the past"):
        engine.cancel(0, 9 * MS)
    for prompt, output in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="at least one prompt token"):
            submit(engine, 0, Ask(10, prompt, output))
    for runs in (((1, 3),), ((1, 5),), ((1, 4), (9, 0)), ((1, 5), (9, -1))):
        with pytest.raises(ValueError, match="do not add up"):
            submit(engine, 0, Ask(10, 4, 1, runs=runs))


def test_a_step_longer_than_the_clock_can_hold_is_an_error() -> None:
    engine = start(config(), Ask(0, 8192, 1), model=u_step(b3=NEVER // 8192))
    with pytest.raises(OverflowError, match="beyond the clock"):
        engine.drain()


def test_a_snapshot_is_restored_only_where_blocks_are_counted() -> None:
    engine = start(config(), Ask(0, 4, 9))
    engine.advance_to(MS)
    snapshot = _native.Snapshot.capture(engine)
    with pytest.raises(ValueError, match="as many expected ends"):
        snapshot.restore(config(), u_step(), [])
    for option in ("enable_prefix_caching", "track_blocks"):
        with pytest.raises(ValueError, match="block identities"):
            snapshot.restore(config(**{option: True}), u_step(), [(9, False)])


def test_a_snapshot_shows_no_true_end() -> None:
    """The oracle boundary: what a router may see is equal whatever the true lengths are."""
    shown = []
    for output, by_length in ((9, False), (40, False), (9, True)):
        engine = start(config(), Ask(0, 4, output, by_length=by_length), Ask(1, 4, output))
        engine.advance_to(40 * MS)
        snapshot = _native.Snapshot.capture(engine)
        shown.append((snapshot.requests.tolist(), snapshot.boundary, snapshot.num_free_blocks))
    assert shown[0] == shown[1] == shown[2]


def test_a_view_counts_its_own_dispatches_until_a_snapshot_shows_them() -> None:
    view = _native.InstanceView(config(max_num_seqs=1), u_step(), mean_output=3, overlay=True)
    engine = start(config(max_num_seqs=1))
    for number, at in enumerate((0, 1, 20)):
        submit(engine, number, Ask(at, 4, 3))
        view.record_dispatch(number, 4, 3, at * MS)
    assert (view.num_running, view.num_waiting, view.num_dispatched_since) == (0, 3, 3)
    engine.advance_to(15 * MS)  # the step from 0 to 14 and the start of the next
    view.refresh(_native.Snapshot.capture(engine))
    assert (view.num_running, view.num_waiting, view.num_dispatched_since) == (1, 2, 1)
    assert view.num_resident == 3


def estimate(view: _native.InstanceView, number: int, ask: Ask) -> int:
    """Return when a request that ends by an EOS would get its first token [ps]."""
    lengths = np.array([ask.prompt]), np.array([ask.output])
    at = np.array([round(ask.at * MS)])
    return int(_native.estimate_first_token([view], number, lengths[0], lengths[1], at)[0])


def test_a_request_that_no_instance_can_serve_has_no_estimate() -> None:
    options = config(block_size=4, usable_blocks=3, max_model_len=32)
    view = _native.InstanceView(options, u_step(), mean_output=3, overlay=True)
    for prompt, expected in ((12, 22 * MS), (13, NEVER), (32, NEVER)):
        assert estimate(view, 0, Ask(0, prompt, 3)) == expected


def test_a_dispatch_that_ends_at_max_tokens_is_believed_to_end_there_seen_or_not() -> None:
    options = config(max_num_seqs=1)
    asks = (Ask(0, 4, 2, max_tokens=6, by_length=True), Ask(1, 4, 1))
    engine = start(options, asks[0])
    view = _native.InstanceView(options, u_step(), mean_output=3, overlay=True)
    view.record_dispatch(0, 4, 2, 0, max_tokens=6, ends_by_length=True)
    before = estimate(view, 1, asks[1])
    engine.advance_to(MS)
    view.refresh(_native.Snapshot.capture(engine))
    assert view.num_dispatched_since == 0
    assert before == estimate(view, 1, asks[1])
    assert simulate(options, *asks)[1].tokens == [before / MS]
