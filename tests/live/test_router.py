"""The live router: what passes through it, what it adds, and what it refuses."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router_rig import EVENTS, Rig, Upstream, rig


def test_a_stream_passes_byte_for_byte_and_tells_who_answered(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        status, body, headers = await rig.stream(X_Request_Id="one")
        assert (status, body) == (200, b"".join(EVENTS))
        assert headers["X-From"] == "upstream"
        assert (headers["x-simcluster-instance"], headers["x-simcluster-policy"]) == ("a", "round_robin")
        assert headers["x-simcluster-model"] == "M"
        assert rig.upstreams[0].headers["X-Request-Id"] == "one"
        (outcome,) = rig.outcomes
        assert (outcome.request_id, outcome.status, outcome.reason) == ("one", "finished", "")
        assert (outcome.output_tokens, outcome.server_counted, outcome.attempts) == (3, False, 1)
        assert 0 <= outcome.arrival_ps <= outcome.first_token_ps <= outcome.end_ps

    rig(tmp_path, check)


def test_a_client_that_leaves_once_it_has_read_the_end_has_its_answer(tmp_path: Path) -> None:
    async def stay(_: Upstream, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in EVENTS:
            await response.write(event)
        await asyncio.sleep(3600)  # the connection does not end
        return response

    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = stay
        body = {"model": "auto", "prompt": "x", "stream": True}
        async with rig.session.post(rig.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(EVENTS[-1])
        await rig.quiet()
        (outcome,) = rig.outcomes
        assert (outcome.status, outcome.reason, outcome.output_tokens) == ("finished", "", 3)
        assert rig.server.core.ended == {"finished": 1}
        assert rig.upstreams[0].left == 1

    rig(tmp_path, check, instances=1)


def test_an_answer_in_one_piece_has_no_first_token_but_the_servers_count(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        status, body, _ = await rig.post()
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "xyz")
        (outcome,) = rig.outcomes
        assert (outcome.first_token_ps, outcome.output_tokens, outcome.server_counted) == (-1, 3, True)

    rig(tmp_path, check)


@pytest.mark.parametrize(
    ("model", "sent", "allowed"),
    [("auto", "M", (True, True)), ("M", "M", (True, True)), ("b", "M", (False, True))],
)
def test_a_client_names_a_model_an_instance_or_nothing(
    tmp_path: Path, model: str, sent: str, allowed: tuple[bool, ...]
) -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.post({"model": model}))[0] == 200
        used = [each for each in rig.upstreams if each.requests]
        assert json.loads(used[0].body)["model"] == sent
        assert rig.server.core.candidates(model) == allowed

    rig(tmp_path, check)


def test_a_body_that_names_the_model_is_not_touched(tmp_path: Path) -> None:
    body = b'{"model":  "M", "prompt": "\xc3\xa4", "stream": true, "unknown": [1, {"x": null}]}'

    async def check(rig: Rig) -> None:
        await rig.post(body)
        assert rig.upstreams[0].body == body

    rig(tmp_path, check)


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b'{"model"', {}, 400, "not JSON"),
        ({"model": "other"}, {}, 404, "must be one of auto, M"),
        ({"prompt": ""}, {}, 400, "not empty"),
        ({}, {"x_slo_ttft_ms": "soon"}, 400, "x-slo-ttft-ms: soon; must be a number of milliseconds above 0"),
        ({}, {"x_slo_tpot_ms": "-1"}, 400, "x-slo-tpot-ms: -1"),
        (b'{"model": "M", "prompt": "' + b"x" * 3000 + b'"}', {}, 413, "Too Large"),
    ],
)
def test_what_makes_no_sense_is_refused_and_counted(
    tmp_path: Path, body: Any, headers: dict[str, str], status: int, words: str
) -> None:
    async def check(rig: Rig) -> None:
        found, answer, _ = await rig.post(body, **headers)
        assert found == status
        assert words in json.loads(answer)["error"]["message"]
        assert rig.server.core.ended == {"rejected": 1}
        assert all(each.requests == 0 for each in rig.upstreams)

    rig(tmp_path, check, live={"max_body_bytes": 2000})


def test_a_packed_body_arrives_unpacked_and_says_so(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        plain = b'{"model": "M", "prompt": "x"}'
        assert (await rig.post(gzip.compress(plain), Content_Encoding="gzip"))[0] == 200
        assert rig.upstreams[0].body == plain
        assert "Content-Encoding" not in rig.upstreams[0].headers

    rig(tmp_path, check)


def test_headers_that_are_too_large_are_refused(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.post(x_long="y" * 5000))[0] == 400
        assert (await rig.post(x_long="y" * 1000))[0] == 200

    rig(tmp_path, check, live={"max_header_bytes": 2048})


def test_models_health_and_metrics_are_told(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        async with rig.session.get(rig.url + "/v1/models") as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["auto", "M"]
        async with rig.session.get(rig.url + "/health") as response:
            assert (response.status, await response.json()) == (200, {"healthy": 2, "instances": 2, "stops": False})
        await rig.stream(x_slo_ttft_ms="0.001")
        text = await rig.metrics()
        assert 'simcluster_request_total{instance="a",policy="round_robin",status="finished"} 1.0' in text
        assert 'simcluster_slo_violation_total{type="ttft"} 1.0' in text
        assert 'simcluster_ttft_seconds_count{instance="a"} 1.0' in text
        assert 'simcluster_inflight{instance="a"} 0.0' in text
        assert 'simcluster_instance_healthy{instance="b"} 1.0' in text

    rig(tmp_path, check)


def test_a_prediction_is_paired_with_what_came(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        _, _, headers = await rig.stream()
        (made,) = rig.decisions
        assert made.predicted_ttft_s is not None
        assert headers["x-simcluster-predicted-ttft-ms"] == f"{1e3 * made.predicted_ttft_s:.3f}"
        waited_s = (made.decided_ps - made.request.arrival_ps) / 1e12
        assert made.predicted_ttft_s - waited_s == pytest.approx(0.011, abs=1e-9)  # 10 ms + 1 token
        text = await rig.metrics()
        for name in ("ttft_seconds", "predicted_ttft_seconds", "ttft_prediction_error_ratio"):
            assert f'simcluster_{name}_count{{instance="a"}} 1.0' in text

    rig(tmp_path, check, policy="sfs")


def test_the_limit_of_open_requests_is_kept_and_said_with_retry_after(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].gap_s = rig.upstreams[1].gap_s = 0.05
        found = await asyncio.gather(*(rig.stream() for _ in range(5)))
        assert sorted(status for status, _, _ in found) == [200, 200, 503, 503, 503]
        assert {headers.get("Retry-After") for status, _, headers in found if status == 503} == {"1"}
        assert rig.server.core.ended == {"finished": 2, "rejected": 3}

    rig(tmp_path, check, live={"max_streams": 2})


def test_one_id_for_two_open_requests_counts_twice(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].gap_s = 0.03
        found = await asyncio.gather(*(rig.stream(X_Request_Id="same") for _ in range(3)))
        assert [status for status, _, _ in found] == [200] * 3
        assert len({each.request.index for each in rig.decisions}) == 3
        assert rig.outcomes[0].request_id == "same" or any(each.request_id == "same" for each in rig.outcomes)

    rig(tmp_path, check, instances=1)


def test_stopping_lets_open_answers_end_and_takes_no_more(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].gap_s = 0.1
        running = asyncio.create_task(rig.stream())
        while not rig.upstreams[0].requests:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(rig.server.stop())
        await asyncio.sleep(0.05)
        assert (await rig.stream())[0] == 503
        assert (await running)[1] == b"".join(EVENTS)
        await stopping
        assert rig.server.core.ended == {"rejected": 1, "finished": 1}

    rig(tmp_path, check, live={"drain_s": 20.0})


def test_a_stream_without_its_end_is_no_finished_request(tmp_path: Path) -> None:
    async def half(_: Upstream, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        return response

    async def error(_: Upstream, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (EVENTS[0], b'data: {"error": {"message": "no"}}\n\n', EVENTS[-1]):
            await response.write(event)
        return response

    async def check(rig: Rig) -> None:
        for behave, reason in ((half, "no_end"), (error, "engine_error")):
            rig.upstreams[0].behave = behave
            assert (await rig.stream())[0] == 200
            assert (rig.outcomes[-1].status, rig.outcomes[-1].reason) == ("failed", reason)

    rig(tmp_path, check, instances=1)
