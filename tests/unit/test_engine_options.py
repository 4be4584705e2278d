"""C072: an option that is accepted has an effect, and one out of range is refused by name."""

from typing import Any

import numpy as np
import pytest

from engine_helpers import MS, Ask, Story, config, simulate, start, steps, stories, u_step
from simcluster import _native
from simcluster._native import Policy, VllmVersion

SMALL_POOL: dict[str, Any] = {"max_num_batched_tokens": 16, "block_size": 4, "usable_blocks": 3}
PAIR = (Ask(0, 4, 3), Ask(0, 4, 3))
LATECOMER = (Ask(0, 4, 10), Ask(11, 4, 2))
SAME_PROMPT = (Ask(0, 8, 1, runs=((500, 8),)), Ask(100, 8, 1, runs=((500, 8),)))

# option: (changed value, the other options, requests on which it binds)
BINDING: dict[str, tuple[Any, dict[str, Any], tuple[Ask, ...]]] = {
    "max_num_batched_tokens": (8, {}, (Ask(0, 12, 2), Ask(0, 4, 2))),
    "max_num_seqs": (1, {}, PAIR),
    "max_num_active_seqs": (1, {}, PAIR),
    "max_model_len": (16, {}, (Ask(0, 10, 20),)),
    "block_size": (4, {"usable_blocks": 3}, PAIR),
    "num_gpu_blocks": (4, {"block_size": 4}, PAIR),
    "long_prefill_token_threshold": (
        4,
        {"max_num_batched_tokens": 8},
        (Ask(0, 12, 1), Ask(0, 4, 1)),
    ),
    "long_prefill_token_threshold_adaptive": (
        True,
        {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 2},
        (Ask(0, 12, 1), Ask(0, 8, 1)),
    ),
    "prefill_schedule_interval": (4, {}, LATECOMER),
    "watermark": (0.5, {"block_size": 4, "usable_blocks": 9}, (Ask(0, 8, 5), Ask(1, 16, 1))),
    "policy": (Policy.priority, SMALL_POOL, (Ask(0, 4, 3, priority=1), Ask(0, 4, 3))),
    "vllm_version": (VllmVersion.v0_32, {"prefill_schedule_interval": 4}, LATECOMER),
    "enable_chunked_prefill": (
        False,
        {"max_num_batched_tokens": 16, "max_model_len": 16},
        (Ask(0, 10, 2), Ask(0, 9, 2)),
    ),
    "enable_prefix_caching": (True, {"block_size": 4}, SAME_PROMPT),
    "scheduler_reserve_full_isl": (
        False,
        {"max_num_batched_tokens": 8, "block_size": 4, "usable_blocks": 5},
        (Ask(0, 8, 3), Ask(1, 20, 1)),
    ),
    "async_scheduling": (True, {}, (Ask(0, 4, 3), Ask(5, 4, 1))),
}

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("max_num_batched_tokens", 0),
    ("max_num_seqs", 0),
    ("max_num_active_seqs", -1),
    ("max_model_len", 0),
    ("block_size", 0),
    ("num_gpu_blocks", 1),
    ("num_gpu_blocks", 2**31),
    ("long_prefill_token_threshold", -1),
    ("prefill_schedule_interval", 0),
    ("watermark", -0.1),
    ("watermark", 1.0),
    ("watermark", float("nan")),
]


def outcome(
    options: _native.SchedulerConfig, *asks: Ask, **how: Any
) -> tuple[list[Story], list[tuple[float, float, int]]]:
    """Return everything that can be told apart: what became of the requests, and the steps."""
    engine = start(options, *asks, **how)
    engine.drain()
    return stories(engine, asks), steps(engine)


@pytest.mark.parametrize("option", BINDING)
def test_every_scheduler_option_changes_the_outcome_where_it_binds(option: str) -> None:
    value, others, asks = BINDING[option]
    before, after = config(**others), config(**others, **{option: value})
    assert getattr(before, option) != value
    assert outcome(before, *asks) != outcome(after, *asks)


def test_no_scheduler_option_is_left_out_of_these_tests() -> None:
    options = {name for name in dir(_native.SchedulerConfig) if not name.startswith("_")}
    assert options - {"validate"} == set(BINDING) | {"track_blocks", "shared_prefixes"}


def test_tracking_blocks_gives_block_tables_and_changes_no_time() -> None:
    assert outcome(config(**SMALL_POOL), *PAIR) == outcome(config(**SMALL_POOL, track_blocks=True), *PAIR)
    scheduler = _native.Scheduler(config(**SMALL_POOL, track_blocks=True))
    scheduler.add(7, 6, 2)
    scheduler.schedule()
    assert scheduler.block_table(7) == [1, 2]
    scheduler = _native.Scheduler(config(**SMALL_POOL))
    scheduler.add(7, 6, 2)
    scheduler.schedule()
    with pytest.raises(ValueError, match="track_blocks"):
        scheduler.block_table(7)


def test_saying_that_prompts_share_nothing_changes_no_time_and_then_they_may_not() -> None:
    for caching in (False, True):
        options = {**SMALL_POOL, "enable_prefix_caching": caching}
        alone = config(**options, shared_prefixes=False)
        assert outcome(config(**options), *PAIR) == outcome(alone, *PAIR)
    with pytest.raises(ValueError, match="shared_prefixes is off"):
        start(alone, *SAME_PROMPT)
    with pytest.raises(ValueError, match="shared_prefixes is off"):
        _native.Scheduler(alone).add(0, 8, 1, prompt=[(500, 8)])


@pytest.mark.parametrize(("option", "value"), OUT_OF_RANGE)
def test_an_option_out_of_range_is_refused_by_name(option: str, value: object) -> None:
    options = config(**{option: value})
    assert options.validate().startswith(f"{option} = ")
    with pytest.raises(ValueError, match=f"^{option} = .*must be "):
        _native.Engine(options, u_step())


def test_without_chunked_prefill_the_token_budget_must_hold_the_longest_prompt() -> None:
    options = config(enable_chunked_prefill=False, max_num_batched_tokens=63, max_model_len=64)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens = 63.*max_model_len = 64"):
        _native.Engine(options, u_step())
    options.max_num_batched_tokens = 64
    assert options.validate() == ""


@pytest.mark.parametrize("coefficient", ["b0", "b1", "b1x", "b2", "b3", "b4", "b5", "host"])
def test_every_coefficient_of_the_step_time_has_an_effect(coefficient: str) -> None:
    # 4 + 1 tokens: the second prompt is prefilled beside a decode, after a context of 4
    asks = (Ask(0, 4, 3), Ask(1, 4, 1))
    plain = outcome(config(), *asks, model=u_step())
    changed = u_step()
    setattr(changed, coefficient, getattr(changed, coefficient) + MS)
    assert outcome(config(), *asks, model=changed) != plain


def test_the_hinge_says_from_which_token_the_extra_cost_counts() -> None:
    ends = [
        simulate(config(), Ask(0, 8, 1), model=u_step(b1x=MS, hinge_tokens=hinge))[0].end for hinge in (0, 6, 8, 20)
    ]
    assert ends == [26, 20, 18, 18]


def test_host_time_adds_to_a_synchronous_period_and_hides_in_an_asynchronous_one() -> None:
    for host, synchronous, asynchronous in ((3, 17, 14), (20, 34, 20)):
        model = u_step(host=host * MS)
        assert simulate(config(), Ask(0, 4, 1), model=model)[0].end == synchronous
        overlapped = config(async_scheduling=True)
        assert simulate(overlapped, Ask(0, 4, 1), model=model)[0].end == asynchronous


def test_noise_scales_each_step_by_a_factor_that_seed_instance_and_step_alone_choose() -> None:
    twice = _native.StepNoise(np.array([2 << 32]), seed=1, instance=0)
    assert outcome(config(), Ask(0, 4, 2), noise=twice)[1] == [(0, 28, 4), (28, 50, 1)]

    factors = np.arange(1, 1001, dtype=np.int64) << 22

    def seen(seed: int, instance: int) -> list[tuple[float, float, int]]:
        noise = _native.StepNoise(factors, seed, instance)
        return outcome(config(), Ask(0, 4, 20), noise=noise)[1]

    assert seen(1, 0) == seen(1, 0)
    assert seen(1, 0) != seen(2, 0)
    assert seen(1, 0) != seen(1, 1)


@pytest.mark.parametrize(
    ("plain", "changed", "options"),
    [
        (Ask(0, 4, 6), Ask(0, 4, 6, max_tokens=3), {}),
        (Ask(0, 4, 6), Ask(0, 4, 6, by_length=True), {"async_scheduling": True}),
        (Ask(0, 4, 6), Ask(0, 4, 6, cancel=20), {}),
        (Ask(0, 4, 3), Ask(0, 4, 3, priority=1), {**SMALL_POOL, "policy": Policy.priority}),
        (
            Ask(0, 4, 3, arrival_time=5),
            Ask(0, 4, 3, arrival_time=3),
            {**SMALL_POOL, "policy": Policy.priority},
        ),
        (
            Ask(0, 9, 1),
            Ask(0, 9, 1, runs=((40, 9),)),
            {"block_size": 4, "enable_prefix_caching": True},
        ),
    ],
    ids=["max_tokens", "ends_by_length", "cancel", "priority", "arrival_time", "prompt"],
)
def test_every_field_of_a_request_has_an_effect(plain: Ask, changed: Ask, options: dict[str, Any]) -> None:
    other = Ask(0, 9 if changed.runs else 4, 3, arrival_time=4, runs=changed.runs)
    assert outcome(config(**options), other, plain) != outcome(config(**options), other, changed)
