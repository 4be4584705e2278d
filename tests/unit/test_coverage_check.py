"""`run` warns when simulated batches leave what a card was fitted to."""

from pathlib import Path
from typing import Any

from simcluster.card import load_card
from simcluster.experiment.coverage_check import SAMPLE, coverage_warnings
from simcluster.experiment.run import run_policy
from small_cluster import make_card, make_world, scenario_data


def warnings_of(tmp_path: Path, requests: int = 4, **limits: Any) -> list[str]:
    """Run equal requests, all at once: prompts of 100 tokens, answers of five; the card was fitted within limits."""
    path = make_card(tmp_path)
    coverage = load_card(path).coverage.model_dump(mode="json") | limits
    make_card(tmp_path, coverage=coverage)
    columns = {
        "request_id": [f"r{number}" for number in range(requests)],
        "arrival_ns": [0] * requests,
        "prompt_tokens": [100] * requests,
        "output_tokens": [5] * requests,
    }
    scenario, world = make_world(tmp_path, columns, scenario_data())
    return coverage_warnings(world, [run_policy(scenario, world, "round_robin")])


def test_a_run_within_the_coverage_is_not_warned_of(tmp_path: Path) -> None:
    assert warnings_of(tmp_path) == []


def test_batches_beyond_the_coverage_are_named_with_how_far_and_what_was_checked(tmp_path: Path) -> None:
    (line,) = warnings_of(tmp_path, n_tokens=[1, 128], sum_decode_context=[0, 300])
    assert line.startswith("a: ")
    assert "under round_robin is beyond what its card was fitted to" in line
    assert "tokens up to 400 (128 fitted)" in line
    assert "decode context up to 412 (300 fitted)" in line  # 4 requests of 103 tokens
    assert line.endswith("(checked: the 4 densest requests, replayed)")


def test_a_feature_that_costs_nothing_is_no_reason_to_warn(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, num_prefill_requests=[0, 1]) == []  # b5 is 0


def test_no_more_than_a_sample_is_replayed(tmp_path: Path) -> None:
    (line,) = warnings_of(tmp_path, requests=SAMPLE + 50, n_tokens=[1, 128])
    assert f"the {SAMPLE} densest requests" in line
