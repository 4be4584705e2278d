"""A run that was measured at a client, as a run directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from command_line import run_command
from simcluster.errors import CalibrationError, ConfigError
from simcluster.live.client.answer import SERVER, TRACE, Answer
from simcluster.live.client.send import Outcome
from simcluster.live.record import LiveRun, record_live_run
from simcluster.routers.base import SHED, Decision
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S
from simcluster.validate.runs import read_run
from simcluster.world import World
from small_cluster import make_world, scenario_data

S = PS_PER_S
COLUMNS = {
    "request_id": [f"r{k}" for k in range(6)],
    "arrival_s": [float(k) for k in range(6)],
    "prompt_tokens": [100] * 6,
    "output_tokens": [3] * 6,
    "slo_ttft_s": [0.5] * 6,
}


def outcome(index: int, status: str, reason: str, tokens_at: list[float], usage: int | None = None) -> Outcome:
    """Return an outcome that was sent on time, whose tokens came so many seconds after that."""
    sent = index * S
    times = [sent + round(each * S) for each in tokens_at]
    counts = None if usage is None else (100, usage)
    return Outcome(
        index=index,
        due_ps=sent,
        sent_ps=sent,
        end_ps=(times[-1] if times else sent + S) if status != "unfinished" else None,
        answer=Answer(chunk_ps=times, usage=counts),
        output_tokens=len(times) if usage is None else usage,
        token_source="chunks" if usage is None else SERVER,
        prompt_tokens=100,
        prompt_token_source=TRACE if usage is None else SERVER,
        status=status,
        reason=reason,
    )


OUTCOMES = [
    outcome(0, "finished", "stop", [0.1, 0.12, 0.16], 3),
    outcome(1, "finished", "length", [0.9, 1.0], 2),
    outcome(2, "failed", "http_503", []),
    outcome(3, "failed", "cut", [0.2]),
    outcome(4, "unfinished", "running", [0.2, 0.3]),
    outcome(5, "finished", "stop", [-0.1, 0.2], 3),
]


def small(folder: Path, instances: int = 1) -> tuple[Scenario, World]:
    return make_world(folder, COLUMNS, scenario_data(instances, slo={"ttft": "trace"}))


def live_run(**changes: Any) -> LiveRun:
    how = {"servers": "mock", "speed": 2.0}
    values = {"policy": "sfs", "outcomes": OUTCOMES, "lag_ps": [0, 0, S // 10, 0, 0, 0], "instance": 0, "how": how}
    return LiveRun(**(values | changes))


def test_every_request_is_a_row_and_totals_add_up(tmp_path: Path) -> None:
    run = record_live_run(*small(tmp_path), live_run())
    rows = pl.from_arrow(run.tables["requests"])
    assert isinstance(rows, pl.DataFrame)
    assert rows["status"].to_list() == ["finished", "finished", "failed", "failed", "unfinished", "failed"]
    assert rows["reason"].to_list() == ["stop", "length", "http_503", "cut", "running", "clock_went_back"]
    assert rows["on_time"].to_list() == [True, False, False, False, False, False]
    assert rows["ttft_s"].to_list() == [pytest.approx(0.1), pytest.approx(0.9), None, pytest.approx(0.2), 0.2, None]
    assert rows["tpot_s"].to_list()[:2] == [pytest.approx(0.03), pytest.approx(0.1)]
    counts = run.summary["requests"]
    assert counts == {"submitted": 6, "finished": 2, "rejected": 0, "failed": 3, "unfinished": 1}
    assert run.summary["not_submitted"] == 0


def test_c027_c029_the_summary_says_who_counted_and_what_was_dropped(tmp_path: Path) -> None:
    measuring = record_live_run(*small(tmp_path), live_run()).summary["measuring"]
    assert measuring["token_source"] == {"server": 3, "chunks": 3}
    assert measuring["token_mismatches"] == 1, "the second has 2 tokens, the trace 3"
    assert measuring["negative_ttft"] == 1
    assert measuring["schedule_lag_s"]["max"] == pytest.approx(0.1)
    assert measuring["chunk_gap_s"]["itl_dropped"] == 0


def test_decisions_and_what_they_expected_are_in_the_tables(tmp_path: Path) -> None:
    predicted = np.array([0.11, 0.2])
    decisions = [
        (0, Decision(0, "feasible", predicted, np.array([0.5, 0.4])), 5, [0.3]),
        (1, Decision(1, "feasible", predicted, np.array([0.4, 0.5])), -1, [0.3]),
        (2, Decision(SHED, "shed"), -1, []),
    ]
    scenario, world = small(tmp_path, 2)
    run = record_live_run(scenario, world, live_run(decisions=decisions, estimators=["lps"], outcomes=OUTCOMES[:3]))
    rows, made = (pl.from_arrow(run.tables[name]) for name in ("requests", "decisions"))
    assert isinstance(rows, pl.DataFrame)
    assert isinstance(made, pl.DataFrame)
    assert rows["instance"].to_list() == ["a", "b", None]
    assert (rows["status"][2], rows["reason"][2]) == ("rejected", "shed")
    assert made["predicted_ttft_s"].to_list() == [0.11, 0.2, None]
    assert run.summary["estimators"]["sfs"]["count"] == 2
    assert run.summary["estimators"]["lps"]["count"] == 2


def test_the_directory_says_how_it_was_measured_and_validate_takes_it(tmp_path: Path) -> None:
    scenario, world = small(tmp_path)
    run = record_live_run(scenario, world, live_run(), tmp_path / "sfs")
    manifest = json.loads((tmp_path / "sfs" / "manifest.json").read_text())
    assert (manifest["engine"], manifest["live"]["servers"], manifest["live"]["speed"]) == ("live", "mock", 2.0)
    assert run.folder == tmp_path / "sfs"
    real = read_run(tmp_path / "sfs")
    assert real.requests.arrival_s.tolist() == [0.0, 1.0, 3.0, 4.0, 5.0]
    assert real.requests.output_tokens.tolist() == [3, 2, 1, 2, 3]
    assert real.requests.ttft_s.tolist() == pytest.approx([0.1, 0.9, 0.2, 0.2, np.nan], nan_ok=True)
    assert real.requests.e2e_s.tolist() == pytest.approx([0.16, 1.0, np.nan, np.nan, np.nan], nan_ok=True)
    assert real.source == "run directory, mock"
    assert real.notes == (
        "3 requests that did not finish there count with the tokens that came of them",
        "1 requests of which no token came are left out",
    )
    code, text, errors = run_command("validate", tmp_path / "u.json", tmp_path / "sfs", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(text)["e2e_s"]["count"] == 2


def test_a_directory_of_several_instances_or_policies_asks_which(tmp_path: Path) -> None:
    scenario, world = small(tmp_path, 2)
    (tmp_path / "runs").mkdir()
    for policy in ("sfs", "random"):
        record_live_run(scenario, world, live_run(policy=policy), tmp_path / "runs" / policy)
    with pytest.raises(ConfigError, match="holds random, sfs; give the folder of one policy"):
        read_run(tmp_path / "runs")
    with pytest.raises(ConfigError, match="has the instances a, b; name one with --run"):
        read_run(tmp_path / "runs" / "sfs")
    with pytest.raises(ConfigError, match="no instance c; it has a, b"):
        read_run(tmp_path / "runs" / "sfs", "c")
    with pytest.raises(CalibrationError, match="no request was finished at b"):
        read_run(tmp_path / "runs" / "sfs", "b")
    assert read_run(tmp_path / "runs" / "sfs", "a").name == "sfs/a"
