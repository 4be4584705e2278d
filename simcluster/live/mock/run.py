"""Run the mock servers of a scenario: all instances in one process, one clock, one port for each."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from simcluster import _native
from simcluster.errors import ConfigError
from simcluster.instance import InstanceSpec
from simcluster.live.clock import LiveClock
from simcluster.live.mock.hosted_engine import HostedEngine, Stream
from simcluster.live.mock.lengths import Lengths
from simcluster.live.mock.metrics import MockMetrics
from simcluster.live.mock.server import MockServer
from simcluster.live.mock.tally import Tally
from simcluster.live.mock.transit import Transit
from simcluster.predict.tokens import Tokens
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["MockCluster", "serve"]

Publish = Callable[[_native.Engine], None]

_CAPACITY = 4096  # requests in a published snapshot; what finds no room is counted
_GRACE_S = 2.0  # for open answers when the servers stop


@dataclass(slots=True)
class MockCluster:
    """The servers of a world's instances.

    Attributes:
        world: the instances and the truth about requests.
        tokens: counts the tokens of prompts that come as text.
        speed: simulated seconds per second.
        channels: (j,) shared memory where each publishes its snapshots, "" for none; left out: nobody does.
        urls: (j,) where each instance listens, once started.
        ended: how many requests ended, by how.
    """

    world: World
    tokens: Tokens
    speed: float = 1.0
    channels: Sequence[str] = ()
    urls: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    hosts: list[HostedEngine] = field(default_factory=list)
    _ttft_s: Tally = field(default_factory=Tally)
    _transit: Transit | None = None
    _exit: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self, host: str, port: int | Sequence[int]) -> None:
        """Listen.

        Args:
            host: where.
            port: of each instance, or of the first, counting up; 0: a free one, for each.

        Raises:
            ConfigError: a port or a shared memory is taken.
        """
        clock = LiveClock(self.speed)
        self._transit = Transit(clock)
        ports = [port and port + number for number in range(len(self._specs))] if isinstance(port, int) else port
        channels = self.channels or ("",) * len(self._specs)
        try:
            for spec, wanted, channel in zip(self._specs, ports, channels, strict=True):
                publish = self._publisher(spec, channel, clock)
                await self._open(spec, self._transit, publish, host, wanted)
        except ConfigError:
            await self.stop()
            raise

    async def _open(self, spec: InstanceSpec, transit: Transit, publish: Publish, host: str, port: int) -> None:
        """Host one instance and let it listen."""
        hosted = HostedEngine(spec, self.world.true_models[spec.index], transit.clock, self._note_end, publish)
        server = MockServer(hosted, Lengths(self.world, spec.index), MockMetrics(hosted), self.tokens, transit)
        hosted.on_end.append(server.metrics.ended)
        publish(hosted.engine)
        self._exit.callback(hosted.close)
        runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE_S)
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, host, port, backlog=4096).start()
        except OSError as error:
            raise ConfigError(f"{host}:{port} ({spec.name}): {error.strerror}; give another --port") from None
        shown = f"[{host}]" if ":" in host else host
        self.urls.append(f"http://{shown}:{runner.addresses[0][1]}")
        self.hosts.append(hosted)

    def _publisher(self, spec: InstanceSpec, channel: str, clock: LiveClock) -> Publish:
        """Return what publishes an engine's state; nothing where nobody reads it."""
        if not channel:
            return lambda _: None
        try:
            writer = _native.SnapshotWriter(channel, _CAPACITY, spec.engine)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{spec.name}: {error}") from None
        self._exit.callback(writer.close)
        origin_ns, speed = clock.origin_ns, self.speed
        return lambda engine: writer.publish(engine, origin_ns, speed)

    @property
    def _specs(self) -> tuple[InstanceSpec, ...]:
        return self.world.instances

    async def stop(self) -> None:
        """Stop listening; open answers get a moment to end."""
        await self._exit.aclose()

    def _note_end(self, stream: Stream) -> None:
        kind = stream.finish or "abort"
        self.ended[kind] = self.ended.get(kind, 0) + 1
        if stream.first_token_ps is not None:
            self._ttft_s.add((stream.first_token_ps - stream.sent_ps) / PS_PER_S)

    def report(self) -> dict[str, Any]:
        """Return what happened: ends, steps, and how many of these were told of late.

        A step is late if it was told of over 1 % of the median TTFT after its end; then clients saw a time that the
        engine did not have, and the speed was too high for this machine. `late_requests_share` is that of the
        requests that came after the instant at which their sender wanted them to reach the engine; None without any
        that named one.
        """
        ttft_s = self._ttft_s.median()
        late = [each for each in self.hosts if each.num_steps]
        share = None
        if ttft_s is not None and late:
            counts = [each.num_steps for each in late]
            share = float(np.average([each.share_late(0.01 * ttft_s) or 0.0 for each in late], weights=counts))
        return {
            "speed": self.speed,
            "requests": dict(sorted(self.ended.items())),
            "open": sum(each.num_open for each in self.hosts),
            "steps": sum(each.num_steps for each in self.hosts),
            "median_ttft_s": ttft_s,
            "late_steps_share": share,
            "late_requests_share": None if self._transit is None else self._transit.late_share,
        }


async def serve(
    cluster: MockCluster,
    host: str,
    port: int | Sequence[int],
    on_ready: Callable[[MockCluster], None],
    *,
    until_input_ends: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; host and port are those of `MockCluster.start`.

    Args:
        cluster: the servers.
        host: where.
        port: of each instance, or of the first.
        on_ready: is told when all of them listen.
        until_input_ends: stop at the end of standard input, too, so that whoever started this process need not live.

    Raises:
        ConfigError: a port or a shared memory is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_input_ends:
        loop.add_reader(sys.stdin.fileno(), _ended, loop, stop)
    await cluster.start(host, port)
    try:
        on_ready(cluster)
        await stop.wait()
    finally:
        await cluster.stop()


def _ended(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Note that there is something to read, which is the end: nobody ever writes there."""
    loop.remove_reader(sys.stdin.fileno())
    stop.set()
