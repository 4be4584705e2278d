"""What the live router costs beside the direct way: a fast server, the router and a client, each in its own process."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import yaml

from simcluster.bench.measure import Measured
from simcluster.bench.stream_upstream import EVENTS, GAP_FIELD

__all__ = ["router_added_ttft", "router_cpu", "router_cpu_paced"]

_TICKS = os.sysconf("SC_CLK_TCK")
_SCENARIO = {
    "name": "router-bench",
    "workload": {"trace": "quickstart", "limit": 10},
    "cluster": {
        "instances": [
            {
                "card": "qwen3-8b-h100",
                "price": {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 1.0},
                "snapshot": "none",
            }
        ]
    },
    "slo": {"ttft": 1.0},
}


@dataclass(frozen=True, slots=True)
class _Ways:
    """The direct way, the one through a router, and the one through a proxy that only passes on.

    Attributes:
        direct: port of the server.
        routed: port of the router.
        router: its process.
        bare: port of the proxy.
        proxy: its process.
    """

    direct: int
    routed: int
    router: int
    bare: int
    proxy: int


def _cpu_s(process: int) -> float:
    """Return the CPU time of a process so far [s]."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _per_request_ms(process: int, port: int, requests: int, streams: int, gap_ms: int) -> float:
    """Return the CPU time of a process while so many requests are sent to its port [ms per request]."""
    before = _cpu_s(process)
    asyncio.run(_ask(port, requests, streams, gap_ms))
    return (_cpu_s(process) - before) / requests * 1e3


@contextmanager
def _ways() -> Iterator[_Ways]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(_program("-m", "simcluster.bench.stream_upstream"))
        direct = int(_line(server))
        data: dict[str, Any] = json.loads(json.dumps(_SCENARIO))
        data["cluster"]["instances"][0]["url"] = f"http://127.0.0.1:{direct}"
        path = folder / "router.yaml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        router = stack.enter_context(
            _program("-m", "simcluster", "router", "serve", str(path), "--port", "0", "--json")
        )
        routed = int(json.loads(_line(router))["url"].rpartition(":")[2])
        proxy = stack.enter_context(_program("-m", "simcluster.bench.bare_proxy", f"http://127.0.0.1:{direct}"))
        yield _Ways(direct, routed, router.pid, int(_line(proxy)), proxy.pid)


@contextmanager
def _program(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-P", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603  (our own)
        try:
            yield process
        finally:
            process.terminate()


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None  # a pipe
    return process.stdout.readline()


async def _ask(port: int, requests: int, streams: int, gap_ms: int) -> list[float]:
    """Send so many requests over so many connections, and return when each got its first event [s]."""
    body = json.dumps(
        {"model": "auto", "prompt": list(range(100)), "max_tokens": EVENTS, "stream": True, GAP_FIELD: gap_ms}
    )
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body.encode())
    left, first_s = requests, []

    async def connection() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            sent = perf_counter()
            writer.write(raw)
            await reader.readuntil(b"data: ")
            first_s.append(perf_counter() - sent)
            await reader.readuntil(b"[DONE]")
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(connection() for _ in range(streams)))
    return first_s


def _cpu(repeats: int, requests: int, streams: int, gap_ms: int, *, judged: bool) -> Measured:
    """Return the router's CPU time per request [ms], several times."""
    values, bare = [], []
    load = (requests, streams, gap_ms)
    with _ways() as ways:
        for port in (ways.routed, ways.bare):
            asyncio.run(_ask(port, requests // 4, streams, gap_ms))  # everything has been used once
        for _ in range(repeats):
            values.append(_per_request_ms(ways.router, ways.routed, *load))
            bare.append(_per_request_ms(ways.proxy, ways.bare, *load))
    pace = f", {gap_ms} ms apart" if gap_ms else ""
    size = f"{requests:,} requests, {streams} streams{pace}; a bare aiohttp proxy by turns {median(bare):.2f}"
    return Measured(tuple(values), size, judged)


def router_cpu(quick: bool) -> Measured:
    """Return the router's CPU time per request of 50 events that come as fast as they can [ms]."""
    requests = 200 if quick else 1500
    return _cpu(3 if quick else 5, requests, 32, 0, judged=not quick)


def router_cpu_paced(quick: bool) -> Measured:
    """Return the router's CPU time per request at 64 streams with 5 ms between events [ms]."""
    requests = 128 if quick else 640
    return _cpu(3, requests, 64, 5, judged=not quick)


def router_added_ttft(quick: bool) -> Measured:
    """Return the median time to the first event through the router beyond the direct one [ms], one stream."""
    requests = 50 if quick else 300
    values = []
    with _ways() as ways:
        for port in (ways.direct, ways.routed):
            asyncio.run(_ask(port, requests, 1, 0))
        for _ in range(5):
            direct, routed = (median(asyncio.run(_ask(port, requests, 1, 0))) for port in (ways.direct, ways.routed))
            values.append((routed - direct) * 1e3)
    return Measured(tuple(values), f"5 x {requests} requests each way, by turns", not quick)
