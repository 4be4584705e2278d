"""The beginning of a file of the log: a view made anew from it estimates what the old one does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mock_servers import COLUMNS
from simcluster import _native
from simcluster.engine_options import with_options
from simcluster.live.router.dispatcher import Dispatcher
from simcluster.live.router.log.journal import DecisionLog
from simcluster.live.router.log.replay import replay
from simcluster.live.router.sight import FRESH, Sight
from simcluster.request import Request
from small_cluster import make_world, scenario_data

MS = 10**9
PROMPT, OUTPUT = 100, 40


class Bench:
    """A dispatcher with a log of which every decision begins a file, and the snapshots that a test makes up."""

    def __init__(self, folder: Path) -> None:
        self.scenario, self.world = make_world(folder, COLUMNS, scenario_data(2))
        self.log = DecisionLog(folder / "log", self.world, self.scenario, "sfs", rows=1)
        self.dispatcher = Dispatcher(
            self.world, self.scenario, "sfs", lambda view, own: Sight(view.views, own), self.log
        )
        self.log.begun(self.dispatcher)
        self.dispatcher.sight.tiers[:] = [FRESH, FRESH]

    def decide(self, number: int, now_ms: int) -> Request:
        arrays = [np.full(2, value, dtype=np.int64) for value in (PROMPT + number, OUTPUT + number)]
        request = Request(number, now_ms * MS, arrays[0], -1, 0, -1, arrays[1], np.array([0.5, 0.5]))
        self.dispatcher.decide(request, now_ms * MS, (True, True))
        return request

    def send(self, number: int, now_ms: int) -> None:
        self.dispatcher.sent(self.decide(number, now_ms), 0, now_ms * MS)

    def show(self, now_ms: int, *running: int, source: str = "shm") -> None:
        """Show what an engine that is known by ids alone says: these requests decode."""
        rows = [(k, PROMPT + k, 5, 3000, PROMPT + k + 4, 0, 0, 0, 5, 8, 0, 0, 0, 0, 1, 0) for k in running]
        shot = _native.Snapshot.from_state(
            taken_at=now_ms * MS,
            boundary=now_ms * MS,
            intake=-1,
            waiting_for_batch=False,
            unflushed_ends=False,
            capacity_bound=False,
            num_executed=0,
            last_prefill=-1,
            num_free_blocks=1000 - 8 * len(rows),
            num_running=len(rows),
            requests=rows,
            in_flight=[],
        )
        self.dispatcher.sight.show(0, source, shot)
        self.log.shown(0, source, shot)


def seen_and_gone(bench: Bench) -> None:
    bench.show(30, 1, 2)
    bench.show(40, 2)  # the engine has ended 1, its last token is still on its way to the router
    assert bench.dispatcher.view.views[0].num_dispatched_since == 0


def a_later_one_seen_and_gone(bench: Bench) -> None:
    bench.show(30, 2)  # 1 is still on its way
    bench.show(40)
    assert bench.dispatcher.view.views[0].num_dispatched_since == 1


def another_source(bench: Bench) -> None:
    bench.show(30, 1, 2)
    bench.show(40, 2, source="streams")  # which may not know of 1 yet
    assert bench.dispatcher.view.views[0].num_dispatched_since == 1


def came_and_went(bench: Bench) -> None:
    bench.show(30)
    bench.decide(6, 31)  # an estimate behind both, which are on their way
    bench.dispatcher.ended(1, 0, 35 * MS)
    bench.dispatcher.ended(2, 0, 36 * MS)


def ended_since(bench: Bench) -> None:
    bench.show(30, 1, 2)
    bench.dispatcher.ended(1, 0, 35 * MS)  # the snapshot still has it


def sent_since(bench: Bench) -> None:
    bench.show(30, 1, 2)
    bench.send(3, 31)


def sent_and_ended_since(bench: Bench) -> None:
    bench.show(30, 1)
    bench.send(3, 31)
    bench.dispatcher.ended(3, 0, 32 * MS)
    bench.dispatcher.ended(2, 0, 33 * MS)


def never_shown(bench: Bench) -> None:
    bench.dispatcher.first_token(1, 0, 30 * MS)


def other_options(bench: Bench) -> None:
    bench.show(30, 1, 2)
    options = with_options(bench.world.instances[0].engine, max_num_seqs=1)
    bench.dispatcher.reconfigure(0, options)
    bench.send(3, 31)
    bench.show(40, 3)


@pytest.mark.parametrize(
    "happens",
    [
        seen_and_gone,
        a_later_one_seen_and_gone,
        another_source,
        came_and_went,
        ended_since,
        sent_since,
        sent_and_ended_since,
        never_shown,
        other_options,
    ],
)
def test_a_view_made_anew_at_any_file_estimates_the_same(tmp_path: Path, happens: Callable[[Bench], Any]) -> None:
    bench = Bench(tmp_path)
    bench.send(1, 10)
    bench.send(2, 20)
    happens(bench)
    for number in (7, 8):
        bench.decide(number, 50 + number)
    bench.log.close()
    whole = replay(tmp_path / "log")
    assert (whole.first_difference, whole.identical) == (None, bench.dispatcher.num_decisions)
    for number in range(2, whole.files + 1):
        report = replay(tmp_path / "log", number)
        assert report.first_difference is None
        assert report.identical == report.decisions > 0
