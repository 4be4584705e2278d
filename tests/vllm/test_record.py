"""Newly recorded decisions of the installed vLLM are those of the native scheduler."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simcluster.backends.vllm_setup import vllm_version
from simcluster.cli import app
from simcluster.conformance.files import check_file, scenario_files
from simcluster.conformance.record import Recorded, record_folder
from simcluster.errors import ConfigError

COUNT, SEED = 300, 20_261_130


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorded]:
    folder = tmp_path_factory.mktemp("recorded") / "new"
    return folder, record_folder(folder, COUNT, SEED)


@pytest.fixture(scope="module")
def scenarios(recorded: tuple[Path, Recorded]) -> list[dict[str, Any]]:
    files = scenario_files([recorded[0]])
    return [scenario for path in files for scenario in json.loads(gzip.decompress(path.read_bytes()))]


def test_every_new_recording_is_reproduced(recorded: tuple[Path, Recorded]) -> None:
    checked = [(name, found) for path in scenario_files([recorded[0]]) for name, found in check_file(path)]
    assert [f"{name}: {found}" for name, found in checked if found is not None] == []
    assert len(checked) == len({name for name, _ in checked}) == recorded[1].scenarios == COUNT


def test_the_recordings_say_which_vllm_made_them(scenarios: list[dict[str, Any]]) -> None:
    assert {scenario["vllm"] for scenario in scenarios} == {vllm_version()}
    for scenario in scenarios:
        assert scenario["scheduler"] == ("AsyncScheduler" if scenario["config"]["async_scheduling"] else "Scheduler")


def test_the_recordings_meet_every_option_and_every_end(scenarios: list[dict[str, Any]]) -> None:
    seen: Counter[object] = Counter()
    for scenario in scenarios:
        config = scenario["config"]
        for name, unused in {
            "policy": "fcfs",
            "async_scheduling": False,
            "max_num_active_seqs": None,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": False,
            "long_prefill_token_threshold": 0,
            "long_prefill_token_threshold_adaptive": False,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
            "prefill_schedule_interval": 1,
        }.items():
            seen[name, config[name] != unused] += 1
        seen.update(summary["reason"] for summary in scenario["summary"])
        seen["preemption"] += scenario["totals"]["preemptions"]
        seen["hit"] += sum(bool(summary["cached"]) for summary in scenario["summary"])
        seen["large"] += len(scenario["requests"]) == 150
    rare = {what: count for what, count in seen.items() if count < 9}
    assert rare == {}
    assert len(seen) == 10 * 2 + 3 + 3
    assert seen["preemption"] > 500


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        record_folder(tmp_path / name, 12, 5)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["small.json.gz", "tight.json.gz"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_recording_and_checking_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "below" / "new"
    done = CliRunner().invoke(app, ["conformance", "record", "--out", str(out), "--scenarios", "9", "--seed", "3"])
    assert (done.exit_code, done.exception) == (0, None)
    assert f"9 scenarios of vLLM {vllm_version()} written to" in done.stdout
    done = CliRunner().invoke(app, ["conformance", "check", str(out)])
    assert (done.exit_code, done.stdout) == (0, "9 of 9 scenarios identical\n")
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("here")
    with pytest.raises(ConfigError, match="is not an empty folder; give a new one"):
        record_folder(tmp_path, 3, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_interrupted_recording_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_folder(tmp_path / "new", 5, 1, stop)
    assert list(tmp_path.iterdir()) == []
