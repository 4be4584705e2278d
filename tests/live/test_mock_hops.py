"""How long requests were on their way to a mock server."""

import asyncio
import json

import pytest

from simcluster.live.clock import LiveClock
from simcluster.live.mock.hops import SENT, Hops, with_fields
from simcluster.units import PS_PER_NS


def test_a_way_is_measured_in_the_time_of_the_engines() -> None:
    async def main() -> None:
        clock = LiveClock(speed=0.1)
        hops = Hops(clock)
        assert hops.median_s() is None
        for wall_ms in (1, 3, 200):
            sent_ns = clock.origin_ns + 5_000_000
            body = with_fields(b'{"model":"m","prompt":[1]}', {"max_tokens": 4, SENT: sent_ns})
            hops.note(body, round((5_000_000 + wall_ms * 1_000_000) * 0.1) * PS_PER_NS)
        assert hops.median_s() == pytest.approx(0.0003, rel=0.01)
        for body in (b"", b"{}", b'{"x_sent_ns":1,"a":2}', b'{"x_sent_ns":"1"}', b'"x_sent_ns":5'):
            hops.note(body, 10**15)
        assert hops.median_s() == pytest.approx(0.0003, rel=0.01)

    asyncio.run(main())


def test_later_fields_hold() -> None:
    body = b'{"model":"m","max_tokens":7,"prompt":"a}"}'
    assert json.loads(with_fields(body, {"max_tokens": 3})) == {"model": "m", "max_tokens": 3, "prompt": "a}"}
