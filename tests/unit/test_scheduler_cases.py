"""The public cases about the scheduler and the KV cache, driven by hand through the engine."""

import pytest

from engine_helpers import MS, Ask, config, simulate, start, steps, stories, submit, u_step
from simcluster import _native
from simcluster._native import EndReason, EventKind


def test_a_second_prompt_gets_what_is_left_of_the_token_budget() -> None:
    # C001
    asks = (Ask(0, 4, 2), Ask(0, 8, 2), Ask(5, 3, 1))
    engine = start(config(max_num_batched_tokens=8), *asks)
    engine.drain()
    assert steps(engine) == [(0, 18, 8), (18, 36, 8), (36, 47, 1)]
    a, b, c = stories(engine, asks)
    assert (a.ttft, b.ttft, c.ttft) == (18, 36, 31)
    assert (a.e2e, b.e2e, c.e2e) == (36, 47, 31)


def test_decodes_ride_in_every_chunk_step_of_a_long_prompt() -> None:
    # C002
    a, b = simulate(config(max_num_batched_tokens=6), Ask(0, 2, 5), Ask(1, 12, 1))
    assert a.tokens == [12, 28, 44, 57, 68]
    assert b.ttft == 56
    assert max(later - sooner for sooner, later in zip(a.tokens, a.tokens[1:], strict=False)) == 16


@pytest.mark.parametrize(("threshold", "ttft_b"), [(4, 18), (0, 36)])
def test_the_long_prefill_threshold_caps_a_prompt_in_company_but_not_alone(threshold: int, ttft_b: float) -> None:
    # C003
    options = config(max_num_batched_tokens=8, long_prefill_token_threshold=threshold)
    a, b = simulate(options, Ask(0, 12, 1), Ask(0, 4, 1))
    assert (a.ttft, b.ttft) == (36, ttft_b)


def test_a_preempted_request_keeps_its_first_token_and_its_latency_holds_the_eviction() -> None:
    # C004
    options = config(max_num_batched_tokens=16, block_size=4, usable_blocks=3)
    a, b = simulate(options, Ask(0, 4, 3), Ask(0, 4, 3))
    assert a.tokens == [18, 29, 40]
    assert b.tokens == [18, 55, 66]
    assert (b.ttft, b.e2e, b.preempted) == (18, 66, [18])


def test_the_prefix_hit_rate_leaves_out_what_a_preempted_request_finds_of_its_own() -> None:
    # C005
    asks = (Ask(0, 4, 3), Ask(0, 4, 3))
    options = config(max_num_batched_tokens=16, block_size=4, usable_blocks=3, enable_prefix_caching=True)
    engine = start(options, *asks)
    engine.drain()
    _, b = stories(engine, asks)
    assert b.tokens == [18, 51, 62]
    assert b.e2e == 62
    queries, hits, preempted_queries, preempted_hits = engine.prefix_stats
    assert (queries, hits) == (8, 0)
    assert (preempted_queries, preempted_hits) == (5, 4)


def test_a_prompt_that_is_cached_as_a_whole_computes_its_last_block_again() -> None:
    # C006
    asks = (Ask(0, 8, 1, runs=((500, 8),)), Ask(100, 8, 1, runs=((500, 8),)))
    options = config(max_num_batched_tokens=16, block_size=4, enable_prefix_caching=True)
    engine = start(options, *asks)
    engine.drain()
    first, second = stories(engine, asks)
    assert (first.ttft, second.ttft) == (18, 14)
    assert second.hit_tokens == 4
    assert engine.prefix_stats == [16, 4, 0, 0]
    assert steps(engine)[1][2] == 4


def test_a_prompt_larger_than_the_whole_pool_is_rejected_and_starves_nobody() -> None:
    # C007
    asks = (Ask(0, 14, 1), Ask(0, 4, 2))
    options = config(block_size=4, usable_blocks=3, max_model_len=32)
    engine = start(options)
    assert not submit(engine, 0, asks[0])
    assert submit(engine, 1, asks[1])
    engine.drain()
    r1, r2 = stories(engine, asks)
    assert (r1.kind, r1.reason, r1.end) == (EventKind.rejected, EndReason.kv_capacity, 0)
    assert (r2.kind, r2.ttft, r2.e2e) == (EventKind.finished, 14, 25)


def test_a_head_that_does_not_fit_holds_back_the_light_request_behind_it() -> None:
    # C010
    options = config(max_num_batched_tokens=32, block_size=4, usable_blocks=5)
    a, h, light = simulate(options, Ask(0, 8, 3), Ask(1, 16, 1), Ask(2, 4, 1))
    assert a.end == 40
    assert (h.ttft, light.ttft) == (69, 68)


def test_a_tiny_cache_ends_after_one_preemption() -> None:
    # C011
    options = config(max_num_batched_tokens=16, block_size=4, usable_blocks=2)
    a, b = simulate(options, Ask(0, 4, 5), Ask(0, 4, 5))
    assert a.tokens == [18, 29, 40, 51, 62]
    assert b.tokens == [18, 77, 88, 99, 110]
    assert len(a.preempted) + len(b.preempted) == 1


def test_max_num_seqs_limits_the_running_requests() -> None:
    # C012
    asks = (Ask(0, 2, 3), Ask(0, 2, 3), Ask(0, 2, 3))
    engine = start(config(max_num_seqs=2), *asks)
    engine.drain()
    assert max(row[8] for row in engine.take_steps().tolist()) == 2
    a, b, c = stories(engine, asks)
    assert [(a.ttft, a.e2e), (b.ttft, b.e2e)] == [(14, 38), (14, 38)]
    assert (c.wait, c.ttft, c.e2e) == (38, 50, 72)


def test_the_end_of_a_step_starts_the_next_one_without_another_arrival() -> None:
    # C013
    a, b = simulate(config(max_num_seqs=1), Ask(0, 2, 2), Ask(1, 2, 1))
    assert a.end == 23
    assert (b.wait, b.ttft, b.end) == (22, 34, 35)


def test_a_request_that_arrives_on_a_step_boundary_joins_the_step_that_starts_there() -> None:
    # C014
    asks = (Ask(0, 8, 2), Ask(18, 2, 1))
    engine = start(config(max_num_batched_tokens=16), *asks)
    engine.drain()
    assert steps(engine) == [(0, 18, 8), (18, 31, 3)]
    assert stories(engine, asks)[1].ttft == 13


def test_a_request_handed_over_at_the_boundary_already_reached_joins_that_step_too() -> None:
    # C014, as an event loop does it: advance first, hand over then
    asks = (Ask(0, 8, 2), Ask(18, 2, 1))
    engine = start(config(max_num_batched_tokens=16), asks[0])
    engine.advance_to(18 * MS)
    submit(engine, 1, asks[1])
    engine.drain()
    assert stories(engine, asks)[1].ttft == 13


def test_the_horizon_includes_what_happens_at_its_very_end() -> None:
    # C015
    asks = (Ask(0, 4, 2), Ask(0, 8, 2), Ask(5, 3, 1))
    engine = start(config(max_num_batched_tokens=8), *asks)
    engine.advance_to(36 * MS)
    a, b, c = stories(engine, asks)
    assert (a.kind, a.end) == (EventKind.finished, 36)
    assert (c.kind, c.end) == (EventKind.finished, 36)
    assert (b.kind, b.tokens) == (None, [36])
    assert (engine.now, engine.running_ids, engine.num_waiting) == (36 * MS, [1], 0)


def test_every_submitted_request_is_counted_where_a_horizon_cuts_the_run() -> None:
    # C021
    asks = (Ask(0, 2, 2),) * 4
    engine = start(config(max_num_seqs=1), *asks)
    engine.advance_to(30 * MS)
    kinds = [story.kind for story in stories(engine, asks)]
    assert kinds.count(EventKind.finished) == 1
    assert kinds.count(EventKind.rejected) == kinds.count(EventKind.failed) == 0
    assert (engine.num_running, engine.num_waiting, engine.num_pending) == (1, 2, 0)


def test_the_time_to_first_token_holds_the_wait_in_the_queue() -> None:
    # C024
    a, b = simulate(config(max_num_seqs=1), Ask(0, 2, 5), Ask(0, 2, 5))
    assert a.ttft == 12
    assert (b.wait, b.ttft) == (56, 68)


def test_a_client_that_leaves_frees_its_seat_at_the_end_of_the_running_step() -> None:
    # C030
    asks = (Ask(0, 4, 100, cancel=20), Ask(21, 4, 1))
    engine = start(config(max_num_batched_tokens=16), *asks)
    engine.advance_to(24 * MS)
    assert engine.num_free_blocks < 100_000
    engine.advance_to(25 * MS)
    assert engine.num_free_blocks == 100_000
    engine.drain()
    assert [step[:2] for step in steps(engine)] == [(0, 14), (14, 25), (25, 39)]
    a, b = stories(engine, asks)
    assert (a.kind, a.reason, a.end, a.tokens) == (EventKind.failed, EndReason.abort, 20, [14])
    assert b.ttft == 18


def test_a_follow_up_turn_comes_after_the_answer_and_the_time_to_think() -> None:
    # C060
    options = config(max_num_batched_tokens=16)
    engine = start(options, Ask(0, 4, 2))
    engine.drain()
    end = stories(engine, (Ask(0, 4, 2),))[0].end
    assert end == 25
    asks = (Ask(0, 4, 2), Ask(end + 100, 4 + 2 + 3, 1))
    submit(engine, 1, asks[1])
    engine.drain()
    assert stories(engine, asks)[1].tokens == [144]


@pytest.mark.parametrize(("budget", "end"), [(8, 36), (4, 46)])
def test_chunks_add_up_to_the_same_prefill_attention(budget: int, end: float) -> None:
    # C063
    engine = start(config(max_num_batched_tokens=budget), Ask(0, 8, 1), model=u_step(b3=MS // 2))
    engine.drain()
    rows = engine.take_steps().tolist()
    assert rows[-1][2] == end * MS
    assert sum(row[6] for row in rows) == 36
    assert [row[6] for row in rows] == ([36] if budget == 8 else [10, 26])


def test_the_larger_priority_value_is_evicted() -> None:
    # C073
    asks = (Ask(0, 4, 3, priority=1), Ask(0, 4, 3, priority=0))
    options = {"max_num_batched_tokens": 16, "block_size": 4, "usable_blocks": 3}
    a, b = simulate(config(**options, policy=_native.Policy.priority), *asks)
    assert b.tokens == [18, 29, 40]
    assert a.tokens == [18, 55, 66]
    a, b = simulate(config(**options), *asks)
    assert a.tokens == [18, 29, 40]
    assert b.tokens == [18, 55, 66]


def test_two_users_in_a_closed_loop_never_have_more_than_two_requests_in_flight() -> None:
    # C074
    engine = start(config(max_num_seqs=8))
    left = {0: 2, 1: 2}
    owner: dict[int, int] = {}
    ends: list[float] = []

    def ask_next(user: int, at: float) -> None:
        left[user] -= 1
        owner[len(owner)] = user
        submit(engine, len(owner) - 1, Ask(at, 2, 2))

    for user in left:
        ask_next(user, 0)
    while (at := engine.next_event()) < _native.NEVER:
        engine.advance_to(at)
        for number, _, _, kind, _ in engine.take_events().tolist():
            if kind == EventKind.finished:
                ends.append(at / MS)
                if left[owner[number]]:
                    ask_next(owner[number], at / MS)
        assert engine.num_running + engine.num_waiting + engine.num_pending <= 2
        engine.advance_to(at + 1)
    assert ends == [26, 26, 52, 52]
    assert [step[:2] for step in steps(engine)] == [(0, 14), (14, 26), (26, 40), (40, 52)]
