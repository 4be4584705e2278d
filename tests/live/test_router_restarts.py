"""Servers that restart, publishers that die, clocks that jump: what the router believes of them follows."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_helpers import config
from router_rig import EVENTS, Rig, rig
from simcluster import _native

GAUGES = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}",engine="0"}} 1.0
"""


def test_a_publisher_that_restarts_with_other_blocks_is_followed(tmp_path: Path) -> None:
    name = f"restart-{os.getpid()}"

    async def check(rig: Rig) -> None:
        dispatcher = rig.server.core.dispatcher
        assert dispatcher.view.instances[0].engine.num_gpu_blocks == 1001  # as the card has it
        for blocks in (301, 77):
            options = config(async_scheduling=False, usable_blocks=blocks - 1)
            writer = _native.SnapshotWriter(name, 16, options)
            writer.publish(_native.Engine(options, dispatcher.view.instances[0].believed), _native.monotonic_ns())
            while dispatcher.view.instances[0].engine.num_gpu_blocks != blocks:
                assert (await rig.stream())[0] == 200
            assert (await rig.stream())[1] == b"".join(EVENTS)
            assert rig.decisions[-1].source == "shm"
            writer.close()
        await rig.stream()

    rig(tmp_path, check, instances=1, policy="sfs", changes=[{"snapshot": f"shm:{name}"}])


def test_a_remote_server_that_restarts_with_other_blocks_is_followed(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        dispatcher = rig.server.core.dispatcher
        for blocks in (301, 77):
            rig.upstreams[0].gauges = GAUGES.format(running=0, blocks=blocks)
            while dispatcher.view.instances[0].engine.num_gpu_blocks != blocks:
                await asyncio.sleep(0.005)
            assert (await rig.stream())[0] == 200
            assert rig.decisions[-1].source == "metrics"

    live = {"scrape_interval_s": 0.01}
    rig(tmp_path, check, instances=1, policy="sfs", live=live, changes=[{"snapshot": "metrics"}])


def test_requests_of_others_keep_the_router_away(tmp_path: Path) -> None:
    """Both servers are remote; at a strangers' requests are running, at b none."""

    async def check(rig: Rig) -> None:
        rig.upstreams[0].gauges = GAUGES.format(running=12, blocks=1001)
        rig.upstreams[1].gauges = GAUGES.format(running=0, blocks=1001)
        sight = rig.server.core.sight
        while 2 in sight.tiers:
            await asyncio.sleep(0.01)
            sight.look(rig.server.core.clock.now_ps())
        for _ in range(5):
            _, _, headers = await rig.stream()
            assert headers["x-simcluster-instance"] == "b"

    live = {"scrape_interval_s": 0.01, "usable_s": 30.0}
    rig(tmp_path, check, policy="shortest_queue", live=live, changes=[{"snapshot": "metrics"}] * 2)


def test_a_publisher_that_is_killed_leaves_a_view_that_ages_out(tmp_path: Path) -> None:
    name = f"killed-{os.getpid()}"
    program = (
        "import sys, time\n"
        "from simcluster import _native\n"
        "options = _native.SchedulerConfig()\n"
        "options.num_gpu_blocks = 1001\n"
        "engine = _native.Engine(options, _native.StepTimeModel())\n"
        "engine.submit(1, 100, 50, 0)\n"
        f"writer = _native.SnapshotWriter({name!r}, 16, options)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    writer.publish(engine, _native.monotonic_ns())\n"
    )

    async def check(rig: Rig) -> None:
        with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while not rig.decisions or rig.decisions[-1].source != "shm":
                assert (await rig.stream())[0] == 200
            process.kill()  # at full speed: most likely in the middle of a record
        while rig.decisions[-1].fallback != "in_flight":
            assert (await rig.stream())[0] == 200
        assert rig.decisions[-1].source == "streams"
        assert 'simcluster_fallback_total{reason="in_flight"}' in await rig.metrics()

    live = {"fresh_s": 0.05, "usable_s": 0.1}
    rig(tmp_path, check, instances=1, policy="sfs", live=live, changes=[{"snapshot": f"shm:{name}"}])


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_change_of_the_systems_time_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].gap_s = 0.02
        running = asyncio.create_task(rig.stream())
        while not rig.upstreams[0].open:
            await asyncio.sleep(0.001)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        assert (await running)[1] == b"".join(EVENTS)
        assert (await rig.stream())[1] == b"".join(EVENTS)
        for outcome in rig.outcomes:
            assert 0 <= outcome.end_ps - outcome.arrival_ps < 60 * 10**12

    rig(tmp_path, check, instances=1, policy="sfs", live={"stall_timeout_s": 30.0, "first_byte_timeout_s": 30.0})
