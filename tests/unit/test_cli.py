"""The command line: results on standard output, everything else on standard error, one line for what is wrong."""

import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import typer
import yaml

import simcluster
from simcluster.cli import app, main
from small_cluster import make_card, scenario_data
from trace_files import write_file

COMMAND = [sys.executable, "-P", "-m", "simcluster"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"TERM": "xterm", "COLUMNS": "200"}
N = 6


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Call the command line in this process, in an empty folder; an exception that it lets through fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["simcluster", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Result(left.value.code, captured.out, captured.err)

    return call


def write_small(folder: Path, n: int = N, **sections: Any) -> None:
    """Write card, trace and scenario `s.yaml` into a folder."""
    make_card(folder, max_model_len=40_000)  # more than the KV cache holds: a warning
    write_file(
        folder / "t.parquet", arrival_ns=[4 * 10**6 * k for k in range(n)], prompt_tokens=[4] * n, output_tokens=[3] * n
    )
    data = scenario_data(2, slo={"ttft": 0.05}, **({"routing": {"policies": ["round_robin", "sfs"]}} | sections))
    (folder / "s.yaml").write_text(yaml.safe_dump(data))


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---- results ---------------------------------------------------------------------------------------------------


def test_run_prints_one_json_object_of_the_promised_shape(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    result = cli("run", "s.yaml", "--json")
    assert result.code == 0
    policies = json.loads(result.out)["policies"]
    assert list(policies) == ["round_robin", "sfs"]
    for summary in policies.values():
        assert summary["requests"] == {"submitted": N, "finished": N, "rejected": 0, "failed": 0, "unfinished": 0}
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            assert {"mean", "p50", "p90", "p95", "p99"} <= set(summary[name])
            assert all(value > 0 for value in summary[name].values())
        assert 0 <= summary["slo_attainment"] <= 1
        assert summary["on_time_utility"] > 0
        assert summary["goodput_rps"] > 0
        assert summary["interrupted"] is False


def test_policies_of_the_command_line_replace_those_of_the_scenario_and_count_once(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    result = cli("run", "s.yaml", "--json", "-p", "random", "--policy", "oracle", "-p", "random")
    assert list(json.loads(result.out)["policies"]) == ["random", "oracle"]


def test_options_reach_the_run(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    write_file(tmp_path / "other.parquet", arrival_ns=[0], prompt_tokens=[4], output_tokens=[3])

    def summary(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(cli("run", "s.yaml", "--json", "-p", "random", *options).out)["policies"]
        return {key: value for key, value in found["random"].items() if key != "mean_decision_us"}

    plain = summary()
    assert summary() == plain
    assert summary("--trace", "other.parquet")["requests"]["submitted"] == 1
    assert summary("--rate-scale", "2") != plain
    assert any(summary("--seed", str(seed)) != plain for seed in range(2, 6))
    assert cli("run", "s.yaml", "-q", "-p", "random", "--decisions", "off", "--out", "d").code == 0
    assert not (tmp_path / "d/random/decisions.parquet").exists()


def test_a_run_directory_holds_what_it_promises_and_can_be_written_again(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    for _ in range(2):
        assert cli("run", "s.yaml", "--out", "deep/d").code == 0
        tables = {f"{name}.parquet" for name in ("requests", "decisions", "instances")}
        of_policy = {"manifest.json", "summary.json"} | tables
        promised = {"summary.json", "round_robin", "sfs", "sfs/estimates.parquet"}
        promised |= {f"{policy}/{name}" for policy in ("round_robin", "sfs") for name in of_policy}
        assert files_in(tmp_path / "deep/d") == promised
    manifest = json.loads((tmp_path / "deep/d/sfs/manifest.json").read_text())
    assert (manifest["policy"], manifest["seed"]) == ("sfs", 1)
    assert manifest["versions"]["simcluster"] == simcluster.__version__
    assert manifest["scenario"]["routing"]["policies"] == ["round_robin", "sfs"]
    together = json.loads((tmp_path / "deep/d/summary.json").read_text())["policies"]
    assert together["sfs"] == json.loads((tmp_path / "deep/d/sfs/summary.json").read_text())


def test_quiet_prints_nothing_but_results(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    loud, quiet = cli("run", "s.yaml"), cli("run", "s.yaml", "--quiet")
    assert "warning: " in loud.err
    assert "read this as" in loud.out
    assert quiet.code == 0
    assert quiet.err == ""
    assert "read this as" not in quiet.out
    for part in ("policy", "round_robin", "sfs", "TTFT p99"):
        assert part in quiet.out
    as_json = cli("run", "s.yaml", "-q", "--json", "--out", "d")
    assert as_json.err == ""
    assert set(json.loads(as_json.out)) == {"policies"}


def test_scenario_check_show_and_schema_print_what_they_say(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    check = cli("scenario", "check", "s.yaml")
    assert check.code == 0
    assert f"s.yaml: fine; {N} requests, 2 instances, policies round_robin, sfs" in check.out
    shown = yaml.safe_load(cli("scenario", "show", "s.yaml").out)
    assert shown["measure"] == {"horizon_s": None, "warmup_s": 0.0, "drain": True}
    assert json.loads(cli("scenario", "schema").out)["title"] == "Scenario"


# ---- help ------------------------------------------------------------------------------------------------------


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    inside = getattr(command, "commands", {})
    for name, inner in inside.items():
        yield from leaves(inner, (*path, name))
    if not inside:
        yield path


@pytest.mark.parametrize("path", list(leaves(typer.main.get_command(app))), ids=" ".join)
def test_the_help_of_every_command_shows_an_example(path: tuple[str, ...], cli: Cli) -> None:
    result = cli(*path, "--help")
    assert (result.code, result.err) == (0, "")
    assert "Example" in result.out
    assert f"simcluster {' '.join(path)}" in result.out.partition("Example")[2]


def test_a_rerun_with_fewer_policies_leaves_no_folder_of_one_that_was_not_run(cli: Cli, tmp_path: Path) -> None:
    write_small(tmp_path)
    assert cli("run", "s.yaml", "-q", "-p", "random", "-p", "sfs", "--out", "d").code == 0
    (tmp_path / "d" / "notes").mkdir()
    assert cli("run", "s.yaml", "-q", "-p", "sfs", "--out", "d").code == 0
    assert sorted(each.name for each in (tmp_path / "d").iterdir()) == ["notes", "sfs", "summary.json"]


def test_without_arguments_there_is_help_and_no_word_of_an_error(cli: Cli) -> None:
    for words in ((), ("scenario",), ("run",)):
        result = cli(*words)
        assert "Usage: " in result.out
        assert result.err == ""
    assert "quickstart" in cli("--help").out


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"simcluster {simcluster.__version__}\n"
    assert done.stderr == ""


# ---- errors ----------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[list[str], str]] = {
    "an unknown scenario": (["run", "quickstrat"], "quickstrat: no such file and no shipped one"),
    "an unknown command": (["rum", "s.yaml"], "No such command 'rum'"),
    "an unknown option": (["run", "s.yaml", "--polcy", "sfs"], "--polcy"),
    "no scenario": (["run", "--json"], "Missing argument"),
    "too many arguments": (["run", "s.yaml", "sfs"], "unexpected extra argument"),
    "an unknown policy": (["run", "s.yaml", "-p", "sfss"], "policy 'sfss' is unknown; did you mean sfs?"),
    "an unknown policy after a good one": (["run", "s.yaml", "-p", "sfs", "-p", "x", "--out", "d"], "policy 'x'"),
    "a rate of 0": (["run", "s.yaml", "--rate-scale", "0"], "option: workload.rate_scale = 0"),
    "a rate that is none": (["run", "s.yaml", "--rate-scale", "nan"], "workload.rate_scale = nan"),
    "a rate in words": (["run", "s.yaml", "--rate-scale", "fast"], "Invalid value for '--rate-scale'"),
    "a negative seed": (["run", "s.yaml", "--seed", "-1"], "option: seed = -1"),
    "an unknown level": (["run", "s.yaml", "--decisions", "some"], "Invalid value for '--decisions'"),
    "an unknown trace": (["run", "s.yaml", "--trace", "x.parquet", "--out", "d"], "x.parquet'; no such file"),
    "a trace that is none": (["run", "s.yaml", "--trace", "s.yaml", "--out", "d"], "s.yaml"),
    "a bad scenario": (["run", "bad.yaml", "--out", "d"], "bad.yaml: workload is missing"),
    "an unknown card": (["run", "card.yaml", "--out", "d"], "card.yaml: cluster.instances[0].card = 'v.json'"),
    "a folder as scenario": (["scenario", "show", "."], ".: is a folder"),
    "an output that is a file": (["run", "s.yaml", "--out", "s.yaml"], "--out s.yaml: is a file; give a folder"),
    "an output below a file": (["run", "s.yaml", "--out", "s.yaml/d"], "--out s.yaml/d: cannot be written"),
    "an output that cannot be": (["run", "s.yaml", "--out", "/proc/none/d"], "--out /proc/none/d: cannot be written"),
    "an output with other things": (["run", "s.yaml", "--out", "mine"], "--out mine: is not empty and no earlier run"),
    "a name with a line break": (["run", "two\nlines"], "two lines: no such file"),
    "a name that is too long": (["run", "x" * 5000], "File name too long"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_is_one_line_and_exit_code_2_and_leaves_nothing_behind(what: str, cli: Cli, tmp_path: Path) -> None:
    arguments, message = ERRORS[what]
    write_small(tmp_path)
    (tmp_path / "bad.yaml").write_text("name: x\ncluster: {instances: []}\n")
    (tmp_path / "card.yaml").write_text((tmp_path / "s.yaml").read_text().replace("u.json", "v.json"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary.txt").write_text("dear diary")
    before = files_in(tmp_path)
    result = cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert files_in(tmp_path) == before


def test_a_policy_that_fails_leaves_the_results_of_those_before_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simcluster.errors import SimulationError  # noqa: PLC0415
    from simcluster.experiment import run as experiment  # noqa: PLC0415

    real = experiment.run_policy

    def broken(scenario: Any, world: Any, policy: str, *rest: Any) -> Any:
        if policy == "sfs":
            raise SimulationError("two requests evict each other")
        return real(scenario, world, policy, *rest)

    monkeypatch.setattr(experiment, "run_policy", broken)
    write_small(tmp_path)
    result = cli("run", "s.yaml", "-q", "--out", "d")
    assert (result.code, result.err) == (2, "error: two requests evict each other\n")
    assert list(json.loads((tmp_path / "d/summary.json").read_text())["policies"]) == ["round_robin"]
    assert cli("run", "s.yaml", "-q", "--out", "new", "-p", "sfs").code == 2
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(experiment, "run_policy", real)
    assert cli("run", "s.yaml", "-q", "--out", "d").code == 0  # it is an earlier run, so it can be written again


def run_process(folder: Path, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Call the command line in a process of its own."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        **how,
    )


def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_run(tmp_path: Path) -> None:
    write_small(tmp_path)
    before = files_in(tmp_path)
    done = run_process(
        tmp_path,
        *("run", "s.yaml", "--out", "d", "-q"),
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --out d/round_robin: cannot be written (")
    assert done.stderr.count("\n") == 1
    assert files_in(tmp_path) == before


def test_a_standard_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    write_small(tmp_path)
    with Path("/dev/full").open("w") as full:
        done = run_process(tmp_path, "scenario", "show", "s.yaml", stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: output: No space left on device\n")


@pytest.mark.parametrize("command", [("run", "s.yaml", "-q"), ("scenario", "schema")], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error_of_ours(command: tuple[str, ...], tmp_path: Path) -> None:
    write_small(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    done = run_process(tmp_path, *command, stdout=writer)
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "error" not in done.stderr


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------


def read_terminal(controller: int, wait_s: float) -> bytes:
    """Return what comes from a terminal within a time, or nothing."""
    return os.read(controller, 100_000) if select.select([controller], [], [], wait_s)[0] else b""


def test_ctrl_c_during_imports_is_one_line_whatever_is_being_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(  # in place of the real one
        "import sys, time\n"
        "sys.stderr.write('importing\\n'); sys.stderr.flush()\n"
        "try:\n    time.sleep(60)\n"
        "except BaseException as error:\n    raise ImportError('hidden') from error\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.Popen([*COMMAND, "run", "quickstart"], env=environment, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    assert run.stderr.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=30)[1] == "error: interrupted\n"
    assert run.returncode == 130


def test_ctrl_c_ends_a_run_with_valid_partial_results(tmp_path: Path) -> None:
    n = 300_000
    write_small(tmp_path, n, routing={"policies": ["shortest_queue", "sfs"]})
    controller, terminal = pty.openpty()
    run = subprocess.Popen(
        [*COMMAND, "run", "s.yaml", "--out", "d", "--json"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    shown = b""
    while b"req/s" not in shown:  # the progress bar moves
        assert run.poll() is None
        shown += read_terminal(controller, 0.1)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=60)
    while more := read_terminal(controller, 0):
        shown += more
    os.close(terminal)
    os.close(controller)
    assert run.returncode == 130
    assert b"stopped early" in shown
    assert b"Traceback" not in shown

    folder = tmp_path / "d"
    assert {path.name for path in folder.iterdir()} == {"summary.json", "shortest_queue"}
    summary = json.loads((folder / "summary.json").read_text())["policies"]["shortest_queue"]
    assert json.loads(out)["policies"] == {"shortest_queue": summary}
    assert summary["interrupted"] is True
    counts = summary["requests"]
    assert 0 < counts["submitted"] < n
    assert counts["submitted"] + summary["not_submitted"] == n
    assert counts["submitted"] == sum(counts[name] for name in ("finished", "rejected", "failed", "unfinished"))
    requests = pl.read_parquet(folder / "shortest_queue/requests.parquet")
    assert requests.height == counts["submitted"]
    assert dict(requests["status"].value_counts().iter_rows()).items() <= counts.items()
