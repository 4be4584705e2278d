"""Mock servers in a process of their own, which never outlives the one that started it."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from simcluster.errors import SimclusterError

__all__ = ["MockProcess", "MockServersError", "mock_process"]

_READY_S, _STOP_S = 120.0, 20.0


class MockServersError(SimclusterError):
    """The mock servers did not start or ended before they were told to."""


@dataclass(slots=True)
class MockProcess:
    """Running mock servers.

    Attributes:
        urls: (j,) where they listen.
        report: what they told when they stopped, as `simcluster mock --json`; empty before.
    """

    urls: list[str]
    report: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def mock_process(arguments: Sequence[str]) -> AsyncIterator[MockProcess]:
    """Run `simcluster mock` while the block runs, on free ports.

    It ends with the block, however that ends; and by itself if this process is killed, since its input ends then.

    Args:
        arguments: scenario and options.

    Raises:
        MockServersError: it does not start.
    """
    command = [sys.executable, "-m", "simcluster", "mock", *arguments, "--port", "0", "--json", "--until-input-ends"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        ready = await _ready(process)
        servers = MockProcess([str(each["url"]) for each in ready["instances"]])
        yield servers
        servers.report = await _stopped(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READY_S):
            line = await process.stdout.readline()
    if not line:
        raise MockServersError(await _said(process) or "the mock servers did not start")
    ready: dict[str, Any] = json.loads(line)
    return ready


async def _said(process: Process) -> str:
    """Return the error line of a process that has failed."""
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await process.wait()
    if process.returncode is None:
        process.kill()
    _, errors = await process.communicate()
    return errors.decode(errors="replace").strip().removeprefix("error: ")


async def _stopped(process: Process) -> dict[str, Any]:
    """Let the servers stop, and return their report."""
    assert process.stdin is not None
    process.stdin.close()
    out = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            out, _ = await process.communicate()
    if not out:
        raise MockServersError(await _said(process) or "the mock servers did not stop")
    report: dict[str, Any] = json.loads(out)
    return report
