"""Laws of a run: totals, causality and determinism."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from hypothesis import given, settings

from cluster_cases import MS, Case, cases, runs
from simcluster.experiment.run import PolicyRun, run_policies, run_policy
from simcluster.world import World
from small_cluster import frame, make_world, scenario_data
from trace_files import write_file

PS = 10**9  # picoseconds of a millisecond


@runs
@given(case=cases())
def test_every_request_is_counted_once(folder: Path, case: Case) -> None:
    run = case.run(folder)
    counts, requests = run.summary["requests"], frame(run, "requests")
    parts = counts["finished"] + counts["rejected"] + counts["failed"] + counts["unfinished"]
    assert counts["submitted"] == parts == requests.height
    assert counts["submitted"] + run.summary["not_submitted"] == len(case.columns["arrival_ns"])
    assert sum(sum(group.values()) for group in run.summary["reasons"].values()) == counts["submitted"]
    assert set(run.summary["reasons"]) == {
        name for name in ("finished", "rejected", "failed", "unfinished") if counts[name]
    }
    if case.data["measure"]["horizon_s"] is None:
        assert run.summary["not_submitted"] == 0
        if case.data["measure"]["drain"]:
            assert counts["unfinished"] == 0
    if case.data["output"]["decisions"] != "off":
        assert frame(run, "decisions")["request_id"].to_list() == requests["request_id"].to_list()


@runs
@given(case=cases())
def test_causes_come_before_effects_in_the_records(folder: Path, case: Case) -> None:
    run = case.run(folder)
    requests = frame(run, "requests")
    order = requests.select("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns").rows()
    for instants in order:
        known = [instant for instant in instants if instant is not None]
        assert known == sorted(known)
    assert requests["arrival_ns"].is_sorted()
    for row in requests.to_dicts():
        started, first, ended = row["scheduled_ns"], row["first_token_ns"], row["end_ns"]
        assert (ended is None) == (row["status"] == "unfinished")
        assert started is not None or first is None
        if row["status"] == "finished":
            assert first is not None
        if row["status"] == "rejected":
            assert started is first is None
        assert (row["output_tokens"] > 0) == (first is not None)
    horizon = case.data["measure"]["horizon_s"]
    samples = frame(run, "instances")
    if horizon is not None:
        assert requests["arrival_s"].max() is None or requests["arrival_s"].max() <= horizon
        ends = requests["end_ns"].drop_nulls().to_list() + requests["first_token_ns"].drop_nulls().to_list()
        assert max(ends, default=0) <= round(horizon * 1e9)
        assert samples["at_s"].max() <= horizon


@runs
@given(case=cases())
def test_metrics_are_consistent_with_each_other_and_with_the_instants(folder: Path, case: Case) -> None:
    run = case.run(folder)
    for row in frame(run, "requests").to_dicts():
        for metric, instant in (("queue_s", "scheduled_ns"), ("ttft_s", "first_token_ns"), ("e2e_s", "end_ns")):
            if row[metric] is not None:
                assert row[metric] == pytest.approx((row[instant] - row["arrival_ns"]) / 1e9, abs=2e-9)
        n = row["output_tokens"]
        prompt = row["prompt_tokens"] if row["scheduled_ns"] is not None else 0
        assert row["cost_micro_usd"] == 2.0 * prompt + 5.0 * n
        if row["status"] != "finished":
            assert row["tpot_s"] is row["e2e_s"] is row["utility"] is None
            assert not row["on_time"]
        elif n == 1:
            assert row["tpot_s"] is None
            assert row["e2e_s"] == row["ttft_s"]
        else:
            assert row["e2e_s"] == pytest.approx(row["ttft_s"] + row["tpot_s"] * (n - 1), abs=1e-9)
        if row["status"] == "finished":
            assert row["on_time"] == (row["slo_ttft_s"] is None or row["ttft_s"] <= row["slo_ttft_s"])
            assert row["utility"] == pytest.approx(row["quality"] - 1e-4 * row["cost_micro_usd"])


@runs
@given(case=cases())
def test_the_time_series_never_goes_back_and_ends_with_the_totals(folder: Path, case: Case) -> None:
    run = case.run(folder)
    requests = frame(run, "requests")
    for (name,), rows in frame(run, "instances").group_by("instance", maintain_order=True):
        for growing in ("at_ns", "num_steps", "busy_s", "num_preemptions", "prefix_queries", "prefix_hits"):
            assert rows[growing].is_sorted(), growing
        assert rows["kv_cache_usage"].is_between(0, 1).all()
        here = requests.filter(pl.col("instance") == name)
        for at_ns, running, waiting in rows.select("at_ns", "num_running", "num_waiting").iter_rows():
            inside = here.filter(
                (pl.col("arrival_ns") <= at_ns)
                & (pl.col("end_ns").is_null() | (pl.col("end_ns") >= at_ns) | (pl.col("status") == "failed"))
            )  # an engine notices that a client has left when its step ends
            assert running + waiting <= inside.height


def far_run(
    folder: Path, measure: dict[str, Any] | None = None, **columns: Any
) -> tuple[PolicyRun, list[dict[str, Any]]]:
    """Run requests of 4 + 3 tokens that need 3.4 ms to the engine and 7 ms back; steps take 10 ms + 1 ms per token."""
    base = {"arrival_ns": [0], "prompt_tokens": [4], "output_tokens": [3]} | columns
    data = scenario_data([{"card": "far.json"}], measure=measure or {})
    run = run_policy(*make_world(folder, base, data), "round_robin")
    return run, frame(run, "requests").to_dicts()


def test_records_are_what_a_client_sees_front_end_times_included(folder: Path) -> None:
    _, (row,) = far_run(folder)
    assert row["queue_s"] == pytest.approx(0.0034)
    assert row["ttft_s"] == pytest.approx(0.0034 + 0.014 + 0.007)
    assert row["tpot_s"] == pytest.approx(0.011)
    assert row["e2e_s"] == pytest.approx(0.0034 + 0.014 + 2 * 0.011 + 0.007)


def test_the_answer_no_to_a_request_travels_as_far_as_any_other(folder: Path) -> None:
    _, (row,) = far_run(folder, prompt_tokens=[5000])
    assert (row["status"], row["reason"]) == ("rejected", "exceeds_context")
    assert row["end_ns"] == round((0.003 + 0.5 + 0.007) * 1e9)


def test_a_token_on_its_way_when_the_client_leaves_was_not_delivered(folder: Path) -> None:
    """The first token leaves the engine at 17.4 ms and would arrive at 24.4 ms."""
    _, (row,) = far_run(folder, cancel_s=[0.020])
    assert (row["status"], row["reason"], row["end_ns"]) == ("failed", "cancelled", 20 * MS)
    assert (row["first_token_ns"], row["output_tokens"]) == (None, 0)
    _, (row,) = far_run(folder, cancel_s=[0.025])
    assert (row["first_token_ns"], row["output_tokens"], row["end_ns"]) == (24_400_000, 1, 25 * MS)


def test_a_step_planned_ahead_does_not_start_for_a_client_that_has_left_before(folder: Path) -> None:
    columns = {"arrival_ns": [0, 5 * MS], "prompt_tokens": [20, 4], "output_tokens": [5, 3], "cancel_s": [None, 0.028]}
    data = scenario_data([{"engine": {"async_scheduling": True}}])  # the second step is planned for 41 ms
    row = frame(run_policy(*make_world(folder, columns, data), "round_robin"), "requests").to_dicts()[1]
    assert (row["status"], row["scheduled_ns"], row["end_ns"]) == ("failed", None, 33 * MS)


def test_what_is_on_its_way_to_the_client_at_the_horizon_has_not_happened(folder: Path) -> None:
    run, (row,) = far_run(folder, {"horizon_s": 0.045})  # the last token leaves the engine at 39.4 ms
    assert (row["status"], row["reason"], row["end_ns"]) == ("unfinished", "in_transit", None)
    assert row["first_token_ns"] == 24_400_000
    assert run.summary["requests"]["unfinished"] == 1
    _, (row,) = far_run(folder, {"horizon_s": 0.020})
    assert (row["status"], row["first_token_ns"], row["output_tokens"]) == ("unfinished", None, 0)


# ---- determinism and common worlds -----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path, folder: Path) -> None:
    columns: dict[str, Any] = {
        "arrival_ns": [7 * MS * k for k in range(40)],
        "prompt_tokens": [3 + k % 17 for k in range(40)],
        "output_tokens": [1 + k % 9 for k in range(40)],
        "task": ["ab"[k % 2] for k in range(40)],
        "session_id": [f"s{k % 5}" for k in range(40)],
    }
    write_file(folder / "t.parquet", **columns)
    policies = ["random", "shortest_queue", "sfs"]
    routing = {"policies": policies, "tie": "random", "replicas": 2, "refresh_interval_s": 0.02}
    data = scenario_data([{"true_model": {}}, {"quality": 0.5}, {}], routing=routing, slo={"ttft": "paper"})
    (folder / "s.yaml").write_text(yaml.safe_dump(data))
    for number in (1, 2):
        command = [sys.executable, "-P", "-m", "simcluster", "run", str(folder / "s.yaml"), "--quiet", "--json"]
        environment = os.environ | {"PYTHONHASHSEED": str(number)}
        subprocess.run(
            [*command, "--out", str(tmp_path / str(number))], env=environment, check=True, capture_output=True
        )
    for policy in policies:
        for table in ("requests", "decisions", "instances"):
            first, second = (tmp_path / str(number) / policy / f"{table}.parquet" for number in (1, 2))
            assert first.read_bytes() == second.read_bytes()


def world_state(world: World) -> dict[str, bytes]:
    """Return everything that is fixed before a run, as bytes."""
    columns = {**{f"known.{k}": getattr(world.known, k) for k in ("arrival_ps", "prompt_tokens", "slo_ttft_ps")}}
    columns["known.group_of_instance"] = world.known.group_of_instance
    columns |= {f"known.{k}": getattr(world.known, k) for k in ("predicted_output_tokens", "predicted_utility")}
    columns |= {f"truth.{k}": getattr(world.truth, k) for k in ("output_tokens", "quality", "cancel_after_ps")}
    return {name: values.tobytes() for name, values in columns.items()}


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_no_policy_changes_the_world_that_the_next_one_meets(folder: Path, case: Case) -> None:
    data = case.data | {"measure": {}}
    scenario, world = make_world(folder, case.columns, data)
    before = world_state(world)
    together = run_policies(scenario, world, ["random", "shortest_queue", "sfs"])
    assert world_state(world) == before
    fixed = ["request_id", "arrival_ns", "slo_ttft_s"]
    first = frame(together[0], "requests").select(fixed)
    for run in together:
        assert frame(run, "requests").select(fixed).equals(first)
        alone = run_policy(*make_world(folder, case.columns, data), run.policy)
        for name in run.tables:
            assert frame(alone, name).equals(frame(run, name)), (run.policy, name)


def test_c043_arrivals_lengths_and_targets_do_not_depend_on_policy_or_cluster(folder: Path) -> None:
    columns = {
        "arrival_ns": [5 * MS * k for k in range(30)],
        "prompt_tokens": [4 + k for k in range(30)],
        "output_tokens": [1 + k % 7 for k in range(30)],
    }
    seen = []
    for count in (2, 3):
        data = scenario_data(count, seed=7, slo={"ttft": "paper"})
        scenario, world = make_world(folder, columns, data)
        for policy in ("round_robin", "random"):
            requests = frame(run_policy(scenario, world, policy), "requests")
            seen.append(requests.select("arrival_ns", "prompt_tokens", "output_tokens", "slo_ttft_s").rows())
    assert seen[0] == seen[1] == seen[2] == seen[3]
    _, other = make_world(folder, columns, scenario_data(2, seed=8, slo={"ttft": "paper"}))
    assert (other.known.slo_ttft_ps != world.known.slo_ttft_ps).any()
