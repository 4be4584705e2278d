"""When the client sends: at the trace's instants, after the ends that follow-ups wait for, and how late it was."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import run_command
from simcluster.live.alarm import Alarm
from simcluster.live.client.drive import Driver
from simcluster.live.client.prompts import prompt_ids
from simcluster.live.client.send import Outcome
from simcluster.live.compare.live_run import replay_clock
from simcluster.request import PrefixHashes
from simcluster.units import PS_PER_S
from simcluster.world import World
from small_cluster import make_world, scenario_data

S = PS_PER_S


class FakePace:
    """A clock that only sleeping and `work` move, so that a sending takes exactly as long as a test says."""

    def __init__(self) -> None:
        self.now = 0
        self._sleepers: list[tuple[int, asyncio.Future[None]]] = []

    def now_ps(self) -> int:
        return self.now

    def work(self, seconds: float) -> None:
        """Take time on the sender's own thread."""
        self.now += round(seconds * S)

    async def sleep_until(self, at_ps: int) -> None:
        if at_ps <= self.now:
            await asyncio.sleep(0)
            return
        done = asyncio.get_running_loop().create_future()
        self._sleepers.append((at_ps, done))
        await done

    async def run(self, work: Awaitable[list[Outcome]]) -> list[Outcome]:
        """Let time pass until some work is done: to the next sleeper whenever nobody has anything else to do."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if not task.done() and self._sleepers:
                self._sleepers.sort(key=lambda each: each[0])
                at_ps, done = self._sleepers.pop(0)
                self.now = max(self.now, at_ps)
                done.set_result(None)
        return task.result()


def world_of(folder: Path, arrivals_s: list[float], **columns: Any) -> World:
    n = len(arrivals_s)
    base = {
        "request_id": [f"r{k}" for k in range(n)],
        "arrival_s": arrivals_s,
        "prompt_tokens": [10] * n,
        "output_tokens": [5] * n,
    }
    return make_world(folder, base | columns, scenario_data())[1]


def drive(world: World, takes_s: Callable[[int], float], answer_s: float = 0.0) -> tuple[Driver, list[Outcome]]:
    """Send a world; each sending takes so long on the sender's thread, and each answer so long after it."""
    pace = FakePace()

    async def send(index: int, due_ps: int) -> Outcome:
        outcome = Outcome(index=index, due_ps=due_ps, sent_ps=pace.now)
        pace.work(takes_s(index))
        if answer_s:
            await pace.sleep_until(pace.now + round(answer_s * S))
        outcome.end_ps = pace.now
        return outcome

    async def main() -> tuple[Driver, list[Outcome]]:
        driver = Driver(world, pace, send)
        return driver, await pace.run(driver.run())

    return asyncio.run(main())


def test_c040_the_time_that_sending_takes_does_not_add_up(tmp_path: Path) -> None:
    driver, outcomes = drive(world_of(tmp_path, [0.5, 1.0, 1.5]), lambda _: 0.1)
    assert [each.sent_ps for each in outcomes] == [S // 2, S, 3 * S // 2]
    assert max(driver.lag_ps) == 0


def test_c040_a_late_send_does_not_shift_later_ones(tmp_path: Path) -> None:
    _, outcomes = drive(world_of(tmp_path, [0.5, 1.0, 1.5, 2.0]), lambda index: 0.7 if index == 0 else 0.0)
    assert [each.sent_ps / S for each in outcomes] == [0.5, 1.2, 1.5, 2.0]
    assert [each.due_ps / S for each in outcomes] == [0.5, 1.0, 1.5, 2.0]


def test_requests_are_sent_without_waiting_for_answers(tmp_path: Path) -> None:
    _, outcomes = drive(world_of(tmp_path, [0.5, 1.0, 1.5]), lambda _: 0.0, answer_s=60.0)
    assert [each.sent_ps / S for each in outcomes] == [0.5, 1.0, 1.5]
    assert [each.end_ps / S for each in outcomes if each.end_ps] == [60.5, 61.0, 61.5]


def test_a_follow_up_is_sent_when_the_earlier_one_has_ended_and_its_client_has_thought(tmp_path: Path) -> None:
    world = world_of(tmp_path, [0.0, 0.0, 0.2], after=[None, "r0", None], think_s=[None, 2.0, None])
    _, outcomes = drive(world, lambda _: 0.0, answer_s=1.0)
    sent = {str(world.request_id[each.index]): each.sent_ps / S for each in outcomes}
    assert sent == {"r0": 0.0, "r2": 0.2, "r1": 3.0}


def test_stopping_leaves_nothing_out_and_sends_nothing_more(tmp_path: Path) -> None:
    world = world_of(tmp_path, [0.0, 0.0, 50.0])

    async def main() -> list[Outcome]:
        pace = FakePace()

        async def send(index: int, due_ps: int) -> Outcome:
            outcome = Outcome(index=index, due_ps=due_ps, sent_ps=pace.now)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            return outcome

        task = asyncio.ensure_future(Driver(world, pace, send).run())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        return await task

    outcomes = asyncio.run(main())
    assert [(each.index, each.status) for each in outcomes] == [(0, "unfinished"), (1, "unfinished")]


def test_prompts_are_as_long_as_asked_for_and_differ_from_the_first_block_on(tmp_path: Path) -> None:
    world = world_of(tmp_path, [0.0, 0.1])
    one, other = prompt_ids(world, 0, 64), prompt_ids(world, 1, 64)
    assert len(one) == 64
    assert one == prompt_ids(world, 0, 100)[:64]
    assert all(100 <= each < 356 for each in one + other)
    assert one[:16] != other[:16]


def test_prompts_share_the_blocks_that_the_trace_says_are_shared(tmp_path: Path) -> None:
    plain = world_of(tmp_path, [0.0, 0.1], prompt_tokens=[40, 40])
    prefix = PrefixHashes(np.array([0, 2, 4]), np.array([0, 1, 0, 2]), 16)
    world = dataclasses.replace(plain, known=dataclasses.replace(plain.known, prefix=prefix))
    one, other = prompt_ids(world, 0, 40), prompt_ids(world, 1, 40)
    assert one[:16] == other[:16]
    assert one[16:32] != other[16:32]
    assert one[32:] != other[32:]


def test_an_alarm_rings_once_when_its_instant_has_come_and_can_be_moved_and_closed() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        rang: list[str] = []
        woken = asyncio.Event()
        one, other = Alarm(lambda: rang.append("one")), Alarm(lambda: (rang.append("other"), woken.set()))
        one.set(loop.time() + 3600)
        one.set(0.0)  # long ago
        other.set(loop.time() + 3600)
        other.set(start := loop.time() + 0.01)
        await woken.wait()
        assert loop.time() >= start
        one.set(0.0)
        one.set(None)
        other.close()
        other.close()
        one.close()
        await asyncio.sleep(0)
        return rang

    assert asyncio.run(main()) == ["one", "other"]


def test_c046_speed_scales_the_intervals_from_the_first_request_on(tmp_path: Path) -> None:
    world = world_of(tmp_path, [100.0, 102.0, 106.0])

    async def main() -> tuple[float, list[float]]:
        clock = replay_clock(world, 2.0)
        due = [clock.loop_time(int(at_ps)) for at_ps in world.known.arrival_ps]
        return due[0] - asyncio.get_running_loop().time(), [each - due[0] for each in due]

    wait_s, offsets_s = asyncio.run(main())
    assert wait_s <= 0.2, "and not 50 s"
    assert offsets_s == pytest.approx([0.0, 1.0, 3.0])
    for speed in (0, -2):
        assert run_command("live-compare", "quickstart", "--mock", "--speed", speed)[0] == 2
