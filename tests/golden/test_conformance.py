"""The native scheduler does what vLLM's did in every recording; an altered one is noticed."""

import copy
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from simcluster.conformance.files import check_file, scenario_files
from simcluster.conformance.replay import compare
from simcluster.errors import ConformanceError

FOLDER = Path(__file__).parent
FILES = scenario_files([FOLDER])

Json = dict[str, Any]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_recorded_scenario_is_reproduced(path: Path) -> None:
    assert [f"{name}: {found}" for name, found in check_file(path) if found is not None] == []


def _load(version: str, name: str) -> list[Json]:
    raw = (FOLDER / version / name).read_bytes()
    data: list[Json] = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    return data


@pytest.mark.parametrize("version", ["vllm_0.32", "vllm_0.33"])
def test_the_recordings_are_complete(version: str) -> None:
    names = [path.name for path in FILES if path.parent.name == version]
    scenarios = [scenario for name in names for scenario in _load(version, name)]
    assert len(scenarios) == 400
    assert {scenario["vllm"] for scenario in scenarios} == {version.replace("vllm_", "") + ".0"}


def _versions_differ(scenario: Json) -> bool:
    other = copy.deepcopy(scenario)
    other["vllm"] = "0.32.0"
    return compare(other) is not None


def test_the_two_versions_are_told_apart() -> None:
    """The recordings of 0.33 do not all pass under the rules of 0.32."""
    names = ("small_random.json.gz", "small_preempt.json.gz")
    assert any(_versions_differ(scenario) for name in names for scenario in _load("vllm_0.33", name))


@pytest.fixture(scope="module")
def rich() -> Json:
    """Return a scenario with aborts, preemptions, finishes, block tables and both queues."""
    for scenario in _load("vllm_0.33", "small_random.json.gz"):
        fields = {name for record in scenario["iterations"] for name in record}
        orders = [r for r in scenario["iterations"] if len(r.get("waiting", ())) > 1]
        if {"aborted", "preempted", "finished", "blocks"} <= fields and orders:
            for record in scenario["iterations"]:  # what only long recordings have in place of the queues
                if "running" in record:
                    record["nrun"], record["nwait"] = len(record["running"]), len(record["waiting"])
            assert compare(scenario) is None
            return scenario
    raise AssertionError("no recorded scenario has every kind of event")


def _record(scenario: Json, field: str, least: int = 1) -> Json:
    """Return the first iteration in which this field has at least so many elements."""
    for record in scenario["iterations"]:
        if field in record and (isinstance(record[field], int) or len(record[field]) >= least):
            found: Json = record
            return found
    raise AssertionError(f"no iteration has {field}")


def _swap(scenario: Json, field: str) -> None:
    items = _record(scenario, field, 2)[field]
    items[0], items[1] = items[1], items[0]


def _reverse_first_table(scenario: Json) -> None:
    tables = next(
        record["blocks"]
        for record in scenario["iterations"]
        if any(len(table) > 1 for table in record.get("blocks", {}).values())
    )
    next(table for table in tables.values() if len(table) > 1).reverse()


def _bump(scenario: Json, field: str) -> None:
    _record(scenario, field)[field] += 1


def _drop(scenario: Json, field: str) -> None:
    del _record(scenario, field)[field]


def _put(scenario: Json, field: str, place: int, value: object) -> None:
    _record(scenario, field)[field][0][place] = value


Alteration = Callable[[Json], None]

# what is altered: (the field in which it must be noticed, the alteration)
ALTERATIONS: dict[str, tuple[str, Alteration]] = {
    "the order of a batch": ("sched", lambda s: _swap(s, "sched")),
    "the tokens of a batch entry": ("sched", lambda s: _put(s, "sched", 2, 999)),
    "the context of a batch entry": ("sched", lambda s: _put(s, "sched", 1, 999)),
    "the order of the tokens": ("tokens", lambda s: _swap(s, "tokens")),
    "one token fewer": ("tokens", lambda s: _record(s, "tokens")["tokens"].pop()),
    "the order of the running": ("running", lambda s: _swap(s, "running")),
    "the order of the waiting": ("waiting", lambda s: _swap(s, "waiting")),
    "a block table": ("blocks", _reverse_first_table),
    "the reason of an end": ("finished", lambda s: _put(s, "finished", 1, "error")),
    "one victim more": ("preempted", lambda s: _record(s, "preempted")["preempted"].append(999)),
    **{
        f"{name} one more": (name, partial(_bump, field=name))
        for name in ("i", "nrun", "nwait", "free_sched", "free_upd", "update")
    },
    **{
        f"{name} left out": (name, partial(_drop, field=name))
        for name in ("added", "aborted", "sched", "preempted", "update", "tokens", "finished")
    },
}


@pytest.mark.parametrize("what", ALTERATIONS)
def test_an_altered_iteration_is_noticed(rich: Json, what: str) -> None:
    field, alter = ALTERATIONS[what]
    scenario = copy.deepcopy(rich)
    alter(scenario)
    found = compare(scenario)
    assert found is not None
    assert found.where.endswith(f", {field}")
    assert "recorded" in str(found)


def test_a_missing_iteration_is_noticed(rich: Json) -> None:
    for place in (0, len(rich["iterations"]) // 2, -1):
        scenario = copy.deepcopy(rich)
        del scenario["iterations"][place]
        assert compare(scenario) is not None


def test_a_surplus_iteration_is_noticed(rich: Json) -> None:
    scenario = copy.deepcopy(rich)
    scenario["iterations"].append({"i": scenario["iterations"][-1]["i"] + 1})
    found = compare(scenario)
    assert found is not None
    assert found.found == "the replay has ended"


def test_every_altered_field_of_a_summary_and_of_the_totals_is_noticed(rich: Json) -> None:
    for name in rich["summary"][0]:
        scenario = copy.deepcopy(rich)
        scenario["summary"][0][name] = "altered"
        found = compare(scenario)
        assert found is not None
        assert found.where == f"summary of request 0, {name}"
    for name in rich["totals"]:
        scenario = copy.deepcopy(rich)
        scenario["totals"][name] += 1
        found = compare(scenario)
        assert found is not None
        assert found.where == f"totals, {name}"


def test_another_option_or_request_is_noticed(rich: Json) -> None:
    alterations: tuple[Alteration, ...] = (
        lambda s: s["config"].update(max_num_batched_tokens=3),
        lambda s: s["requests"][0].update(prompt=[[5, 1]], prompt_len=1),
        lambda s: s["requests"][0].update(arrival_iter=s["requests"][0]["arrival_iter"] + 1),
    )
    for alter in alterations:
        scenario = copy.deepcopy(rich)
        alter(scenario)
        assert compare(scenario) is not None


def _written(folder: Path, content: object, name: str = "file.json") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def _without(scenario: Json, *keys: str | int) -> Json:
    """Return a copy without the item at this path."""
    changed = copy.deepcopy(scenario)
    item: Any = changed
    for key in keys[:-1]:
        item = item[key]
    del item[keys[-1]]
    return changed


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"\xff\xfe", {"id": 1}, [1, 2], "text"])
def test_a_file_that_is_no_list_of_scenarios_is_refused(tmp_path: Path, content: object) -> None:
    path = _written(tmp_path, content)
    with pytest.raises(ConformanceError, match=r"file\.json: "):
        list(check_file(path))


def test_a_damaged_archive_or_an_unreadable_path_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"[]")
    for content in (whole[:-6], b"no archive"):
        with pytest.raises(ConformanceError, match="not a readable JSON file"):
            list(check_file(_written(tmp_path, content, "file.json.gz")))
    with pytest.raises(ConformanceError, match="not a readable JSON file"):
        list(check_file(tmp_path))
    with pytest.raises(ConformanceError, match="no such file"):
        scenario_files([tmp_path / "absent.json"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConformanceError, match=r"holds no \.json"):
        scenario_files([empty])


@pytest.mark.parametrize(
    "path",
    [
        ("config",),
        ("config", "policy"),
        ("requests",),
        ("requests", 0, "prompt"),
        ("vllm",),
        ("iterations",),
        ("summary",),
        ("summary", -1),
        ("totals",),
    ],
    ids=str,
)
def test_a_scenario_without_a_field_of_the_format_is_refused(
    rich: Json, tmp_path: Path, path: tuple[str | int, ...]
) -> None:
    file = _written(tmp_path, [_without(rich, *path)])
    with pytest.raises(ConformanceError, match="does not follow the format"):
        list(check_file(file))


def test_a_prompt_that_does_not_add_up_to_its_length_is_refused(rich: Json, tmp_path: Path) -> None:
    scenario = copy.deepcopy(rich)
    scenario["requests"][0]["prompt_len"] += 5
    with pytest.raises(ConformanceError, match="do not add up"):
        list(check_file(_written(tmp_path, [scenario])))
