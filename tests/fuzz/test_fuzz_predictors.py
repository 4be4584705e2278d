"""The reader of predictor files under broken and unusual ones; README.md says how.

LightGBM ends the process when it meets broken trees. It is never shown any: the file's hash seals them, and here no
file has changed trees with a hash that fits.
"""

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from predictor_tables import predictor
from simcluster.errors import PredictorError
from simcluster.predict.predictor import load_predictor

SECONDS = float(os.environ.get("SIMCLUSTER_FUZZ_SECONDS", "4"))
PROMPT = "Explain the meaning of rivers. Use 100 words."

VALUES = st.one_of(
    st.integers(-2, 200),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([None, True, [], {}, "1 2 3", "nan", 10**30, -1, "model", ["x"], {"length": {}}]),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A predictor file."""
    folder = tmp_path_factory.mktemp("predictor")
    path = folder / "p.json"
    predictor(folder)[0].save(path)
    return path.read_bytes()


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[float, float, int, bytes]]:
    """Return edits of bytes: where and how much, as shares, what kind, and what comes in."""
    pieces = st.sampled_from([b"0", b"-", b'"', b"}", b"[", b"\xff", b""])
    one = st.tuples(st.floats(0, 1), st.floats(0, 0.3), st.integers(0, 4), pieces)
    return draw(st.lists(one, min_size=1, max_size=4))


def edited(data: bytes, changes: list[tuple[float, float, int, bytes]]) -> bytes:
    """Apply edits: overwrite, insert, cut out, cut off, repeat."""
    for place, share, kind, piece in changes:
        at = int(place * len(data))
        end = at + int(share * len(data))
        parts = {
            0: (data[:at], piece, data[at + len(piece) :]),
            1: (data[:at], piece, data[at:]),
            2: (data[:at], data[end:]),
            3: (data[:at],),
            4: (data[:end], data[at:]),
        }
        data = b"".join(parts[kind])
    return data


@st.composite
def replacements(draw: st.DrawFn) -> list[tuple[list[float], Any]]:
    """Return values to put into the file's content, and the way to each as a share of the keys at every level."""
    way = st.lists(st.floats(0, 0.999), min_size=1, max_size=4)
    return draw(st.lists(st.tuples(way, st.one_of(VALUES, st.just("(leave out)"))), min_size=1, max_size=3))


def replaced(content: dict[str, Any], changes: list[tuple[list[float], Any]]) -> dict[str, Any]:
    """Replace or leave out parts of the content."""
    content = copy.deepcopy(content)
    for way, value in changes:
        owner: Any = content
        for number, share in enumerate(way):
            keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
            if not keys:
                break
            key = keys[int(share * len(keys))]
            if number + 1 < len(way) and isinstance(owner[key], dict | list):
                owner = owner[key]
                continue
            if value == "(leave out)":
                del owner[key]
            else:
                owner[key] = copy.deepcopy(value)
            break
    return content


def check(path: Path, data: bytes) -> None:
    """Read a file: one line, or a predictor that predicts and survives being saved."""
    path.write_bytes(data)
    said = ""
    try:
        found = load_predictor(path)
        predict = found.for_models([model.name for model in found.models])
    except PredictorError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        return
    predicted = np.array(predict(PROMPT, "easy"))
    assert np.isfinite(predicted).all()
    found.save(path)
    again = load_predictor(path)
    assert np.array_equal(predicted, again.for_models([model.name for model in again.models])(PROMPT, "easy"))


def run(body: Callable[[Any], None], strategy: st.SearchStrategy[Any]) -> None:
    """Draw until the time is over."""
    end = time.monotonic() + SECONDS

    def timed(drawn: Any) -> None:
        if time.monotonic() < end:
            body(drawn)

    number = 0 if SECONDS < 60 else time.time_ns() % 10**9  # the short run is the same every time
    quiet = settings(
        max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    while time.monotonic() < end:
        number += 1
        seed(number)(quiet(given(strategy)(timed)))()


def test_any_bytes_are_a_predictor_or_one_line(small: bytes, tmp_path: Path) -> None:
    run(lambda changes: check(tmp_path / "p.json", edited(small, changes)), edits())


def test_any_content_is_a_predictor_or_one_line(small: bytes, tmp_path: Path) -> None:
    content = json.loads(small)
    run(
        lambda changes: check(tmp_path / "p.json", json.dumps(replaced(content, changes)).encode(errors="replace")),
        replacements(),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((b'"schema_version": 1', b'"schema_version": 2'), "schema_version = 2; must be 1"),
        ((b'"simcluster predictor"', b'"another format"'), "format = 'another format'; must be 'simcluster predictor'"),
        ((b'"num_leaves=', b'"num_leaves=9'), "trees is damaged (its hash differs); train the predictor again"),
        ((b'"best_iteration": ', b'"best_iteration": 1'), "train it again"),
        ((b"{", b""), "not valid JSON"),
        ((b"{", b"\xff{"), "cannot be read (no text); give a predictor file"),
    ],
)
def test_a_damaged_predictor_says_in_one_line_what_is_wrong(
    small: bytes, tmp_path: Path, change: tuple[bytes, bytes], said: str
) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(small.replace(*change, 1))
    with pytest.raises(PredictorError) as caught:
        load_predictor(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_predictor_cut_off_anywhere_is_one_line(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for length in (0, 1, 50, len(small) // 2, len(small) - 3):
        path.write_bytes(small[:length])
        with pytest.raises(PredictorError) as caught:
            load_predictor(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
