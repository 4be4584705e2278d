"""The trace doctor on traces whose statistics are known, and its estimate of load against the engine itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run_command
from simcluster import _native
from simcluster.card import load_card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.instance import step_time_model
from simcluster.rng import Stream, generator
from simcluster.scenario import load_scenario
from simcluster.workload import Trace, poisson_arrivals_ns, write_trace
from simcluster.workload.doctor import cluster_groups, hit_rate_bound, inspect_trace, shared_prefix_tokens
from simcluster.workload.doctor.offered_load import offered_load, work_per_request_s

CARDS = Path(__file__).resolve().parents[2] / "calibration"


def trace_of(arrivals_s: Any, prompts: Any = None, answers: Any = None, **optional: Any) -> Trace:
    n = len(arrivals_s)
    return Trace.from_columns(
        np.rint(np.asarray(arrivals_s, dtype=float) * 1e9).astype(np.int64),
        np.full(n, 10) if prompts is None else np.asarray(prompts, dtype=np.int64),
        np.full(n, 5) if answers is None else np.asarray(answers, dtype=np.int64),
        **optional,
    )


def hashed(rows: list[tuple[int, list[int]]], block: int, **optional: Any) -> Trace:
    offsets = np.concatenate([[0], np.cumsum([len(ids) for _, ids in rows])]).astype(np.int64)
    return trace_of(
        range(len(rows)),
        [prompt for prompt, _ in rows],
        prefix_offsets=offsets,
        prefix_values=np.array([value for _, ids in rows for value in ids], dtype=np.int64),
        prefix_block_size=block,
        **optional,
    )


# ---- arrivals and lengths ------------------------------------------------------------------------


def test_equal_gaps_have_no_burstiness() -> None:
    found = inspect_trace(trace_of(np.arange(601) / 2))["arrivals"]
    assert found["rate_rps"] == 2
    assert found["gap_cv"] == pytest.approx(0, abs=1e-9)
    assert found["dispersion"]["10 s"] == pytest.approx(0, abs=1e-9)
    assert found["gaps_s"] == {"min": 0.5, "p50": 0.5, "p90": 0.5, "p99": 0.5, "max": 0.5, "mean": 0.5}


def test_poisson_arrivals_have_a_cv_and_a_dispersion_of_one() -> None:
    arrivals = poisson_arrivals_ns(50.0, 200_000, generator(3, Stream.ARRIVALS))
    found = inspect_trace(trace_of(arrivals / 1e9))["arrivals"]
    assert found["gap_cv"] == pytest.approx(1, abs=0.01)
    assert found["dispersion"]["1 s"] == pytest.approx(1, abs=0.08)
    assert found["dispersion"]["10 s"] == pytest.approx(1, abs=0.25)


def test_ties_and_repeated_rows_are_counted() -> None:
    found = inspect_trace(trace_of([0, 1, 1, 1, 2, 2], [1, 7, 8, 7, 9, 9], [1, 1, 1, 1, 1, 2]))
    assert found["arrivals"]["equal_arrivals"] == 3
    assert found["repeated_rows"] == 1
    assert any("1 request with arrival and lengths of an earlier one" in warning for warning in found["warnings"])


def test_requests_that_wait_are_not_taken_for_repeated_rows() -> None:
    assert inspect_trace(trace_of([0, 0, 0], after=np.array([-1, 0, 1])))["repeated_rows"] == 0
    assert inspect_trace(trace_of([0, 0, 0], after=np.array([-1, -1, 1])))["repeated_rows"] == 1


def test_one_request_has_no_rate_and_no_number_that_json_could_not_hold() -> None:
    found = inspect_trace(trace_of([3.0]))
    assert found["arrivals"]["rate_rps"] is None
    assert found["arrivals"]["gap_cv"] is None
    json.dumps(found, allow_nan=False)
    found = inspect_trace(trace_of([3.0, 3.0]))
    assert found["arrivals"]["rate_rps"] is None
    json.dumps(found, allow_nan=False)


def test_what_exceeds_a_context_is_counted_as_the_engine_would_see_it() -> None:
    found = inspect_trace(trace_of(range(5), [6700, 8000, 8000, 8192, 23000], [500, 192, 193, 1, 450]), 8192)
    assert found["context"] == {"max_model_len": 8192, "prompt_too_long": 2, "answer_cut": 1, "longest": 23450}
    assert any("2 prompts fill the context of 8,192 tokens" in warning for warning in found["warnings"])


def test_sessions_and_turns_are_counted() -> None:
    sessions = np.array(["a", "b", "a", None, "a"], dtype=object)
    after = np.array([-1, -1, 0, -1, 2])
    found = inspect_trace(trace_of(range(5), session_id=sessions, after=after))
    assert found["sessions"] == {
        "sessions": 2,
        "requests_in_sessions": 4,
        "turns_mean": 2,
        "turns_max": 3,
        "requests_that_wait": 2,
    }
    assert any("2 requests wait for an earlier one" in warning for warning in found["warnings"])


# ---- prefix sharing ------------------------------------------------------------------------------


def test_whole_blocks_hit_and_never_the_last_token() -> None:
    # 64 tokens per hash: 128 shared tokens; the second prompt is the first, so its last block is computed.
    trace = hashed([(128, [1, 2]), (128, [1, 2]), (200, [1, 2, 3, 4])], 64)
    assert hit_rate_bound(trace, 16) == {
        "block_size": 16,
        "hit_tokens": 112 + 128,
        "prompt_tokens": 456,
        "hit_rate": 240 / 456,
        "requests_with_hits": 2,
    }


def test_a_partial_last_hash_matches_only_its_full_blocks() -> None:
    shared = shared_prefix_tokens(hashed([(100, [1, 2]), (128, [1, 2]), (90, [1, 2])], 64))
    assert shared is not None
    assert shared.tolist() == [0, 100, 90]
    found = hit_rate_bound(hashed([(100, [1, 2]), (128, [1, 2]), (90, [1, 2])], 64), 16)
    assert found is not None
    assert found["hit_tokens"] == 96 + 80


def test_equal_hashes_after_a_difference_share_nothing() -> None:
    shared = shared_prefix_tokens(hashed([(30, [1, 2, 3]), (30, [9, 2, 3]), (30, [1, 8, 3])], 10))
    assert shared is not None
    assert shared.tolist() == [0, 0, 10]


def test_a_later_turn_shares_the_answer_of_the_turn_that_it_waits_for() -> None:
    rows = [(20, [1, 2]), (60, [1, 2, 3, 4, 5, 6])]
    optional: dict[str, Any] = {"after": np.array([-1, 0]), "answers": [30, 1]}
    shared = shared_prefix_tokens(hashed(rows, 10, **optional))
    assert shared is not None
    assert shared.tolist() == [0, 49]  # 20 + 30 tokens, of which the last was never fed back


def test_nothing_is_known_without_hashes() -> None:
    assert hit_rate_bound(trace_of([0, 1])) is None


def tokens_of(row: tuple[int, list[int]], block: int) -> list[tuple[int, int]]:
    prompt, ids = row
    return [(ids[place // block], place % block) for place in range(prompt)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 2), min_size=8, max_size=8)), max_size=8))
def test_shared_tokens_are_those_of_spelled_out_prompts(drawn: list[tuple[int, list[int]]]) -> None:
    block = 5
    rows = [(1, [0])] + [(prompt, ids[: -(-prompt // block)]) for prompt, ids in drawn]
    shared = shared_prefix_tokens(hashed(rows, block))
    assert shared is not None
    for row, found in enumerate(shared.tolist()):
        mine = tokens_of(rows[row], block)
        most = 0
        for other in rows[:row]:
            theirs = tokens_of(other, block)
            same = [a == b for a, b in zip(mine, theirs, strict=False)]
            most = max(most, same.index(False) if False in same else len(same))
        assert found == most


# ---- offered load --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-0.6b-h100", "qwen3-8b-h100", "qwen3-32b-tp2-h100"])
@pytest.mark.parametrize(("prompt", "answer"), [(200, 400), (3000, 100), (1000, 500)])
@pytest.mark.parametrize("is_async", [True, False])
def test_the_estimated_work_is_what_the_engine_needs_for_a_burst(
    name: str, prompt: int, answer: int, is_async: bool
) -> None:
    card = load_card(CARDS / f"{name}.json")
    config, _ = resolve_engine_options(EngineOptions(async_scheduling=is_async, max_num_seqs=64), card, "test")
    rng = np.random.default_rng(1)
    n = 3000
    prompts = rng.integers(prompt // 2, prompt * 3 // 2, n)
    answers = rng.integers(answer // 2, answer * 3 // 2, n)
    engine = _native.Engine(config, step_time_model(card.step_time, card.host_time_s))
    for row in range(n):
        engine.submit(row, int(prompts[row]), int(answers[row]), 0)
    engine.drain()
    end_s = engine.take_events()[:, 1].max() / 1e12
    scenario, path = load_scenario("quickstart")
    groups = {group.model: group for group in cluster_groups(scenario, path)}
    group = groups[card.model]
    group = type(group)(**{**{k: getattr(group, k) for k in group.__slots__}, "is_async": is_async, "max_seqs": 64})
    estimate = work_per_request_s(group, prompts, answers) * n
    assert estimate == pytest.approx(end_s, rel=0.1)


def test_the_load_of_a_cluster_is_spread_over_its_groups() -> None:
    scenario, path = load_scenario("quickstart")
    groups = cluster_groups(scenario, path)
    load = offered_load(trace_of(np.arange(101) / 2, np.full(101, 1000), np.full(101, 200)), groups)
    assert load["rate_rps"] == 2
    assert load["prompt_tokens_per_s"] == 2000
    assert load["output_tokens_per_s"] == 400
    shares = [1 / group["utilisation"] for group in load["groups"]]
    assert load["utilisation"] == pytest.approx(1 / sum(shares))
    for group in load["groups"]:
        assert group["utilisation"] == pytest.approx(2 / group["capacity_rps"])


def test_a_closed_loop_offers_no_load_of_its_own() -> None:
    scenario, path = load_scenario("quickstart")
    trace = trace_of([0, 1], after=np.array([-1, 0]))
    load = offered_load(trace, cluster_groups(scenario, path))
    assert load["rate_rps"] is None
    assert load["utilisation"] is None
    assert load["groups"][0]["capacity_rps"] > 0


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(trace_of(np.arange(50) / 10), path)
    code, text, errors = run_command("trace", "inspect", path, "--scenario", "quickstart", "--max-model-len", 12)
    assert (code, errors) == (0, "")
    assert "arrivals: 10 requests/s over 4.9 s, (n - 1) / span" in text
    assert "qwen3-8b: holds " in text
    assert "context of 12 tokens: 0 prompts fill it (rejected), 50 answers run into it (cut)" in text
    code, text, errors = run_command("trace", "inspect", path, "--json")
    assert json.loads(text)["requests"] == 50


def test_the_command_refuses_bad_files_and_scenarios_in_one_line(tmp_path: Path) -> None:
    for arguments in ([tmp_path / "none.parquet"], [tmp_path], ["x", "--scenario", "nope"]):
        code, text, errors = run_command("trace", "inspect", *arguments)
        assert (code, text) == (2, "")
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
