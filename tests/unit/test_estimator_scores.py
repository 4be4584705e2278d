"""Scores of estimators against hand-computed values, regret, and estimators that only watch."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from command_line import run_command
from record_tables import Row, table
from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.experiment.run import PolicyRun, run_policies, run_policy
from simcluster.report.estimators import resident_requests, score_estimates
from simcluster.report.metrics import Window
from simcluster.report.regret import regret
from simcluster.routers import check_estimator
from simcluster.scenario import Scenario, load_scenario, override
from small_cluster import frame, make_card, make_world, scenario_data
from trace_files import write_file

EVER = Window(0, 100)


def scores(*pairs: tuple[Row, float | None], window: Window = EVER) -> dict[str, Any]:
    """Score an estimator on requests with what it predicted for each [s]; None: without bound."""
    requests = table(*(row for row, _ in pairs))
    estimates = pl.DataFrame(
        {
            "request_id": requests["request_id"],
            "estimator": ["it"] * len(pairs),
            "predicted_ttft_s": pl.Series([value for _, value in pairs], dtype=pl.Float64),
        }
    )
    return score_estimates(requests, estimates, window)["it"]


def seen(ttft: float, **others: Any) -> Row:
    arrival = others.get("arrival", 0.0)
    return Row(first=arrival + ttft, end=arrival + ttft + 1, **others)


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_errors_are_shares_of_the_observed_ttft_and_the_bias_keeps_its_sign() -> None:
    found = scores((seen(1.0), 1.5), (seen(2.0), 1.0), (seen(4.0), 4.0), (seen(0.5), 0.4))
    assert found["count"] == 4
    assert found["unbounded"] == 0
    assert found["bias_s"] == pytest.approx((0.5 - 1.0 + 0 - 0.1) / 4)
    assert found["bias"] == pytest.approx((0.5 - 0.5 + 0 - 0.2) / 4)
    assert found["mape"] == pytest.approx((0.5 + 0.5 + 0 + 0.2) / 4)
    assert found["median_ape"] == pytest.approx((0.2 + 0.5) / 2)


def test_rank_agreement_is_kendalls_tau() -> None:
    # Of six pairs (1, 1.5), (2, 1), (4, 4), (0.5, 0.4) one is turned around: (5 - 1) / 6.
    assert scores((seen(1.0), 1.5), (seen(2.0), 1.0), (seen(4.0), 4.0), (seen(0.5), 0.4))["kendall_tau"] == (
        pytest.approx(4 / 6)
    )
    assert scores((seen(1.0), 3.0), (seen(2.0), 2.0), (seen(3.0), 1.0))["kendall_tau"] == pytest.approx(-1)
    assert scores((seen(1.0), 2.0), (seen(3.0), 2.0))["kendall_tau"] is None


def test_it_counts_who_was_wrongly_expected_to_be_on_time_and_limits_are_inclusive() -> None:
    found = scores(
        (seen(2.0, target=1.0), 1.0),  # expected on time, late
        (seen(1.0, target=1.0), 1.1),  # expected late, on time
        (seen(1.0, target=1.0), 1.0),
        (seen(1.5, target=1.0), 1.5),
        (seen(9.0), 0.1),  # without a target
    )
    assert found["false_on_time"] == pytest.approx(1 / 4)
    assert found["false_late"] == pytest.approx(1 / 4)
    without = scores((seen(9.0), 0.1))
    assert without["false_on_time"] is without["false_late"] is None


def test_an_estimate_without_bound_has_no_error_and_expects_to_be_late() -> None:
    found = scores((seen(1.0, target=2.0), None), (seen(2.0, target=2.0), 3.0))
    assert (found["count"], found["unbounded"]) == (2, 1)
    assert found["bias"] == pytest.approx(0.5)
    assert found["false_late"] == 1
    assert found["kendall_tau"] == pytest.approx(-1)
    alone = scores((seen(1.0), None))
    assert alone["mape"] is alone["bias"] is alone["median_ape"] is None


def test_only_requests_that_arrive_in_the_window_and_have_a_first_token_count() -> None:
    found = scores(
        (seen(1.0, arrival=1), 1.0),
        (seen(1.0, arrival=5), 9.0),
        (Row(arrival=2, status="unfinished"), 9.0),
        (Row(arrival=2, first=2.5, end=3, status="failed"), 9.0),
        (Row(arrival=2, first=2.5, status="unfinished"), 0.5),
        window=Window(1, 4),
    )
    assert (found["count"], found["mape"]) == (2, 0)


def test_requests_find_those_that_were_sent_before_and_have_not_ended() -> None:
    rows = [
        Row(arrival=0, first=1, end=2),
        Row(arrival=1, first=1, end=9),
        Row(arrival=1, first=1, end=3, instance="b"),
        Row(arrival=1, status="unfinished"),
        Row(arrival=2, first=3, end=4),  # the first one ends at this instant
        Row(arrival=5, first=6, end=7),
    ]
    assert resident_requests(table(*rows)).to_list() == [0, 1, 0, 2, 2, 2]


def test_scores_are_given_by_load_prompt_length_instance_and_model() -> None:
    lengths = [256, 257, 2048, 2049]
    rows = [(seen(1.0, arrival=0.1 * k, prompt=n, instance="ab"[k % 2]), 1.0 + k) for k, n in enumerate(lengths)]
    found = scores(*rows)
    by_prompt = found["by_prompt_tokens"]
    assert [(part["lowest"], part["highest"], part["count"]) for part in by_prompt] == [
        (256, 256, 1),
        (257, 2048, 2),
        (2049, 2049, 1),
    ]
    assert [part["mape"] for part in by_prompt] == pytest.approx([0, 1.5, 3])
    assert {name: part["mape"] for name, part in found["by_instance"].items()} == pytest.approx({"a": 1, "b": 2})
    assert found["by_model"]["M"]["count"] == 4
    assert [(part["lowest"], part["highest"]) for part in found["by_resident"]] == [(0, 0), (1, 1)]


def test_regret_is_what_the_oracle_got_more_of_the_same_requests() -> None:
    mine = table(seen(1.0, utility=0.4), seen(1.0, target=0.5, utility=0.9), seen(1.0, utility=0.9), seen(9.0))
    best = table(seen(1.0, utility=0.5), seen(0.5, target=0.5, utility=0.9), seen(1.0, utility=0.3))
    found = regret(mine, best, EVER)
    assert found is not None
    assert found["count"] == 3
    assert found["on_time_utility"] == pytest.approx((0.1 + 0.9 - 0.6) / 3)
    assert (found["share_worse"], found["share_better"]) == pytest.approx((2 / 3, 1 / 3))
    assert regret(mine, best, Window(50, 60)) is None


# ---- in a run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart() -> Scenario:
    scenario, _ = load_scenario("quickstart")
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"limit": 300})})


def watched(scenario: Scenario, policy: str, estimators: list[str], **routing: Any) -> PolicyRun:
    _, path = load_scenario("quickstart")
    scenario = override(scenario, estimators=estimators)
    scenario = scenario.model_copy(update={"routing": scenario.routing.model_copy(update=routing)})
    return run_policy(scenario, build_world(scenario, path), policy)


ALL = ["sfs", "throughput", "lps:window_s=20", "ml_latency:first=50,every=50"]
STALE = {"refresh_interval_s": 0.1, "publish_delay_s": 0.05, "replicas": 2}


@pytest.mark.parametrize("policy", ["round_robin", "shortest_queue", "sfs", "lps:cut=residual", "ml_latency:first=60"])
@pytest.mark.parametrize("routing", [{}, STALE], ids=["fresh", "stale"])
def test_estimators_that_watch_change_nothing(quickstart: Scenario, policy: str, routing: dict[str, Any]) -> None:
    alone, beside = watched(quickstart, policy, [], **routing), watched(quickstart, policy, ALL, **routing)
    for name in ("requests", "instances"):
        assert beside.tables[name].equals(alone.tables[name]), name
    changing = {"estimators", "mean_decision_us"}
    assert {k: v for k, v in beside.summary.items() if k not in changing} == {
        k: v for k, v in alone.summary.items() if k not in changing
    }
    assert set(beside.summary["estimators"]) >= {name for name in ALL if name != policy}


@pytest.mark.parametrize("policy", ["sfs", "throughput", "lps"])
def test_an_estimator_beside_a_policy_predicts_what_it_would_predict_as_the_policy(
    quickstart: Scenario, policy: str
) -> None:
    variant = f"{policy}:margin=0.999"
    run = watched(quickstart, variant, [policy])
    table = frame(run, "estimates").pivot("estimator", index="request_id", values="predicted_ttft_s")
    assert table.height == 300
    assert table[policy].to_list() == table[variant].to_list()
    decided = frame(run, "decisions").select("request_id", "predicted_ttft_s")
    joined = table.join(decided, on="request_id")
    assert joined[variant].to_list() == joined["predicted_ttft_s"].to_list()


def test_a_policy_that_predicts_nothing_has_no_scores(quickstart: Scenario) -> None:
    run = watched(quickstart, "round_robin", [])
    assert run.summary["estimators"] is None
    assert "estimates" not in run.tables


def test_an_exact_estimate_has_no_error(tmp_path: Path) -> None:
    """One instance, no noise, true steps believed, no later arrival before a first token: SFS is exact."""
    columns = {
        "arrival_ns": [k * 10**9 for k in range(9)],
        "prompt_tokens": [100] * 9,
        "output_tokens": [150] * 9,
    }
    run = run_policy(*make_world(tmp_path, columns, scenario_data()), "sfs")
    found = run.summary["estimators"]["sfs"]
    assert (found["count"], found["mape"], found["kendall_tau"]) == (9, pytest.approx(0, abs=1e-9), pytest.approx(1))


def test_the_oracle_is_not_watched_since_its_view_is_the_truth(quickstart: Scenario) -> None:
    assert set(watched(quickstart, "oracle", ALL).summary["estimators"]) == {"oracle"}


def test_regret_comes_with_the_oracle_and_is_written_down(tmp_path: Path) -> None:
    columns = {"arrival_ns": [0, 0, 10**9], "prompt_tokens": [5, 6, 7], "output_tokens": [4, 5, 6]}
    scenario, world = make_world(tmp_path, columns, scenario_data(2))
    (tmp_path / "d").mkdir()
    runs = run_policies(scenario, world, ["always_busiest", "oracle"], tmp_path / "d")
    assert runs[0].summary["regret"]["count"] == 3
    assert runs[1].summary["regret"]["on_time_utility"] == 0
    together = json.loads((tmp_path / "d/summary.json").read_text())["policies"]
    for run in runs:
        assert json.loads((tmp_path / "d" / run.policy / "summary.json").read_text()) == run.summary
        assert together[run.policy] == run.summary
    assert run_policies(scenario, world, ["always_busiest"])[0].summary["regret"] is None


# ---- on the command line -----------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_card(tmp_path)
    write_file(tmp_path / "t.parquet")
    data = scenario_data(2, routing={"policies": ["round_robin"]})
    (tmp_path / "s.yaml").write_text(json.dumps(data))
    return tmp_path


def test_the_table_of_estimators_is_shown_only_if_something_is_estimated(here: Path) -> None:
    assert here
    title = "predicted against observed"
    assert title not in run_command("run", "s.yaml")[1]
    text = run_command("run", "s.yaml", "-p", "round_robin", "-p", "sfs", "--estimators", "lps:ca2=2,cs2=2,sfs")[1]
    assert title in text
    for part in ("its own", "lps:ca2=2,cs2=2", "no regret is shown: the oracle is not among the policies"):
        assert part in text
    assert "regret against the oracle" in run_command("run", "s.yaml", "-p", "sfs", "-p", "oracle")[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sfz", "error: estimator 'sfz' is unknown; did you mean sfs?"),
        ("lps:winow_s=3", "error: estimator 'lps:winow_s=3': lps has no parameter 'winow_s'; did you mean window_s?"),
        ("lps:window_s=0", "error: estimator 'lps:window_s=0': window_s = 0; must be above 0"),
        ("epsilon(sfs)", "error: estimator 'epsilon(sfs)' is unknown;"),
    ],
)
def test_an_unknown_estimator_is_one_line_and_exit_code_2(here: Path, text: str, message: str) -> None:
    code, out, errors = run_command("run", "s.yaml", "--estimators", text, "--out", "d")
    assert (code, out) == (2, "")
    assert errors.startswith(message)
    assert errors.count("\n") == 1
    assert not (here / "d").exists()


def test_estimators_of_a_scenario_file_are_scored_too(here: Path) -> None:
    data = json.loads((here / "s.yaml").read_text()) | {"output": {"estimators": ["throughput"]}}
    (here / "s.yaml").write_text(json.dumps(data))
    assert set(json.loads(run_command("run", "s.yaml", "--json")[1])["policies"]["round_robin"]["estimators"]) == {
        "throughput"
    }
    with pytest.raises(ConfigError):
        check_estimator("nothing")


def test_estimates_without_bound_are_null_in_the_table(here: Path) -> None:
    run_command("run", "s.yaml", "--estimators", "lps:arrival_rate=1000", "--out", "d", "-q")
    table = pl.read_parquet(here / "d/round_robin/estimates.parquet")
    assert table["predicted_ttft_s"].to_list() == [None] * 3
    assert table["estimator"].to_list() == ["lps:arrival_rate=1000"] * 3
