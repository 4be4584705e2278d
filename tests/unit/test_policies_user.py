"""Policies of users: how they are found, what they may answer, and what is said when they fail."""

import json
import os
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from policy_helpers import make_request, make_router, make_specs, make_view, play
from simcluster.cli import main
from simcluster.errors import ConfigError, PolicyError
from simcluster.experiment.run import run_policy
from simcluster.routers import SHED, check_policy, located, user
from small_cluster import frame, make_card, make_world, run_once, scenario_data
from trace_files import write_file

TWO = make_specs(2)
EXAMPLE = Path(__file__).parents[2] / "docs" / "my_policy.py"
FIXED = "recording_policy:Fixed"
COLUMNS: dict[str, Any] = {"arrival_ns": [0, 10**9, 2 * 10**9], "prompt_tokens": [4] * 3, "output_tokens": [3] * 3}


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, standard output, standard error."""
    before = sys.argv
    sys.argv = ["simcluster", *arguments]
    try:
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def small_scenario(folder: Path, policies: list[str]) -> Path:
    make_card(folder)
    write_file(folder / "t.parquet", **COLUMNS)
    path = folder / "small.yaml"
    path.write_text(json.dumps(scenario_data(2, routing={"policies": policies})))
    return path


# ---- found where ------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_passes_its_test_and_does_what_it_says() -> None:
    check_policy(f"{EXAMPLE}:Uncrowded:most=2")
    router = make_router(f"{EXAMPLE}:Uncrowded:most=2", TWO)
    request = make_request(count=2, utility=[0.9, 0.1])
    for residents, expected in (([0, 0], 0), ([2, 0], 0), ([3, 0], 1), ([3, 4], 0)):
        view = make_view(TWO, [[(4, 50)] * count for count in residents], at_ms=100)
        assert router.route(request, view).instance == expected


def test_a_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policy_in_a_module.py").write_text(
        "class Last:\n    def route(self, request, view):\n        return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert make_router("own_policy_in_a_module:Last", TWO).route(make_request(count=2), make_view(TWO)).instance == 1
    assert sys.path == before


def test_files_of_one_name_in_two_folders_are_two_policies(tmp_path: Path) -> None:
    for folder, answer in (("one", 0), ("two", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.py").write_text(
            f"class P:\n    def route(self, request, view):\n        return {answer}\n"
        )
    for folder, answer in (("one", 0), ("two", 1)):
        router = make_router(f"{tmp_path / folder}/my.py:P", TWO)
        assert router.route(make_request(count=2), make_view(TWO)).instance == answer


def test_a_file_is_looked_for_beside_the_scenario_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    path = small_scenario(folder, ["epsilon(mine.py:Mine,p=0)"])
    (folder / "mine.py").write_text("class Mine:\n    def route(self, request, view):\n        return 1\n")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_cli(capsys, "run", "scenarios/small.yaml", "--json")
    assert code == 0
    (summary,) = json.loads(out)["policies"].values()
    assert summary["composition"]["all"] == {"b": 1.0}
    assert run_cli(capsys, "scenario", "check", str(path))[0] == 0
    assert located("mine.py:Mine", folder) == f"{folder}/mine.py:Mine"
    (tmp_path / "mine.py").write_text("")
    assert located("mine.py:Mine", folder) == "mine.py:Mine"  # the current folder comes first
    assert located("sfs", folder) == "sfs"


def test_installed_packages_offer_policies_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("their_policy", "recording_policy:Fixed", "simcluster.policies")])

    def offered(*, group: str, name: str | None = None) -> EntryPoints:
        found = points.select(group=group)
        return found if name is None else found.select(name=name)

    monkeypatch.setattr(user, "entry_points", offered)
    assert make_router("their_policy:answer=1", TWO).route(make_request(count=2), make_view(TWO)).instance == 1
    with pytest.raises(ConfigError, match="policy 'their_polic' is unknown; did you mean their_policy\\?"):
        check_policy("their_polic")


NOT_FOUND = {
    "nowhere.py:Mine": "policy: nowhere.py: no such file; give its path from the current folder",
    "no_such_module:Mine": "policy: no_such_module cannot be loaded: ModuleNotFoundError: No module named",
    "recording_policy:Fxed": "policy 'recording_policy:Fxed': recording_policy has no 'Fxed'; did you mean Fixed?",
    "recording_policy:NOT_A_POLICY": "has no route(request, view); give a class that has",
    "recording_policy:Fixed:anser=1": "recording_policy:Fixed has no parameter 'anser'; did you mean answer?",
    "recording_policy:Fixed:factor=x": "factor = x; must be a number",
    "recording_policy:Fixed:blind=1": "blind = 1; must be true or false",
    "some/file.py": "policy 'some/file.py': name the class too, as in some/file.py:MyRouter",
}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_a_policy_that_cannot_be_found_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_policy(text)
    assert NOT_FOUND[text] in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class P(:\n    pass\n", r"bad.py cannot be loaded: SyntaxError: invalid syntax \(bad.py:1\)"),
        ("import json\n\n1 / 0\n", r"bad.py cannot be loaded: ZeroDivisionError: division by zero \(bad.py:3\)"),
        ("raise SystemExit(3)\n", r"bad.py cannot be loaded: SystemExit: 3 \(bad.py:1\)"),
        ("class Q:\n    def route(self): ...\n", r"bad.py has no 'P'; known: Q"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line_with_the_place(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    for _ in range(2):  # the second time as the first
        with pytest.raises(ConfigError, match=message):
            check_policy(f"{tmp_path}/bad.py:P")


# ---- what they may answer ----------------------------------------------------------------------------------------


def test_an_index_a_numpy_index_or_a_decision_will_do() -> None:
    view, request = make_view(TWO), make_request(count=2)
    assert make_router(f"{FIXED}:answer=1", TWO).route(request, view).instance == 1
    decision = make_router(f"{FIXED}:answer=lists", TWO).route(request, view)
    assert decision.score is not None
    assert (decision.instance, decision.reason, decision.score.tolist()) == (1, "mine", [0.0, 1.0])
    assert make_router(f"{FIXED}:answer=shed", TWO).route(request, view).instance == SHED


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("none", "route returned None; must be an instance from 0 to 1, or a Decision"),
        ("2", "route returned 2; must be an instance from 0 to 1, or a Decision"),
        ("minus", "route returned -1; must be an instance from 0 to 1, or a Decision"),
        ("true", "route returned True; must be"),
        ("float", "route returned 0.5; must be"),
        ("text", "route returned 'a'; must be"),
        ("big", "route returned 7; must be"),
        ("short", "score of its decision is [1.0, 2.0, 3.0]; must be 2 numbers or None"),
    ],
)
def test_anything_else_is_an_error_that_names_policy_request_and_answer(answer: str, said: str) -> None:
    router = make_router(f"{FIXED}:answer={answer}", TWO)
    with pytest.raises(PolicyError) as caught:
        router.route(make_request(17, count=2), make_view(TWO))
    assert str(caught.value).startswith(f"policy {FIXED}:answer={answer}: request 17: {said}")


def test_an_exception_is_one_line_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        run_once(tmp_path, COLUMNS, scenario_data(2), "recording_policy:Raising")
    said = str(caught.value)
    assert said.startswith("policy recording_policy:Raising: request 2: route raised ZeroDivisionError: ")
    assert "(recording_policy.py:" in said
    with pytest.raises(PolicyError, match="request 0: observe_end raised RuntimeError: two"):
        run_once(tmp_path, COLUMNS, scenario_data(2), "recording_policy:Raising:where=observe")
    with pytest.raises(PolicyError, match="policy recording_policy:Raising:where=init: cannot be built: KeyError"):
        run_once(tmp_path, COLUMNS, scenario_data(2), "recording_policy:Raising:where=init")


def test_a_policy_says_itself_whether_it_needs_the_view(tmp_path: Path) -> None:
    scenario, world = make_world(tmp_path, COLUMNS, scenario_data(2))
    for blind in ("true", "false"):
        decisions = frame(run_policy(scenario, world, f"{FIXED}:blind={blind}"), "decisions")
        assert decisions["snapshot_age_s"].is_null().all() == (blind == "true")


def test_wrappers_work_around_a_users_policy() -> None:
    assert set(play(f"epsilon({FIXED}:answer=2):p=0.3")) == {0, 1, 2}
    assert set(play(f"admission({FIXED}:answer=2)")) == {SHED, 2}


# ---- on the command line -----------------------------------------------------------------------------------------


def test_a_run_with_a_broken_policy_ends_with_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_scenario(tmp_path, ["sfs"])
    for policy, said in (
        (f"{FIXED}:answer=9", f"error: policy {FIXED}:answer=9: request 0: route returned 9; must be an instance"),
        ("recording_policy:Raising", "error: policy recording_policy:Raising: request 2: route raised ZeroDivision"),
        ("recording_policy:Raising:where=observe", "request 0: observe_end raised RuntimeError: two lines"),
        ("recording_policy:Fxed", "did you mean Fixed?"),
    ):
        code, out, err = run_cli(capsys, "run", str(path), "--policy", policy, "--quiet")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err
        assert "Traceback" not in err


def test_runs_of_oddly_named_policies_get_folders_that_name_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_scenario(tmp_path, ["sfs"])
    policies = [f"{EXAMPLE}:Uncrowded", "admission(sfs)", "power_of_two:load=tokens", f"{FIXED}:answer=1"]
    arguments = [part for policy in policies for part in ("-p", policy)]
    assert run_cli(capsys, "run", str(path), *arguments, "--out", str(tmp_path / "out"), "-q")[0] == 0
    folders = {
        json.loads(file.read_text())["policy"]: file.parent.name for file in (tmp_path / "out").glob("*/manifest.json")
    }
    assert folders == {
        policies[0]: "my_policy.py_Uncrowded",
        policies[1]: "admission_sfs",
        policies[2]: "power_of_two_load=tokens",
        policies[3]: "recording_policy_Fixed_answer=1",
    }
    assert list(json.loads((tmp_path / "out" / "summary.json").read_text())["policies"]) == policies
    requests = pl.read_parquet(tmp_path / "out" / "recording_policy_Fixed_answer=1" / "requests.parquet")
    assert set(requests["instance"]) == {"b"}


def test_policy_test_passes_a_sound_policy_and_fails_one_that_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "policy", "test", f"{EXAMPLE}:Uncrowded", "--limit-us", "1e6", "--json")
    found = json.loads(out)
    assert (code, found["passed"], len(found["checks"])) == (0, True, 5)
    code, out, _ = run_cli(capsys, "policy", "test", "recording_policy:Unfair", "--limit-us", "1e6", "--json")
    failed = [check["name"] for check in json.loads(out)["checks"] if not check["passed"]]
    assert code == 1
    assert failed == [
        "never an unhealthy instance",
        "same seed, same decisions",
        "fair ties, rule random",
        "fair ties, rule rotate",
    ]
    code, out, _ = run_cli(capsys, "policy", "test", "sfs", "--limit-us", "0", "--decisions", "100")
    assert code == 1
    assert "time per decision" in out
    assert "FAIL" in out


def test_policy_test_of_a_policy_that_fails_or_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for policy, said in (
        (f"{FIXED}:answer=none", "route returned None"),
        ("shortest_que", "did you mean shortest_queue?"),
        ("oracle", "policy 'oracle' needs the simulator's truth"),
    ):
        code, out, err = run_cli(capsys, "policy", "test", policy)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_policy_list_names_every_policy_rule_source_and_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "policy", "list", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["policies"]["power_of_two"]["parameters"] == {"d": 2, "load": "requests"}
    assert found["wrappers"]["epsilon"]["parameters"] == {"p": 0.05}
    assert all(item["rule"] and item["source"] for item in (found["policies"] | found["wrappers"]).values())
    code, out, _ = run_cli(capsys, "policy", "list")
    assert code == 0
    for name in [*found["policies"], "admission(POLICY)", "epsilon(POLICY)"]:
        assert name in out


def test_the_example_needs_no_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented commands name it by a path from the current folder."""
    monkeypatch.chdir(EXAMPLE.parents[1])
    check_policy(f"{os.path.relpath(EXAMPLE)}:Uncrowded")
    assert "docs/my_policy.py:Uncrowded" in EXAMPLE.read_text()


def test_what_a_policy_reports_stands_in_the_summary_and_in_the_remarks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = f"{EXAMPLE}:Uncrowded:most=0"
    path = small_scenario(tmp_path, [example, FIXED])
    code, out, _ = run_cli(capsys, "run", str(path), "--json")
    found = json.loads(out)["policies"]
    assert code == 0
    assert found[example]["policy_reports"] == [{"crowded_everywhere": 0}]
    assert found[FIXED]["policy_reports"] == []  # it has no report
    assert "Uncrowded:most=0: crowded_everywhere 0" in run_cli(capsys, "run", str(path))[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return {'rate': float('nan')}", "report failed: ValueError: Out of range float values"),
        ("return {'router': self}", "report failed: TypeError: Object of type Told is not JSON serializable"),
        ("return [1]", "report returned [1]; must be a dict for the summary"),
        ("return 1 / 0", "report failed: ZeroDivisionError: division by zero (told.py:5)"),
    ],
)
def test_a_report_that_json_cannot_hold_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, said: str
) -> None:
    file = tmp_path / "told.py"
    file.write_text(
        f"class Told:\n    def route(self, request, view):\n        return 0\n    def report(self):\n        {body}\n"
    )
    code, out, err = run_cli(capsys, "run", str(small_scenario(tmp_path, [f"{file}:Told"])), "-q")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
