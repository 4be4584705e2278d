"""Prefix caching of a cluster against an independent count from a trace's hashes."""

import pytest

from shared_data import shared_data
from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import Scenario
from simcluster.workload import Trace, read_trace
from simcluster.workload.importing import ImportOptions, import_trace
from small_cluster import frame

BLOCK = 16
LIMIT = 131_072


def hits_of_an_endless_cache(trace: Trace) -> tuple[int, int]:
    """Count the prompt tokens that earlier prompts share, in whole blocks of 16 and never a whole prompt.

    Prompts at or over the context limit are rejected and leave nothing behind.
    """
    per_hash = trace.prefix_block_size
    known: dict[int, int] = {}  # hash: how many of its blocks were full in some earlier prompt
    hits = queries = 0
    for row, tokens in enumerate(trace.prompt_tokens.tolist()):
        if tokens >= LIMIT:
            continue
        queries += tokens
        hashes = trace.prefix_values[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]].tolist()
        allowed = (tokens - 1) // BLOCK
        for value in hashes:
            found = min(known.get(value, 0), allowed)
            hits += found * BLOCK
            allowed -= found
            if found < per_hash // BLOCK:
                break
        for number, value in enumerate(hashes):
            full = min(per_hash, tokens - number * per_hash) // BLOCK
            known[value] = max(known.get(value, 0), full)
    return hits, queries


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_a_cache_that_never_evicts_hits_what_the_hashes_of_the_trace_say(tmp_path, name):
    data = shared_data()
    if data is None:
        pytest.skip("needs the shared data folder with the Mooncake traces")
    import_trace(data / "traces" / f"{name}.parquet", tmp_path / "trace.parquet", ImportOptions())
    scenario = Scenario.model_validate(
        {
            "name": "mooncake",
            "workload": {"trace": "trace.parquet"},
            "cluster": {
                "instances": [
                    {
                        "card": "qwen3-8b-h100",
                        "price": {"input_usd_per_mtok": 0.18, "output_usd_per_mtok": 0.7},
                        "engine": {"max_model_len": LIMIT, "num_gpu_blocks_override": 12_000_000},
                        "true_model": {"noise": None},
                    }
                ]
            },
            "slo": {"ttft": "none"},
        }
    )
    run = run_policy(scenario, build_world(scenario, tmp_path / "scenario.yaml"), "round_robin")
    cache = run.summary["prefix_cache"]
    expected_hits, expected_queries = hits_of_an_endless_cache(read_trace(tmp_path / "trace.parquet"))
    assert (cache["hits"], cache["queries"]) == (expected_hits, expected_queries)
    assert cache["hit_rate"] > 0.3
    assert (cache["preempted_queries"], cache["preempted_hits"]) == (0, 0)
    assert (frame(run, "requests")["cached_tokens"] % BLOCK == 0).all()
