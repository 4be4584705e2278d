"""What goes wrong around a live router: no hang, no request lost, nothing counted as open that is not (C035, C037)."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router_rig import EVENTS, Behave, Rig, Upstream, answer, rig


async def hang(_: Upstream, __: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def begin(request: web.Request, count: int = 1) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS[:count]:
        await response.write(event)
    return response


async def hang_later(_: Upstream, request: web.Request) -> web.StreamResponse:
    await begin(request)
    await asyncio.sleep(3600)
    raise AssertionError


async def cut_later(_: Upstream, request: web.Request) -> web.StreamResponse:
    response = await begin(request)
    await asyncio.sleep(0.02)
    assert request.transport is not None
    request.transport.abort()
    return response


async def cut_at_once(_: Upstream, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def says(status: int) -> Behave:
    async def say(_: Upstream, __: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"it is {status}"}}, status=status, headers={"Retry-After": "7"})

    return say


FAST_LIMITS = {"first_byte_timeout_s": 0.15, "stall_timeout_s": 0.2, "connect_timeout_s": 0.5}


@pytest.mark.parametrize(
    ("behave", "reason", "marks"),
    [
        (hang, "timeout", True),
        (cut_at_once, "disconnected", True),
        (says(500), "status_500", True),
        (says(503), "status_503", True),
        (says(429), "busy", False),
    ],
)
def test_before_the_first_byte_another_instance_gets_the_request(
    tmp_path: Path, behave: Behave, reason: str, marks: bool
) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = behave
        for k in range(4):
            status, body, headers = await rig.stream(X_Request_Id=f"r{k}")
            assert (status, body, headers["x-simcluster-instance"]) == (200, b"".join(EVENTS), "b")
        assert rig.server.core.ended == {"finished": 4}
        asked = rig.upstreams[0].requests
        # In turn a, b, then only b while a is marked; one that leaves by a used connection may be cut twice.
        assert asked in ({2, 3} if behave is cut_at_once else {2}) or not marks
        assert rig.server.core.dispatcher.health[0].is_marked == marks
        assert f'simcluster_retry_total{{reason="{reason}"}}' in await rig.metrics()

    rig(tmp_path, check, live=FAST_LIMITS | {"trip_after": 2, "mark_s": 100.0})


def test_a_connection_that_was_idle_too_long_costs_neither_a_request_nor_an_attempt(tmp_path: Path) -> None:
    used: list[asyncio.BaseTransport] = []

    async def cut_when_used_again(upstream: Upstream, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if request.transport in used:
            request.transport.abort()
            return web.Response()
        used.append(request.transport)
        return await answer(upstream, request)

    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = cut_when_used_again
        for _ in range(4):
            status, body, _ = await rig.stream()
            assert (status, body) == (200, b"".join(EVENTS))
        assert [each.attempts for each in rig.outcomes] == [1] * 4
        assert rig.upstreams[0].requests > 4, "some had to be sent once more"
        assert rig.server.core.dispatcher.health[0].failures == 0

    rig(tmp_path, check, instances=1)


def test_a_server_that_is_not_there_is_marked_at_once(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        await rig.upstreams[0].stop()
        for _ in range(3):
            assert (await rig.stream())[0] == 200
        assert rig.server.core.dispatcher.health[0].is_marked
        assert 'simcluster_retry_total{reason="refused"} 1.0' in await rig.metrics()

    rig(tmp_path, check, live=FAST_LIMITS | {"mark_s": 100.0})


def test_a_server_that_does_not_even_accept_is_given_up_after_its_own_time(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        with socket.socket() as full, socket.socket() as first, socket.socket() as second:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for each in (first, second):  # one is in the queue, and the next one in its place
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            port = full.getsockname()[1]
            rig.server.core.upstreams._servers[0]._port = port
            began = asyncio.get_running_loop().time()
            assert (await rig.stream())[2]["x-simcluster-instance"] == "b"
            assert 0.3 < asyncio.get_running_loop().time() - began < 20
        assert rig.server.core.dispatcher.health[0].is_marked, "at once: nobody is there"
        assert 'simcluster_retry_total{reason="timeout"} 1.0' in await rig.metrics()

    rig(tmp_path, check, live={"connect_timeout_s": 0.3, "first_byte_timeout_s": 40.0, "mark_s": 100.0})


def test_a_mark_expires_and_one_request_tries_the_server_again(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        port = int(rig.upstreams[0].url.rpartition(":")[2])
        await rig.upstreams[0].stop()
        assert (await rig.stream())[0] == 200
        health = rig.server.core.dispatcher.health[0]
        assert health.is_marked
        await rig.upstreams[0].start(port)
        rig.upstreams[0].gap_s = 0.05
        while not health.may_be_asked(rig.server.core.clock.now_ps()):
            await asyncio.sleep(0.01)
        rig.upstreams[1].gap_s = 0.05
        before = rig.upstreams[0].requests
        found = await asyncio.gather(*(rig.stream() for _ in range(6)))
        assert [status for status, _, _ in found] == [200] * 6
        assert rig.upstreams[0].requests > before
        assert not health.is_marked

    rig(tmp_path, check, live=FAST_LIMITS | {"mark_s": 0.05})


def test_what_is_wrong_with_a_request_counts_against_nobody(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        for each in rig.upstreams:
            each.behave = says(400)
        for _ in range(5):
            status, body, _ = await rig.stream()
            assert (status, json.loads(body)["error"]["message"]) == (400, "it is 400")
        assert sum(each.requests for each in rig.upstreams) == 5
        assert not any(each.failures for each in rig.server.core.dispatcher.health)
        assert rig.server.core.ended == {"rejected": 5}

    rig(tmp_path, check, live={"trip_after": 1})


@pytest.mark.parametrize(("behave", "status", "reason"), [(says(500), 500, "status_500"), (hang, 504, "timeout")])
def test_when_all_fail_the_client_hears_the_last_word(tmp_path: Path, behave: Behave, status: int, reason: str) -> None:
    async def check(rig: Rig) -> None:
        for each in rig.upstreams:
            each.behave = behave
        found, body, headers = await rig.stream()
        assert found == status
        assert "error" in json.loads(body)
        assert headers["Retry-After"] in ("7", "1")
        assert (rig.outcomes[0].status, rig.outcomes[0].reason, rig.outcomes[0].attempts) == ("failed", reason, 2)

    rig(tmp_path, check, live=FAST_LIMITS)


@pytest.mark.parametrize("choice", ["least_bad", "refuse"])
def test_when_all_are_marked_the_least_bad_is_asked_or_nobody(tmp_path: Path, choice: str) -> None:
    async def check(rig: Rig) -> None:
        for each in rig.upstreams:
            each.behave = says(500)
        await rig.stream()
        assert all(each.is_marked for each in rig.server.core.dispatcher.health)
        for each in rig.upstreams:
            each.behave = answer
        status, _, headers = await rig.stream()
        if choice == "least_bad":
            assert (status, headers["x-simcluster-fallback"]) == (200, "none_healthy")
            assert not all(each.is_marked for each in rig.server.core.dispatcher.health)
        else:
            assert (status, headers["Retry-After"]) == (503, "1")
            assert (rig.outcomes[-1].status, rig.outcomes[-1].reason) == ("rejected", "no_instance")

    rig(tmp_path, check, live={"trip_after": 1, "mark_s": 100.0, "all_unhealthy": choice})


@pytest.mark.parametrize(("behave", "reason"), [(cut_later, "upstream_disconnected"), (hang_later, "upstream_stalled")])
def test_after_the_first_byte_a_failure_is_passed_on_and_not_tried_again(
    tmp_path: Path, behave: Behave, reason: str
) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = behave
        async with rig.session.post(
            rig.url + "/v1/completions", json={"model": "a", "prompt": "x", "stream": True}
        ) as r:
            assert r.status == 200
            assert await r.content.readany() == EVENTS[0]
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
                await r.content.read()
        await rig.quiet()
        (outcome,) = rig.outcomes
        assert (outcome.status, outcome.reason, outcome.attempts, outcome.output_tokens) == ("failed", reason, 1, 1)
        assert rig.upstreams[1].requests == 0
        assert rig.server.core.dispatcher.health[0].failures == 1

    rig(tmp_path, check, live=FAST_LIMITS)


def test_four_hundred_clients_that_leave_before_the_headers_leave_no_trace(tmp_path: Path) -> None:
    """C035: the next request goes to the instance that everybody left, which nobody occupies."""

    async def check(rig: Rig) -> None:
        first = rig.upstreams[0]
        first.behave = hang
        rig.upstreams[1].gap_s = 0.2
        at_b = asyncio.create_task(rig.post({"model": "b", "stream": True}))
        while not rig.upstreams[1].open:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(rig.post({"model": "a", "stream": True})) for _ in range(400)]
        while first.open < 400:
            await asyncio.sleep(0.005)
        assert rig.open_by_instance == [400, 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while rig.open_by_instance[0]:
            await asyncio.sleep(0.005)
        first.behave = answer
        _, _, headers = await rig.stream()
        assert headers["x-simcluster-instance"] == "a"
        await at_b
        await rig.quiet()
        assert rig.server.core.ended == {"cancelled": 400, "finished": 2}
        assert first.left == 400

    rig(tmp_path, check, policy="shortest_queue")


def test_a_hung_server_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """C037: round robin over one that never answers and one that does; all four requests complete."""

    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = hang
        found = await asyncio.gather(*(rig.stream(X_Request_Id=f"r{k}") for k in range(4)))
        assert [status for status, _, _ in found] == [200] * 4
        assert sorted(each.attempts for each in rig.outcomes) == [1, 1, 2, 2]
        once = [each.end_ps for each in rig.outcomes if each.attempts == 1]
        twice = [each.end_ps - each.arrival_ps for each in rig.outcomes if each.attempts == 2]
        assert max(once) < min(twice)
        assert all(each >= 3e11 for each in twice)  # the time-out came first

    rig(tmp_path, check, live={"first_byte_timeout_s": 0.3, "retries": 1})


def test_an_answer_in_one_piece_may_take_longer_than_a_first_token(tmp_path: Path) -> None:
    async def late(upstream: Upstream, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.4)
        return await answer(upstream, request)

    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = late
        assert (await rig.post())[0] == 200
        assert (await rig.stream())[0] == 504
        rig.upstreams[0].behave = hang
        assert (await rig.post())[0] == 504

    rig(tmp_path, check, instances=1, live={"first_byte_timeout_s": 0.1, "whole_timeout_s": 2.0, "trip_after": 100})


def test_without_retries_a_hung_server_fails_its_own_requests_alone(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = hang
        found = await asyncio.gather(*(rig.stream(X_Request_Id=f"r{k}") for k in range(4)))
        assert sorted(status for status, _, _ in found) == [200, 200, 504, 504]
        assert rig.server.core.ended == {"finished": 2, "failed": 2}

    rig(tmp_path, check, live={"first_byte_timeout_s": 0.2, "retries": 0})


def test_a_client_that_leaves_ends_the_request_upstream(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = hang_later
        body = {"model": "a", "prompt": "x", "stream": True}
        async with rig.session.post(rig.url + "/v1/completions", json=body) as response:
            await response.content.readany()
        await rig.quiet()
        assert rig.upstreams[0].left == 1
        assert (rig.outcomes[0].status, rig.outcomes[0].reason) == ("cancelled", "client_left")

    rig(tmp_path, check)


def test_a_client_that_is_gone_when_its_whole_answer_is_to_be_closed_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: web.StreamResponse, __: bytes = b"") -> None:
        raise ConnectionResetError

    async def check(rig: Rig) -> None:
        rig.upstreams[0].gap_s = 0.05  # so that the last event does not leave together with the end
        monkeypatch.setattr("simcluster.live.router.exchange._Passed.write_eof", gone)
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await rig.stream()
        monkeypatch.undo()
        await rig.quiet()
        assert [(each.status, each.output_tokens) for each in rig.outcomes] == [("finished", 3)]

    rig(tmp_path, check, instances=1)


async def flood(_: Upstream, request: web.Request) -> web.StreamResponse:
    """Send 30 MB, more than the system's buffers on the way hold."""
    response = await begin(request)
    for _ in range(3000):
        await response.write(b"data: " + b"x" * 10_000 + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def take_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the router have the whole answer, however little of it the client has read."""

    async def write(response: web.StreamResponse, piece: bytes) -> None:
        assert response._payload_writer is not None
        await response._payload_writer.write(piece, drain=False)

    monkeypatch.setattr("simcluster.live.router.exchange._Passed.write", write)
    monkeypatch.setattr("simcluster.live.router.relay.Relay.open", lambda *_, **__: None)


def ask_and_read_nothing(rig: Rig) -> socket.socket:
    host, port = rig.url.removeprefix("http://").split(":")
    plain = socket.create_connection((host, int(port)))
    body = b'{"model": "a", "prompt": "x", "stream": true}'
    plain.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return plain


@pytest.mark.parametrize("waits", ["for more", "with the end"])
def test_a_client_that_does_not_read_is_given_up_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    if waits == "with the end":
        take_all_at_once(monkeypatch)

    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = flood
        plain = ask_and_read_nothing(rig)
        while not any(each.status == "failed" for each in rig.outcomes):
            assert (await rig.post({"model": "b", "stream": True}))[0] == 200
            await asyncio.sleep(0.02)
        (slow,) = [each for each in rig.outcomes if each.status != "finished"]
        assert (slow.status, slow.reason) == ("failed", "client_stalled")
        assert rig.server.core.dispatcher.health[0].failures == 0
        plain.close()

    rig(tmp_path, check, live={"stall_timeout_s": 0.3})


def test_a_client_that_leaves_before_it_has_read_the_end_has_not_got_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_all_at_once(monkeypatch)

    async def check(rig: Rig) -> None:
        rig.upstreams[0].behave = flood
        plain = ask_and_read_nothing(rig)
        while rig.upstreams[0].requests == 0 or rig.upstreams[0].open:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # so that the router has the rest, too
        plain.close()
        await rig.quiet()
        assert [(each.status, each.reason) for each in rig.outcomes] == [("cancelled", "client_left")]

    rig(tmp_path, check, instances=1)


def test_a_body_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        line = await reader.readline()
        assert b" 408 " in line
        writer.close()
        assert rig.server.core.ended == {"rejected": 1}

    rig(tmp_path, check, live={"stall_timeout_s": 0.1})


def test_two_thousand_streams_at_once(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        gate = asyncio.Event()

        async def wait(_: Upstream, request: web.Request) -> web.StreamResponse:
            response = await begin(request)
            await gate.wait()
            for event in EVENTS[1:]:
                await response.write(event)
            return response

        for each in rig.upstreams:
            each.behave = wait
        tasks = [asyncio.create_task(rig.stream()) for _ in range(2000)]
        while sum(each.open for each in rig.upstreams) < 2000:
            await asyncio.sleep(0.01)
        assert sum(rig.open_by_instance) == 2000
        gate.set()
        assert {(status, body) for status, body, _ in await asyncio.gather(*tasks)} == {(200, b"".join(EVENTS))}
        assert rig.server.core.ended == {"finished": 2000}

    rig(tmp_path, check, policy="shortest_queue", live={"connect_timeout_s": 50.0})


def test_a_prompt_of_a_mebibyte_passes(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        body = {"prompt": "word " * 2**18 + "x" * 10, "stream": True}
        status, answered, _ = await rig.post(body)
        assert (status, answered) == (200, b"".join(EVENTS))
        assert int(rig.decisions[0].request.prompt_tokens[0]) > 2**18

    rig(tmp_path, check)


@pytest.mark.parametrize("policy", ["sfs", "shortest_queue", "ewma_latency", "kv_cost", "sfs_plus"])
def test_any_mix_of_faults_loses_no_request(tmp_path: Path, policy: str) -> None:
    kinds: list[Any] = [answer, says(500), says(429), cut_at_once, cut_later, hang, hang_later, answer]

    async def check(rig: Rig) -> None:
        count = 0

        async def mixed(upstream: Upstream, request: web.Request) -> web.StreamResponse:
            nonlocal count
            count += 1
            found = await kinds[count % len(kinds)](upstream, request)
            assert isinstance(found, web.StreamResponse)
            return found

        for each in rig.upstreams:
            each.behave = mixed
        tasks = [asyncio.create_task(rig.stream()) for _ in range(80)]
        while rig.server.num_open + sum(rig.server.core.ended.values()) < 80:
            await asyncio.sleep(0.001)
        for task in tasks[::10]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rig.quiet()
        assert sum(rig.server.core.ended.values()) == 80 == len(rig.outcomes)
        assert all(each.reason or each.status == "finished" for each in rig.outcomes)

    rig(tmp_path, check, instances=3, policy=policy, live=FAST_LIMITS | {"mark_s": 0.05})
