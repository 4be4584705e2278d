"""Features of a prompt: hashing, projection, counts, wording, tokens."""

import json
import re
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_data import shared_data
from simcluster.errors import PredictorError
from simcluster.predict.features import (
    BUCKETS,
    COMPONENTS,
    PROMPT_FEATURES,
    UNIT,
    Projection,
    bucket_shares,
    fit_projection,
    prompt_features,
    signed_slots,
)
from simcluster.predict.tokens import EstimatedTokens, load_tokens
from simcluster.predict.wording import WORDING_FEATURES, wording
from simcluster.rng import seeded

TOKENS = EstimatedTokens()
PROMPTS = [
    "List three ideas for a birthday party.",
    "Summarize the report below in at most 100 words.\nThe agency spent 40 billion dollars.",
    "What is 12 * 7?",
    "Write a story about a dragon who cannot fly.",
]


def projection() -> Projection:
    rng = seeded(7, 0)
    texts = [" ".join(rng.choice(list(string.ascii_lowercase), size=30)) for _ in range(60)]
    return fit_projection([TOKENS.ids(text) for text in texts], seeded(1, 0))


def features(text: str) -> dict[str, float]:
    return dict(zip(PROMPT_FEATURES, prompt_features(text, TOKENS, PROJECTION).tolist(), strict=True))


# ---- hashing ---------------------------------------------------------------------------------------------------


def test_the_hash_never_changes() -> None:
    ids = np.array([0, 1, 2, 151_642, 2**32 - 1, 2**62], dtype=np.int64)
    assert signed_slots(ids).tolist() == [(_by_hand(int(each)) >> 54) for each in ids]
    assert signed_slots(np.arange(1, 6)).tolist() == [95, 806, 927, 424, 358]


def _by_hand(number: int) -> int:
    word = number * 0x9E3779B97F4A7C15 % 2**64
    word ^= word >> 32
    return word * 0xD6E8FEB86659FD93 % 2**64


def test_neighbouring_ids_spread_evenly_over_buckets_and_signs() -> None:
    counts = np.bincount(signed_slots(np.arange(151_643)), minlength=2 * BUCKETS)
    expected = 151_643 / (2 * BUCKETS)
    assert ((counts - expected) ** 2 / expected).sum() < 2 * BUCKETS + 5 * np.sqrt(4 * BUCKETS)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_projected_features_are_the_signed_bucket_shares_times_the_components(ids: list[int]) -> None:
    array = np.array(ids, dtype=np.int64)
    found = PROJECTION.of_ids(array)
    expected = (bucket_shares(array) @ PROJECTION.components - PROJECTION.offset) / UNIT
    np.testing.assert_allclose(found, expected, atol=1e-12)


PROJECTION = projection()


# ---- the projection --------------------------------------------------------------------------------------------


def test_components_are_orthonormal_in_order_of_variance_with_a_fixed_sign() -> None:
    rows = PROJECTION.components.T / UNIT
    np.testing.assert_allclose(rows @ rows.T, np.eye(COMPONENTS), atol=1e-4)
    assert (rows[np.arange(COMPONENTS), np.abs(rows).argmax(axis=1)] > 0).all()
    rng = seeded(7, 0)
    texts = [" ".join(rng.choice(list(string.ascii_lowercase), size=30)) for _ in range(60)]
    values = np.array([PROJECTION.of_ids(TOKENS.ids(text)) for text in texts])
    variance = values.var(axis=0)
    assert (np.diff(variance) <= 1e-9).all()
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-5)


def test_fewer_directions_of_variation_than_components_leave_zeros() -> None:
    found = fit_projection([TOKENS.ids("yes"), TOKENS.ids("no"), TOKENS.ids("yes")], seeded(1, 0))
    assert (found.components[:, 0] != 0).any()
    assert not found.components[:, 1:].any()


def test_a_prompt_has_the_same_features_in_another_process() -> None:
    program = (
        "import json, sys; sys.path.insert(0, 'tests/unit'); sys.path.insert(0, 'tests'); "
        "import test_predict_features as t; "
        "print(json.dumps([t.prompt_features(p, t.TOKENS, t.PROJECTION).tolist() for p in t.PROMPTS]))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(done.stdout) == [prompt_features(p, TOKENS, PROJECTION).tolist() for p in PROMPTS]


# ---- counts and wording ----------------------------------------------------------------------------------------


def test_tokens_characters_and_sentences_are_counted() -> None:
    found = features("Is it so? Yes. It costs 3.50 dollars!")
    assert found["characters"] == 37
    assert found["sentences"] == 3  # the point inside of a number ends none
    assert found["tokens"] == 14  # Is it so ? Yes . It costs 3 . 5 0 dollars !
    assert found["characters_per_token"] == 37 / found["tokens"]


@pytest.mark.parametrize("text", ["", " ", "\n", "\ud800", "日本語", "a" * 100_000])
def test_any_text_has_finite_features(text: str) -> None:
    assert np.isfinite(prompt_features(text, TOKENS, PROJECTION)).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Answer in 3 sentences.", 60),
        ("Use at most 100 words.", 100),
        ("Write two short paragraphs.", 200),
        ("a 500-word essay", 500),
        ("Give me five reasons", 125),
        ("three wise men", 0),
        ("the words of a song", 0),
    ],
)
def test_a_stated_length_is_read(text: str, words: float) -> None:
    found = dict(zip(WORDING_FEATURES, wording(text), strict=True))
    assert found["stated_words"] == words
    assert found["has_stated_length"] == (words > 0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Use no more than ten words.", "has_at_most"),
        ("Use at least 3 examples.", "has_at_least"),
        ("Be brief.", "wants_brief"),
        ("Give a detailed answer.", "wants_detail"),
        ("List some fruits.", "task_list"),
        ("Summarise this.", "task_summarise"),
        ("Explain gravity.", "task_explain"),
        ("Write a poem.", "task_write"),
        ("Rewrite this sentence.", "task_edit"),
        ("Translate it into French.", "task_translate"),
        ("Classify the sentiment.", "task_classify"),
        ("def f(x): # complete this function", "task_code"),
        ("Calculate the total.", "task_compute"),
        ("Compare cats and dogs.", "task_compare"),
        ("Who was it?", "task_question"),
        ("Choose the best: (a) one (b) two", "has_choices"),
        ("Answer:", "ends_with_colon"),
        ("why so", "starts_with_question_word"),
        ("Simplify $x^2$", "has_mathematics"),
    ],
)
def test_wording_shows_the_task(text: str, name: str) -> None:
    assert dict(zip(WORDING_FEATURES, wording(text), strict=True))[name] == 1
    assert dict(zip(WORDING_FEATURES, wording("Xyzzy plugh."), strict=True))[name] == 0


def test_instructions_are_found_at_both_ends_of_a_long_prompt_and_not_inside() -> None:
    material = "lorem ipsum " * 500
    place = WORDING_FEATURES.index("task_summarise")
    assert wording("Summarize this. " + material)[place] == 1
    assert wording(material + "Summarize this.")[place] == 1
    assert wording(material + "summary " + material)[place] == 0


PIECES = [
    "a",
    "b)",
    "(c)",
    "4:",
    "1.",
    " ",
    "\n",
    "(",
    "at most",
    "up to",
    "under",
    "limit",
    "maximum",
    "more than",
    "or more",
]
PIECES += [
    "at least",
    "three",
    "12",
    "\u0663",
    "words",
    "sentence",
    "_",
    "\u212a",
    "\ud800",
    "x",
    "-",
    "\u00e9",
    "list",
    "explain",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_wording_is_what_the_plain_patterns_find(text: str) -> None:
    found = dict(zip(WORDING_FEATURES, wording(text), strict=True))
    lower = text.lower()
    most = "at most|no more than|not more than|less than|fewer than|under|up to|within|maximum|max|limit"
    assert found["has_at_most"] == bool(re.search(rf"\b(?:{most})\b", lower))
    assert found["has_at_least"] == bool(re.search(r"\b(?:at least|no less than|more than|minimum|or more)\b", lower))
    assert found["has_choices"] == bool(re.search(r"(?:^|\s)\(?[a-d1-4][).:]\s", lower))
    words = re.findall(r"[a-z]+|\d+", lower)
    assert found["task_list"] == ("list" in words)
    assert found["task_explain"] == ("explain" in words)
    number = r"\d{1,5}|three"
    stated = re.search(rf"\b({number})[ -](?:[a-z]+[ -])?(words|sentence)\b", lower)
    if stated is None:
        assert not found["has_stated_length"]
    else:
        times = {"words": 1, "sentence": 20}[stated[2]]
        assert found["stated_words"] == (3 if stated[1] == "three" else int(stated[1])) * times


# ---- tokens ----------------------------------------------------------------------------------------------------


def test_the_estimate_is_near_the_count_of_a_real_tokenizer() -> None:
    data = shared_data()
    if data is None:
        pytest.skip("no shared data")
    import polars as pl  # noqa: PLC0415

    for name in ("quality/llmrouter_prompts", "quality/alpaca_eval_prompts", "quality/routellm_gsm8k_mmlu"):
        table = pl.read_parquet(data / f"{name}.parquet", columns=["prompt", "prompt_tokens_qwen"])
        counts = table["prompt_tokens_qwen"].to_numpy()
        found = np.array([len(TOKENS.ids(text)) for text in table["prompt"]])
        assert abs(found.sum() / counts.sum() - 1) < 0.05
        assert np.mean(np.abs(found - counts) / counts) < 0.08


def test_a_tokenizer_file_gives_its_own_ids_and_a_name_by_its_content(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({"hello": 7, "world": 3, "?": 0}, unk_token="?")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    tokens = load_tokens(file)
    assert tokens.ids("hello world hello moon").tolist() == [7, 3, 7, 0]
    assert tokens.name.startswith("sha256:")
    assert tokens.ids("\ud800").tolist() == [0]


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text("{}")
    for name in ("t.json", "missing.json"):
        with pytest.raises(PredictorError, match=f"{name}: no tokenizer file .*give a tokenizer.json"):
            load_tokens(tmp_path / name)


def test_without_the_library_a_tokenizer_file_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(PredictorError, match=r"install simcluster\[tokenizers\]"):
        load_tokens(tmp_path / "t.json")
    assert load_tokens(None).name == "estimate-1"
