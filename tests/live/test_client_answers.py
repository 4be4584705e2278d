"""Reading a streamed answer: which chunks are tokens, how many tokens there are, and where times come from."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.live.client.answer import Answer, clean_gaps
from simcluster.live.client.events import EventReader
from simcluster.units import PS_PER_S

MS = PS_PER_S // 1000


def chat(finish: str | None = None, **delta: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def text(value: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": value, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def read(*events: tuple[int, str]) -> Answer:
    """Return what events say that came at so many milliseconds."""
    answer = Answer()
    for at_ms, event in events:
        answer.take(event, at_ms * MS)
    return answer


@pytest.mark.parametrize("nothing", [None, ""])
def test_c025_the_chunk_of_the_role_is_no_token_and_neither_finish_nor_done_move_the_end(nothing: str | None) -> None:
    answer = read(
        (5, chat(role="assistant", content=nothing)),
        (214, chat(content="Hi")),
        (234, chat(content=" you")),
        (254, chat("stop")),
        (255, "[DONE]"),
    )
    assert (answer.first_token_ps, answer.last_token_ps) == (214 * MS, 234 * MS)
    assert answer.chunk_gaps_s() == [pytest.approx(0.020)]
    assert answer.output_tokens == (2, "chunks")
    assert (answer.finish, answer.done) == ("stop", True)


def test_c025_an_empty_text_without_a_role_is_a_token() -> None:
    assert read((7, chat(content=""))).chunk_ps == [7 * MS]
    assert read((7, text(""))).chunk_ps == [7 * MS]
    assert read((7, chat(reasoning_content="Hm"))).chunk_ps == [7 * MS]
    assert read((7, chat(role="assistant", content="Hi"))).chunk_ps == [7 * MS], "some servers send role and text"
    assert read((7, chat("stop", content=None))).chunk_ps == []


def test_c026_several_tokens_in_a_chunk_count_by_the_servers_usage() -> None:
    answer = read(
        (100, text("a")), (160, text("b c d")), (200, text("e f", "length")), (201, usage(9, 6)), (202, "[DONE]")
    )
    assert answer.output_tokens == (6, "server")
    assert answer.tpot_s == pytest.approx(0.020)
    assert answer.chunk_gaps_s() == pytest.approx([0.060, 0.040])


def test_usage_that_comes_with_every_chunk_counts_once() -> None:
    chunk = json.loads(text("a"))
    events = [(k, json.dumps(chunk | {"usage": {"prompt_tokens": 4, "completion_tokens": k}})) for k in (1, 2, 3)]
    assert read(*events).output_tokens == (3, "server")
    assert read((1, json.dumps(chunk | {"usage": None}))).output_tokens == (1, "chunks")


def test_c029_negative_gaps_are_dropped_and_counted() -> None:
    kept, dropped = clean_gaps([0.012, -0.003, 0.015])
    assert dropped == 1
    assert sum(kept) / len(kept) == pytest.approx(0.0135)


def test_an_error_inside_a_stream_is_told() -> None:
    assert read((1, text("a")), (2, '{"error": {"message": "out of memory"}}')).error == "out of memory"
    assert read((1, '{"error": "gone"}')).error == "gone"


@pytest.mark.parametrize("event", ["{", "[1]", '{"choices": [], "usage": {"prompt_tokens": 3}}'])
def test_what_is_no_answer_is_an_error(event: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        read((1, event))


STREAM = 'data: {"a": 1}\n\n: comment\r\ndata: b\r\ndata: ü\r\n\r\nevent: x\n\nid: 3\rdata:d\r\rdata: [DONE]\n\n'


@given(cuts=st.lists(st.integers(0, len(STREAM.encode())), max_size=8))
def test_events_are_the_same_wherever_a_connection_cuts_them(cuts: list[int]) -> None:
    data = STREAM.encode()
    reader = EventReader()
    places = [0, *sorted(cuts), len(data)]
    found = [event for a, b in itertools.pairwise(places) for event in reader.feed(data[a:b])]
    assert found == ['{"a": 1}', "b\nü", "d", "[DONE]"]


def test_an_endless_line_is_an_error() -> None:
    with pytest.raises(ValueError, match="a line of over"):
        EventReader().feed(b"x" * (17 * 2**20))
