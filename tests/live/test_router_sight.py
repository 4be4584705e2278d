"""What a live router sees: shared memory, its own streams and gauges; how old a view may be (C031, C038)."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_helpers import MS, config, u_step
from mock_servers import COLUMNS
from simcluster import _native
from simcluster.live.endpoints import Endpoint
from simcluster.live.router.dispatcher import Dispatcher
from simcluster.live.router.gauges import Gauges, read_gauges
from simcluster.live.router.own import OwnRequests
from simcluster.live.router.sight import FRESH, OLD, USABLE, LiveSight
from simcluster.live.router.streams import Others, OwnStreams, others_of
from simcluster.request import Request
from simcluster.routers.base import ClusterView
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_NS, PS_PER_S
from simcluster.world import World
from small_cluster import make_world, scenario_data

S = PS_PER_S


@pytest.fixture
def name() -> str:
    return f"sight-{os.getpid()}"


def world_of(folder: Path, instances: int, **sections: Any) -> tuple[Scenario, World]:
    return make_world(folder, COLUMNS, scenario_data(instances, **sections))


def dispatcher(
    folder: Path, sources: list[str], policy: str = "sfs", live: dict[str, Any] | None = None
) -> tuple[Dispatcher, LiveSight]:
    """Return a router whose clock is the test's, with snapshots since CLOCK_MONOTONIC's 0."""
    scenario, world = world_of(folder, len(sources), live=live or {})
    endpoints = [Endpoint(None, *each.split(":")) for each in sources]
    made: list[LiveSight] = []

    def build(view: ClusterView, own: OwnRequests) -> LiveSight:
        mean = [(20, 6)] * len(sources)
        made.append(LiveSight(view.instances, view.views, own, endpoints, scenario.live, mean, 0))
        return made[0]

    return Dispatcher(world, scenario, policy, build), made[0]


def request(number: int, at_ps: int, instances: int, prompt: int = 20, output: int = 5) -> Request:
    return Request(
        index=number,
        arrival_ps=at_ps,
        prompt_tokens=np.full(instances, prompt),
        max_tokens=-1,
        priority=0,
        slo_ttft_ps=S,
        predicted_output_tokens=np.full(instances, output),
        predicted_utility=np.full(instances, 0.5),
        predicted_quality=np.full(instances, 0.5),
    )


# ---- gauges


def test_a_renamed_gauge_is_found_and_an_unknown_one_is_not_zero() -> None:
    """C031."""
    new = read_gauges('vllm:kv_cache_usage_perc{engine="0"} 0.75\n')
    old = read_gauges('vllm:gpu_cache_usage_perc{engine="0"} 0.75\n')
    assert (new.kv_usage, old.kv_usage) == (0.75, 0.75)
    assert read_gauges("other 1\n") == Gauges()
    assert read_gauges("vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running NaN\n") == Gauges()


def test_the_engines_of_one_server_are_added_up() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{k}"}} {k + 1}.0\nvllm:num_requests_waiting{{engine="{k}"}} 2.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{k}"}} 0.{k}\n'
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="500",engine="{k}"}} 1.0\n'
        for k in range(2)
    )
    assert read_gauges(text + "broken{ line\n") == Gauges(3, 4, 0.05, 500, 16)


def test_what_is_beyond_the_own_requests_belongs_to_others() -> None:
    assert others_of(Gauges(running=5, waiting=3, kv_usage=0.2), 2, 4) == Others(3, 1, 0.2)
    assert others_of(Gauges(running=1, waiting=0), 0, 4) == Others(0, 0, None)  # own ones are still on their way
    assert others_of(Gauges(), 3, 3) == Others()


# ---- own streams


def test_own_streams_make_the_snapshot_that_the_engine_would(tmp_path: Path) -> None:
    """Two requests of 20 and 30 tokens: after the first step both have a token, and the engine goes on as it does."""
    _, world = world_of(tmp_path, 1)
    spec = world.instances[0]
    engine = _native.Engine(spec.engine, spec.believed)
    own = OwnRequests(world.instances)
    view = _native.InstanceView(spec.engine, spec.believed, 6, True)
    streams = OwnStreams(spec, 20, 6)
    for number, prompt in enumerate((20, 30)):
        engine.submit(number, prompt, 5, 0)
        own.sent(request(number, 0, 1, prompt), 0, 0, view)
    engine.advance_to(60 * MS)  # 10 + 50 ms
    for each in own.open[0].values():
        each.tokens = 1
    seen, real = streams.snapshot(own.open[0], 60 * MS, Others()), engine.snapshot()
    assert seen.requests[:, [0, 1, 2, 3, 5]].tolist() == real.requests[:, [0, 1, 2, 3, 5]].tolist()
    assert seen.num_free_blocks == real.num_free_blocks
    probe = (99, 10, 3, 61 * MS)
    views = [_native.InstanceView(spec.engine, spec.believed, 5, True) for _ in range(2)]
    views[0].refresh(seen)
    views[1].refresh(real)
    assert views[0].simulate_first_token(*probe) == views[1].simulate_first_token(*probe)


def test_a_prompt_in_work_is_as_far_as_the_believed_engine_would_be(tmp_path: Path) -> None:
    scenario, world = make_world(
        tmp_path, COLUMNS, scenario_data([{"engine": {"max_num_batched_tokens": 64, "max_num_seqs": 8}}])
    )
    spec = world.instances[0]
    own = OwnRequests(world.instances)
    view = _native.InstanceView(spec.engine, spec.believed, 6, True)
    streams = OwnStreams(spec, 20, 6)
    own.sent(request(1, 0, 1, 10, 50), 0, 0, view)
    own.sent(request(2, 0, 1, 300, 5), 0, 0, view)
    own.open[0][1].tokens = 1
    first = streams.snapshot(own.open[0], 74 * MS, Others())  # a step of 64 tokens: 10, and 54 of the 300
    assert first.requests[:, [0, 3]].tolist() == [[1, 10], [2, 54]]
    own.open[0][1].tokens = 2
    second = streams.snapshot(own.open[0], 148 * MS, Others())  # 1 and 63 more
    assert second.requests[:, [0, 3]].tolist() == [[1, 11], [2, 117]]
    assert scenario.name == "small"


def test_requests_of_others_take_their_place(tmp_path: Path) -> None:
    _, world = world_of(tmp_path, 1)
    streams = OwnStreams(world.instances[0], 20, 6)
    seen = streams.snapshot({}, S, Others(3, 2, 0.25))
    assert (seen.num_running, seen.num_waiting, seen.num_free_blocks) == (3, 2, 750)
    assert seen.requests[:, 1].tolist() == [20] * 5


# ---- tiers


def test_a_stale_gauge_is_unknown_and_the_own_ledger_decides(tmp_path: Path) -> None:
    """C038: A said 99 % full 30 s ago, B 8 running just now. A has nothing open, so it gets the next request."""
    router, sight = dispatcher(tmp_path, ["metrics", "metrics"])
    sight.gauges_came(0, Gauges(0, 0, 0.99, 1001, 16), 0)
    sight.gauges_came(1, Gauges(8, 0, 0.5, 1001, 16), 30 * S - S // 10)
    sight.look(30 * S)
    assert (sight.tiers, sight.sources) == ([OLD, FRESH], ["streams", "metrics"])
    made = router.decide(request(1, 30 * S, 2), 30 * S, (True, True))
    assert (made.instance, made.fallback, made.source) == (0, "in_flight", "streams")
    assert sight.ages_ps[0] == 30 * S


def test_without_a_usable_view_rates_decide_where_the_scenario_says_so(tmp_path: Path) -> None:
    router, sight = dispatcher(tmp_path, ["metrics", "none"], live={"when_old": "lps"})
    sight.gauges_came(0, Gauges(0, 0, 0.0), 0)
    sight.look(S // 10)
    made = router.decide(request(1, S // 10, 2), S // 10, (True, True))
    assert (made.fallback, sight.tiers) == ("lps", [FRESH, OLD])
    made = router.decide(request(2, S // 10, 2), S // 10, (True, False))
    assert (made.instance, made.fallback, made.source) == (0, "", "metrics")


def test_a_busy_engine_that_is_silent_grows_stale_and_an_idle_one_does_not(tmp_path: Path, name: str) -> None:
    router, sight = dispatcher(tmp_path, [f"shm:{name}"], live={"fresh_s": 1e-9, "usable_s": 3600.0})
    sight.look(now_ps())
    assert (sight.tiers, sight.ages_ps) == ([OLD], [-1])  # nobody publishes yet
    options = config(async_scheduling=False)
    engine = _native.Engine(options, u_step())
    writer = _native.SnapshotWriter(name, 16, options)
    try:
        writer.publish(engine, _native.monotonic_ns())
        while sight.sources != ["shm"]:  # a new writer is met some 10 ms later
            sight.look(now_ps())
        assert sight.tiers == [FRESH]
        engine.submit(5, 20, 5, 0)
        engine.advance_to(1 * MS)
        writer.publish(engine, _native.monotonic_ns())
        sight.look(now_ps())
        assert sight.tiers == [USABLE]
        made = router.decide(request(1, now_ps(), 1), now_ps(), (True,))
        assert (made.fallback, made.source) == ("stale", "shm")
    finally:
        writer.close()
    sight.look(now_ps())
    assert sight.tiers == [USABLE]  # of a writer that has gone the last word counts until it is too old


def test_an_old_snapshot_gives_way_to_the_own_ledger_and_comes_back(tmp_path: Path, name: str) -> None:
    """What the router sent meanwhile is counted once, whichever source tells the state."""
    router, sight = dispatcher(tmp_path, [f"shm:{name}"], live={"fresh_s": 1e-9, "usable_s": 1e-9})
    options = config(async_scheduling=False)
    engine = _native.Engine(options, u_step())
    writer = _native.SnapshotWriter(name, 16, options)
    view = router.view.views[0]
    try:
        writer.publish(engine, _native.monotonic_ns())
        while sight.sources != ["shm"]:
            sight.look(now_ps())
        router.sent(request(7, now_ps(), 1), 0, now_ps())
        assert (sight.sources, view.num_resident) == (["shm"], 1)
        engine.submit(7, 20, 5, 0)
        engine.advance_to(1 * MS)
        writer.publish(engine, _native.monotonic_ns())
        sight.look(now_ps())  # busy and silent for over a nanosecond
        assert (sight.sources, sight.tiers, view.num_resident) == (["streams"], [OLD], 1)
        engine.drain()
        engine.submit(8, 20, 5, engine.now)
        engine.cancel(8, engine.now)
        engine.drain()
        writer.publish(engine, _native.monotonic_ns())
        router.ended(7, 0, now_ps())
        sight.look(now_ps())
        assert (sight.sources, sight.tiers, view.num_resident) == (["shm"], [FRESH], 0)
    finally:
        writer.close()


def now_ps() -> int:
    return _native.monotonic_ns() * PS_PER_NS
