"""Closed loops: requests that are sent when an earlier one has ended."""

import pytest

from simcluster.errors import ConfigError
from small_cluster import make_world, run_once, scenario_data

ENGINE = {"engine": {"enable_prefix_caching": False, "max_num_batched_tokens": 16}}


def chain(after: list[str | None], think: list[float | None], **columns: object) -> dict[str, object]:
    n = len(after)
    return {
        "request_id": [str(row) for row in range(n)],
        "arrival_s": [0.0] * n,
        "after": after,
        "think_s": think,
    } | columns


def test_a_follow_up_turn_is_sent_when_the_answer_has_ended_and_was_thought_about(tmp_path):
    # C060: turn 1 ends at 25 ms, turn 2 arrives at 125 ms with 9 tokens: TTFT 19 ms.
    columns = chain([None, "0"], [None, 0.1], prompt_tokens=[4, 9], output_tokens=[2, 1])
    _, requests = run_once(tmp_path, columns, scenario_data([ENGINE]))
    assert requests["arrival_ns"].to_list() == [0, 125_000_000]
    assert requests["end_ns"].to_list() == [25_000_000, 144_000_000]
    assert requests["ttft_s"].to_list() == pytest.approx([0.014, 0.019])


def test_two_users_with_two_requests_each_never_have_more_than_two_in_flight(tmp_path):
    # C074
    columns = chain([None, None, "0", "1"], [None, None, 0.0, 0.0], prompt_tokens=[2] * 4, output_tokens=[2] * 4)
    data = scenario_data([{"engine": {"max_num_seqs": 8}}])
    run, requests = run_once(tmp_path, columns, data)
    assert requests["first_token_ns"].to_list() == [14_000_000, 14_000_000, 40_000_000, 40_000_000]
    assert requests["end_ns"].to_list() == [26_000_000, 26_000_000, 52_000_000, 52_000_000]
    assert run.summary["request_throughput_rps"] == pytest.approx(4 / 0.052)
    assert run.summary["e2e_s"]["mean"] == pytest.approx(0.026)


def test_a_request_that_waits_for_a_rejected_one_is_sent_all_the_same(tmp_path):
    columns = chain([None, "0"], [None, 0.5], prompt_tokens=[5000, 4], output_tokens=[1, 1])
    _, requests = run_once(tmp_path, columns, scenario_data([ENGINE | {"engine": {"max_num_batched_tokens": 16}}]))
    assert requests["status"].to_list() == ["rejected", "finished"]
    assert requests["arrival_ns"].to_list() == [0, 500_000_000]


def test_a_client_that_leaves_during_a_step_releases_its_next_request_when_the_step_has_ended(tmp_path):
    # The prompt takes 0 to 110 ms, the client leaves at 50 ms and has the next request ready 20 ms later.
    columns = chain([None, "0"], [None, 0.02], prompt_tokens=[100, 5], output_tokens=[50, 2], cancel_s=[0.05, None])
    _, requests = run_once(tmp_path, columns, scenario_data(1))
    assert requests["status"].to_list() == ["failed", "finished"]
    assert requests["end_ns"].to_list() == [50_000_000, 136_000_000]
    assert requests["arrival_ns"].to_list() == [0, 110_000_000]


def test_an_arrival_in_between_moves_the_end_that_others_wait_for(tmp_path):
    # Alone request 0 would end at 25 ms; request 1 joins the step at 14 ms with 3 tokens: 14 + 10 + 1 + 3.
    columns = {
        "request_id": ["0", "1", "2"],
        "arrival_s": [0.0, 0.001, 0.001],
        "after": [None, None, "0"],
        "think_s": [None, None, 0.0],
        "prompt_tokens": [4, 3, 2],
        "output_tokens": [2, 1, 1],
    }
    _, requests = run_once(tmp_path, columns, scenario_data([ENGINE]))
    arrivals = dict(requests.select("request_id", "arrival_ns").iter_rows())
    assert arrivals == {"0": 0, "1": 1_000_000, "2": 28_000_000}


@pytest.mark.parametrize("policy", ["round_robin", "shortest_queue", "sfs"])
def test_chains_over_several_instances_end_whatever_the_policy_and_the_staleness(tmp_path, policy):
    n = 24
    columns = chain(
        [None, None] + [str(row) for row in range(n - 2)],
        [None, None] + [0.003 * (row % 5) for row in range(n - 2)],
        prompt_tokens=[3 + row % 7 for row in range(n)],
        output_tokens=[1 + row % 4 for row in range(n)],
    )
    data = scenario_data(3, routing={"refresh_interval_s": 0.02, "publish_delay_s": 0.005})
    run, requests = run_once(tmp_path, columns, data, policy)
    assert run.summary["requests"] == {
        "submitted": n,
        "finished": n,
        "rejected": 0,
        "failed": 0,
        "unfinished": 0,
    }
    ends = dict(requests.select("request_id", "end_ns").iter_rows())
    for row in requests.iter_rows(named=True):
        index = int(row["request_id"])
        if index >= 2:
            think = 3_000_000 * ((index - 2) % 5)
            assert row["arrival_ns"] == ends[str(index - 2)] + think


def test_a_horizon_leaves_later_turns_unsent(tmp_path):
    columns = chain([None, "0", "1"], [None, 0.1, 0.1], prompt_tokens=[4, 4, 4], output_tokens=[2, 2, 2])
    run, _ = run_once(tmp_path, columns, scenario_data([ENGINE], measure={"horizon_s": 0.2}))
    assert run.summary["requests"]["finished"] == 2
    assert run.summary["not_submitted"] == 1


def test_a_delayed_view_without_refresh_is_refused_where_arrivals_are_not_known_beforehand(tmp_path):
    columns = chain([None, "0"], [None, 0.1], prompt_tokens=[4, 9], output_tokens=[2, 1])
    with pytest.raises(ConfigError, match=r"publish_delay_s = 0\.05; must be 0, or refresh_interval_s above 0"):
        make_world(tmp_path, columns, scenario_data(2, routing={"publish_delay_s": 0.05}))
