"""When requests reach the engine of a mock server."""

import asyncio
import json
from pathlib import Path

import pytest

from simcluster.live.clock import LiveClock
from simcluster.live.mock.hosted_engine import HostedEngine
from simcluster.live.mock.transit import REACH, Transit, with_fields
from simcluster.units import PS_PER_S
from small_cluster import make_world, scenario_data


def body_for(reach_ns: int) -> bytes:
    return with_fields(b'{"model":"m","prompt":[1]}', {"max_tokens": 4, REACH: reach_ns})


def test_requests_reach_an_engine_when_they_say_and_late_ones_at_once() -> None:
    async def main() -> None:
        clock = LiveClock(speed=0.1)
        transit = Transit(clock)
        assert transit.late_share is None
        soon_ns = clock.origin_ns + 5_000_000_000
        assert transit.reach_ps(body_for(soon_ns)) == 5 * PS_PER_S // 10
        assert transit.late_share == 0
        for reach_ns in (clock.origin_ns, 10**18 - 1):  # it has passed; nobody can mean it
            before = clock.now_ps()
            assert before <= transit.reach_ps(body_for(reach_ns)) <= clock.now_ps()
        assert (transit.timed, transit.late) == (3, 2)
        for body in (b"", b"{}", b'{"x_reach_ns":1,"a":2}', b'{"x_reach_ns":"1"}', b'"x_reach_ns":5', body_for(10**18)):
            before = clock.now_ps()
            assert before <= transit.reach_ps(body) <= clock.now_ps()
        assert transit.timed == 3

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_the_engine_starts_when_a_request_reaches_it(tmp_path: Path, *, leaves: bool) -> None:
    _, world = make_world(tmp_path, {"arrival_s": [0.0], "prompt_tokens": [8], "output_tokens": [2]}, scenario_data(1))

    async def main() -> None:
        clock = LiveClock()
        spec = world.instances[0]
        hosted = HostedEngine(spec, world.true_models[0], clock, lambda _: None)
        reach_ps = clock.now_ps() + PS_PER_S // 20
        sent = hosted.submit("a", 8, 2, -1, ends_by_length=True, reach_ps=reach_ps)
        assert sent is not None
        key, stream = sent
        if leaves:
            hosted.cancel(key)
            await asyncio.sleep(0.1)
            assert (hosted.num_open, hosted.engine.num_steps, stream.scheduled_ps) == (0, 0, None)
        else:
            async with asyncio.timeout(10):
                while stream.finish is None:
                    await stream.wait()
            assert stream.scheduled_ps == spec.engine_arrival_ps(reach_ps, 8)
            assert stream.tokens == 2
        hosted.close()

    asyncio.run(main())


def test_later_fields_hold() -> None:
    body = b'{"model":"m","max_tokens":7,"prompt":"a}"}'
    assert json.loads(with_fields(body, {"max_tokens": 3})) == {"model": "m", "max_tokens": 3, "prompt": "a}"}
