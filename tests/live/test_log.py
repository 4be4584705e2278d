"""The decision log of a live router: what it holds, and that a replay decides the same, bit for bit."""

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command_line import run_command
from log_playground import DEAD, Playground
from mock_servers import prompt
from simcluster import _native
from simcluster.engine_options import with_options
from simcluster.errors import ConfigError
from simcluster.live.router.log.journal import DecisionLog
from simcluster.live.router.log.replay import replay
from small_cluster import scenario_data

SOURCES = ("shm", "metrics", "none")


async def a_hundred(ground: Playground) -> None:
    await ground.burst(0, 100)


def events(folder: Path) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(path) for path in sorted(folder.glob("events-*.parquet"))]).sort("seq")


def decisions(folder: Path) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(path) for path in sorted(folder.glob("decisions-*.parquet"))]).sort("decision")


def changed(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Write a file of events anew after a change of its rows."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("policy", "sections"),
    [
        ("sfs", {}),
        ("shortest_queue", {"routing": {"tie": "random"}}),
        ("ewma_latency", {"output": {"estimators": ["sfs", "lps"]}}),
        ("sfs_plus", {}),
        ("session_hash", {}),
        ("epsilon(weighted_scorers)", {}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_replay_decides_the_same_bit_for_bit(
    tmp_path: Path, policy: str, sections: dict[str, Any], source: str
) -> None:
    ground = Playground(tmp_path, source, **sections)
    ground.play(policy, a_hundred)
    report = replay(ground.log)
    assert report.first_difference is None
    assert report.decisions == report.identical == ground.server.core.dispatcher.num_decisions >= 100
    assert report.notes == ground.warnings == []
    kinds = events(ground.log)["kind"].value_counts().rows_by_key("kind", unique=True)
    assert kinds["sent"] == kinds["ended"]
    assert ("shown" in kinds) == ground.server.core.dispatcher.looks


def test_retries_and_a_restart_with_another_block_count_are_in_the_log(tmp_path: Path) -> None:
    ground = Playground(tmp_path)

    async def script(ground: Playground) -> None:
        await ground.burst(0, 60)
        ports = [int(url.rpartition(":")[2]) for url in ground.cluster.urls]
        await ground.cluster.stop()
        smaller = [
            replace(spec, engine=with_options(spec.engine, num_gpu_blocks=77)) for spec in ground.world.instances
        ]
        ground.cluster = ground.servers(replace(ground.world, instances=tuple(smaller)))
        await ground.cluster.start("127.0.0.1", ports)
        await ground.burst(100, 60)

    ground.play("sfs", script)
    told = events(ground.log)
    options = [json.loads(each)["num_gpu_blocks"] for each in told.filter(kind="reconfigured")["options"]]
    assert options.count(77) >= 2
    found = decisions(ground.log)
    assert "retried" in found["status"].to_list(), "the last instance is dead"
    assert set(found.filter(pl.col("status") == "retried")["instance"]) == {"c"}
    assert found.filter(pl.col("status") == "retried")["observed_ttft_s"].null_count() == len(
        found.filter(pl.col("status") == "retried")
    )
    report = replay(ground.log)
    assert (report.first_difference, report.identical) == (None, len(found))


def test_the_table_of_decisions_is_for_people(tmp_path: Path) -> None:
    ground = Playground(tmp_path, dead=False, output={"estimators": ["throughput"]})
    ground.play("sfs", a_hundred)
    found = decisions(ground.log)
    assert found["decision"].to_list() == list(range(100))
    assert set(found["request_id"]) == {f"q{k}" for k in range(100)}
    assert (set(found["policy"]), set(found["model"]), set(found["status"])) == ({"sfs"}, {"M"}, {"finished"})
    assert set(found["instance"]) <= {"a", "b", "c"}
    assert (found["runner_up"] != found["instance"]).all()
    assert (found["margin"] >= 0).all()
    assert (found["predicted_ttft_s"] > 0).all()
    assert found["observed_ttft_s"].null_count() == 50, "every second answer is no stream"
    assert set(found["source"]) <= {"shm", "streams"}
    assert (found["t_route_us"] > 0).all()
    assert found.select((pl.col("decided_wall_ns").diff() >= 0).all()).item()
    assert set(found["slo_ttft_s"]) == {0.25}
    by_id = {row["request_id"]: row for row in found.iter_rows(named=True)}
    assert [by_id[f"q{k}"]["output_tokens"] for k in range(100)] == [3 + k % 9 for k in range(100)]
    maps = pq.read_table(next(ground.log.glob("decisions-*.parquet")))["estimates_s"].to_pylist()
    assert [[name for name, _ in each] for each in maps] == [["throughput"]] * 100


def test_a_changed_snapshot_is_noticed(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    ground.play("sfs", a_hundred)
    path = ground.log / "events-00001.parquet"
    whole = path.read_bytes()

    def flip(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["snapshot"])
        row["snapshot"] = row["snapshot"][:-30] + bytes([row["snapshot"][-30] ^ 1]) + row["snapshot"][-29:]

    changed(path, flip)
    with pytest.raises(ConfigError, match="the file was changed"):
        replay(ground.log)
    path.write_bytes(whole)

    def delay(rows: list[dict[str, Any]]) -> None:  # sound ones, but each comes a look late
        last: dict[int, bytes] = {}
        for row in sorted(rows, key=lambda row: row["seq"]):
            if row["snapshot"] and row["source"] == "shm":
                late = last.get(row["instance"], row["snapshot"])
                last[row["instance"]], row["snapshot"] = row["snapshot"], late

    changed(path, delay)
    report = replay(ground.log)
    assert report.identical < report.decisions
    assert report.first_difference is not None
    assert report.first_difference.logged != report.first_difference.replayed


def edit_manifest(folder: Path, change: Callable[[Any], None], *, sealed: bool) -> None:
    """Change the manifest; `sealed`: and all that tells of it, as nobody does by accident."""
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    if not sealed:
        return
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for each in folder.glob("events-*.parquet"):
        table = pq.read_table(each)
        about = json.loads(table.schema.metadata[b"simcluster"]) | {"manifest_sha256": digest}
        pq.write_table(table.replace_schema_metadata({b"simcluster": json.dumps(about)}), each)


def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    ground = Playground(tmp_path, dead=False)
    ground.play("cheapest", a_hundred)
    assert replay(ground.log).identical == 100

    def price(content: Any) -> None:
        content["instances"][0]["price_in"] = content["instances"][0]["price_out"] = 3.0

    edit_manifest(ground.log, price, sealed=False)
    with pytest.raises(ConfigError, match="was changed"):
        replay(ground.log)
    edit_manifest(ground.log, price, sealed=True)
    report = replay(ground.log)
    assert report.identical < report.decisions == 100
    difference = report.first_difference
    assert difference is not None
    assert (difference.decision, difference.field, difference.logged) == (0, "instance", 0)
    assert difference.replayed != 0


def test_a_changed_step_time_is_noticed_in_the_last_bit(tmp_path: Path) -> None:
    ground = Playground(tmp_path, dead=False)
    ground.play("sfs", a_hundred)

    def slower(content: Any) -> None:
        for each in content["instances"]:
            each["believed"]["b0"] += 1  # ps

    edit_manifest(ground.log, slower, sealed=True)
    difference = replay(ground.log).first_difference
    assert difference is not None
    assert difference.field == "predicted_ttft_s"


@pytest.mark.parametrize("source", SOURCES)
def test_files_rotate_and_a_replay_may_start_at_each(tmp_path: Path, source: str) -> None:
    ground = Playground(tmp_path, source)
    ground.play("sfs", a_hundred, rows=60)
    files = sorted(path.name for path in ground.log.glob("events-*.parquet"))
    assert len(files) >= 4
    assert files == [f"events-{k:05d}.parquet" for k in range(1, len(files) + 1)]
    assert len(list(ground.log.glob("decisions-*.parquet"))) == len(files)
    assert not list(ground.log.glob(".*"))
    assert events(ground.log)["seq"].to_list() == list(range(len(events(ground.log))))
    total = len(decisions(ground.log))
    assert (replay(ground.log).identical, replay(ground.log).notes) == (total, [])
    for number in range(2, len(files) + 1):
        report = replay(ground.log, number)
        assert report.first_difference is None
        assert (report.identical, report.first_file) == (report.decisions, number)
        assert 0 < report.decisions < total
        assert "what the policy itself remembers" in report.notes[0]
    (ground.log / ".events-00099.parquet.tmp").write_bytes(b"PAR1")
    assert replay(ground.log).notes == ["not whole and left out: events-00099.parquet"]
    frame = pl.read_parquet(ground.log / files[2])
    repeated = frame.filter("keyframe").sort("seq")
    assert repeated["seq"].to_list() == sorted(frame["seq"])[: len(repeated)], "a keyframe comes first"
    assert "shown" in repeated["kind"].to_list()


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    ground.play("sfs", a_hundred, rows=60, files=2)
    numbers = sorted(int(path.name[7:12]) for path in ground.log.glob("events-*.parquet"))
    assert len(numbers) == 2
    assert numbers[0] > 2
    report = replay(ground.log)
    assert (report.first_file, report.identical) == (numbers[0], report.decisions)
    assert report.decisions > 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)


def swap(folder: Path) -> None:
    (folder / "events-00001.parquet").replace(folder / "x")
    (folder / "events-00002.parquet").replace(folder / "events-00001.parquet")
    (folder / "x").replace(folder / "events-00002.parquet")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "events-00002.parquet").unlink(), "events-00002.parquet is missing between"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "not the manifest of a decision log"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not the manifest of a decision log"),
        (lambda folder: (folder / "events-00002.parquet").write_bytes(b"PAR1"), "damaged or no Parquet"),
        (lambda folder: cut(folder / "events-00002.parquet"), "damaged or no Parquet"),
        (lambda folder: flip_byte(folder / "events-00002.parquet"), "damaged or no Parquet"),
        (swap, "give it its name back"),
        (lambda folder: changed(folder / "events-00001.parquet", lambda rows: rows.pop(3)), "is missing; it was"),
        (
            lambda folder: (folder / "decisions-00001.parquet").replace(folder / "events-00001.parquet"),
            "no file of events",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("events-*")], "no whole file"),
    ],
)
def test_a_damaged_log_is_one_clear_line(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    ground = Playground(tmp_path, dead=False)
    ground.play("round_robin", a_hundred, rows=60)
    assert replay(ground.log).files > 2
    damage(ground.log)
    with pytest.raises(ConfigError, match=words) as found:
        replay(ground.log)
    assert "\n" not in str(found.value)
    with pytest.raises(ConfigError):
        replay(tmp_path / "nowhere")


def test_a_router_goes_on_when_its_log_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Playground(tmp_path, dead=False)

    async def script(ground: Playground) -> None:
        await ground.burst(0, 40)
        monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
        await ground.burst(50, 40)
        for _ in range(500):
            if ground.warnings:
                break
            await asyncio.sleep(0.01)
        await ground.burst(100, 10)
        async with ground.session.get(f"{ground.url}/metrics") as response:
            text = await response.text()
        lost = next(line for line in text.splitlines() if line.startswith("simcluster_log_lost_events_total"))
        assert float(lost.split()[1]) > 0

    ground.play("round_robin", script, rows=40)
    assert len(ground.warnings) == 1
    assert "No space left on device" in ground.warnings[0]
    assert not list(ground.log.glob(".*")), "what is not whole goes away"
    report = replay(ground.log)
    assert 0 < report.identical == report.decisions < 90


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    (ground.log).mkdir()
    (ground.log / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        DecisionLog(ground.log, ground.world, ground.scenario, "sfs")


def test_a_log_of_nothing_leaves_nothing(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    log = DecisionLog(ground.log, ground.world, ground.scenario, "sfs")
    log.close()
    assert not ground.log.exists()


def test_options_and_step_times_survive_the_manifest(tmp_path: Path) -> None:
    ground = Playground(tmp_path, routing={"router_delay_s": 0.001})
    ground.play("sfs", a_hundred)
    content = json.loads((ground.log / "manifest.json").read_text())
    names = [name for name, kind in vars(_native.SchedulerConfig).items() if isinstance(kind, property)]
    assert set(content["instances"][0]["engine"]) == set(names)
    assert content["scenario"]["routing"]["router_delay_s"] == 0.001
    assert content["policy"] == "sfs"


def test_the_replay_tells_the_first_difference_by_exit_code_1_and_a_bad_log_by_2(tmp_path: Path) -> None:
    ground = Playground(tmp_path, dead=False)
    ground.play("cheapest", a_hundred)
    code, text, errors = run_command("router", "replay", ground.log)
    assert (code, errors) == (0, "")
    assert text.startswith("100 decisions replayed, 100 identical")

    def price(content: Any) -> None:
        content["instances"][0]["price_in"] = 3.0

    edit_manifest(ground.log, price, sealed=True)
    code, text, errors = run_command("router", "replay", ground.log)
    assert (code, errors) == (1, "")
    assert "first difference: decision 0 in events-00001.parquet" in text
    assert "instance\n  logged   0\n  replayed 1\n" in text
    code, text, errors = run_command("router", "replay", ground.log, "--from", "7")
    assert (code, text) == (2, "")
    assert errors == f"error: {ground.log}: has no file of events number 7; there are 1 to 1\n"


def test_a_policy_file_that_has_changed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (
        "from simcluster.routers.base import Decision\n"
        "class Last:\n"
        "    needs_view = False\n"
        "    def route(self, request, view):\n"
        "        return Decision(view.candidates[-1])\n"
    )
    file.write_text(text)
    ground = Playground(tmp_path, dead=False)
    ground.play(f"{file}:Last", a_hundred)
    assert (replay(ground.log).identical, replay(ground.log).notes) == (100, [])
    file.write_text(text + "# changed\n")
    assert replay(ground.log).notes == [f"changed since, or gone: {file}"]


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "simcluster", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_command_leaves_a_log_that_replays(tmp_path: Path, how: signal.Signals) -> None:
    Playground(tmp_path)
    (tmp_path / "live.yaml").write_text(json.dumps(scenario_data([{"url": DEAD, "snapshot": "none"}])))
    log = tmp_path / "log"
    with start("mock", str(tmp_path / "live.yaml"), "--port", "0", "--speed", "50", "--json") as mock:
        assert mock.stdout is not None
        url = json.loads(mock.stdout.readline())["instances"][0]["url"]
        (tmp_path / "live.yaml").write_text(json.dumps(scenario_data([{"url": url, "snapshot": "none"}])))
        arguments = ["--port", "0", "--speed", "50", "--json", "--log", str(log), "--log-rows", "30"]
        with start("router", str(tmp_path / "live.yaml"), *arguments) as router:
            assert router.stdout is not None
            ready = json.loads(router.stdout.readline())

            async def ask() -> None:
                async with aiohttp.ClientSession() as session:
                    for _ in range(40):
                        body = prompt(9, max_tokens=2)
                        async with session.post(f"{ready['url']}/v1/completions", json=body) as response:
                            assert response.status == 200

            asyncio.run(ask())
            for _ in range(1000):
                if (log / "events-00001.parquet").exists():
                    break
                time.sleep(0.01)
            router.send_signal(how)
            _, errors = router.communicate(timeout=30)
        mock.kill()
    assert errors == ""
    with start("router", "replay", str(log), "--json") as replayed:
        out, errors = replayed.communicate(timeout=60)
    assert (replayed.returncode, errors) == (0, "")
    report = json.loads(out)
    assert report["identical"] == report["decisions"] > 0
    assert (report["decisions"] < 40) == (how == signal.SIGKILL), "the last file is lost, and no other"
    assert report["files"] == len(list(log.glob("events-*.parquet")))
