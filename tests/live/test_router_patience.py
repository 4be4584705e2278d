"""Deadlines of a router that does not get to run: what came meanwhile is not late."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from router_rig import Rig, Upstream, answer, rig
from simcluster.live.router.patience import Patience


def with_patience(check: Callable[[Patience], Awaitable[None]]) -> None:
    async def main() -> None:
        patience = Patience()
        try:
            await check(patience)
        finally:
            patience.close()

    asyncio.run(main())


def test_time_in_which_the_loop_does_not_run_is_left_out() -> None:
    async def check(patience: Patience) -> None:
        clock = asyncio.get_running_loop().time
        begin, now = clock(), patience.now_s()
        await asyncio.sleep(0.2)
        for _ in range(3):
            time.sleep(0.3)
            await asyncio.sleep(0)
        assert clock() - begin > 1.1
        assert 0.2 < patience.now_s() - now < 0.5
        lost = True
        while lost:  # until this machine leaves the loop alone for a moment
            begin, now = clock(), patience.now_s()
            await asyncio.sleep(0.2)
            lost = abs(clock() - begin - (patience.now_s() - now)) > 1e-3

    with_patience(check)


def test_a_limit_ends_a_block_that_takes_too_long() -> None:
    async def check(patience: Patience) -> None:
        clock = asyncio.get_running_loop().time
        begin = clock()
        with pytest.raises(TimeoutError):
            async with patience.limit(0.1):
                await asyncio.sleep(100)
        assert clock() - begin >= 0.1
        async with patience.limit(0.1) as limit:
            await asyncio.sleep(0.05)
            limit.set_anew(50)
            await asyncio.sleep(0.15)  # longer than it was first

    with_patience(check)


def test_a_limit_waits_for_what_takes_several_rounds_of_a_loop_that_hardly_runs() -> None:
    async def check(patience: Patience) -> None:
        async with patience.limit(1.0):
            for _ in range(6):
                time.sleep(0.3)
                await asyncio.sleep(0)

        async def take_too_long() -> None:
            async with patience.limit(0.3):
                time.sleep(0.4)
                await asyncio.sleep(100)

        with pytest.raises(TimeoutError):
            await take_too_long()

    with_patience(check)


@pytest.mark.parametrize("stream", [True, False])
def test_a_router_that_did_not_run_asks_nobody_else(tmp_path: Path, *, stream: bool) -> None:
    async def later(upstream: Upstream, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await answer(upstream, request)

    async def check(rig: Rig) -> None:
        for each in rig.upstreams:
            each.behave = later
        task = asyncio.create_task(rig.post({"stream": stream}))
        while not any(each.requests for each in rig.upstreams):
            await asyncio.sleep(0.01)
        time.sleep(1.5)
        assert (await task)[0] == 200
        assert [each.attempts for each in rig.outcomes] == [1]

    rig(tmp_path, check, live={"first_byte_timeout_s": 1.0, "whole_timeout_s": 1.0, "stall_timeout_s": 1.0})


def test_an_answer_does_not_stall_while_its_router_does_not_run(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].gap_s = 0.1
        task = asyncio.create_task(rig.stream())
        while not rig.upstreams[0].requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)
        time.sleep(2.0)
        assert (await task)[0] == 200
        assert [each.status for each in rig.outcomes] == ["finished"]

    rig(tmp_path, check, instances=1, live={"stall_timeout_s": 0.8})
