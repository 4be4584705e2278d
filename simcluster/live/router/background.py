"""What a live router does beside answering: it asks servers for names and gauges, and gives up what stalls."""

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from simcluster.engine_options import with_options
from simcluster.live.router.gauges import Gauges, read_gauges
from simcluster.live.router.upstream import Upstreams

if TYPE_CHECKING:
    from simcluster.live.router.server import RouterServer

__all__ = ["scrape", "served_name", "stopped", "watch_stalls"]

_LOOK_S: Final = 0.25  # between two looks for answers that stall
_ASK_S: Final = 2.0  # for an answer to a question of this kind


async def served_name(upstreams: Upstreams, instance: int, model: str) -> str:
    """Return what a server calls its model; one that does not say so is taken to call it as the scenario does."""
    said = await upstreams.get(instance, "/v1/models", _ASK_S)
    with suppress(ValueError, TypeError, KeyError):
        names = [str(each["id"]) for each in json.loads(said or b"{}")["data"]]
        if names and model not in names:
            return names[0]
    return model


async def scrape(server: "RouterServer", instance: int) -> None:
    """Read the gauges of one instance for ever; one that does not answer stays unknown."""
    live = server.live
    while True:
        said = await server.upstreams.get(instance, "/metrics", min(_ASK_S, live.usable_s))
        if said is not None:
            with suppress(ValueError):
                gauges = read_gauges(said.decode("utf-8", "replace"))
                _resize(server, instance, gauges)
                server.sight.gauges_came(instance, gauges, server.clock.now_ps())
        await asyncio.sleep(live.scrape_interval_s)


def _resize(server: "RouterServer", instance: int, gauges: Gauges) -> None:
    """Go on with the KV cache that a server really has."""
    engine = server.dispatcher.view.instances[instance].engine
    blocks = gauges.num_blocks or engine.num_gpu_blocks
    size = gauges.block_size or engine.block_size
    if (blocks, size) != (engine.num_gpu_blocks, engine.block_size):
        server.dispatcher.reconfigure(instance, with_options(engine, num_gpu_blocks=blocks, block_size=size))


async def watch_stalls(server: "RouterServer") -> None:
    """Give up answers in which nothing moves."""
    patience = server.live.stall_timeout_s
    while True:
        await asyncio.sleep(min(_LOOK_S, patience / 4))
        late = server.loop.time() - patience
        for exchange in [each for each in server.exchanges if each.touched_s and each.touched_s < late]:
            exchange.stall()


async def stopped(task: "asyncio.Task[None]") -> None:
    """End a task."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
