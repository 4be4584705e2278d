"""The same requests live and in simulation: what is shown, and that nothing is left behind."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from command_line import run_command
from simcluster.live.compare.lookup import TraceAnswers, TraceRequests
from simcluster.live.compare.mock_process import MockServersError, mock_process
from simcluster.live.mock.transit import REACH
from simcluster.live.openai_api import ApiError, parse_request
from simcluster.request import Request
from simcluster.world import World
from small_cluster import make_card, make_world, scenario_data
from trace_files import write_file

N = 12
COLUMNS: dict[str, Any] = {
    "request_id": [f"r{k}" for k in range(N)],
    "arrival_s": [0.4 * k for k in range(N)],
    "prompt_tokens": [10 + 5 * k for k in range(N)],
    "output_tokens": [3 + k % 4 for k in range(N)],
    "max_tokens": [None] * (N - 1) + [4],
}


def write_scenario(
    folder: Path, columns: dict[str, Any] = COLUMNS, instances: int | list[dict[str, Any]] = 2, **sections: Any
) -> Path:
    make_card(folder)
    write_file(folder / "t.parquet", **columns)
    file = folder / "small.yaml"
    file.write_text(json.dumps(scenario_data(instances, **sections)), encoding="utf-8")
    return file


@pytest.mark.parametrize("sight", ["shm", "metrics", "none"])
def test_a_policy_that_does_not_look_decides_the_same_live_and_in_simulation(tmp_path: Path, sight: str) -> None:
    file = write_scenario(tmp_path)
    out = tmp_path / "out"
    options = ("--mock", "--sight", sight, "--speed", 5, "-p", "round_robin", "--out", out, "--json", "-q")
    code, text, errors = run_command("live-compare", file, *options)
    assert (code, errors) == (0, "")
    result = json.loads(text)
    found = result["policies"]["round_robin"]
    assert (result["requests"], found["compared"], found["identical_decisions"]) == (N, N, 1.0)
    for side in ("simulated", "live"):
        assert found["requests"][side] == {"submitted": N, "finished": N, "rejected": 0, "failed": 0, "unfinished": 0}
        assert found["composition"][side] == {"a": 0.5, "b": 0.5}
    assert found["measuring"]["token_source"] == {"server": N}
    assert found["measuring"]["token_mismatches"] == 0
    assert found["mock"]["steps"] > 0
    routing = json.loads((out / "simulated" / "round_robin" / "manifest.json").read_text())["scenario"]["routing"]
    assert routing["router_delay_s"] == 0.05, "10 ms of wall-clock time, as live"
    assert 0 <= found["late_requests_share"] < 1
    assert 0 <= found["late_steps_share"] <= 1
    tables = {side: pl.read_parquet(out / side / "round_robin" / "requests.parquet") for side in ("live", "simulated")}
    lengths = [table.sort("request_id").select("request_id", "output_tokens", "reason") for table in tables.values()]
    assert lengths[0].equals(lengths[1]), "answers are as long, and end for the same reasons"
    samples = pl.read_parquet(out / "live" / "round_robin" / "instances.parquet")
    assert set(samples["instance"]) == {"a", "b"}
    assert samples["num_running"].null_count() == 0
    assert (samples["kv_cache_usage"] <= 1).all()
    assert samples["busy_s"].null_count() == samples.height, "servers do not tell"
    assert json.loads((out / "comparison.json").read_text())["policies"] == result["policies"]
    assert json.loads((out / "live" / "round_robin" / "manifest.json").read_text())["live"]["servers"] == "mock"


def test_policies_that_look_and_predict_are_scored_on_both_sides(tmp_path: Path) -> None:
    file = write_scenario(tmp_path)
    options = (
        "--mock",
        "--speed",
        5,
        "-p",
        "sfs",
        "-p",
        "shortest_queue",
        "--estimators",
        "throughput",
        "--json",
        "-q",
    )
    code, text, errors = run_command("live-compare", file, *options)
    assert (code, errors) == (0, "")
    policies = json.loads(text)["policies"]
    assert list(policies) == ["sfs", "shortest_queue"]
    assert set(policies["sfs"]["estimators"]["sfs"]) == {"simulated", "live"}
    assert all(each["requests"]["live"]["finished"] == N for each in policies.values())
    for name in ("ttft_s_p50", "ttft_s_p99", "e2e_s_p50", "on_time_utility"):
        assert set(policies["sfs"]["metrics"][name]) == {"simulated", "live", "error"}


def test_tables_show_both_sides(tmp_path: Path) -> None:
    file = write_scenario(tmp_path)
    code, text, errors = run_command("live-compare", file, "--mock", "--speed", 20, "--limit", 3, "-p", "random", "-q")
    assert (code, errors) == (0, "")
    assert "3 requests, mock, speed 20" in text
    for word in ("simulated", "live", "error", "TTFT p50", "of 3 decisions are identical", "steps were told of"):
        assert word in text


def test_a_run_that_is_cut_by_the_horizon_counts_what_is_open(tmp_path: Path) -> None:
    columns = COLUMNS | {"output_tokens": [3] * (N - 1) + [3000], "max_tokens": [None] * N}
    file = write_scenario(tmp_path, columns, measure={"horizon_s": 5.5})
    code, text, errors = run_command("live-compare", file, "--mock", "--speed", 5, "-p", "round_robin", "--json", "-q")
    assert (code, errors) == (0, "")
    found = json.loads(text)
    assert not found["interrupted"]
    for side in ("simulated", "live"):
        counts = found["policies"]["round_robin"]["requests"][side]
        assert (counts["submitted"], counts["unfinished"], counts["failed"]) == (N, 1, 0)


def test_without_mock_every_instance_needs_an_address(tmp_path: Path) -> None:
    file = write_scenario(tmp_path)
    code, _, errors = run_command("live-compare", file, "-p", "random", "-q")
    assert (code, errors.count("\n")) == (2, 1)
    assert "has no url" in errors
    code, _, errors = run_command("live-compare", file, "--speed", 2)
    assert code == 2
    assert "add --mock" in errors
    code, _, errors = run_command("live-compare", file, "--mock", "-p", "oracle", "-q")
    assert code == 2
    assert "oracle" in errors


def test_servers_at_the_scenarios_addresses_answer_at_the_traces_lengths(tmp_path: Path) -> None:
    """They are mock ones of another trace, which know nothing of this one's lengths."""
    columns = COLUMNS | {"arrival_s": [0.02 * k for k in range(N)]}
    (tmp_path / "other").mkdir()
    other = write_scenario(tmp_path / "other", columns | {"request_id": [f"x{k}" for k in range(N)]})

    async def main() -> dict[str, Any]:
        async with mock_process([str(other)]) as servers:
            places = [{"url": url, "snapshot": "metrics"} for url in servers.urls]
            file = write_scenario(tmp_path, columns, instances=places)
            command = [sys.executable, "-m", "simcluster", "live-compare", str(file), "-p", "round_robin", "--json"]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            out, _ = await process.communicate()
            return dict(json.loads(out))

    result = asyncio.run(main())
    found = result["policies"]["round_robin"]
    assert (result["servers"], found["mock"], found["late_steps_share"]) == ("real servers", None, None)
    assert found["late_requests_share"] is None
    assert found["requests"]["live"]["finished"] == N
    assert found["identical_decisions"] == 1.0
    assert found["measuring"]["token_mismatches"] == 0


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_mock_servers_go_however_the_comparison_ends(tmp_path: Path, how: signal.Signals) -> None:
    file = write_scenario(tmp_path)
    command = [sys.executable, "-m", "simcluster", "live-compare", str(file), "--mock", "--speed", "0.001"]
    with subprocess.Popen([*command, "-p", "sfs", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (servers := [pid for pid in children_of(process.pid) if published(pid)]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(how)
        out, _ = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert not out or json.loads(out)["interrupted"]
    deadline = time.monotonic() + 60
    while any(map(is_alive, servers)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def published(pid: int) -> bool:
    """Whether a mock process has its shared memory open: then it listens, or is about to."""
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and "simcluster.live-compare-" in maps.read_text(encoding="utf-8")


def test_mock_servers_that_cannot_start_are_one_clear_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with mock_process([str(tmp_path / "nothing.yaml")]):
            pass

    with pytest.raises(MockServersError, match=r"nothing\.yaml: no such file"):
        asyncio.run(main())


# ---- what policies and servers are told --------------------------------------------------------------------------


def looked_up(world: World, request_id: str) -> tuple[TraceRequests, Request]:
    requests = TraceRequests(world)
    asked = parse_request("/v1/completions", b'{"model": "auto", "prompt": [1, 2]}')
    request = asyncio.run(requests.build(2**62 + 1, asked, {}, request_id, lambda: 77))
    return requests, request


def test_policies_see_of_a_request_what_they_see_in_simulation(tmp_path: Path) -> None:
    _, world = make_world(tmp_path, COLUMNS, scenario_data(2))
    _, request = looked_up(world, "r11")
    simulated = world.known.request(11, 77)
    assert (request.index, request.arrival_ps) == (2**62 + 1, 77)
    for name in ("prompt_tokens", "predicted_output_tokens", "predicted_utility", "predicted_quality"):
        assert getattr(request, name).tolist() == getattr(simulated, name).tolist()
    for name in ("max_tokens", "priority", "slo_ttft_ps", "session_id", "prefix_hashes", "prefix_block_size"):
        assert getattr(request, name) == getattr(simulated, name)
    with pytest.raises(ApiError, match="'r99' is not in the trace"):
        looked_up(world, "r99")


def test_mock_servers_get_the_clients_limit_and_real_ones_the_true_length(tmp_path: Path) -> None:
    _, world = make_world(tmp_path, COLUMNS, scenario_data(2))
    for request_id, limit, true_length in (("r3", 4096 - 25, 6), ("r11", 4, 4)):
        requests, request = looked_up(world, request_id)
        prompt = list(range(int(request.prompt_tokens[0])))
        body = json.dumps({"model": "M", "prompt": prompt}).encode()
        answers = TraceAnswers(world, requests, mock=True)
        mocks = {"model": "M", "prompt": prompt, "max_tokens": limit}
        assert json.loads(answers(body, request, 0)) == mocks
        answers.reach_ns[requests.index_of[request.index]] = 123
        assert json.loads(answers(body, request, 0)) == mocks | {REACH: 123}
        real = json.loads(TraceAnswers(world, requests, mock=False)(body, request, 1))
        assert (real["max_tokens"], real["ignore_eos"]) == (true_length, True)
