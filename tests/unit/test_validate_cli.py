"""`simcluster validate` as users call it."""

import json
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from recordings import MS, requests, step, steps, write_recording
from simcluster.card import StepTimeFit, load_card, write_card
from simcluster.cli import app, main
from simcluster.shipped import find_file

RUNNER = CliRunner()


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """Write a card whose steps take the 10 ms of the small recording."""
    fit = StepTimeFit(b0_s=0.010, b1_s=0.0, b2_s=0.0, b3_s=0.0)
    shipped = load_card(find_file("qwen3-8b-h100", "calibration", ".json"))
    file = tmp_path / "card.json"
    write_card(
        shipped.model_copy(update={"fits": {"hinge": fit}, "chosen_fit": "hinge", "host_time_s": 0.003}),
        file,
    )
    return file


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "run")


def test_the_result_is_one_json_object_and_the_tables_of_the_paper_s_figures(
    card: Path, recording: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = RUNNER.invoke(app, ["validate", str(card), str(recording), "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["split"]["scheduling"]["same_composition"] == 1
    assert found["badge"].startswith("validated on run (1 requests), error ")
    assert set(found["estimators"]) == {"sfs_measured", "sfs", "throughput", "lps"}
    assert json.loads((out / "summary.json").read_text()) == found
    assert pl.read_parquet(out / "steps.parquet")["observed_s"].to_list() == [0.01] * 3
    estimates = pl.read_parquet(out / "estimates.parquet").filter(pl.col("estimator") == "sfs")
    assert estimates["predicted_s"].to_list() == pytest.approx(estimates["observed_s"].to_list())


def test_the_tables_name_the_badge_and_every_part_of_the_error(card: Path, recording: Path) -> None:
    done = RUNNER.invoke(app, ["validate", str(card), str(recording)])
    assert done.exit_code == 0, done.output
    for text in ("validated on run", "TTFT ms", "scheduling", "step time", "front end", "sfs, recorded step times"):
        assert text in done.stdout


def test_no_number_is_cut_on_a_terminal_of_80_columns(card: Path, tmp_path: Path) -> None:
    """Minutes of waiting: in milliseconds the numbers would be too long."""
    file = tmp_path / "slow_runs.parquet"
    times = {"arrival_s": [0.0, 0.25], "first_token_s": [137.782, 138.032], "last_token_s": [153.85, 154.1]}
    lengths = {"prompt_tokens": [100] * 2, "output_tokens": [20] * 2}
    pl.DataFrame({"run": ["slow"] * 2, **times, **lengths}).write_parquet(file)
    done = RUNNER.invoke(app, ["validate", str(card), str(file)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    table = done.stdout.splitlines()[1:]
    assert all(len(line) <= 80 and "…" not in line for line in table)
    real = [line.split() for line in table if " real " in line]
    assert real[0] == ["TTFT", "s", "real", *["137.78"] * 4]


def test_a_table_of_points_fits_80_columns(card: Path, tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    names = (
        "model,hardware,engine,version,serve_cmd,n,max_concurrency,input_tokens,output_tokens,ttft_mean_ms,tpot_mean_ms"
    )
    row = "Qwen/Qwen3-8B,one H100,vllm,v0.11.0,vllm serve,1000,{},4096000,128000,{},1169.72\n"
    file.write_text(f"{names}\n{row.format('', 585981.22)}{row.format(128, 12.5)}")
    done = RUNNER.invoke(app, ["validate", str(card), str(file)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    table = done.stdout.splitlines()[1:]
    assert all(len(line) <= 80 and "…" not in line for line in table)
    first = next(line.split() for line in table if "4096+128 x1000 once" in line)
    assert (first[3], first[6]) == ("1,169.72", "585.98")


def test_points_that_a_card_was_tuned_on_are_not_scored(card: Path, tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    names = "model,hardware,engine,version,serve_cmd,n,max_concurrency,input_tokens,output_tokens,tpot_mean_ms"
    row = "Qwen/Qwen3-8B,one H100,vllm,v0.11.0,vllm serve,10,{},1000,100,13\n"
    file.write_text(f"{names}\n{row.format(1)}{row.format(2)}")
    arguments = ["validate", str(card), str(file), "--tune", "scale", "--json", "--on"]
    done = RUNNER.invoke(app, [*arguments, "max_concurrency=1"])
    assert done.exit_code == 0, done.output
    assert [point["point"] for point in json.loads(done.stdout)["points"]] == ["100+10 x2"]
    assert "name fewer" in str(RUNNER.invoke(app, [*arguments, "version=v0.11.0"]).exception)


def test_a_stored_result_stands_in_the_card_once_per_run(card: Path, recording: Path) -> None:
    for _ in range(2):
        assert RUNNER.invoke(app, ["validate", str(card), str(recording), "--write"]).exit_code == 0
    stored = load_card(card)
    assert stored.validations is not None
    assert [each.run for each in stored.validations] == ["run"]
    assert stored.badge.startswith("validated on run (1 requests)")


def test_a_tuned_card_is_stored_with_what_was_tuned_on_what(card: Path, tmp_path: Path) -> None:
    second = {**requests()[0], "request_id": "b", "t_add_ns": 199 * MS}
    more = [
        step(4, 200 * MS, [("b", 8, 0, False, False, 12)]),
        step(5, 213 * MS, [("b", 4, 8, False, True, 12)]),
        step(6, 226 * MS, [("b", 1, 12, True, True, 12)]),
    ]
    two = write_recording(tmp_path / "two", steps_=[*steps(), *more], requests_=[*requests(), second])
    slow = load_card(card)
    fit = slow.step_time.model_copy(update={"b0_s": 0.02})
    write_card(slow.model_copy(update={"fits": {"hinge": fit}}), card)
    arguments = ["validate", str(card), str(two), "--tune", "scale", "--on", "first=1", "--write", "--json"]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["requests"] == 1
    stored = load_card(card)
    assert stored.step_time.b0_s == pytest.approx(0.01, rel=0.01)
    assert stored.adjustments[-1].reason.startswith("tuned on first=1: scale")
    assert "tuned on first=1: scale" in stored.badge


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tune", "scale"], "--tune and --on belong together"),
        (["--tune", "scale", "--on", "isl=4"], "for a run it must be first=N"),
        (["--tune", "speed", "--on", "first=1"], "must be first=N, N from 1 to 0"),
        (["--select", "isl=4"], "--select and --max-tokens are for tables of points"),
        (["--engine", "block_size=0"], "--engine: block_size = 0"),
        (["--engine", "block_size"], "must be COLUMN=VALUE"),
    ],
)
def test_options_that_do_not_fit_are_one_line_and_exit_code_2(
    card: Path,
    recording: Path,
    options: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["simcluster", "validate", str(card), str(recording), *options])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert told in error
    assert error.count("error:") == 1


def test_results_of_a_run_say_how_far_its_cards_can_be_trusted() -> None:
    done = RUNNER.invoke(app, ["run", "quickstart", "-p", "round_robin", "--decisions", "off", "--json", "-q"])
    assert done.exit_code == 0, done.output
    cards = json.loads(done.stdout)["policies"]["round_robin"]["cards"]
    assert set(cards.values()) == {"uncalibrated preset"}
