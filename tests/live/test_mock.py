"""`simcluster mock`: simulated engines behind vLLM's API, in wall-clock time."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from mock_servers import Client, against, prompt, running, small_world
from simcluster import _native
from simcluster.backends.vllm_publisher import request_key
from simcluster.errors import ConfigError
from simcluster.live.mock.hosted_engine import Stream
from simcluster.live.mock.run import MockCluster
from simcluster.predict.tokens import EstimatedTokens
from simcluster.request import PrefixHashes
from small_cluster import scenario_data


def test_an_answer_is_as_long_as_the_trace_has_it_for_this_request(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        for request_id, tokens, finish in (("r0", 5, "stop"), ("r1", 9, "stop"), ("r2", 4, "length")):
            status, answer = await client.post("/v1/completions", prompt(10, max_tokens=50), request_id)
            assert status == 200
            assert answer["id"] == f"cmpl-{request_id}"
            assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
            assert answer["choices"][0]["finish_reason"] == finish
        _, answer = await client.post("/v1/completions", prompt(10, max_tokens=3), "r1")
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")

    against(small_world(tmp_path), check)


def test_an_unknown_request_ends_at_its_limit_and_without_one_at_the_mean(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        _, answer = await client.post("/v1/completions", prompt(3, max_tokens=7), "stranger")
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (7, "length")
        _, answer = await client.post("/v1/completions", prompt(3))
        assert answer["usage"]["completion_tokens"] == 16, "the API's own default"
        chat = {"model": "M", "messages": [{"role": "user", "content": "two words"}]}
        _, answer = await client.post("/v1/chat/completions", chat)
        assert answer["usage"]["completion_tokens"] == 6, "the mean of 5, 9 and 4"
        assert answer["choices"][0]["message"]["role"] == "assistant"
        _, answer = await client.post("/v1/completions", prompt(3, max_tokens=2, ignore_eos=True), "r1")
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (2, "length")

    against(small_world(tmp_path), check)


def test_a_stream_has_every_token_once_and_the_counts_if_asked_for(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        options = {"max_tokens": 50, "stream_options": {"include_usage": True}}
        *chunks, last = await client.stream("/v1/completions", prompt(20, **options), "r1")
        assert "".join(each["choices"][0]["text"] for each in chunks) == " tok" * 9
        assert [each["choices"][0]["finish_reason"] for each in chunks][-1] == "stop"
        assert all(each["choices"][0]["finish_reason"] is None for each in chunks[:-1])
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
        chat = {"model": "M", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        chunks = await client.stream("/v1/chat/completions", chat)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["choices"][0]["delta"]["content"] for each in chunks[1:]) == " tok" * 5
        assert all("usage" not in each for each in chunks)

    against(small_world(tmp_path), check)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", [1], 400, "JSON object"),
        ("/v1/completions", {"prompt": "x"}, 400, "model is missing"),
        ("/v1/completions", prompt(4) | {"model": "other"}, 404, "`other` does not exist"),
        ("/v1/completions", prompt(0), 400, "not empty"),
        ("/v1/completions", prompt(4) | {"prompt": [1, -1]}, 400, "token ids"),
        ("/v1/completions", prompt(4, max_tokens=0), 400, "at least 1"),
        ("/v1/completions", prompt(4, max_tokens=True), 400, "at least 1"),
        ("/v1/completions", prompt(4, n=2), 400, "n = 2; must be 1"),
        ("/v1/completions", prompt(4, stream="yes"), 400, "of type bool"),
        ("/v1/completions", prompt(4096, stream=True), 400, "maximum context length is 4096"),
        ("/v1/completions", prompt(4, max_tokens=4097, stream=True), 400, "maximum context length is 4096"),
        ("/v1/chat/completions", {"model": "M", "messages": []}, 400, "at least one message"),
        ("/v1/chat/completions", {"model": "M", "messages": ["x"]}, 400, "messages[0]"),
        ("/v1/chat/completions", {"model": "M", "messages": [{"role": "u", "content": 3}]}, 400, "must be text"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_a_bad_request_is_refused_before_anything_streams(
    tmp_path: Path, path: str, body: Any, status: int, words: str
) -> None:
    async def check(client: Client) -> None:
        found, answer = await client.post(path, body)
        assert found == status
        assert words in answer["error"]["message"]
        assert answer["error"]["code"] == status
        assert client.cluster.hosts[0].num_open == 0

    against(small_world(tmp_path), check)


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        hosted = client.cluster.hosts[0]
        body = prompt(10, max_tokens=3000, stream=True)
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            assert hosted.engine.num_running == 1
        for _ in range(200):
            hosted.wake()
            if hosted.engine.num_running == 0:
                break
            await asyncio.sleep(0.01)
        assert (hosted.engine.num_running, hosted.num_open) == (0, 0)
        assert hosted.engine.num_free_blocks == 1000

    against(small_world(tmp_path), check)


def test_answers_come_at_exactly_the_instants_of_a_simulated_engine(tmp_path: Path) -> None:
    world = small_world(tmp_path)
    streams: list[tuple[Stream, int]] = []

    async def check(client: Client) -> None:
        client.cluster.hosts[0].on_end.append(lambda stream: streams.append((stream, stream.tokens)))

        async def one(number: int) -> None:
            await asyncio.sleep(0.003 * number)
            await client.post("/v1/completions", prompt(5 + 7 * number, max_tokens=3 + number % 9))

        await asyncio.gather(*map(one, range(40)))

    against(world, check)
    assert len(streams) == 40
    streams.sort(key=lambda each: each[0].sent_ps)
    model = world.true_models[0]
    engine = _native.Engine(world.instances[0].engine, model.step_time, model.noise)
    for number, (stream, tokens) in enumerate(streams):
        assert engine.submit(number, stream.prompt_tokens, tokens, stream.sent_ps, tokens, True)
    engine.drain()
    told = {(row[0], row[3]): row[1] for row in engine.take_events().tolist()}
    for number, (stream, _) in enumerate(streams):
        assert stream.first_token_ps == told[number, int(_native.EventKind.first_token)]
        assert stream.end_ps == told[number, int(_native.EventKind.finished)]


def test_a_thousand_streams_run_side_by_side(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        bodies = [client.stream("/v1/completions", prompt(4, max_tokens=8)) for _ in range(1000)]
        answers = await asyncio.gather(*bodies)
        assert all("".join(each["choices"][0]["text"] for each in chunks) == " tok" * 8 for chunks in answers)
        assert client.cluster.report()["requests"] == {"length": 1000}
        assert client.cluster.hosts[0].num_open == 0

    against(small_world(tmp_path), check, speed=1000.0)


def test_metrics_have_the_names_of_vllm_and_count(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        await client.post("/v1/completions", prompt(10, max_tokens=4))
        async with client.session.get(client.url + "/metrics") as response:
            lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        label = '{engine="0",model_name="M"}'
        assert float(lines[f"vllm:num_requests_running{label}"]) == 0
        assert float(lines[f"vllm:prompt_tokens_total{label}"]) == 10
        assert float(lines[f"vllm:generation_tokens_total{label}"]) == 4
        assert float(lines[f"vllm:time_to_first_token_seconds_count{label}"]) == 1
        assert float(lines[f"vllm:time_to_first_token_seconds_sum{label}"]) == pytest.approx(0.020)
        assert lines['vllm:request_success_total{engine="0",finished_reason="length",model_name="M"}'] == "1.0"
        assert any(name.startswith("vllm:cache_config_info") and 'num_gpu_blocks="1001"' in name for name in lines)
        async with client.session.get(client.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 4096
        async with client.session.get(client.url + "/health") as response:
            assert response.status == 200

    against(small_world(tmp_path), check)


def test_each_instance_has_its_own_port(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        assert len(set(client.cluster.urls)) == 2
        await client.post("/v1/completions", prompt(10, max_tokens=4))
        assert [each.num_steps > 0 for each in client.cluster.hosts] == [True, False]

    against(small_world(tmp_path, 2), check)


def test_the_command_serves_until_it_is_told_to_stop_and_then_reports() -> None:
    command = [sys.executable, "-m", "simcluster", "mock", "quickstart", "--port", "0", "--speed", "20", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())

            async def ask() -> Any:
                async with aiohttp.ClientSession() as session:
                    body = {"model": "Qwen3-0.6B", "prompt": "Say something.", "max_tokens": 12}
                    url = f"{ready['instances'][0]['url']}/v1/completions"
                    async with session.post(url, json=body) as response:
                        return await response.json()

            assert asyncio.run(ask())["usage"]["completion_tokens"] == 12
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    report = json.loads(out)
    assert report["requests"] == {"length": 1}
    assert report["steps"] >= 12
    assert 0 <= report["late_steps_share"] <= 1


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_world(tmp_path)) as client:
            port = client.url.rsplit(":", 1)[1]
            command = [sys.executable, "-m", "simcluster", "mock", "quickstart", "--port", port]
            process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
            _, errors = await process.communicate()
            assert process.returncode == 2
            assert errors.decode().count("\n") == 1
            assert "give another --port" in errors.decode()

    asyncio.run(main())


def test_c008_a_prompt_near_the_context_is_clipped_and_one_that_fills_it_refused_before_any_event(
    tmp_path: Path,
) -> None:
    """max_model_len 64, stream, no EOS: (prompt, max_tokens) -> tokens, or 400 before anything streams."""

    async def check(client: Client) -> None:
        usage = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        for more in ({"max_tokens": 10}, {}):
            *chunks, last = await client.stream("/v1/completions", prompt(60, **usage, **more))
            assert "".join(each["choices"][0]["text"] for each in chunks) == " tok" * 4
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert last["usage"]["completion_tokens"] == 4
        for length, limit in ((64, 1), (60, 65)):
            status, answer = await client.post("/v1/completions", prompt(length, max_tokens=limit, stream=True))
            assert (status, answer["error"]["code"]) == (400, 400)

    engine = {"max_model_len": 64, "max_num_batched_tokens": 64}
    against(small_world(tmp_path, [{"engine": engine}]), check)


def test_snapshots_show_the_requests_of_an_engine_by_the_ids_of_their_clients(tmp_path: Path) -> None:
    name = f"test-mock-{os.getpid()}"
    reader = _native.SnapshotReader(name)

    def resident() -> list[int]:
        return reader.read()[0].request_ids

    async def check(client: Client) -> None:
        _, _, state = reader.read()
        assert state == _native.SourceState.live
        assert resident() == []
        body = prompt(10, max_tokens=3000, stream=True)
        url = client.url + "/v1/completions"
        async with client.session.post(url, json=body, headers={"X-Request-Id": "one"}) as first:
            await first.content.readline()
            assert resident() == [request_key("one")]
            assert reader.config.num_gpu_blocks == 1001
            async with client.session.post(url, json=body, headers={"X-Request-Id": "one"}) as again:
                await again.content.readline()
                assert len(set(resident())) == 2, "a retry of a request that is still there is another one"
        for _ in range(500):
            if not resident():
                break
            await asyncio.sleep(0.01)
        assert resident() == []

    against(small_world(tmp_path), check, channels=[name])
    assert reader.read()[2] == _native.SourceState.closed


def test_a_taken_channel_is_one_clear_line(tmp_path: Path) -> None:
    name = f"test-mock-taken-{os.getpid()}"

    async def check(_: Client) -> None:
        other = MockCluster(world=small_world(tmp_path), tokens=EstimatedTokens(), channels=[name])
        with pytest.raises(ConfigError, match=rf"^a: .*{name}: another process publishes .* take another name$"):
            await other.start("127.0.0.1", 0)

    against(small_world(tmp_path), check, channels=[name])


def test_the_command_listens_where_the_scenario_says_that_its_instances_are(tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, two)]
    channel = f"test-command-{os.getpid()}"
    places = [
        {"url": f"http://127.0.0.1:{ports[0]}", "snapshot": f"shm:{channel}"},
        {"url": f"http://localhost:{ports[1]}"},
    ]
    small_world(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(scenario_data(places)), encoding="utf-8")
    command = [sys.executable, "-m", "simcluster", "mock", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())["instances"]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
    assert [each["url"] for each in ready] == [f"http://127.0.0.1:{port}" for port in ports]
    assert [each["snapshot"] for each in ready] == [f"shm:{channel}", None]
    assert _native.SnapshotReader(channel).read()[2] in (_native.SourceState.missing, _native.SourceState.closed)


def test_metrics_count_tokens_as_they_come_and_clients_that_left(tmp_path: Path) -> None:
    async def check(client: Client) -> None:
        await client.post("/v1/completions", prompt(10, max_tokens=7), "x")
        body = prompt(10, max_tokens=3000, stream=True)
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            lines = await client.metrics()
            assert lines["vllm:generation_tokens_total"] >= 8
            assert lines["vllm:num_requests_running"] == 1
        for _ in range(500):
            lines = await client.metrics()
            if lines.get("vllm:request_success_total abort"):
                break
            await asyncio.sleep(0.01)
        assert lines["vllm:request_success_total abort"] == 1
        assert client.cluster.report()["requests"] == {"abort": 1, "length": 1}

    against(small_world(tmp_path), check)


def test_requests_of_the_trace_share_the_prefixes_that_the_trace_says_are_shared(tmp_path: Path) -> None:
    plain = small_world(tmp_path)
    prefix = PrefixHashes(np.array([0, 2, 4, 4]), np.array([0, 1, 0, 2]), 16)
    world = dataclasses.replace(plain, known=dataclasses.replace(plain.known, prefix=prefix))
    world.instances[0].engine.shared_prefixes = True

    async def check(client: Client) -> None:
        for request_id in ("r0", "r1", "r2"):
            await client.post("/v1/completions", prompt(40, max_tokens=2), request_id)
        lines = await client.metrics()
        assert lines["vllm:prefix_cache_queries_total"] == 120
        assert lines["vllm:prefix_cache_hits_total"] == 16, "the first block of r1"

    against(world, check)
