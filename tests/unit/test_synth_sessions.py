"""Conversations and closed loops: prompts that grow, turns that wait, prefixes that are shared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcluster.errors import ConfigError
from simcluster.workload import Trace, read_trace, write_trace
from simcluster.workload.doctor import shared_prefix_tokens
from simcluster.workload.recipe import Recipe, load_recipe
from simcluster.workload.sessions import conversation_prompts
from simcluster.workload.synth import make_trace

TASKS = Path(__file__).resolve().parents[2] / "traces" / "recipes" / "quickstart.yaml"


def fixed(prompt: int, answer: int) -> dict[str, Any]:
    return {"kind": "drawn", "prompt": {"median": prompt, "sigma": 0}, "answer": {"median": answer, "sigma": 0}}


def made(**parts: Any) -> Trace:
    return make_trace(Recipe.model_validate({"name": "t", "seed": 7, **parts}))


@pytest.mark.parametrize("path", sorted(TASKS.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_says_that_it_is_synthetic(path: Path) -> None:
    trace = make_trace(load_recipe(path))
    assert len(trace) >= 1000
    assert trace.metadata["source"] == f"synthetic, recipe {path.stem}; no measured prompts, answers or scores"


def test_a_shared_prefix_is_added_once() -> None:
    # C059
    new, answers, turn = np.array([3, 4]), np.array([2, 1]), np.array([0, 1])
    assert conversation_prompts(5, new, answers, turn).tolist() == [8, 14]


def test_a_recipe_adds_the_prefix_once_too(tmp_path: Path) -> None:
    # C059
    (tmp_path / "l.csv").write_text("prompt_tokens,output_tokens\n3,2\n4,1\n")
    (tmp_path / "r.yaml").write_text(
        "name: t\nseed: 1\nrequests: 2\nrate_rps: 1\n"
        "lengths: {kind: file, file: l.csv, order: file}\n"
        "sessions: {turns: {median: 2, sigma: 0}, prefix_tokens: 5}\n"
    )
    assert make_trace(load_recipe(tmp_path / "r.yaml")).prompt_tokens.tolist() == [8, 14]


def test_a_follow_up_waits_for_the_turn_before_it_and_thinks() -> None:
    # C060, the trace: the arrival itself comes out of the run.
    sessions = {"turns": {"median": 2, "sigma": 0}, "think_s": {"median": 0.1}}
    trace = made(requests=2, arrivals={"kind": "constant", "rate_rps": 1.0}, lengths=fixed(4, 2), sessions=sessions)
    assert trace.arrival_ns.tolist() == [0, 100_000_000]
    assert trace.prompt_tokens.tolist() == [4, 10]
    assert trace.after is not None
    assert trace.think_ns is not None
    assert trace.after.tolist() == [-1, 0]
    assert trace.think_ns.tolist() == [0, 100_000_000]
    assert trace.session_id is not None
    assert trace.session_id.tolist() == ["session-0", "session-0"]


def test_users_of_a_closed_loop_have_one_request_at_a_time() -> None:
    # C074, the trace
    trace = made(requests=4, arrivals={"kind": "closed", "concurrency": 2}, lengths=fixed(2, 2))
    assert trace.arrival_ns.tolist() == [0, 0, 0, 0]
    assert trace.after is not None
    assert trace.think_ns is not None
    assert trace.after.tolist() == [-1, -1, 0, 1]
    assert trace.think_ns.tolist() == [0, 0, 0, 0]
    assert trace.session_id is not None
    assert trace.session_id.tolist() == ["user-0", "user-1", "user-0", "user-1"]


def test_more_users_than_requests_and_uneven_shares_are_fine() -> None:
    trace = made(requests=3, arrivals={"kind": "closed", "concurrency": 9}, lengths=fixed(2, 2))
    assert trace.after is None
    trace = made(requests=5, arrivals={"kind": "closed", "concurrency": 2, "think_s": 1.5}, lengths=fixed(2, 2))
    assert trace.arrival_ns.tolist() == [0, 0, 1_500_000_000, 1_500_000_000, 3_000_000_000]
    assert trace.after is not None
    assert trace.after.tolist() == [-1, -1, 0, 1, 2]


def test_an_open_conversation_follows_the_clock() -> None:
    sessions = {"turns": {"median": 3, "sigma": 0}, "think_s": {"median": 2}, "mode": "open"}
    trace = made(requests=6, arrivals={"kind": "constant", "rate_rps": 1.0}, lengths=fixed(4, 2), sessions=sessions)
    assert trace.after is None
    assert (trace.arrival_ns / 1e9).tolist() == [0, 1, 2, 3, 4, 5]
    assert trace.session_id is not None
    assert trace.session_id.tolist() == [f"session-{number}" for number in (0, 1, 0, 1, 0, 1)]
    assert trace.prompt_tokens.tolist() == [4, 4, 10, 10, 16, 16]


def test_all_turns_of_a_conversation_have_one_task() -> None:
    data = load_recipe(TASKS).model_dump(exclude_none=True)
    trace = make_trace(Recipe.model_validate(data | {"sessions": {"turns": {"median": 4, "sigma": 0.5}}}))
    assert trace.session_id is not None
    assert trace.task is not None
    names = trace.session_id.astype(str)
    tasks = {(name, int(task)) for name, task in zip(names, trace.task, strict=True)}
    assert len(tasks) == len(set(names.tolist()))
    assert set(trace.task.tolist()) == {0, 1, 2, 3}
    assert trace.quality_by_model.keys() == {"Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B"}


def test_conversations_that_grow_beyond_what_a_trace_holds_are_refused() -> None:
    sessions = {"turns": {"median": 9, "sigma": 0}}
    with pytest.raises(ConfigError, match="a prompt grows to"):
        made(requests=9, rate_rps=1.0, lengths=fixed(10**9, 1), sessions=sessions)
    with pytest.raises(ConfigError, match="blocks of 1 tokens; allowed are 200,000,000; raise hash_block"):
        made(requests=2, rate_rps=1.0, lengths=fixed(2**28, 1), sessions={**sessions, "hash_block": 1})


@settings(max_examples=60, deadline=None)
@given(
    requests=st.integers(1, 40),
    turns=st.integers(1, 6),
    prefix_tokens=st.sampled_from([0, 3, 8, 20]),
    prefixes=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_a_turn_shares_everything_before_its_own_tokens(
    requests: int, turns: int, prefix_tokens: int, prefixes: int, seed: int
) -> None:
    lengths = {"kind": "drawn", "prompt": {"median": 5, "sigma": 1}, "answer": {"median": 4, "sigma": 1}}
    trace = make_trace(
        Recipe.model_validate(
            {
                "name": "t",
                "seed": seed,
                "requests": requests,
                "rate_rps": 1.0,
                "lengths": lengths,
                "sessions": {
                    "turns": {"median": turns, "sigma": 0.5},
                    "think_s": {"median": 1, "sigma": 1},
                    "prefix_tokens": prefix_tokens,
                    "prefixes": prefixes,
                    "hash_block": 4,
                },
            }
        )
    )
    assert len(trace) == requests
    assert (np.diff(trace.arrival_ns) >= 0).all()
    assert trace.prompt_tokens.min() > prefix_tokens
    if trace.after is None or trace.think_ns is None:
        return
    shared = shared_prefix_tokens(trace)
    assert shared is not None
    assert trace.session_id is not None
    for row, before in enumerate(trace.after.tolist()):
        if before >= 0:
            known = trace.prompt_tokens[before] + trace.output_tokens[before]
            assert trace.session_id[row] == trace.session_id[before]
            assert trace.prompt_tokens[row] > known
            assert shared[row] == known - 1  # the last token of an answer is never fed back
            assert trace.arrival_ns[row] == trace.arrival_ns[before] + trace.think_ns[row]
        else:
            assert shared[row] in (0, prefix_tokens // 4 * 4)


def test_a_trace_with_conversations_is_written_and_read_back(tmp_path: Path) -> None:
    sessions = {"turns": {"median": 3, "sigma": 1}, "think_s": {"median": 0.7, "sigma": 1}, "prefix_tokens": 40}
    trace = made(requests=200, rate_rps=5.0, lengths=fixed(30, 20), sessions=sessions)
    write_trace(trace, tmp_path / "t.parquet")
    again = read_trace(tmp_path / "t.parquet")
    assert again.equals(trace)
    assert again.notes == ()
    assert again.after is not None
