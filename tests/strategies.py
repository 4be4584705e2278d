"""Random small worlds for the laws: options of a scheduler, a step-time model and requests.

Pools, budgets and prompts are small, so that everything a scheduler can meet is met often: ties, preemption, full
queues, clients that leave, and requests that outgrow the pool.
"""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from engine_helpers import MS, Ask, config, submit, u_step
from simcluster import _native
from simcluster._native import Policy, VllmVersion


@dataclass(frozen=True, slots=True)
class World:
    """One engine and everything that will be asked of it."""

    options: dict[str, Any]
    step_time: dict[str, int]
    asks: tuple[Ask, ...]
    fast: bool = False  # lockstep and jumps; such an engine tells neither single tokens nor steps

    def with_options(self, **changes: object) -> "World":
        return replace(self, options=self.options | changes)

    def driven(self, *, fast: bool) -> "World":
        return replace(self, fast=fast)

    def without_cancels(self) -> "World":
        return replace(self, asks=tuple(replace(ask, cancel=None) for ask in self.asks))

    def without_sharing(self) -> "World":
        return replace(self, asks=tuple(replace(ask, runs=()) for ask in self.asks))

    @property
    def config(self) -> _native.SchedulerConfig:
        return config(**self.options)

    @property
    def model(self) -> _native.StepTimeModel:
        return u_step(**self.step_time)

    @property
    def usable_blocks(self) -> int:
        return int(self.options["usable_blocks"])

    @property
    def seats(self) -> int:
        return int(self.options["max_num_active_seqs"] or self.options["max_num_seqs"])

    @property
    def may_livelock(self) -> bool:
        """Whether two requests could evict each other for ever, as in the real scheduler."""
        keys = [(ask.priority, ask.arrival_time) for ask in self.asks]
        return (
            self.options["policy"] == Policy.priority
            and not self.options["scheduler_reserve_full_isl"]
            and len(set(keys)) < len(keys)
        )

    def new_engine(self) -> _native.Engine:
        tell = not self.fast
        return _native.Engine(self.config, self.model, record_tokens=tell, record_steps=tell, fast=self.fast)

    def engine(self) -> _native.Engine:
        """Return an engine with every request handed over; nothing has run yet."""
        engine = self.new_engine()
        for number, ask in enumerate(self.asks):
            submit(engine, number, ask)
        return engine

    def end_of(self, ask: Ask) -> tuple[int, bool]:
        """Return how a request ends if nothing stops it: (output tokens, known beforehand)."""
        if ask.by_length and ask.max_tokens > 0:
            return ask.max_tokens, True
        return ask.output, ask.by_length


def _fit_together(options: dict[str, Any]) -> dict[str, Any]:
    """Give the pool in blocks, and a budget for whole prompts where they are not chunked."""
    pool = options.pop("pool_tokens")
    options["usable_blocks"] = max(2, pool // options["block_size"])
    if not options["enable_chunked_prefill"]:
        options["max_num_batched_tokens"] += options["max_model_len"]
    return options


def scheduler_options(lasting: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Every option but the loop, which a law chooses."""
    usual = 5 if lasting else 1  # how often an option keeps the value that lets an engine jump
    small, large = st.integers(12, 40), st.integers(20, 120)
    return st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(8, 64) if lasting else st.integers(1, 24),
            "max_num_seqs": st.sampled_from([1, 2, 3, 5, 9, 20]),
            "max_num_active_seqs": st.sampled_from([0, 0, 0, 0, 0, 2]),
            "max_model_len": st.sampled_from([100, 200, 300] if lasting else [24, 40, 64]),
            "block_size": st.sampled_from([1, 4, 16] if lasting else [1, 2, 3, 4, 8]),
            "pool_tokens": st.integers(80, 900) if lasting else st.one_of(small, large),
            "long_prefill_token_threshold": st.sampled_from([0, 0] * usual + [1, 3, 6]),
            "long_prefill_token_threshold_adaptive": st.booleans(),
            "prefill_schedule_interval": st.sampled_from([1, 1] * usual + [2, 4]),
            "watermark": st.sampled_from([0.0, 0.0, 0.1, 0.4]),
            "policy": st.sampled_from([Policy.fcfs] * usual + [Policy.priority]),
            "vllm_version": st.sampled_from([VllmVersion.v0_33, VllmVersion.v0_32]),
            "enable_chunked_prefill": st.sampled_from([True, True, False]),
            "enable_prefix_caching": st.booleans(),
            "scheduler_reserve_full_isl": st.sampled_from([True, True, False]),
            "track_blocks": st.sampled_from([False] * usual + [True]),
            "shared_prefixes": st.booleans(),
        }
    ).map(_fit_together)


def step_times() -> st.SearchStrategy[dict[str, int]]:
    """Whole milliseconds, so that steps end on the grid of arrivals, or every term at once."""
    grid = st.fixed_dictionaries(
        {"host": st.sampled_from([0, 0, 5 * MS, 15 * MS]), "b2": st.sampled_from([0, 0, MS // 50])}
    )
    every = st.fixed_dictionaries(
        {
            "b1x": st.integers(0, MS),
            "hinge_tokens": st.integers(0, 8),
            "b2": st.integers(0, MS // 10),
            "b3": st.integers(0, MS // 10),
            "b4": st.integers(0, MS // 10),
            "b5": st.integers(0, MS),
            "host": st.integers(0, 20 * MS),
        }
    )
    return st.one_of(grid, every)


def _ask(at: int, sizes: tuple[int, int], stay: int | None, limit: int, flags: tuple[bool, int], prefix: int) -> Ask:
    prompt, output = sizes
    by_length, priority = flags
    shared = min(prefix, prompt)
    runs = [(1000, shared), (5000 + 100 * at, prompt - shared)] if shared else []
    return Ask(
        at=at,
        prompt=prompt,
        output=output,
        cancel=None if stay is None else at + stay,
        max_tokens=limit,
        by_length=by_length,
        priority=priority,
        runs=tuple(run for run in runs if run[1]),
    )


def asks(lasting: bool = False) -> st.SearchStrategy[Ask]:
    """One request; ties on a grid, idle gaps, early leavers, shared prefixes."""
    scale = 10 if lasting else 1
    short, long = st.integers(1, 8 * scale), st.integers(2, 24)
    return st.builds(
        _ask,
        at=st.one_of(st.just(0), st.integers(0, 12).map(lambda n: 10 * n), st.integers(0, 150 * scale)),
        sizes=st.tuples(st.one_of(short, long), st.integers(1, 12 * scale)),
        stay=st.integers(-900 * scale, 150 * scale).map(lambda stay: stay if stay >= 0 else None),
        limit=st.sampled_from([-1] * 6 + [1, 5, 20, 60]),
        flags=st.tuples(st.booleans(), st.integers(0, 2)),
        prefix=st.sampled_from([0, 0, 8, 20]),
    )


def _world(options: dict[str, Any], step_time: dict[str, int], requests: list[Ask], gap: int, keyed: bool) -> World:
    """Join the parts: a pause before the last requests, arrival times as keys or none, prefixes or none."""
    pause_from = len(requests) - len(requests) // 3
    placed = []
    for number, ask in enumerate(requests):
        later = gap if number >= pause_from else 0
        at = ask.at + later
        cancel = None if ask.cancel is None else ask.cancel + later
        key = round(at * MS) if keyed else 0
        runs = ask.runs if options["shared_prefixes"] else ()
        placed.append(replace(ask, at=at, cancel=cancel, arrival_time=key, runs=runs))
    return World(options, step_time, tuple(placed))


def worlds(lasting: bool = False) -> st.SearchStrategy[World]:
    """Small worlds; those that last have answers long enough for an engine to jump."""
    return st.builds(
        _world,
        options=scheduler_options(lasting),
        step_time=step_times(),
        requests=st.lists(asks(lasting), min_size=2, max_size=12),
        gap=st.sampled_from([0, 0, 0, 3000]),
        keyed=st.booleans(),
    )


def tight_worlds() -> st.SearchStrategy[World]:
    """Worlds that last and in which several requests are evicted at a time."""

    def tighten(world: World) -> World:
        pool = max(2, world.usable_blocks // 3)
        return world.with_options(usable_blocks=pool, max_num_seqs=20, max_num_active_seqs=0, watermark=0.0)

    return worlds(lasting=True).map(tighten)


def any_worlds() -> st.SearchStrategy[World]:
    return st.one_of(worlds(), worlds(lasting=True))


@dataclass(frozen=True, slots=True)
class Instant:
    """A time to look at a run: near the end of its n-th step, or anywhere."""

    step: int
    offset: int

    def of(self, ends: list[int]) -> int:
        if not ends or self.step < 0:
            return max(0, -self.step * MS + self.offset)
        return max(0, ends[self.step % len(ends)] + self.offset)


def instants() -> st.SearchStrategy[Instant]:
    return st.builds(Instant, step=st.integers(-120, 400), offset=st.sampled_from([0, 0, -1, 1, -4 * MS, 5 * MS]))
