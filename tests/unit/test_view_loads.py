"""What a view says about an instance's load: tokens left, by hand and against what the engine then does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import MS, Ask, config, start, submit, u_step
from policy_helpers import make_specs, make_view
from simcluster import _native
from simcluster._native import EventKind


def view_at(engine: _native.Engine, options: _native.SchedulerConfig, mean_output: int = 10) -> _native.InstanceView:
    view = _native.InstanceView(options, u_step(), mean_output, True)
    view.refresh(_native.Snapshot.capture(engine))
    return view


def test_tokens_left_by_hand() -> None:
    """Budget 8: a (prompt 4, output 5) and b (prompt 12) share the first step; it runs from 0 to 18."""
    options = config(max_num_batched_tokens=8)
    engine = start(options, Ask(0, 4, 5), Ask(0, 12, 3), Ask(0, 6, 1))
    engine.advance_to(10 * MS)
    running = view_at(engine, options)
    assert (running.num_running, running.num_waiting) == (2, 1)
    assert running.prefill_tokens_left == 4 + 12 + 6  # a step that runs counts as undone
    assert running.decode_tokens_left == 30  # nobody of them is known: the mean, three times
    engine.advance_to(18 * MS)
    later = view_at(engine, options)  # a has its first token, b has 4 of 12 tokens
    assert later.prefill_tokens_left == 8 + 6
    assert later.decode_tokens_left == 9 + 10 + 10


def test_own_predictions_count_and_own_dispatches_since_the_snapshot_too() -> None:
    options = config()
    engine = _native.Engine(options, u_step())
    view = _native.InstanceView(options, u_step(), 10, True)
    view.record_dispatch(7, 100, 25, 0)
    view.record_dispatch(8, 50, 25, 0, max_tokens=5)
    assert (view.prefill_tokens_left, view.decode_tokens_left) == (150, 25 + 5)
    engine.submit(7, 100, 25, 0)
    engine.advance_to(110 * MS)  # one step: 10 ms + 100 tokens
    view.refresh(_native.Snapshot.capture(engine))
    assert (view.prefill_tokens_left, view.decode_tokens_left) == (0, 24)
    blind = _native.InstanceView(options, u_step(), 10, False)
    blind.record_dispatch(7, 100, 25, 0)
    assert (blind.prefill_tokens_left, blind.decode_tokens_left) == (0, 0)


def test_an_answer_longer_than_predicted_has_one_token_left_and_never_more_than_max_tokens() -> None:
    options = config()
    engine = _native.Engine(options, u_step())
    view = _native.InstanceView(options, u_step(), 10, True)
    for number, limit in ((1, -1), (2, 40)):
        view.record_dispatch(number, 4, 3 if number == 1 else 100, 0, max_tokens=limit)
        engine.submit(number, 4, 60, 0, max_tokens=limit)
    engine.advance_to(18 * MS + 19 * 12 * MS)  # 1 + 19 tokens each
    view.refresh(_native.Snapshot.capture(engine))
    assert view.decode_tokens_left == 1 + 20


def test_a_preempted_request_has_its_whole_recomputation_left() -> None:
    """C004: at 18 ms a takes the last block, b is evicted with one token delivered and 4 + 1 to recompute."""
    options = config(block_size=4, usable_blocks=3, max_num_batched_tokens=16)
    engine = start(options, Ask(0, 4, 3), Ask(0, 4, 3))
    engine.advance_to(20 * MS)
    view = view_at(engine, options)
    assert (view.num_running, view.num_waiting) == (1, 1)
    assert view.prefill_tokens_left == 5
    assert view.kv_usage == pytest.approx(2 / 3)


def test_kv_usage_is_the_share_of_usable_blocks() -> None:
    specs = make_specs(3, block_size=4, usable_blocks=10)
    view = make_view(specs, [(), [(8, 50)], [(20, 50), (8, 50)]], at_ms=1)
    assert view.kv_usage().tolist() == pytest.approx([0.0, 0.2, 0.7])
    assert view.num_running().tolist() == [0, 1, 2]


@settings(deadline=None, max_examples=150)
@given(
    asks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=8),
    cut=st.integers(0, 200),
    budget=st.integers(4, 40),
    loop=st.booleans(),
)
def test_tokens_left_are_what_the_engine_then_computes(
    asks: list[tuple[int, int, int]], cut: int, budget: int, loop: bool
) -> None:
    """With true predictions, room for all and nobody new: later prefill tokens and tokens not yet delivered."""
    options = config(max_num_batched_tokens=budget, async_scheduling=loop)
    engine = _native.Engine(options, u_step(), record_tokens=True, record_steps=True)
    view = _native.InstanceView(options, u_step(), 10, True)
    here = [(number, ask) for number, ask in enumerate(asks) if ask[0] <= cut]
    for number, (at, prompt, output) in here:
        submit(engine, number, Ask(at, prompt, output))
        view.record_dispatch(number, prompt, output, at * MS)
    engine.advance_to(cut * MS)
    snapshot = _native.Snapshot.capture(engine)
    view.refresh(snapshot)
    delivered = np.count_nonzero(engine.take_events()[:, 3] == int(EventKind.token))
    engine.drain()
    steps = engine.take_steps()
    late = steps[steps[:, 2] > cut * MS]
    assert view.prefill_tokens_left == int((late[:, 3] - late[:, 4]).sum())
    assert view.decode_tokens_left == sum(output for _, (_, _, output) in here) - delivered


def test_numbers_of_all_views_at_once_are_those_of_each_before_and_after_a_dispatch() -> None:
    specs = make_specs(3)
    seen = make_view(specs)
    for dispatched in range(2):
        views = seen.views
        assert seen.num_waiting().tolist() == [each.num_waiting for each in views]
        assert seen.num_running().tolist() == [each.num_running for each in views]
        assert seen.num_resident().tolist() == [each.num_resident for each in views]
        assert seen.tokens_left().tolist() == [v.prefill_tokens_left + v.decode_tokens_left for v in views]
        assert seen.kv_usage().tolist() == [each.kv_usage for each in views]
        assert (int(seen.tokens_left()[1]) > 0) == bool(dispatched)
        views[1].record_dispatch(7, 100, 25, 0)
    with pytest.raises(ValueError, match="one value per view"):
        _native.num_waiting(seen.views, np.empty(2, dtype=np.int64))
