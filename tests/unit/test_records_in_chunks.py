"""Records leave while a run goes: in chunks that say the same as one table, written whole or not at all."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from simcluster import _native
from simcluster.backends import simulated
from simcluster.backends.ledger import DecisionRows, RequestRows
from simcluster.backends.simulated import SimulatedCluster
from simcluster.experiment.run import run_policy
from simcluster.records import FolderWriter
from simcluster.request import IntArray
from small_cluster import make_card, make_world, scenario_data
from trace_files import write_file

N = 700
OPEN: dict[str, Any] = {
    "arrival_s": [0.03 * k for k in range(N)],
    "prompt_tokens": [3 + (7 * k) % 40 for k in range(N)],
    "output_tokens": [1 + (5 * k) % 9 for k in range(N)],
    "cancel_s": [0.05 if k % 11 == 0 else None for k in range(N)],
    "task": ["ab"[k % 2] for k in range(N)],
}
CLOSED = OPEN | {
    "request_id": [str(k) for k in range(N)],
    "arrival_s": [0.0] * N,
    "after": [None] * 4 + [str(k - 4) for k in range(4, N)],
    "think_s": [None] * 4 + [0.0 if k % 3 else 0.2 for k in range(4, N)],
}


def run(folder: Path, columns: dict[str, Any], out: Path | None, policy: str = "least_tokens") -> dict[str, pa.Table]:
    data = scenario_data(3, output={"decisions": "full", "sample_interval_s": 0.5}, routing={"tie": "rotate"})
    scenario, world = make_world(folder, columns, data)
    tables = run_policy(scenario, world, policy, folder=out).tables
    if out is not None:
        tables = {path.stem: pq.read_table(path) for path in out.glob("*.parquet")}
    return tables


@pytest.mark.parametrize("columns", [OPEN, CLOSED], ids=["open", "closed"])
def test_chunks_together_are_the_table_that_leaves_at_once(
    tmp_path: Path, columns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path, columns, None)
    monkeypatch.setattr(simulated, "CHUNK_ROWS", 50)
    chunked, in_memory = run(tmp_path, columns, tmp_path / "out"), run(tmp_path, columns, None)
    assert pq.read_metadata(tmp_path / "out/requests.parquet").num_row_groups > 5
    assert pq.read_metadata(tmp_path / "out/decisions.parquet").num_row_groups > 5
    assert set(whole) == set(chunked) == {"requests", "decisions", "instances"}
    for name, table in whole.items():
        assert table.num_rows >= N or name == "instances"
        assert chunked[name].equals(table), name
        assert in_memory[name].equals(table), name
    assert whole["requests"]["arrival_ns"].to_pylist() == sorted(whole["requests"]["arrival_ns"].to_pylist())


class Counting:
    """A recorder that notes how many requests had been sent when rows left."""

    def __init__(self) -> None:
        self.left: list[tuple[int, int]] = []
        self.cluster: SimulatedCluster

    def requests(self, rows: RequestRows) -> None:
        self.left.append((self.cluster.num_sent, len(rows.request)))

    def decisions(self, rows: DecisionRows) -> None:
        pass

    def samples(self, rows: IntArray) -> None:
        pass


def test_what_a_run_keeps_does_not_grow_with_the_requests_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "CHUNK_ROWS", 50)
    scenario, world = make_world(tmp_path, OPEN, scenario_data(3))
    recorder = Counting()
    recorder.cluster = SimulatedCluster(world, scenario, "round_robin", recorder=recorder)
    recorder.cluster.run()
    assert sum(count for _, count in recorder.left) == N
    total = 0
    for sent, count in recorder.left:
        assert sent - total < 50 + 2 * 64 + 50  # a chunk, two looks, and those that have not ended
        total += count


class PythonEngine:
    """The native engine behind Python, as another engine would be."""

    def __init__(self, *arguments: Any) -> None:
        self.__dict__["native"] = _native.Engine(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


@pytest.mark.parametrize("columns", [OPEN, CLOSED], ids=["open", "closed"])
def test_an_engine_written_in_python_takes_the_native_ones_place(tmp_path: Path, columns: dict[str, Any]) -> None:
    scenario, world = make_world(tmp_path, columns, scenario_data(3))
    sizes = []
    for build in (_native.Engine, PythonEngine):
        rows: list[IntArray] = []
        recorder = Counting()
        recorder.requests = lambda each, rows=rows: rows.append(each)  # type: ignore[method-assign,misc]
        recorder.cluster = SimulatedCluster(world, scenario, "sfs", build_engine=build, recorder=recorder)
        recorder.cluster.run()
        found = [getattr(each, name) for each in rows for name in RequestRows.__slots__]
        sizes.append([np.asarray(column).tolist() for column in found])
    assert sizes[0] == sizes[1]


def test_what_is_not_finished_is_no_table_and_goes_away(tmp_path: Path) -> None:
    table = run(tmp_path, OPEN, None)["requests"]
    with FolderWriter(tmp_path / "p", ["requests"]) as writer:
        writer.write("requests", table)
        (hidden,) = tmp_path.glob(".p.*")
        with pytest.raises(pa.ArrowInvalid):
            pq.read_table(hidden / "requests.parquet")
    assert not list(tmp_path.glob(".p.*"))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_valid_tables_and_a_killed_one_none(tmp_path: Path, kill: signal.Signals) -> None:
    n = 200_000
    write_file(
        tmp_path / "t.parquet",
        arrival_ns=[30_000_000 * k for k in range(n)],
        prompt_tokens=[20] * n,
        output_tokens=[3] * n,
    )
    make_card(tmp_path)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario_data(3)))
    command = [sys.executable, "-P", "-m", "simcluster", "run", "s.yaml", "-q", "-p", "round_robin", "--out", "d"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("d/.round_robin.*/requests.parquet")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(kill)
    process.communicate(timeout=60)
    if kill == signal.SIGKILL:
        assert not (tmp_path / "d/round_robin").exists()
        assert not (tmp_path / "d/summary.json").exists()
    else:
        assert process.returncode == 130
        rows = pq.read_table(tmp_path / "d/round_robin/requests.parquet")
        assert 0 < rows.num_rows < n
        assert rows["arrival_ns"].to_pylist() == [30_000_000 * k for k in range(rows.num_rows)]
