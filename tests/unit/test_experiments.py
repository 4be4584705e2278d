"""Cells, their store and the local executor: nothing lost, nothing run twice, nothing that depends on who ran it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

import simcluster
from command_line import run_command
from experiment_files import write_experiment, write_policy
from simcluster.errors import ConfigError
from simcluster.experiment import cells
from simcluster.experiment.build import build_world
from simcluster.experiment.cells import Cell, CellFailure, CellResult, make_cell, run_cell
from simcluster.experiment.executors import LocalProcesses, Outcome, Work, run_cells
from simcluster.experiment.run import run_policy
from simcluster.experiment.store import open_store
from simcluster.experiment.sweep import tidy_table
from simcluster.report.metrics import Window
from simcluster.report.request_values import MEANS, QUANTILES, request_values
from simcluster.scenario import load_scenario
from small_cluster import frame, make_card, make_world, scenario_data
from trace_files import write_file

COMMAND = [sys.executable, "-P", "-m", "simcluster"]


def cell_of(path: Path, policy: str = "round_robin", seed: int = 1, **options: Any) -> Cell:
    scenario, where = load_scenario(str(path))
    return make_cell(scenario.model_copy(update={"seed": seed}), where, policy, **options)


def result_of(cell: Cell) -> CellResult:
    outcome = run_cell(cell)
    assert isinstance(outcome, CellResult)
    return outcome


def one_by_one(cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Outcome]]:
    """Run cells in this process."""
    for cell in cells:
        yield cell, work(cell)


# ---- cells -------------------------------------------------------------------------------------------------------


def test_a_cell_is_what_run_prints_but_for_wall_times(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    cell = cell_of(path)
    summary = run_policy(cell.scenario, build_world(cell.scenario, path), "round_robin").summary
    del summary["mean_decision_us"]
    assert result_of(cell).summary == summary


def keys(path: Path, policy: str = "round_robin") -> str:
    """Return the key of a cell as a new command would: nothing is remembered of the files."""
    for remembered in (cells._inputs, cells._file_digest, cells._recipe_files, cells._code_digest):
        remembered.cache_clear()
    return cell_of(path, policy).key


def test_the_key_changes_with_everything_that_a_result_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_experiment(tmp_path)
    policy = write_policy(tmp_path, "mine", "pass")
    first = keys(path)
    assert keys(path) == first
    seen = {first, keys(path, "shortest_queue"), cell_of(path, seed=2).key, cell_of(path, keep_requests=True).key}
    seen.add(keys(path, policy))
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# changed\n")
    seen.add(keys(path, policy))
    make_card(tmp_path, host_time_s=0.001)
    seen.add(keys(path))
    recipe = yaml.safe_load((tmp_path / "drawn.yaml").read_text())
    (tmp_path / "drawn.yaml").write_text(yaml.safe_dump(recipe | {"slo_scale": 2.0}))
    seen.add(keys(path))
    monkeypatch.setattr(simcluster, "__version__", "99")
    seen.add(keys(path))
    assert len(seen) == 9


def test_the_policies_that_a_scenario_lists_do_not_matter_to_a_cell(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    first = cell_of(path).key
    write_experiment(tmp_path, routing={"policies": ["random"]})
    assert cell_of(path).key == first


def test_an_error_of_the_simulation_is_an_outcome_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = write_policy(tmp_path, "raises", "raise ValueError('no idea')")
    outcome = run_cell(cell_of(write_experiment(tmp_path), policy))
    assert isinstance(outcome, CellFailure)
    assert outcome.message.startswith("policy raises.py:Policy: request 19: route raised ValueError: no idea")


@pytest.mark.parametrize("horizon", [None, 9.05])
def test_values_of_requests_average_to_the_metrics_of_their_run(tmp_path: Path, horizon: float | None) -> None:
    n = 60
    columns = {
        "arrival_ns": [2 * 10**8 * k for k in range(n)],
        "prompt_tokens": [4 + 7 * (k % 11) for k in range(n)],
        "output_tokens": [1 + 9 * (k % 7) for k in range(n)],
    }
    price = {"input_usd_per_mtok": 100.0, "output_usd_per_mtok": 100.0}
    data = scenario_data(
        [{"price": price, "engine": {"max_num_seqs": 3}}],
        slo={"ttft": 0.3, "tpot_s": 0.0125},
        measure={"warmup_s": 0.4, "horizon_s": horizon},
    )
    scenario, world = make_world(tmp_path, columns, data)
    run = run_policy(scenario, world, "round_robin")
    window = Window(*run.summary["window_s"])
    values = request_values(frame(run, "requests"), window, world.request_id.tolist(), 0.0125)
    table = pl.from_arrow(values)
    assert isinstance(table, pl.DataFrame)
    summary = run.summary
    expected = {
        "on_time_utility": summary["on_time_utility"],
        "slo_attainment": summary["slo_attainment"],
        "share_negative_utility": summary["share_negative_utility"],
        "cost_micro_usd": summary["cost"]["token_cost_micro_usd_mean"],
    }
    assert 0 < expected["slo_attainment"] < 1
    assert 0 < expected["share_negative_utility"] < 1
    for name, column in MEANS.items():
        assert table[column].fill_nan(None).mean() == pytest.approx(expected[name])
    for (column, q), name in zip(QUANTILES.values(), ("p50", "p99"), strict=True):
        assert table[column].fill_nan(None).quantile(q, "linear") == pytest.approx(summary["ttft_s"][name])


# ---- the store ---------------------------------------------------------------------------------------------------


def test_what_is_stored_is_not_run_again(tmp_path: Path) -> None:
    all_cells = [cell_of(write_experiment(tmp_path), seed=seed, keep_requests=True) for seed in (1, 2)]
    store = open_store(tmp_path / "out", {})
    first = run_cells(all_cells, one_by_one, run_cell, store)

    def refuse(_cell: Cell) -> Outcome:
        raise AssertionError("it is stored")

    again = run_cells(all_cells, one_by_one, refuse, store)
    for key, outcome in first.items():
        stored = again[key]
        assert isinstance(outcome, CellResult)
        assert isinstance(stored, CellResult)
        assert stored.summary == outcome.summary
        assert stored.requests is not None
        assert outcome.requests is not None
        assert stored.requests.to_pylist()[0] == outcome.requests.to_pylist()[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"summary": {}}'])
def test_a_result_that_cannot_be_read_is_run_again(tmp_path: Path, content: str) -> None:
    cell = cell_of(write_experiment(tmp_path))
    store = open_store(tmp_path / "out", {})
    (store.folder / f"{cell.key}.json").write_text(content)
    assert store.load(cell) is None


def test_failures_are_not_stored(tmp_path: Path) -> None:
    cell = cell_of(write_experiment(tmp_path))
    store = open_store(tmp_path / "out", {})
    run_cells([cell], one_by_one, lambda _cell: CellFailure("no"), store)
    assert list(store.folder.iterdir()) == []


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and no earlier experiment"):
        open_store(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# ---- processes ---------------------------------------------------------------------------------------------------


def test_equal_cells_run_once_and_all_are_reported(tmp_path: Path) -> None:
    cell = cell_of(write_experiment(tmp_path))
    reported: list[bool] = []
    outcomes = run_cells([cell, cell], one_by_one, run_cell, None, lambda *about: reported.append(about[2]))
    assert list(outcomes) == [cell.key]
    assert reported == [False]


def test_a_process_that_dies_costs_its_own_cell_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    killed = write_policy(tmp_path, "killed", "os.kill(os.getpid(), signal.SIGKILL)")
    path = write_experiment(tmp_path)
    all_cells = [cell_of(path, policy, seed) for seed in (1, 2) for policy in ("round_robin", killed, "random")]
    outcomes = run_cells(all_cells, LocalProcesses(2), run_cell)
    for cell in all_cells:
        outcome = outcomes[cell.key]
        if cell.policy == killed:
            assert isinstance(outcome, CellFailure)
            assert "its process died" in outcome.message
        else:
            assert isinstance(outcome, CellResult)
            assert outcome.summary == result_of(cell).summary


def sweep_command(policy: str, out: str, workers: int = 2) -> list[str]:
    fields = ["--set", "workload.rate_scale=1,2", "--set", "routing.tie=index,rotate"]
    policies = ["-p", "round_robin", "-p", policy]
    return [
        *COMMAND,
        "sweep",
        "s.yaml",
        *fields,
        *policies,
        "--seeds",
        "2",
        "--workers",
        str(workers),
        "--out",
        out,
        "-q",
    ]


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def stored(folder: Path) -> list[Path]:
    return list((folder / "cells").glob("*.json")) if (folder / "cells").is_dir() else []


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """Write a sweep of 16 cells and a policy that hangs from its fourth run on, while there is a file `hang`."""
    write_experiment(tmp_path)
    condition = "os.path.exists('hang') and open('slow.log').read().count('run') > 3"
    return write_policy(tmp_path, "slow", f"while {condition}: time.sleep(0.05)")


def stored_of(folder: Path, policy: str) -> int:
    return len([path for path in stored(folder) if f'"policy": "{policy}"' in path.read_text()])


def test_a_sweep_that_is_killed_goes_on_and_equals_one_that_is_not(tmp_path: Path, slow: str) -> None:
    whole = subprocess.run(sweep_command(slow, "whole", 1), cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / "slow.log").unlink()
    (tmp_path / "hang").touch()
    killed = subprocess.Popen(
        sweep_command(slow, "cut"), cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL
    )
    wait_for(lambda: stored_of(tmp_path / "cut", slow) == 3)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    wait_for(lambda: group_is_gone(killed.pid))  # its processes do not outlive it
    assert 3 < len(stored(tmp_path / "cut")) < 16
    (tmp_path / "slow.log").unlink()
    (tmp_path / "hang").unlink()
    resumed = subprocess.run(sweep_command(slow, "cut"), cwd=tmp_path, check=True, capture_output=True, text=True)
    assert resumed.stdout == whole.stdout
    for name in ("sweep.json", "cells.parquet", "summary.parquet"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "slow.log").read_text().count("run") == 8 - 3


def test_an_interrupted_sweep_says_how_to_go_on_and_leaves_no_process(tmp_path: Path, slow: str) -> None:
    (tmp_path / "hang").touch()
    running = subprocess.Popen(
        sweep_command(slow, "cut"),
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: stored_of(tmp_path / "cut", slow) == 3)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    out, err = running.communicate(timeout=300)
    assert running.returncode == 130
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("interrupted: ")
    assert "of 16 cells are done; the same command goes on from cut" in err
    wait_for(lambda: group_is_gone(running.pid))
    assert not list((tmp_path / "cut" / "cells").glob(".*"))


# ---- commands ----------------------------------------------------------------------------------------------------


def compare(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "compare", "s.yaml", "--seeds", "3", "--rates", "5,20", "--json", *options]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def test_comparisons_in_other_processes_with_other_workers_give_the_same_bytes(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    first = compare(tmp_path, "--workers", "1", "--policies", "round_robin,shortest_queue,random")
    second = compare(tmp_path, "--workers", "3", "-p", "round_robin", "-p", "shortest_queue", "-p", "random", "-q")
    assert first.stdout == second.stdout
    result = json.loads(first.stdout)
    assert len(result["cells"]) == 2 * 3 * 3
    assert "mean_decision_us" not in first.stdout


def test_all_policies_of_a_seed_meet_the_same_requests(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    tables = {}
    for policy in ("round_robin", "random"):
        for seed in (1, 2):
            requests = result_of(cell_of(path, policy, seed, keep_requests=True)).requests
            assert requests is not None
            tables[policy, seed] = requests["arrival_ns"].to_pylist()
    assert tables["round_robin", 1] == tables["random", 1]
    assert tables["round_robin", 2] == tables["random", 2]
    assert tables["random", 1] != tables["random", 2]


def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "250")


def test_compare_prints_table_verdicts_and_what_they_rest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(monkeypatch, tmp_path)
    write_experiment(tmp_path, measure={"warmup_s": 0.5})
    command = ("compare", "s.yaml", "--seeds", 2, "--rates", "5,20", "--workers", 1)
    code, out, err = run_command(*command)
    assert (code, err) == (0, "")
    table, verdicts, rests = (
        out.index(text) for text in ("TTFT p99", "verdicts on on-time utility:", "this rests on:")
    )
    assert table < verdicts < rests
    for text in (
        "5 req/s: ",
        "20 req/s: ",
        "area over all rates: ",
        "2 seeds can never show one here, at least 6 are needed",
        "measured after a warm-up of 0.5 s; runs go on after the last arrival until every request has ended (drain)",
        "base rate 10 req/s (mean rate of recipe drawn)",
        "seeds 1 to 2: for each, all policies meet the same arrivals, lengths, qualities and targets",
        "Wilcoxon",
    ):
        assert text in out, text


def test_compare_stops_when_intervals_are_narrow_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(monkeypatch, tmp_path)
    write_experiment(tmp_path)
    command = ("compare", "s.yaml", "--seeds", 2, "--max-seeds", 5, "--json", "-q", "--workers", 1, "--out", "o")
    loose = json.loads(run_command(*command, "--until-width", 5)[1])
    assert loose["stopping"]["looks_at_seeds"] == [2]
    assert 0 < loose["stopping"]["widest_interval"] < 5
    tight = json.loads(run_command(*command, "--until-width", 1e-9)[1])
    assert tight["stopping"]["looks_at_seeds"] == [2, 4, 5]
    assert tight["seeds"] == [1, 2, 3, 4, 5]
    assert "looked 3 times, at 2, 4, 5 seeds" in " ".join(tight["method"])


def test_one_trace_is_compared_by_blocks_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(monkeypatch, tmp_path)
    make_card(tmp_path)
    n = 120  # in tens, with time to drain between them
    arrivals = [10**9 * (k // 10) + 10**6 * (k % 10) for k in range(n)]
    write_file(tmp_path / "t.parquet", arrival_ns=arrivals, prompt_tokens=[4] * n, output_tokens=[3] * n)
    data = scenario_data(2, slo={"ttft": 0.03}, routing={"policies": ["always_busiest", "round_robin"]})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(data))
    code, out, _ = run_command("compare", "s.yaml", "--json", "--workers", 1, "-q")
    assert code == 0
    result = json.loads(out)
    assert result["seeds"] == [1]
    assert result["blocks"]["length"] == 10
    assert result["blocks"]["memory"] == {"always_busiest": 10, "round_robin": 10}
    text = " ".join(result["method"])
    assert "one trace, t.parquet, is one sample of traffic" in text
    assert "blocks of 10 of 120 requests, longer than any backlog or 99 of 100 answers last (10)" in text
    pair = result["loads"][0]["pairs"][0]["metrics"]["on_time_utility"]
    assert pair["interval"][0] <= pair["difference"] <= pair["interval"][1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "s.yaml", "-p", "random"), "give at least two to compare"),
        (("compare", "s.yaml", "--reference", "sfs"), "must be best or one of round_robin, shortest_queue"),
        (("compare", "s.yaml", "--rates", "0"), "must be a rate above 0"),
        (("compare", "s.yaml", "--policies", "sfs,nobody"), "policy 'nobody' is unknown"),
        (("compare", "s.yaml", "--block-requests", "3"), "seeds are independent"),
        (("compare", "s.yaml", "--until-width", "-1"), "must be a number above 0"),
        (("compare", "s.yaml", "--trace", "t.parquet", "--recipe", "drawn"), "both are given"),
        (("sweep", "s.yaml"), "--set: is missing"),
        (("sweep", "s.yaml", "--set", "routing.ties=index"), "did you mean routing.tie?"),
        (("sweep", "s.yaml", "--set", "routing.tie=coin"), "must be 'index', 'rotate' or 'random'"),
        (("sweep", "s.yaml", "--set", "workload.rate_scale=1", "--rates", "2"), "changes the rate too"),
        (("sweep", "s.yaml", "--set", "routing.tie=index", "--out", "s.yaml"), "cannot be written"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    in_folder(monkeypatch, tmp_path)
    write_experiment(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    code, out, err = run_command(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_sweep_writes_a_tidy_table_of_cells_and_one_of_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(monkeypatch, tmp_path)
    write_experiment(tmp_path)
    fields = ("--set", "cluster.instances[*].replicas=1,2", "--set", "routing.tie=index,rotate", "--zip")
    code, out, err = run_command(
        "sweep", "s.yaml", *fields, "--rates", "5,20", "--seeds", 2, "--workers", 1, "--out", "o"
    )
    assert (code, err) == (0, "")
    assert "cluster.instances[*].replicas" in out
    cells, points = pl.read_parquet("o/cells.parquet"), pl.read_parquet("o/summary.parquet")
    assert cells.height == 2 * 2 * 2 * 2  # points, rates, seeds, policies
    assert points.height == cells.height / 2
    assert cells["cluster.instances[*].replicas"].to_list() == [1] * 8 + [2] * 8
    assert set(cells["routing.tie"]) == {"index", "rotate"}
    assert cells["requests.submitted"].dtype == pl.Int64
    assert cells["error"].null_count() == cells.height
    first = cells.filter((pl.col("point") == 0) & (pl.col("policy") == "round_robin"))
    assert points["ttft_p99_s"][0] == pytest.approx(first["ttft_s.p99"].mean())
    assert points["ttft_p99_s_low"][0] <= points["ttft_p99_s"][0] <= points["ttft_p99_s_high"][0]


def test_cells_that_fail_are_named_and_the_others_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(monkeypatch, tmp_path)
    write_experiment(tmp_path)
    raises = write_policy(tmp_path, "raises", "raise ValueError('no idea')")
    code, out, err = run_command("compare", "s.yaml", "--policies", f"random,{raises}", "--seeds", 2, "--workers", 1)
    assert code == 1
    assert err.startswith("2 of 4 cells have no result; the first says: policy raises.py:Policy: request 19")
    assert f"FAILED {raises}, seed 2, 10 req/s: policy {raises}: request 19: route raised ValueError: no idea" in out
    code, out, err = run_command("sweep", "s.yaml", "--set", "routing.tie=index", "-p", raises, "--workers", 1, "-q")
    assert (code, out) == (2, "")
    assert err.startswith("error: no cell has a result; the first says: policy raises.py:Policy")


def test_a_table_of_mixed_rows_keeps_what_is_whole_whole() -> None:
    table = tidy_table([{"a": 1, "b": None, "c": [1], "d": True}, {"a": 2.5, "b": 3, "c": "x", "e": None}])
    assert table.to_pylist() == [
        {"a": 1.0, "b": None, "c": "[1]", "d": True, "e": None},
        {"a": 2.5, "b": 3, "c": "x", "d": None, "e": None},
    ]
    assert str(table.schema.field("b").type) == "int64"
