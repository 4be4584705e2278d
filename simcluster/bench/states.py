"""Engines and views in the states that figures are about, from native parts alone.

Nothing but the standard library and the native module is imported here, since these also run under callgrind, where
starting a program is slow.
"""

from array import array
from collections.abc import Iterator

from simcluster import _native

__all__ = ["View", "burst_view", "decoding_engine", "engines_for", "run_states"]

_UNIT = 2**32  # a factor of 1 in a table of step noise
_LONGEST_OUTPUT = 40_000
_MS = 10**9

View = tuple[_native.InstanceView, _native.Snapshot, int]
"""A view, the snapshot that it was last shown, and the instant [ps] of the next arrival."""


def engines_for(
    config: _native.SchedulerConfig, model: _native.StepTimeModel, count: int, *, fast: bool = True
) -> list[_native.Engine]:
    """Return so many idle engines."""
    return [_native.Engine(config, model, fast=fast) for _ in range(count)]


def decoding_engine(config: _native.SchedulerConfig, model: _native.StepTimeModel, batch: int) -> _native.Engine:
    """Return an engine in which so many requests decode for tens of thousands of steps.

    It has step noise of factor 1: durations stay, but every step has to be made, none is jumped over. `config` must
    have seats and KV blocks for them.
    """
    noise = _native.StepNoise(array("q", [_UNIT]), 0, 0)  # type: ignore[arg-type]  # any int64 buffer will do
    engine = _native.Engine(config, model, noise)
    for number in range(batch):
        engine.submit(number, 16, _LONGEST_OUTPUT, 0)
    while engine.num_running < batch or engine.num_steps < 100:
        engine.advance_to(engine.now + 10 * _MS)
    return engine


def burst_view(
    config: _native.SchedulerConfig, model: _native.StepTimeModel, running: int, waiting: int, prompt_tokens: int = 512
) -> View:
    """Return a router's view of an instance with so many requests running and waiting, all sent by this router.

    Nearly all decode, with different contexts; then prompts have come at once, and one step was made since, whose
    budget they exceed.
    """
    engine, view = _native.Engine(config, model), _native.InstanceView(config, model, 256, True)
    budget = config.max_num_batched_tokens
    # The step after the burst admits as many prompts, the last of them in part, as fit beside the decodes.
    admitted = next(k for k in range(running + 1) if k * prompt_tokens >= budget - (running - k)) if waiting else 0
    decodes, number, at = running - admitted, 0, 0

    def send(prompt: int, output: int) -> None:
        nonlocal number
        engine.submit(number, prompt, output, at)
        view.record_dispatch(number, prompt, output, at)
        number += 1

    for k in range(decodes):
        send(64 + 997 * k % 900, 1000 + 613 * k % 2000)
    while engine.num_running < decodes or engine.num_steps < 400:
        at += 10 * _MS
        engine.advance_to(at)
    for _ in range(admitted + waiting):
        send(prompt_tokens, 256)
    while engine.num_running < running or engine.num_pending:
        at += _MS
        engine.advance_to(at)
    if (engine.num_running, engine.num_waiting) != (running, waiting):
        raise ValueError(f"running {engine.num_running}, waiting {engine.num_waiting}; wanted {running}, {waiting}")
    snapshot = engine.snapshot()
    view.refresh(snapshot)
    return view, snapshot, at


def run_states(
    config: _native.SchedulerConfig,
    model: _native.StepTimeModel,
    requests: list[tuple[int, int, int]],
    first: int,
    every: int,
) -> Iterator[View]:
    """Run one instance and yield its router's view at every so manyth arrival from the first one that counts.

    Args:
        config: options.
        model: step times, known to the router.
        requests: (prompt tokens, output tokens, arrival [ps]).
        first: requests before this one only warm up.
        every: arrivals from one state to the next.
    """
    engine, view = _native.Engine(config, model), _native.InstanceView(config, model, 256, True)
    for number, (prompt, output, at) in enumerate(requests):
        engine.advance_to(at)
        if number >= first and (number - first) % every == 0:
            snapshot = engine.snapshot()
            view.refresh(snapshot)
            yield view, snapshot, at
        elif number % 8 == 0:  # so that the view forgets what has ended
            view.refresh(engine.snapshot())
        engine.submit(number, prompt, output, at)
        view.record_dispatch(number, prompt, output, at)
