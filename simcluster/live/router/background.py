"""What a live router does beside answering: it reads gauges, and gives up what stalls."""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from simcluster.engine_options import with_options
from simcluster.live.router.core import RouterCore
from simcluster.live.router.exchange import Exchange
from simcluster.live.router.gauges import Gauges, read_gauges

__all__ = ["meet_publishers", "scrape", "stopped", "watch_stalls"]

_LOOK_S: Final = 0.25  # between two looks for answers that stall
_MEET_S: Final = 0.05  # between two questions whether publishers live
_ASK_S: Final = 2.0  # for an answer to a question of this kind


async def scrape(core: RouterCore, instance: int) -> None:
    """Read the gauges of one instance for ever; one that does not answer stays unknown."""
    live = core.setup.scenario.live
    while True:
        said = await core.upstreams.get(instance, "/metrics", min(_ASK_S, live.usable_s))
        if said is not None:
            with suppress(ValueError):
                gauges = read_gauges(said.decode("utf-8", "replace"))
                _resize(core, instance, gauges)
                core.sight.gauges_came(instance, gauges, core.clock.now_ps())
        await asyncio.sleep(live.scrape_interval_s)


def _resize(core: RouterCore, instance: int, gauges: Gauges) -> None:
    """Go on with the KV cache that a server really has."""
    engine = core.dispatcher.view.instances[instance].engine
    blocks = gauges.num_blocks or engine.num_gpu_blocks
    size = gauges.block_size or engine.block_size
    if (blocks, size) != (engine.num_gpu_blocks, engine.block_size):
        core.dispatcher.reconfigure(instance, with_options(engine, num_gpu_blocks=blocks, block_size=size))


async def meet_publishers(core: RouterCore) -> None:
    """Learn for ever which publishers of snapshots have gone or come."""
    while True:
        await asyncio.sleep(_MEET_S)
        core.sight.meet()


async def watch_stalls(exchanges: Collection[Exchange], core: RouterCore) -> None:
    """Give up answers in which nothing moves."""
    longest_s = core.setup.scenario.live.stall_timeout_s
    while True:
        await asyncio.sleep(min(_LOOK_S, longest_s / 4))
        now = core.patience.now_s()
        for exchange in list(exchanges):
            if exchange.moved:
                exchange.moved, exchange.still_s = False, now
            elif exchange.still_s is not None and exchange.still_s < now - longest_s:
                exchange.stall()


async def stopped(task: "asyncio.Task[None]") -> None:
    """End a task."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
