"""C016 to C023 and what else a summary promises."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import Ask, config, start, stories
from record_tables import Row, table
from simcluster.report import metrics
from simcluster.report.metrics import Window, measured_window, percentiles, summarise
from small_cluster import run_once, scenario_data

RATES = ("request_throughput_rps", "output_throughput_tps", "output_throughput_finished_tps", "goodput_rps")


def summary(*rows: Row, warmup: float = 0.0, horizon: float | None = None, **options: Any) -> dict[str, Any]:
    requests = table(*rows)
    return summarise(requests, measured_window(requests, warmup, horizon), **options)


def served(ttft: float, end: float, tokens: int = 1, **others: Any) -> Row:
    return Row(first=ttft, end=end, tokens=tokens, **others)


# ---- percentiles and latencies ---------------------------------------------------------------------------------


def test_c016_percentiles_are_linear_and_the_method_is_named() -> None:
    found = summary(*(served(n / 1000, n / 1000) for n in range(10, 101, 10)))
    assert found["percentile_method"] == "linear"
    ttft = found["ttft_s"]
    assert ttft["count"] == 10
    for name, right in (("mean", 0.055), ("p50", 0.055), ("p90", 0.091), ("p95", 0.0955), ("p99", 0.0991)):
        assert ttft[name] == pytest.approx(right), name


def test_percentiles_leave_out_what_is_missing_and_of_nothing_they_are_null() -> None:
    assert percentiles(pl.Series([None, 1.0, None, 3.0]))["mean"] == 2.0
    assert percentiles(pl.Series([7.0]))["p99"] == 7.0
    nothing = percentiles(pl.Series([], dtype=pl.Float64))
    assert nothing == {"count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None}


def test_c017_an_answer_of_one_token_has_no_tpot_and_does_not_count_as_0() -> None:
    found = summary(served(0.1, 0.1), served(0.1, 0.4, tokens=4))
    assert (found["tpot_s"]["count"], found["tpot_s"]["mean"]) == (1, pytest.approx(0.1))
    assert (found["ttft_s"]["count"], found["ttft_s"]["mean"]) == (2, pytest.approx(0.1))


def test_c017_a_run_writes_no_tpot_for_an_answer_of_one_token(tmp_path: Path) -> None:
    columns = {"arrival_ns": [0, 10**9], "prompt_tokens": [2, 2], "output_tokens": [1, 3]}
    run, requests = run_once(tmp_path, columns, scenario_data())
    assert requests["tpot_s"].to_list() == [None, pytest.approx(0.011)]
    assert requests["ttft_s"].to_list() == pytest.approx([0.012, 0.012])
    assert requests["e2e_s"].to_list() == pytest.approx([0.012, 0.034])
    assert run.summary["tpot_s"]["count"] == 1


def test_c018_failures_are_left_out_of_latencies_and_count_everywhere_else() -> None:
    found = summary(
        served(0.1, 1.0),
        served(0.2, 1.1),
        served(0.3, 1.2),
        Row(end=30.0, tokens=0, status="failed", reason="cancelled"),
    )
    assert (found["ttft_s"]["count"], found["ttft_s"]["mean"]) == (3, pytest.approx(0.2))
    assert found["e2e_s"]["count"] == 3
    assert found["requests"] == {"submitted": 4, "finished": 3, "rejected": 0, "failed": 1, "unfinished": 0}
    assert found["reasons"] == {"failed": {"cancelled": 1}, "finished": {"stop": 3}}
    assert found["error_rate"] == 0.25
    assert found["window_s"] == [0.0, 30.0]
    assert found["duration_s"] == 30.0
    assert found["request_throughput_rps"] == pytest.approx(3 / 30)


def test_a_failed_or_rejected_request_gives_no_latency_even_if_it_got_a_token() -> None:
    found = summary(
        served(0.1, 0.1),
        Row(scheduled=0.5, first=0.9, end=2.0, tokens=3, status="failed", reason="cancelled"),
        Row(end=0.0, tokens=0, status="rejected", reason="exceeds_context"),
    )
    for name in ("ttft_s", "e2e_s"):
        assert (found[name]["count"], found[name]["mean"]) == (1, pytest.approx(0.1)), name
    assert found["queue_s"]["count"] == found["tpot_s"]["count"] == 0
    assert found["error_rate"] == pytest.approx(1 / 3)


# ---- throughput and the window ---------------------------------------------------------------------------------


def test_c019_tokens_of_unfinished_requests_count_as_delivered() -> None:
    finished = [served(1.0, 9.0, tokens=100) for _ in range(4)]
    found = summary(*finished, Row(first=2.0, tokens=50, status="unfinished", reason="running"), horizon=10.0)
    assert found["output_throughput_tps"] == pytest.approx(45.0)
    assert found["output_throughput_finished_tps"] == pytest.approx(40.0)
    assert found["request_throughput_rps"] == pytest.approx(0.4)
    assert found["requests"]["unfinished"] == 1


def test_c020_each_event_counts_by_its_own_time_and_the_rule_is_documented() -> None:
    rows = [
        Row(arrival=1, first=4, end=9),
        Row(arrival=5, first=8, end=12),
        Row(arrival=9, first=11, end=14),
        Row(arrival=12, first=13, end=18),
    ]
    found = summary(*rows, warmup=10.0, horizon=20.0)
    assert found["window_s"] == [10.0, 20.0]
    assert (found["ttft_s"]["count"], found["ttft_s"]["mean"]) == (2, pytest.approx(1.5))
    assert found["request_throughput_rps"] == pytest.approx(0.3)
    assert found["e2e_s"]["count"] == 3
    assert metrics.__doc__ is not None
    assert "Each event counts by its own time" in " ".join(metrics.__doc__.split())


def test_what_belongs_to_a_request_counts_those_that_arrive_in_the_window() -> None:
    rows = [
        Row(arrival=5, first=6, end=15, target=2.0, quality=1.0, cost=100.0, instance="a"),
        Row(arrival=12, first=13, end=25, target=2.0, quality=0.4, cost=10.0, instance="b"),
        Row(arrival=14, first=18, end=19, target=2.0, quality=0.8, cost=20.0, instance="b"),
    ]
    found = summary(*rows, warmup=10.0, horizon=20.0)
    assert found["slo_attainment"] == 0.5
    assert found["on_time_utility"] == pytest.approx(0.2)
    assert found["mean_utility"] == pytest.approx(0.6)
    assert found["cost"]["token_cost_micro_usd_mean"] == pytest.approx(15.0)
    assert found["cost"]["token_cost_usd_total"] == pytest.approx(30e-6)
    assert found["composition"] == {"all": {"b": 1.0}}
    assert found["goodput_rps"] == pytest.approx(0.1)  # the first one: it ends in the window, in time


def test_both_ends_of_the_window_belong_to_it() -> None:
    rows = [Row(arrival=10, first=10, end=20), Row(arrival=20, first=20, end=20.000000001)]
    found = summary(*rows, warmup=10.0, horizon=20.0)
    assert found["ttft_s"]["count"] == 2
    assert found["e2e_s"]["count"] == 1


def test_the_window_without_a_horizon_runs_from_the_first_arrival_to_the_last_end() -> None:
    requests = table(Row(arrival=3, first=4, end=5), Row(arrival=4, status="unfinished", reason="waiting", tokens=0))
    assert measured_window(requests, 0.0, None) == Window(3.0, 5.0)
    assert measured_window(requests, 4.5, None) == Window(4.5, 5.0)
    assert measured_window(requests, 7.0, None) == Window(7.0, 7.0)  # all over before the warm-up: empty, not negative
    assert measured_window(requests, 0.0, 8.0) == Window(0.0, 8.0)
    assert measured_window(requests, 0.0, None, stopped_s=6.0) == Window(3.0, 6.0)


def test_tokens_are_split_between_windows_and_none_is_lost_or_counted_twice() -> None:
    row = Row(first=2.0, end=18.0, tokens=33)
    cuts = [0.0, 1.0, 5.0, 11.5, 20.0]
    parts = [
        summarise(table(row), Window(low, high))["output_throughput_tps"] * (high - low) for low, high in pairwise(cuts)
    ]
    assert parts == pytest.approx([0.0, 1 + 6.0, 13.0, 13.0])
    assert sum(parts) == pytest.approx(33)


def test_what_an_unfinished_request_got_before_the_window_is_not_counted() -> None:
    row = Row(first=5.0, tokens=16, status="unfinished", reason="running")
    found = summary(row, warmup=10.0, horizon=20.0)
    assert found["output_throughput_tps"] == pytest.approx(15 * (10 / 15) / 10)


def test_c021_a_horizon_leaves_every_request_in_one_state() -> None:
    asks = (Ask(0, 2, 2),) * 4
    engine = start(config(max_num_seqs=1), *asks)
    engine.advance_to(30 * 10**9)
    ended = [story.end for story in stories(engine, asks) if story.end is not None]
    assert ended == [23]
    assert (len(ended), engine.num_running, engine.num_waiting) == (1, 1, 2)


def test_c021_a_run_with_a_horizon_counts_finished_running_and_waiting(tmp_path: Path) -> None:
    columns = {"arrival_ns": [0] * 4, "prompt_tokens": [2] * 4, "output_tokens": [2] * 4}
    data = scenario_data([{"engine": {"max_num_seqs": 1}}], measure={"horizon_s": 0.030})
    run, requests = run_once(tmp_path, columns, data)
    assert run.summary["requests"] == {"submitted": 4, "finished": 1, "rejected": 0, "failed": 0, "unfinished": 3}
    assert run.summary["reasons"] == {"finished": {"stop": 1}, "unfinished": {"running": 1, "waiting": 2}}
    assert run.summary["not_submitted"] == 0
    assert run.summary["window_s"] == [0.0, 0.030]
    assert requests["output_tokens"].to_list() == [2, 0, 0, 0]
    assert requests["end_ns"].to_list() == [23_000_000, None, None, None]


def test_c022_goodput_counts_requests_that_meet_every_limit_and_limits_are_inclusive() -> None:
    rows = [
        served(0.150, 0.150 + 9 * 0.040, tokens=10, target=0.2),
        served(0.200, 0.200 + 9 * 0.050, tokens=10, target=0.2),
        served(0.201, 0.201 + 9 * 0.010, tokens=10, target=0.2),
        served(0.100, 0.100, target=0.2),
        Row(end=5.0, tokens=0, status="failed", reason="cancelled", target=0.2),
    ]
    found = summary(*rows, horizon=10.0, tpot_slo_s=0.050)
    assert found["goodput_rps"] == pytest.approx(0.3)
    assert found["slo_attainment"] == pytest.approx(0.6)
    assert summary(*rows, horizon=10.0, tpot_slo_s=0.049)["goodput_rps"] == pytest.approx(0.2)


def test_c022_without_limits_goodput_and_attainment_are_null() -> None:
    rows = [served(0.1, 0.4, tokens=4), served(0.1, 0.1)]
    assert summary(*rows)["goodput_rps"] is None
    assert summary(*rows)["slo_attainment"] is None
    only_tpot = summary(*rows, tpot_slo_s=0.01)
    assert only_tpot["slo_attainment"] == 0.5


def test_c023_all_rates_use_the_one_printed_duration() -> None:
    rows = [served(0.05, 0.02 * number, tokens=4, target=1.0) for number in range(1, 6)]
    found = summary(*rows, horizon=1.0, num_gpus=2)
    assert found["duration_s"] == 1.0
    assert found["request_throughput_rps"] == pytest.approx(5.0)
    assert found["goodput_rps"] == pytest.approx(5.0)
    assert found["output_throughput_tps"] == found["output_throughput_finished_tps"] == pytest.approx(20.0)
    assert found["cost"]["gpu_seconds"] == pytest.approx(2.0)
    assert found["cost"]["gpu_seconds_per_finished_request"] == pytest.approx(0.4)


# ---- utility and composition -----------------------------------------------------------------------------------


def test_on_time_utility_is_the_mean_over_all_requests_and_late_or_lost_ones_count_0() -> None:
    rows = [
        served(0.1, 1.0, target=0.2, utility=0.9),
        served(0.2, 1.0, target=0.2, utility=-0.3),
        served(0.3, 1.0, target=0.2, utility=0.8),  # late
        Row(status="rejected", reason="kv_capacity", tokens=0, end=0.0, target=0.2),
        Row(status="unfinished", reason="running", first=0.1, target=0.2),
    ]
    found = summary(*rows)
    assert found["on_time_utility"] == pytest.approx(0.6 / 5)
    assert found["slo_attainment"] == pytest.approx(2 / 5)
    assert found["mean_utility"] == pytest.approx(1.4 / 3)
    assert found["share_negative_utility"] == pytest.approx(1 / 3)
    assert found["share_on_time_with_negative_utility"] == pytest.approx(1 / 5)


def test_composition_gives_shares_of_all_requests_and_of_each_task() -> None:
    places = [("x", "a"), ("x", "a"), ("x", "b"), ("y", "b")]
    found = summary(*(served(0.1, 0.2, task=task, instance=instance) for task, instance in places))
    assert found["composition"] == {
        "all": {"a": 0.5, "b": 0.5},
        "x": {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)},
        "y": {"b": 1.0},
    }


def test_preemptions_are_summed_over_all_requests() -> None:
    rows = [served(0.1, 0.2, preemptions=2), Row(status="unfinished", reason="waiting", preemptions=3)]
    assert summary(*rows)["num_preemptions"] == 5


# ---- nothing but plain numbers ---------------------------------------------------------------------------------

TABLES = {
    "empty": [],
    "one row": [served(0.1, 0.2, tokens=2)],
    "one instant": [served(0.0, 0.0)],
    "all failed": [Row(end=1.0, tokens=0, status="failed", reason="cancelled")] * 3,
    "all rejected": [Row(end=0.0, tokens=0, status="rejected", reason="kv_capacity")] * 3,
    "all unfinished": [Row(tokens=0, status="unfinished", reason="waiting", target=0.1)] * 3,
}


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
def test_no_number_of_a_summary_is_nan_or_infinite(rows: list[Row]) -> None:
    for options in ({}, {"horizon": 5.0}, {"warmup": 3.0}):
        found = summary(*rows, tpot_slo_s=0.1, num_gpus=1, **options)
        text = json.dumps(found, allow_nan=False)
        assert json.loads(text) == found
    if not rows:
        assert found["slo_attainment"] is found["on_time_utility"] is found["error_rate"] is None
        assert all(found[rate] is None for rate in RATES)


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    arrival = draw(st.floats(0, 10))
    status = draw(st.sampled_from(["finished", "rejected", "failed", "unfinished"]))
    first = arrival + draw(st.floats(0, 5)) if status == "finished" or draw(st.booleans()) else None
    end = None if status == "unfinished" else (arrival if first is None else first) + draw(st.floats(0, 5))
    tokens = draw(st.integers(1, 9)) if first is not None else 0
    return Row(
        arrival=arrival,
        first=first,
        end=end,
        tokens=tokens,
        status=status,
        target=draw(st.sampled_from([None, 0.0, 1.0])),
        utility=draw(st.floats(-1, 1)),
    )


@given(st.lists(any_row(), max_size=6), st.floats(0, 12), st.one_of(st.none(), st.floats(12, 20)))
def test_any_summary_is_plain_json_with_shares_between_0_and_1(
    rows: list[Row], warmup: float, horizon: float | None
) -> None:
    found = summary(*rows, warmup=warmup, horizon=horizon, num_gpus=1)
    json.dumps(found, allow_nan=False)
    for share in ("error_rate", "slo_attainment", "share_negative_utility", "share_on_time_with_negative_utility"):
        assert found[share] is None or 0 <= found[share] <= 1
    assert all(found[rate] is None or found[rate] >= 0 for rate in RATES)
    if found["output_throughput_tps"] is not None and horizon is not None:
        tokens = sum(row.tokens for row in rows)
        assert found["output_throughput_tps"] * found["duration_s"] <= tokens + 1e-6
