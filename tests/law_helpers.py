"""How a law is tried on many random worlds, and how a run is read.

The same worlds are tried on every run. SIMCLUSTER_LAW_SCALE=10 tries ten times as many, at random.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, settings

from simcluster import _native
from simcluster._native import EventKind
from strategies import World

Row = tuple[int, ...]  # (id, at, value, kind, reason)

SCALE = int(os.environ.get("SIMCLUSTER_LAW_SCALE", "1"))
LAST = (EventKind.finished, EventKind.rejected, EventKind.failed)


both_loops = pytest.mark.parametrize("loop", [False, True], ids=["sync", "async"])
stepping_and_fast = pytest.mark.parametrize("fast", [False, True], ids=["stepping", "fast"])


def law(examples: int = 100) -> Callable[[Any], Any]:
    """Run a law on both loops, so many random worlds each."""
    limits = settings(
        max_examples=examples * SCALE,
        derandomize=SCALE == 1,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    return lambda test: both_loops(limits(test))


def drain(engine: _native.Engine, world: World) -> bool:
    """Run to the end; False if requests evict each other for ever, which only some worlds may do."""
    try:
        engine.drain()
    except _native.LivelockError:
        assert world.may_livelock
        return False
    return True


def events_of(engine: _native.Engine) -> list[Row]:
    return [tuple(row) for row in engine.take_events().tolist()]


def steps_of(engine: _native.Engine) -> list[Row]:
    return [tuple(row) for row in engine.take_steps().tolist()]


def history(world: World) -> tuple[_native.Engine, list[Row], list[Row]]:
    """Run a world to its end: (engine, events, steps); a livelock is another world's matter."""
    engine = world.engine()
    assume(drain(engine, world))
    return engine, events_of(engine), steps_of(engine)


def step_ends(world: World) -> list[int]:
    """Return when the steps of a run end, even of one that would go on for ever."""
    engine = world.driven(fast=False).engine()
    drain(engine, world)
    return [row[2] for row in steps_of(engine)][:500]


def of_kind(events: list[Row], *kinds: EventKind) -> list[Row]:
    return [event for event in events if event[3] in kinds]


def ended_ids(events: list[Row]) -> list[int]:
    return [event[0] for event in of_kind(events, *LAST)]
