"""The load of live instances over time, as their `/metrics` tell it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pyarrow as pa

from simcluster.live.clock import LiveClock
from simcluster.live.router.gauges import Gauges, read_gauges
from simcluster.records import INSTANCES
from simcluster.units import PS_PER_S, ns_from_ps, ps_from_seconds

__all__ = ["Sampler"]

_LEAST_S = 0.5  # of wall-clock time between two looks, which cost servers something
_PATIENCE_S = 2.0


class Sampler:
    """Looks at every instance now and then.

    Args:
        names: (j,) of the instances.
        ask: reads `/metrics` of an instance within so many seconds; None: it did not answer.
        clock: the client's time.
        interval_s: between two looks [simulated s]; longer where that is too short in wall-clock time.
    """

    def __init__(
        self,
        names: Sequence[str],
        ask: Callable[[int, str, float], Awaitable[bytes | None]],
        clock: LiveClock,
        interval_s: float,
    ) -> None:
        self._names, self._ask, self._clock = names, ask, clock
        self._interval_ps = ps_from_seconds(max(interval_s, _LEAST_S * clock.speed))
        self._rows: list[tuple[int, str, Gauges]] = []

    async def run(self) -> None:
        """Look until cancelled."""
        at_ps = 0
        while True:
            await self._clock.sleep_until(at_ps)
            found = await asyncio.gather(*(self._ask(j, "/metrics", _PATIENCE_S) for j in range(len(self._names))))
            now = self._clock.now_ps()
            for name, text in zip(self._names, found, strict=True):
                with suppress(ValueError):  # not a server of this kind: it tells nothing
                    self._rows.append((now, name, read_gauges((text or b"").decode("utf-8", "replace"))))
            at_ps += self._interval_ps * max(1, -(-(now - at_ps) // self._interval_ps))

    def table(self) -> pa.Table:
        """Return what was seen; what servers do not tell is missing."""
        rows = self._rows
        columns = {
            "at_ns": [ns_from_ps(at_ps) for at_ps, *_ in rows],
            "at_s": [at_ps / PS_PER_S for at_ps, *_ in rows],
            "instance": [name for _, name, _ in rows],
            "num_running": [each.running for *_, each in rows],
            "num_waiting": [each.waiting for *_, each in rows],
            "kv_cache_usage": [each.kv_usage for *_, each in rows],
        }
        missing = dict.fromkeys(set(INSTANCES.names) - set(columns), [None] * len(rows))
        return pa.table({name: (columns | missing)[name] for name in INSTANCES.names}, schema=INSTANCES)
