"""Every public trace at hand can be imported and inspected, and the prefix bounds agree with a count of their own."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shared_data import shared_data
from simcluster.workload import Trace
from simcluster.workload.doctor import hit_rate_bound, inspect_trace
from simcluster.workload.recipe import Recipe
from simcluster.workload.synth import make_trace
from trace_files import imported, replayed

TRACES = {
    "aibrix_8min_up_and_down": (2024, 4.44),
    "azure2023_code": (8819, 2.57),
    "azure2023_conv": (19366, 5.53),
    "mooncake_conversation": (12031, 3.40),
    "mooncake_synthetic": (3993, 3.91),
    "sharegpt_lengths_llama-3.1-8b": (300, 10.26),
    "sharegpt_lengths_qwen3-32b": (300, 10.26),
}


def shared_traces() -> Path:
    data = shared_data()
    if data is None:
        pytest.skip("the shared data is not here")
    return data / "traces"


@pytest.mark.parametrize("name", TRACES)
def test_a_public_trace_is_imported_and_inspected(name: str, tmp_path: Path) -> None:
    path = shared_traces() / f"{name}.parquet"
    table = pq.read_table(path)
    count, rate = TRACES[name]
    trace, report = imported(path, tmp_path / "out.parquet", missing_output="drop")
    assert report.read == table.num_rows
    assert len(trace) == report.kept == count
    assert sum(report.skipped.counts.values()) == table.num_rows - count
    assert trace.notes == ()
    answers = table.column("output_tokens").drop_null().to_numpy()
    assert trace.output_tokens.sum() == answers.sum()
    found = inspect_trace(trace, 8192)
    assert found["arrivals"]["rate_rps"] == pytest.approx(rate, abs=0.01)
    assert (found["prefix"] is not None) == name.startswith("mooncake")
    if name.startswith("mooncake"):
        assert trace.prefix_block_size == 512
        assert trace.prefix_values is not None
        assert len(trace.prefix_values) == sum(map(len, table.column("hash_ids").to_pylist()))


@pytest.mark.parametrize("name", TRACES)
def test_a_public_trace_is_replayed_and_every_request_is_accounted_for(name: str, tmp_path: Path) -> None:
    imported(shared_traces() / f"{name}.parquet", tmp_path / "t.parquet", missing_output="drop")
    assert replayed(tmp_path / "t.parquet", limit=250)["submitted"] == 250


def test_every_file_with_arrivals_is_tried() -> None:
    names = {path.stem for path in shared_traces().glob("*.parquet") if "arrival_s" in pq.read_schema(path).names}
    assert names == set(TRACES)


def count_by_hand(trace: Trace, block: int) -> int:
    """Count the tokens that hit in an endless cache, block by block, from nothing but the lists of hashes."""
    assert trace.prefix_offsets is not None
    assert trace.prefix_values is not None
    assert trace.prefix_block_size is not None
    per_hash = trace.prefix_block_size // block
    known: dict[tuple[int, int, int], int] = {}  # (everything before, hash, block of the hash): everything so far
    hits = 0
    for row in range(len(trace)):
        prompt = int(trace.prompt_tokens[row])
        hashes = trace.prefix_values[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]].tolist()
        so_far, is_prefix = 0, True
        for position in range(prompt // block):
            key = (so_far, hashes[position // per_hash], position % per_hash)
            is_prefix = is_prefix and key in known
            so_far = known.setdefault(key, len(known) + 1)
            hits += block * (is_prefix and position < (prompt - 1) // block)
    return hits


def count_by_paths(trace: Trace, block: int) -> int:
    """Count the same one hash at a time: how far any earlier prompt with this beginning reached into it."""
    assert trace.prefix_offsets is not None
    assert trace.prefix_values is not None
    assert trace.prefix_block_size is not None
    reached: dict[int, int] = {}
    hits = 0
    for row in range(len(trace)):
        left = prompt = int(trace.prompt_tokens[row])
        path, shared, is_prefix = 0, 0, True
        for value in trace.prefix_values[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]].tolist():
            path = hash((path, value))
            reach = min(left, trace.prefix_block_size)
            both = min(reached.get(path, 0), reach)
            shared += both if is_prefix else 0
            is_prefix = is_prefix and both == trace.prefix_block_size
            reached[path] = max(reached.get(path, 0), reach)
            left -= reach
        hits += block * min(shared // block, (prompt - 1) // block)
    return hits


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_the_upper_bound_of_the_hit_rate_is_that_of_a_count_by_hand(name: str, tmp_path: Path) -> None:
    trace, _ = imported(shared_traces() / f"{name}.parquet", tmp_path / "out.parquet")
    found = hit_rate_bound(trace, 16)
    assert found is not None
    assert found["hit_tokens"] == count_by_paths(trace, 16)
    assert found["prompt_tokens"] == trace.prompt_tokens.sum()
    expected = {"mooncake_conversation": 0.3736, "mooncake_synthetic": 0.6512}[name]
    assert found["hit_rate"] == pytest.approx(expected, abs=1e-4)
    head = trace.head(600)
    found = hit_rate_bound(head, 16)
    assert found is not None
    assert found["hit_tokens"] == count_by_hand(head, 16) == count_by_paths(head, 16)


def test_lengths_without_arrivals_become_a_trace() -> None:
    path = shared_traces() / "arxiv_summarization_lengths.parquet"
    recipe = Recipe.model_validate(
        {
            "name": "arxiv",
            "seed": 1,
            "requests": 5000,
            "rate_rps": 2.0,
            "lengths": {"kind": "file", "file": str(path)},
        }
    )
    trace = make_trace(recipe)
    pairs = set(zip(*(pq.read_table(path).column(k).to_pylist() for k in range(2)), strict=True))
    assert len(trace) == 5000
    assert set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) <= pairs
    public = pq.read_table(path).column("prompt_tokens").to_numpy()
    assert np.median(trace.prompt_tokens) == pytest.approx(np.median(public), rel=0.03)


@pytest.mark.parametrize("name", ["m-small", "m-mid", "deepseek-r1"])
def test_public_rates_and_lengths_become_a_trace_of_a_window(name: str) -> None:
    folder = shared_traces() / "servegen"
    table = pq.read_table(folder / f"{name}_rates.parquet")
    start, rate = (table.column(column).to_numpy().astype(float) for column in ("t_s", "rate_rps"))
    window = [float(start.min()), float(start.min()) + 600.0]
    inside = (start >= window[0]) & (start < window[1])
    recipe = Recipe.model_validate(
        {
            "name": name,
            "seed": 1,
            "arrivals": {"kind": "servegen", "rates": str(folder / f"{name}_rates.parquet"), "window_s": window},
            "lengths": {
                "kind": "servegen",
                "lengths": str(folder / f"{name}_lengths.parquet"),
                "without_lengths": "pool",
            },
        }
    )
    trace = make_trace(recipe)
    # Every window has as many requests as its rate says: rates are counts over 600 s.
    assert len(trace) == int(np.rint(rate[inside] * 600).sum())
    assert trace.arrival_ns[-1] <= 600 * 10**9
    assert (np.diff(trace.arrival_ns) >= 0).all()
    assert trace.prompt_tokens.min() >= 1
