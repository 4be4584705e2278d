"""A snapshot built from plain rows is taken apart as it was put together, and a wrong one is refused."""

from typing import Any

import numpy as np
import pytest

from engine_helpers import MS, Ask, config, start, u_step
from simcluster import _native

RUNNING = (7, 20, 3, 500, 23, 1, 1, 0, 4, 2, 0, 0, 0, 0, 1, 0)
WAITING = (9, 30, 0, 400, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0)
BATCH: tuple[int, list[tuple[int, int]], list[int], list[tuple[int, int, int]]] = (90 * MS, [], [22], [(0, 1, 3)])


def _state(**changes: Any) -> _native.Snapshot:
    state: dict[str, Any] = {
        "taken_at": 95 * MS,
        "boundary": 90 * MS,
        "intake": 90 * MS,
        "waiting_for_batch": True,
        "unflushed_ends": False,
        "capacity_bound": False,
        "num_executed": 0,
        "last_prefill": -1,
        "num_free_blocks": 98,
        "num_running": 1,
        "requests": [RUNNING, WAITING],
        "in_flight": [BATCH],
    }
    return _native.Snapshot.from_state(**(state | changes))


def test_the_state_can_be_read_back() -> None:
    snapshot = _state()
    assert (snapshot.taken_at, snapshot.boundary, snapshot.intake) == (95 * MS, 90 * MS, 90 * MS)
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_free_blocks) == (1, 1, 98)
    assert snapshot.request_ids == [7, 9]
    assert snapshot.requests.tolist() == [[7, 20, 3, 23, 1, 2, 500, 1], [9, 30, 0, 0, 0, 0, 400, 0]]


def test_the_batch_in_flight_goes_on_from_its_start() -> None:
    """The decode began at 90 ms and takes 11; then both requests are in the next batch."""
    engine = _state().restore(config(async_scheduling=False, usable_blocks=100), u_step(), [(5, False), (1, False)])
    engine.drain()
    steps = [(row[1] // MS, row[3]) for row in engine.take_steps().tolist()]
    assert steps[0] == (101, 1 + 30)


def test_an_engines_own_snapshot_is_the_captured_one() -> None:
    engine = start(config(), Ask(at=0, prompt=20, output=30), Ask(at=5, prompt=20, output=30))
    engine.advance_to(200 * MS)
    own, captured = engine.snapshot(), _native.Snapshot.capture(engine)
    assert own.requests.tolist() == captured.requests.tolist()
    assert (own.boundary, own.taken_at) == (captured.boundary, captured.taken_at)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_running": 3}, "num_running"),
        ({"num_running": -1}, "num_running"),
        ({"in_flight": [(0, [], [], [(2, 1, 0)])]}, "an entry names a request that is not there"),
        ({"in_flight": [(0, [], [], [(-2, 1, 0)])]}, "an entry names a request that is not there"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _state(**changes)


def test_the_loops_period_and_the_noise_can_be_asked_for() -> None:
    model = u_step(host=5 * MS)
    assert (model.period(11 * MS, False), model.period(11 * MS, True), model.period(2 * MS, True)) == (
        16 * MS,
        11 * MS,
        5 * MS,
    )
    twice = _native.StepNoise(np.array([2 * 2**32], dtype=np.int64), 1, 2)
    assert twice.apply(11 * MS, 3) == 22 * MS
