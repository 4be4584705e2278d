"""Many requests through the router to mock servers: none is lost, and memory does not grow with their number.

SIMCLUSTER_SOAK_REQUESTS=100000 pytest tests/live/test_router_soak.py is the long form.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mock_servers import COLUMNS
from small_cluster import INSTANCE, make_card, scenario_data
from trace_files import write_file

REQUESTS = int(os.environ.get("SIMCLUSTER_SOAK_REQUESTS", "3000"))
STREAMS = int(os.environ.get("SIMCLUSTER_SOAK_STREAMS", "24"))
SPEED = "200"
MOST_GROWTH_KIB = 12 * 1024  # allocators keep some of what was free


@contextmanager
def program(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-P", "-m", "simcluster", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()


def first_line(process: "subprocess.Popen[bytes]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(pid)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def drive(port: int, count: int, first: int) -> dict[str, int]:
    """Send so many requests, every 16th of which leaves early, and count how they end."""
    found = {"whole": 0, "left": 0, "broken": 0}
    numbers = iter(range(first, first + count))

    async def stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            body = json.dumps({"model": "auto", "prompt": [1] * (5 + number % 40), "max_tokens": 1 + number % 5,
                               "stream": True}).encode()  # fmt: skip
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: s{number}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if number % 16 == 0:
                writer.close()
                found["left"] += 1
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                continue
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " in answer.split(b"\r\n")[0]:
                answer = await reader.readuntil(b"0\r\n\r\n")
                found["whole" if b"[DONE]" in answer else "broken"] += 1
            else:
                found["broken"] += 1
        writer.close()

    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return found


def test_a_long_run_loses_nothing_and_does_not_grow(tmp_path: Path) -> None:
    make_card(tmp_path)
    write_file(tmp_path / "t.parquet", **COLUMNS)
    instances = [INSTANCE | {"name": f"i{k}", "snapshot": f"shm:soak-{os.getpid()}-{k}"} for k in range(3)]
    instances[2]["snapshot"] = "metrics"
    data = scenario_data(1) | {"cluster": {"instances": instances}}
    path = tmp_path / "soak.yaml"
    path.write_text(yaml.safe_dump(data))
    with program("mock", str(path), "--speed", SPEED, "--port", "0", "--json") as mock:
        for entry, told in zip(instances, first_line(mock)["instances"], strict=True):
            entry["url"] = told["url"]
        path.write_text(yaml.safe_dump(data))
        words = ("router", "serve", str(path), "--policy", "sfs", "--speed", SPEED, "--port", "0", "--json")
        with program(*words) as router:
            port = int(first_line(router)["url"].rpartition(":")[2])
            part = REQUESTS // 3
            totals = asyncio.run(drive(port, part, 0))
            before = resident_kib(router.pid), resident_kib(mock.pid)
            files = open_files(router.pid)
            for name, count in asyncio.run(drive(port, REQUESTS - part, part)).items():
                totals[name] += count
            after = resident_kib(router.pid), resident_kib(mock.pid)
            more_files = open_files(router.pid) - files
            router.terminate()
            assert router.stdout is not None
            report = json.loads(router.stdout.read())
    assert totals["broken"] == 0
    assert totals["whole"] + totals["left"] == REQUESTS
    assert report["open"] == 0
    ended = report["requests"]
    assert ended["finished"] >= totals["whole"]
    assert sum(ended.values()) <= REQUESTS  # one whose client leaves at once may never be read
    assert set(ended) <= {"finished", "cancelled"}
    sys.stdout.write(f"{REQUESTS} requests: {ended}; resident KiB of router and mock {before} -> {after}\n")
    assert after[0] - before[0] < MOST_GROWTH_KIB
    assert after[1] - before[1] < MOST_GROWTH_KIB
    assert more_files <= 2 * STREAMS  # connections that are idle
