"""Figures about the engine and the SFS estimate: native loops, no Python call in what is measured."""

from functools import cache

import numpy as np

from simcluster import _native
from simcluster.bench.measure import Measured, cpu_s, ratio
from simcluster.bench.states import burst_view, decoding_engine, engines_for, run_states
from simcluster.bench.stepper import PlainStepper
from simcluster.bench.workload import engine_parts, requests

__all__ = [
    "against_cpp",
    "against_python",
    "core_rate",
    "core_seconds",
    "estimate_seconds",
    "python_step",
    "sfs_frontier",
    "sfs_snapshot",
    "sfs_snapshot_p99",
    "step_growth",
    "step_seconds",
]

_WARM = 1000  # requests per instance before anything is measured; an answer takes about 120 arrivals
_BATCH = 95  # of the plain Python stepper
_MANY_BLOCKS = 4_000_000


# ---- steps -------------------------------------------------------------------------------------------------------


def step_seconds(batch: int) -> float:
    """Return the CPU time of one decode step [s], none jumped over."""
    config, model = engine_parts()
    config.num_gpu_blocks = _MANY_BLOCKS
    engine = decoding_engine(config, model, batch)
    before = engine.num_steps
    seconds = cpu_s(engine.drain)
    return seconds / (engine.num_steps - before)


def step_growth(quick: bool) -> Measured:
    """Compare a decode step of 256 requests with one of 16."""
    pairs = [(step_seconds(256), step_seconds(16)) for _ in range(3 if quick else 9)]
    return Measured(ratio([a for a, _ in pairs], [b for _, b in pairs]), "40,000 steps each, none jumped over")


# ---- one instance against plain steppers -------------------------------------------------------------------------


def core_seconds(instances: int, warm: int, chunk: int, repetitions: int, *, fast: bool = True) -> list[float]:
    """Return the CPU time per request [s] of chunks of a run in steady state, round robin.

    Args:
        instances: how many.
        warm: requests before the first chunk.
        chunk: requests of a chunk.
        repetitions: chunks.
        fast: the engine as it is, or its plain stepping.
    """
    config, model = engine_parts()
    asked = requests(warm + chunk * repetitions, instances)
    engines = engines_for(config, model, instances, fast=fast)
    columns = (asked.prompt_tokens, asked.output_tokens, asked.at_ps)
    _native.bench_round_robin(engines, *columns, 0, warm)
    return [
        cpu_s(lambda k=k: _native.bench_round_robin(engines, *columns, warm + k * chunk, chunk)) / chunk  # type: ignore[misc]
        for k in range(repetitions)
    ]


@cache
def _fast_per_request(quick: bool) -> list[float]:
    return core_seconds(1, _WARM, 20_000 if quick else 100_000, 5)


def against_cpp(quick: bool) -> Measured:
    """Compare with the same engine without lockstep and jumps."""
    chunk = 2000 if quick else 10_000
    plain = core_seconds(1, _WARM, chunk, 5, fast=False)
    return Measured(ratio(plain, _fast_per_request(quick)), f"1 instance, 5 x {chunk:,} requests stepped")


def against_python(quick: bool) -> Measured:
    """Compare with the stepper in plain Python."""
    chunk = 200 if quick else 1000
    config, model = engine_parts()
    asked = requests(_WARM + 5 * chunk, 1)
    rows = list(zip(asked.prompt_tokens.tolist(), asked.output_tokens.tolist(), asked.at_ps.tolist(), strict=True))
    stepper = PlainStepper(config, model)

    def run(first: int, count: int) -> None:
        for number, (prompt, output, at) in enumerate(rows[first : first + count], first):
            stepper.advance_to(at)
            stepper.submit(number, prompt, output, at)

    run(0, _WARM)
    plain = [cpu_s(lambda k=k: run(_WARM + k * chunk, chunk)) / chunk for k in range(5)]  # type: ignore[misc]
    return Measured(ratio(plain, _fast_per_request(quick)), f"1 instance, 5 x {chunk:,} requests stepped")


def python_step(quick: bool) -> Measured:
    """Time a decode step of the plain Python stepper [us]."""
    config, model = engine_parts()
    stepper = PlainStepper(config, model)
    for number in range(_BATCH):
        stepper.submit(number, 512, 30_000, 0)
    period, steps = 10**10, 300 if quick else 1000
    at = 100 * period
    stepper.advance_to(at)
    values = []
    for _ in range(5):
        before, at = stepper.num_steps, at + steps * period
        seconds = cpu_s(lambda at=at: stepper.advance_to(at))  # type: ignore[misc]
        values.append(seconds / (stepper.num_steps - before) * 1e6)
    return Measured(tuple(values), f"5 x about {steps:,} steps of {_BATCH} decodes")


# ---- many instances ----------------------------------------------------------------------------------------------


def core_rate(instances: int, quick: bool) -> Measured:
    """Return requests per CPU-second, round robin in steady state."""
    chunk = 20 * instances if quick and instances > 100 else 20_000 if quick else 400_000
    warm = (100 if quick and instances > 100 else _WARM) * instances
    seconds = core_seconds(instances, warm, chunk, 3 if quick else 5)
    size = f"{instances:,} instances, {len(seconds)} x {chunk:,} requests after {warm:,}"
    return Measured(tuple(1 / each for each in seconds), size)


# ---- SFS ---------------------------------------------------------------------------------------------------------


def estimate_seconds(running: int, waiting: int, repeats: int, *, anew: bool) -> float:
    """Return the CPU time of an SFS estimate [s], for a prompt of 512 tokens.

    Args:
        running: running requests of the instance.
        waiting: waiting ones.
        repeats: how many estimates.
        anew: read the snapshot before each; else ask the same view again and again.
    """
    config, model = engine_parts(max_num_batched_tokens=2048)
    view, snapshot, at = burst_view(config, model, running, waiting)
    _native.bench_estimates(view, snapshot, 512, 256, at, 1)
    used = snapshot if anew else None
    return cpu_s(lambda: _native.bench_estimates(view, used, 512, 256, at, repeats)) / repeats


def sfs_snapshot(quick: bool) -> Measured:
    """Time an estimate from a snapshot, parsed anew [us]."""
    repeats = 200 if quick else 5000
    values = tuple(estimate_seconds(128, 50, repeats, anew=True) * 1e6 for _ in range(9))
    return Measured(values, f"128 running and 50 waiting, 2,048 tokens a step, 9 x {repeats:,} estimates")


def sfs_frontier(quick: bool) -> Measured:
    """Time a further estimate from the same snapshot [ns]."""
    repeats = 1000 if quick else 50_000
    values = tuple(estimate_seconds(128, 50, repeats, anew=False) * 1e9 for _ in range(9))
    return Measured(values, f"128 running and 50 waiting, 2,048 tokens a step, 9 x {repeats:,} estimates")


def sfs_snapshot_p99(quick: bool) -> Measured:
    """Return the 99th percentile over states of an estimate from a snapshot [us].

    The values are those of the smallest, the middle and the largest of three times per state.
    """
    count, every, repeats = (100, 5, 20) if quick else (2000, 5, 50)
    config, model = engine_parts()
    asked = requests(2 * _WARM + count * every, 1, 0.95)
    rows = list(zip(asked.prompt_tokens.tolist(), asked.output_tokens.tolist(), asked.at_ps.tolist(), strict=True))
    times: list[list[float]] = []
    for view, snapshot, at in run_states(config, model, rows, 2 * _WARM, every):
        times.append(
            [
                cpu_s(lambda: _native.bench_estimates(view, snapshot, 512, 256, at, repeats)) / repeats  # noqa: B023
                for _ in range(3)
            ]
        )
    values = np.percentile(np.sort(times, axis=1) * 1e6, 99, axis=0)
    return Measured(tuple(values.tolist()), f"{len(times):,} states, each 3 x {repeats} estimates")
