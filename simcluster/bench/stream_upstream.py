"""A server that streams 50 short events for every request, as cheaply as it can: the other end of router benchmarks.

Run as a program it prints its port and serves until its standard input closes.
"""

import asyncio
import re
import sys

__all__ = ["EVENTS", "GAP_FIELD"]

EVENTS = 50
GAP_FIELD = "gap_ms"  # in the body: between two events [ms]
_EVENT = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" tok","finish_reason":null}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nDate: Tue, 01 Jan 2030 00:00:00 GMT\r\n\r\n"
)
_MODELS = b'{"data":[]}'
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_GAP = re.compile(rb'"gap_ms": ?(\d+)')


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = _LENGTH.search(head)
            body = await reader.readexactly(int(found.group(1))) if found else b""
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_MODELS) + _MODELS)
                continue
            gap = _GAP.search(body)
            gap_s = int(gap.group(1)) / 1e3 if gap else 0.0
            writer.write(_HEAD)
            for _ in range(EVENTS):
                writer.write(_chunk(_EVENT))
                await asyncio.sleep(gap_s)  # with 0 others get their turn, so that events are sent one by one
            writer.write(_chunk(_DONE) + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
