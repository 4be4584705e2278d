"""A request's body with another model: the same in all else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.live.openai_api import renamed

_TEXT = st.text(max_size=8) | st.sampled_from(["model", '"model"', '"model": "auto"', "auto"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_TEXT, _VALUES, max_size=4), st.text(min_size=1, max_size=8), st.booleans(), st.text(min_size=1))
def test_only_the_model_changes(fields: dict[str, object], before: str, ascii_only: bool, after: str) -> None:
    body = json.dumps(fields | {"model": before}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert json.loads(renamed(body, after)) == json.loads(body) | {"model": after}


def test_what_the_client_wrote_stays_as_it_was_written() -> None:
    rest = b', "seed": 12345678901234567890 , "x":"\xc3\xa9"}'
    assert renamed(b'{ "top_p":1.0E-1, "model" :\n"auto"' + rest, "b/8") == b'{ "top_p":1.0E-1, "model":"b/8"' + rest


@pytest.mark.parametrize(
    "body",
    [
        rb'{"m\u006fdel": "auto", "metadata": {"model": "auto"}}',
        rb'{"model": "au\"to"}',
        b'{"model": "a", "model": "b"}',
        '{"model": "auto"}'.encode("utf-16"),
    ],
)
def test_a_model_that_is_hard_to_find_is_found(body: bytes) -> None:
    assert json.loads(renamed(body, "x")) == json.loads(body) | {"model": "x"}
