"""Counting tokens of answers that pass by in pieces of any size, and marks on servers that fail."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.live.router.health import Health
from simcluster.live.router.meter import Meter
from simcluster.scenario import Live
from simcluster.units import PS_PER_S

S = PS_PER_S


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(**content: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": content, "finish_reason": None}]})


def text(content: str) -> bytes:
    return event({"choices": [{"index": 0, "text": content}]})


DONE = b"data: [DONE]\n\n"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 9, "total_tokens": 26}})


def metered(pieces: list[bytes]) -> Meter:
    meter = Meter(streams=True)
    for piece in pieces:
        meter.feed(piece)
    meter.finish()
    return meter


@given(st.data())
def test_a_stream_counts_the_same_however_it_is_cut(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    stream = b"".join(text("x" * k + "\n\n") for k in range(count)) + DONE  # JSON escapes what is inside
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=9)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    meter = metered(pieces)
    assert (meter.events, meter.tokens, meter.is_done, meter.error) == (count, count, True, False)


@given(st.data())
def test_the_servers_count_wins_over_that_of_the_events(data: st.DataObject) -> None:
    stream = text("a") + text("b") + USAGE + DONE
    cuts = sorted(data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=5, unique=True)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    meter = metered(pieces)
    assert (meter.tokens, meter.completion_tokens, meter.prompt_tokens) == (9, 9, 17)


@pytest.mark.parametrize(
    ("head", "events"),
    [
        ([delta(role="assistant", content="")], 0),  # C025
        ([delta(role="assistant", content=None)], 0),
        ([delta(role="assistant", content=""), delta(content="")], 1),  # an empty text without a role is a token
        ([delta(role="assistant", content="Hi")], 1),
        ([delta(role="assistant", content=""), delta(reasoning_content="hm")], 1),
        ([delta(tool_calls=[{"index": 0}])], 1),
        ([b": comment\n\n"], 0),
        ([event({"choices": []})], 0),
        ([b"data: {broken\n\n"], 0),
    ],
)
def test_the_first_token_is_no_role_and_no_comment(head: list[bytes], events: int) -> None:
    meter = Meter(streams=True)
    for piece in head:
        meter.feed(piece)
    assert meter.events == events


def test_an_error_inside_a_stream_and_a_missing_end_are_seen() -> None:
    assert metered([text("a"), event({"error": {"message": "no"}}), DONE]).error
    cut = metered([text("a"), b"data: {"])
    assert (cut.is_done, cut.error, cut.tokens) == (False, False, 1)


def test_an_answer_in_one_piece_tells_its_usage() -> None:
    meter = Meter(streams=False)
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}).encode()
    meter.feed(body[:10])
    meter.feed(body[10:])
    meter.finish()
    assert (meter.tokens, meter.prompt_tokens, meter.is_done) == (5, 3, True)


# ---- health


def test_failures_in_a_row_mark_a_server_and_an_answer_clears_them() -> None:
    health, live = Health(), Live(trip_after=3, mark_s=5.0)
    for number in range(2):
        health.failed(number, 0, live)
    assert health.may_be_asked(0)
    health.answered(2)
    for number in range(3):
        health.failed(number, 0, live)
    assert not health.may_be_asked(5 * S - 1)
    assert health.may_be_asked(5 * S)


def test_after_a_mark_one_request_at_a_time_tries_and_each_failure_doubles_the_mark() -> None:
    health, live = Health(), Live(trip_after=1, mark_s=5.0)
    health.failed(0, 0, live)
    now, expected = 5 * S, 5.0
    for number in range(1, 8):
        assert health.may_be_asked(now)
        health.asked(number)
        assert not health.may_be_asked(now)
        health.failed(number, now, live)
        expected = min(2 * expected, 60.0)
        assert health.marked_until_ps == now + round(expected * S)
        now = health.marked_until_ps
    health.asked(99)
    health.answered(99)
    assert (health.is_marked, health.failures, health.may_be_asked(now)) == (False, 0, True)


def test_requests_that_were_sent_before_the_mark_do_not_lengthen_it() -> None:
    health, live = Health(), Live(trip_after=1, mark_s=5.0)
    for number in range(10):
        health.failed(number, S, live)
    assert health.marked_until_ps == 6 * S


def test_a_try_that_its_client_gave_up_leaves_room_for_the_next() -> None:
    health, live = Health(), Live(trip_after=1, mark_s=5.0)
    health.failed(0, 0, live)
    health.asked(1)
    health.gave_up(1)
    assert health.may_be_asked(5 * S)


@pytest.mark.parametrize("blank", [0, 1, 9, 100])
def test_blank_lines_do_not_hide_the_usage(blank: int) -> None:
    meter = metered([text("x"), USAGE, b"\n" * blank, DONE, b"\n" * blank])
    assert (meter.is_done, meter.tokens, meter.prompt_tokens) == (True, 9, 17)
