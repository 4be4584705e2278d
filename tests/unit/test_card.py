import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from shared_data import shared_data
from simcluster.calibrate.composed import PROVENANCE, main
from simcluster.card import Card, load_card, write_card
from simcluster.errors import CardError

CARDS = Path(__file__).resolve().parents[2] / "calibration"
PAPER_NAMES = ("qwen3-0.6b-h100", "qwen3-8b-h100", "qwen3-32b-tp2-h100")
NAMES = (*PAPER_NAMES, "llama-3.1-8b-h100")


def card_json() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((CARDS / "qwen3-8b-h100.json").read_text())
    return data


def error_of(tmp_path: Path, text: str) -> str:
    """Return the message of the CardError that a file with this text raises."""
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(CardError) as caught:
        load_card(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert caught.value.__suppress_context__
    return message.removeprefix(f"{path}: ")


def error_with(tmp_path: Path, path: str, value: object) -> str:
    """Return the message of a good card with one field replaced, path as a.b.c."""
    data = copy.deepcopy(card_json())
    *parents, last = path.split(".")
    target = data
    for part in parents:
        target = target[part]
    target[last] = value
    return error_of(tmp_path, json.dumps(data))


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_card_says_what_it_is(name: str) -> None:
    card = load_card(CARDS / f"{name}.json")
    assert card.name == name
    assert card.provenance == PROVENANCE == "composed from measured kernels, not a serving run"
    assert not card.measured
    assert card.chosen_fit == "hinge"
    assert set(card.fits) == {"eq9", "hinge"} | ({"eq9_served"} if name in PAPER_NAMES else set())
    assert card.step_time is card.fits["hinge"]
    assert {"host_time_s", "front_end", "kv_cache.num_gpu_blocks"} <= {
        assumption.field for assumption in card.assumptions
    }


@pytest.mark.parametrize(
    ("name", "limit"),
    # The limit of the smallest is looser: its attention kernels jump by 10 % between grid points.
    [("qwen3-0.6b-h100", 0.045), ("qwen3-8b-h100", 0.03), ("qwen3-32b-tp2-h100", 0.03), ("llama-3.1-8b-h100", 0.032)],
)
def test_a_committed_card_predicts_held_out_steps(name: str, limit: float) -> None:
    errors = load_card(CARDS / f"{name}.json").step_time.held_out_mape
    assert errors is not None
    assert errors["all"] <= limit


def test_kv_blocks_include_the_null_block() -> None:
    card = load_card(CARDS / "qwen3-0.6b-h100.json")
    assert (card.kv_cache.num_gpu_blocks - 1) * card.kv_cache.block_size == 600_000


def test_the_scale_of_the_largest_model_is_an_explicit_adjustment() -> None:
    assert [a.factor for a in load_card(CARDS / "qwen3-32b-tp2-h100.json").adjustments] == [1.1]
    assert load_card(CARDS / "qwen3-8b-h100.json").adjustments == []


def test_committed_cards_are_what_the_shared_data_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shared_data()
    if data is None:
        pytest.skip("the composed step times are not in the repository; set SIMCLUSTER_SHARED")
    assert main([str(data / "calibration/composed_h100_steps.parquet"), str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for name in NAMES:
        made = (tmp_path / f"{name}.json").read_bytes()
        committed = load_card(CARDS / f"{name}.json")
        fits = {key: fit for key, fit in committed.fits.items() if key != "eq9_served"}  # added from simulated steps
        assumptions = [each for each in committed.assumptions if each.field != "fits.eq9_served"]
        write_card(committed.model_copy(update={"fits": fits, "assumptions": assumptions}), tmp_path / "plain.json")
        assert made == (tmp_path / "plain.json").read_bytes(), name


def test_making_cards_from_a_missing_table_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.parquet"), str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "none.parquet" in err


def test_writing_and_reading_gives_the_same_card_and_the_same_bytes(tmp_path: Path) -> None:
    source = CARDS / "qwen3-8b-h100.json"
    card = load_card(source)
    path = tmp_path / "new folder" / "card.json"
    write_card(card, path)
    assert load_card(path) == card
    assert path.read_bytes() == source.read_bytes()
    assert path.read_text().endswith("}\n")
    write_card(card, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["card.json"]


def test_writing_where_a_file_is_in_the_way_is_a_card_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CardError, match="cannot be written"):
        write_card(load_card(CARDS / "qwen3-8b-h100.json"), tmp_path / "file" / "card.json")


def test_a_card_is_frozen() -> None:
    card = load_card(CARDS / "qwen3-8b-h100.json")
    with pytest.raises(ValueError, match="frozen"):
        card.host_time_s = 1.0


def test_a_card_without_held_out_error_is_allowed_and_says_so(tmp_path: Path) -> None:
    data = card_json()
    del data["fits"]["hinge"]["held_out_mape"]
    path = tmp_path / "card.json"
    path.write_text(json.dumps(data))
    assert load_card(path).step_time.held_out_mape is None


def test_a_missing_file_is_a_card_error(tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"none\.json: no such file; give the path"):
        load_card(tmp_path / "none.json")


def test_a_folder_instead_of_a_file_is_a_card_error(tmp_path: Path) -> None:
    with pytest.raises(CardError, match="cannot be read"):
        load_card(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"name": }', "\x00"])
def test_invalid_json_is_a_card_error(tmp_path: Path, text: str) -> None:
    assert error_of(tmp_path, text).startswith("not valid JSON (")


def test_bytes_that_are_not_text_are_a_card_error(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(b'{"name": "\xff\xfe"}')
    with pytest.raises(CardError, match="not valid JSON"):
        load_card(path)


def test_a_list_is_not_a_card(tmp_path: Path) -> None:
    assert error_of(tmp_path, "[]").startswith("the file = []; must be a mapping")


def test_an_unknown_key_is_named_with_the_likely_spelling(tmp_path: Path) -> None:
    assert error_with(tmp_path, "fits.eq9.b9_s", 1.0) == ("fits.eq9.b9_s = 1.0; unknown key; did you mean b5_s?")
    assert error_with(tmp_path, "zzz", 1).startswith("zzz = 1; unknown key; allowed here: adjustments, assumptions,")


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    data = card_json()
    del data["kv_cache"]["block_size"]
    assert error_of(tmp_path, json.dumps(data)).startswith("kv_cache.block_size is missing;")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("fits.hinge.b2_s", -1e-9, "fits.hinge.b2_s = -1e-09; must be greater than or equal to 0;"),
        ("fits.hinge.b2_s", math.nan, "fits.hinge.b2_s = nan; must be a finite number;"),
        ("fits.hinge.b2_s", math.inf, "fits.hinge.b2_s = inf; must be a finite number;"),
        ("fits.hinge.b2_s", "1e-9", "fits.hinge.b2_s = '1e-9'; must be a valid number;"),
        ("fits.hinge.b2_s", True, "fits.hinge.b2_s = True; must be a valid number;"),
        ("fits.hinge.hinge_tokens", 1.5, "fits.hinge.hinge_tokens = 1.5; must be a valid integer"),
        ("fits.third", {}, "fits.third = 'third'; must be 'eq9', 'hinge', 'extended' or 'eq9_served';"),
        ("host_time_s", None, "host_time_s = None; must be a valid number;"),
        ("kv_cache.num_gpu_blocks", 1, "kv_cache.num_gpu_blocks = 1; must be greater than or"),
        ("num_gpus", 0, "num_gpus = 0; must be greater than or equal to 1;"),
        ("schema_version", 2, "schema_version = 2; must be 1;"),
        ("engine", "sglang", "engine = 'sglang'; must be 'vllm';"),
        ("measured", "no", "measured = 'no'; must be a valid boolean;"),
        ("front_end.request_s", -1, "front_end.request_s = -1; must be greater than or equal to 0"),
        ("coverage.n_tokens", [1], "coverage.n_tokens[1] is missing;"),
        ("date", "30.11.2026", "date = '30.11.2026'; String should match pattern"),
        ("fits.hinge.held_out_mape", {"all": -0.1}, "fits.hinge.held_out_mape.all = -0.1; must"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(tmp_path: Path, path: str, value: object, message: str) -> None:
    assert error_with(tmp_path, path, value).startswith(message)


def test_several_mistakes_are_counted(tmp_path: Path) -> None:
    data = card_json()
    data["num_gpus"] = 0
    data["host_time_s"] = -1
    assert error_of(tmp_path, json.dumps(data)).endswith(" (and 1 more)")


def test_the_chosen_fit_must_be_there(tmp_path: Path) -> None:
    data = card_json()
    del data["fits"]["hinge"]
    assert error_of(tmp_path, json.dumps(data)) == ("chosen_fit = 'hinge'; must be one of the fits: eq9, eq9_served")


def test_the_plain_form_has_no_optional_terms(tmp_path: Path) -> None:
    assert error_with(tmp_path, "fits.eq9.b1x_s", 1e-6).startswith("fits.eq9.b1x_s = 1e-06; must")


def test_a_card_in_code_is_checked_as_well() -> None:
    data = load_card(CARDS / "qwen3-8b-h100.json").model_dump() | {"num_gpus": -1}
    with pytest.raises(ValueError, match="num_gpus"):
        Card.model_validate(data)
