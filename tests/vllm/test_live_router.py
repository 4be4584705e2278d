"""Two real vLLM servers behind the live router: nothing is lost, and SFS errs less about them than rates do.

The servers run small models with random weights on a CPU; they publish and record at once. Their cards were recorded
before, as a user would. Answers run to their limits, which the router is told: so lengths are known online as they are
in the offline scores.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from simcluster._native import SnapshotReader, SourceState
from simcluster.calibrate.collect import collect
from simcluster.calibrate.recording import load_recording
from simcluster.live.router.sight import OLD

if importlib.util.find_spec("openai") is None and os.environ.get("SIMCLUSTER_REQUIRE_VLLM") != "1":
    pytest.skip("the openai client is not installed; it comes with vLLM", allow_module_level=True)

from openai import OpenAI

from live_scores import offline_errors, online_errors, shown, summarized
from live_traffic import Ask, Got, draw_mix, open_client, send_all, write_client_times
from trace_files import write_file
from vllm_cluster import LONGEST, Routed, TwoServers, say, two_servers

REQUESTS = 200
LOAD = 0.7  # of what the cards say that both servers can answer; with all that shares the cores, queues form
RUN_S = 900.0  # generous: other jobs may hold the cores
SECOND_CACHE = "128M"
BENCH = (  # what `vllm bench serve` runs; vLLM's own command does not start where its package has another name
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoServers]:
    with two_servers(tmp_path_factory.mktemp("live")) as found:
        yield found


# ---- routing, and what was predicted -------------------------------------------------------------------------------


async def warm_up(cluster: TwoServers) -> None:
    """Let every server meet long and short prompts once, since first times are slower."""
    for name, server in cluster.servers.items():
        async with open_client(server.url) as client:
            await send_all(client, draw_mix(8, 3, f"warm-{name}"), name)


async def route_mix(cluster: TwoServers) -> tuple[list[Got], Routed]:
    async with asyncio.timeout(RUN_S):
        await warm_up(cluster)
        async with cluster.router(fresh_s=10.0, usable_s=60.0) as routed:  # a step may take long on shared cores
            gots = await send_all(routed.client, draw_mix(REQUESTS, 7, "live", LOAD * cluster.capacity_rps()))
            await routed.quiet()
    return gots, routed


def test_two_hundred_requests_are_served_and_sfs_errs_least_on_measured_steps(
    cluster: TwoServers, record_property: Any
) -> None:
    gots, routed = asyncio.run(route_mix(cluster))
    # None is lost, and both sides count the same.
    assert [each.error for each in gots if each.error] == []
    assert all(each.finish == "length" and each.output_tokens == each.ask.output for each in gots)
    assert routed.server.core.ended == {"finished": REQUESTS}
    ended = {each.request_id: each for each in routed.outcomes}
    assert {each.ask.key: each.output_tokens for each in gots} == {k: v.output_tokens for k, v in ended.items()}
    assert [each for each in routed.outcomes if not each.server_counted] == []
    core = routed.server.core
    told = core.metrics.text(core.dispatcher, core.clock.now_ps()).decode().splitlines()
    retries = [each for each in told if each.startswith("simcluster_retry")]
    assert [each for each in routed.outcomes if each.attempts != 1] == [], retries
    assert Counter(each.fallback for each in gots) == {"": REQUESTS}, "every decision rested on a fresh view"
    for each in routed.outcomes:
        assert each.made is not None
        assert each.made.source == "shm"
    # What was expected of them, against what came.
    tables = [online_errors(gots, routed.outcomes, routed.server.core.dispatcher.estimators)]
    for name, server in cluster.servers.items():
        there = [each for each in gots if each.instance == name]
        assert len(there) >= REQUESTS // 10, "both servers had their share"
        write_client_times(server.recording, there)
        collect(server.recording)
        tables.append(offline_errors(cluster.cards[name], load_recording(server.recording), there))
    found = summarized(pl.concat(tables))
    text = shown(found)
    record_property("table: TTFT, predicted against observed", text)
    for name in cluster.servers:
        for how in ("offline, engine", "offline, client"):
            rows = found.filter((pl.col("instance") == name) & (pl.col("how") == how))
            error = dict(zip(rows["estimator"], rows["median_ms"], strict=True))
            assert error["sfs_measured"] < min(error["throughput"], error["lps"]), text
    assert found.filter(pl.col("estimator").str.starts_with("sfs"))["not_predicted"].sum() == 0


# ---- clients that know nothing of it -------------------------------------------------------------------------------


def answers_of(client: OpenAI, model: str) -> list[tuple[str, int]]:
    """Ask in four ways; return why each answer ended, and its tokens."""
    more: dict[str, Any] = {"model": model, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": "router server queue"}]
    completion, chat = client.completions, client.chat.completions
    found = []
    for whole in (
        completion.create(prompt="router server queue", **more),
        chat.create(messages=messages, **more),
    ):
        found.append((whole.choices[0].finish_reason, whole.usage.completion_tokens))
    for stream in (
        completion.create(prompt="router server queue", **more, **streaming),
        chat.create(messages=messages, **more, **streaming),
    ):
        *chunks, last = list(stream)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        found.append((reasons[-1], last.usage.completion_tokens))
    return found


def test_vllms_benchmark_and_the_openai_client_work_through_the_router_as_they_are(
    cluster: TwoServers, tmp_path: Path
) -> None:
    result = tmp_path / "vllm_bench_serve.json"
    words = ["--backend", "openai", "--model", "large", "--tokenizer", str(cluster.folder / "large-model")]
    words += ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "24", "--ignore-eos"]
    words += ["--random-range-ratio", "0.5", "--num-prompts", "24", "--request-rate", "4", "--seed", "5"]
    words += ["--save-result", "--save-detailed", "--result-filename", str(result), "--disable-tqdm"]
    with cluster.router_command() as (url, router):
        command = [sys.executable, "-P", "-c", BENCH, *words, "--base-url", url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S)
        assert done.returncode == 0, done.stderr
        with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=600.0) as client:
            assert {each.id for each in client.models.list()} == {"auto", "small", "large"}
            assert [answers_of(client, model) for model in ("auto", "small")] == [[("length", 6)] * 4] * 2
        router.send_signal(signal.SIGTERM)
        report, _ = router.communicate(timeout=120)
    content = json.loads(result.read_text())
    assert (content["completed"], content["failed"]) == (24, 0)
    assert json.loads(report) == {"requests": {"finished": 24 + 8}, "open": 0}
    # Its result is a real run that a card can be compared with.
    options = [word for each in ("max_num_seqs=8", "max_num_batched_tokens=256") for word in ("--engine", each)]
    shown_text = say("validate", cluster.folder / "large.json", result, *options, "--json")
    compared = json.loads(shown_text)
    assert (compared["requests"], compared["not_served"], compared["source"]) == (24, 0, "vllm bench")
    assert compared["ttft_s"]["count"] == compared["e2e_s"]["count"] == 24
    sys.stdout.write(f"{shown_text}\n")


# ---- side by side with a simulation --------------------------------------------------------------------------------


def test_live_compare_gives_real_servers_the_lengths_of_a_trace(cluster: TwoServers, tmp_path: Path) -> None:
    mix = draw_mix(40, 5, "compare", LOAD * cluster.capacity_rps())
    trace, out = tmp_path / "compare.parquet", tmp_path / "out"
    write_file(
        trace,
        request_id=[each.key for each in mix],
        arrival_s=[each.at_s for each in mix],
        prompt_tokens=[each.prompt for each in mix],
        output_tokens=[each.output for each in mix],
        max_tokens=[LONGEST] * len(mix),  # what policies know
    )
    words = ["live-compare", cluster.scenario(fresh_s=10.0, usable_s=60.0), "--trace", trace, "--out", out]
    result = json.loads(say(*words, "-p", "sfs", "-p", "shortest_queue", "--json", "--quiet"))
    assert (result["servers"], list(result["policies"])) == ("real servers", ["sfs", "shortest_queue"])
    lengths = {each.key: (each.prompt, each.output) for each in mix}
    for policy, found in result["policies"].items():
        every = {"submitted": 40, "finished": 40, "rejected": 0, "failed": 0, "unfinished": 0}
        assert found["requests"] == {"simulated": every, "live": every}
        assert (found["compared"], found["late_steps_share"]) == (40, None)
        assert 0 < found["identical_decisions"] <= 1
        assert found["measuring"]["token_source"] == {"server": 40}
        assert found["measuring"]["token_mismatches"] == 0
        table = pl.read_parquet(out / "live" / policy / "requests.parquet")
        rows = table.select("request_id", "prompt_tokens", "output_tokens").iter_rows()
        assert {key: (prompt, output) for key, prompt, output in rows} == lengths
        shown_of = {name: found["metrics"][name] for name in ("ttft_s_p50", "ttft_s_p99", "e2e_s_p50")}
        sys.stdout.write(f"{policy}: {found['identical_decisions']:.1%} of decisions are the same; {shown_of}\n")
    # What one server got is a run that its card can be compared with.
    options = [word for each in ("max_num_seqs=8", "max_num_batched_tokens=256") for word in ("--engine", each)]
    run = ("validate", cluster.folder / "small.json", out / "live" / "sfs", "--run", "small", *options, "--json")
    assert json.loads(say(*run))["requests"] > 0


# ---- servers that die ----------------------------------------------------------------------------------------------


async def kill_in_the_middle(cluster: TwoServers, routed: Routed) -> tuple[list[Got], float]:
    """Kill the large server once it streams; return what became of all requests and when it was dead [ns]."""
    core, j = routed.server.core, list(cluster.servers).index("large")
    there = [Ask(f"there-{number}", 0.0, "ids", 40 + number, 90) for number in range(4)]
    asks = [Ask(f"fall-{number}", 0.2 * number, "ids", 40 + number, 90) for number in range(36)]
    named = asyncio.create_task(send_all(routed.client, there, "large"))
    sending = asyncio.create_task(send_all(routed.client, asks))
    while not any(each.tokens > 1 for each in core.dispatcher.own.open[j].values()):
        assert not named.done(), "killed while it streams"
        await asyncio.sleep(0.01)
    await asyncio.to_thread(cluster.servers["large"].kill)
    dead_ns = time.monotonic_ns()
    gots = [*await named, *await sending]
    await routed.quiet()
    await asyncio.sleep(core.setup.scenario.live.usable_s + 0.1)
    core.sight.look(core.clock.now_ps())
    assert core.sight.tiers[j] == OLD, "snapshots of the dead are not used for ever"
    return gots, dead_ns


async def fall_and_return(cluster: TwoServers) -> None:
    large = cluster.servers["large"]
    j = list(cluster.servers).index("large")
    async with asyncio.timeout(RUN_S), cluster.router(mark_s=1.0, fresh_s=3.0, usable_s=3.0) as routed:
        core = routed.server.core
        gots, dead_ns = await kill_in_the_middle(cluster, routed)
        # Every request has ended, those that were being answered there as failed ones; all others went elsewhere.
        assert len(gots) == 40 == sum(core.ended.values())
        failed = {each.request_id: each.made for each in routed.outcomes if each.status == "failed"}
        assert failed.keys() == {each.ask.key for each in gots if each.error}
        assert 0 < len(failed) == core.ended["failed"]
        assert {made.instance for made in failed.values() if made is not None} == {j}
        late = [each for each in gots if each.sent_ns > dead_ns]
        assert late, "requests came after its death"
        assert {(each.instance, each.error) for each in late} == {("small", "")}
        assert SnapshotReader(large.channel).read()[2] != SourceState.live
        # It comes back with a smaller cache, and the router goes on with what it publishes.
        before = core.dispatcher.view.instances[j].engine.num_gpu_blocks
        large.cache = SECOND_CACHE
        await asyncio.to_thread(large.start)
        await asyncio.to_thread(large.wait)
        again = await send_all(routed.client, draw_mix(6, 11, "again", 2.0), "large")
        await routed.quiet()
        assert {(each.instance, each.error, each.finish) for each in again} == {("large", "", "length")}
        (resolved,) = (large.recording / "raw").glob("engine_*.json")
        blocks = json.loads(resolved.read_text())["engine"]["num_gpu_blocks"]
        assert core.dispatcher.view.instances[j].engine.num_gpu_blocks == blocks < before
        assert again[-1].fallback == ""


def test_a_server_that_is_killed_loses_what_it_was_answering_and_is_followed_when_it_returns(
    cluster: TwoServers,
) -> None:
    asyncio.run(fall_and_return(cluster))
