"""The paper's figures, in small: each runs, says what it measured, and compares as it should."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from command_line import run_command
from simcluster.cli import paper as paper_command
from simcluster.cli.paper_markdown import markdown
from simcluster.errors import ConfigError, SimulationError
from simcluster.experiment.build import build_world
from simcluster.experiment.cells import Cell, CellFailure, CellResult
from simcluster.experiment.executors import Outcome, Work
from simcluster.experiment.plan import Runner
from simcluster.experiment.run import run_policy
from simcluster.paper import catalogue, gains, routing
from simcluster.paper.assumptions import write_recipe
from simcluster.paper.catalogue import BEYOND, FIGURES, as_data, chosen_figures, make_figures, write_figure
from simcluster.paper.draw import NO_MATPLOTLIB, can_draw, draw
from simcluster.paper.figure import Claim, Figure, Grid, Plot, gain
from simcluster.paper.lab import Ask, Lab, Runs, Sizes
from simcluster.paper.overhead import estimate_times_us
from simcluster.paper.staleness import SfsWithoutCredit
from simcluster.report.statistics import Interval
from simcluster.workload.recipe import load_recipe

TINY = Sizes(seeds=2, requests=60, dense=False)


def here(cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Outcome]]:
    """Run cells in this process."""
    for cell in cells:
        yield cell, work(cell)


def tiny_lab(folder: Path, sizes: Sizes = TINY) -> Lab:
    return Lab(sizes, folder, Runner(here))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One for all figures, so that equal runs happen once."""
    return tiny_lab(tmp_path_factory.mktemp("recipes"))


def runs(*values: float) -> Runs:
    return Runs([{"on_time_utility": value, "slo_attainment": value} for value in values])


# ---- every figure ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*FIGURES, *BEYOND])
def test_every_figure_runs_in_small_and_says_what_it_measured(key: str, lab: Lab, tmp_path: Path) -> None:
    figure = (FIGURES | BEYOND)[key](lab)
    assert figure.key == key
    assert len(figure.table) > 0
    assert figure.claims
    assert figure.moved_by.endswith(".")
    assert set(figure.shown) <= set(figure.table.columns)
    data = json.loads(json.dumps(as_data([figure], TINY), allow_nan=False))
    assert len(data["figures"][key]["rows"]) == len(figure.table)
    drawn = figure.table if figure.points is None else figure.points
    assert {figure.plot.x, figure.plot.y, figure.plot.series} <= set(drawn.columns)
    write_figure(figure, tmp_path)
    assert pl.read_parquet(tmp_path / f"figure-{key}.parquet").equals(figure.table)
    assert (tmp_path / f"figure-{key}.png").is_file() == can_draw()


def test_the_figures_are_those_of_the_paper_and_what_lies_beyond() -> None:
    assert list(FIGURES) == ["2", "3", "4", "5", "6", "7", "8", "9", "10", "12", "13", "14", "assumptions"]
    assert list(chosen_figures([])) == list(FIGURES)
    assert list(chosen_figures(["5", "beyond", "bound"])) == ["5", *BEYOND]
    with pytest.raises(ConfigError, match="figure '11' is unknown"):
        chosen_figures(["11"])


def test_all_settings_are_run_where_a_figure_is_asked_for_in_full(tmp_path: Path) -> None:
    dense = tiny_lab(tmp_path, Sizes(seeds=1, requests=8))
    few = tiny_lab(tmp_path, Sizes(seeds=1, requests=8, dense=False))
    for key in ("6", "errors", "assumptions"):
        make = (FIGURES | BEYOND)[key]
        assert len(make(dense).table) > len(make(few).table)


# ---- the numbers -----------------------------------------------------------------------------------------------


def test_a_gain_is_that_of_the_means_with_an_interval_of_paired_differences() -> None:
    ours, other = np.array([0.6, 0.7, 0.65]), np.array([0.4, 0.5, 0.45])
    percent, interval = gain(ours, other)
    assert percent == pytest.approx(100 * (0.65 / 0.45 - 1))
    assert interval == pytest.approx((percent, percent))  # every pair differs by 0.2
    assert gain(np.array([1.0]), np.array([2.0])) == (-50.0, None)


def test_the_best_baseline_is_the_one_with_the_largest_area_and_no_other_policy() -> None:
    groups = [
        {"round_robin": runs(0.5), "shortest_queue": runs(0.4), "latency_agnostic": runs(0.6), "sfs": runs(0.7)},
        {"round_robin": runs(0.3), "shortest_queue": runs(0.4), "latency_agnostic": runs(0.1), "sfs": runs(0.6)},
    ]
    best, areas = routing.best_baseline(groups, (1.0, 3.0))
    assert best == "round_robin"
    assert areas["round_robin"] == pytest.approx(areas["shortest_queue"])
    claims = routing.headline(groups, (1.0, 5.0))
    assert claims[0].ours == pytest.approx(100 * (1.3 / 0.8 - 1))
    assert claims[1].ours == pytest.approx(50)  # at 5 requests/s, over shortest_queue
    assert "shortest_queue" in claims[1].what
    assert (claims[0].paper, claims[1].paper) == ("+33 %", "+46 %")


def test_the_smallest_lead_names_where_and_over_whom_and_may_be_negative() -> None:
    groups = {
        "A": {"sfs": runs(0.5, 0.5), "round_robin": runs(0.4, 0.4), "shortest_queue": runs(0.1, 0.1)},
        "B": {"sfs": runs(0.5, 0.6), "round_robin": runs(0.2, 0.2), "shortest_queue": runs(0.6, 0.7)},
    }
    where, claim = routing.smallest_lead(groups, "on_time_utility", ("round_robin", "shortest_queue"))
    assert where == "B"
    assert claim.ours == pytest.approx(-0.1)
    assert "at B, over shortest_queue" in claim.what


def test_utility_at_equal_ttft_is_read_off_the_frontier() -> None:
    ttft_s, utility = np.array([0.1, 0.02, 0.04]), np.array([0.5, 0.3, 0.6])
    assert routing.at_equal_ttft(ttft_s, utility, 0.03) == pytest.approx(0.45)
    assert routing.at_equal_ttft(ttft_s, utility, 1.0) == pytest.approx(0.6)  # slower and worse is no frontier
    assert routing.at_equal_ttft(ttft_s, utility, 0.001) == pytest.approx(0.3)


def test_what_cannot_be_computed_is_null_in_json() -> None:
    figure = Figure(
        key="x",
        title="t",
        table=pl.DataFrame({"a": [1.0, float("nan")], "b": ["p", None]}),
        claims=[Claim("c", None, float("nan"), Interval(0.0, float("inf")), "%")],
        moved_by="nothing.",
        plot=Plot("a", "a", "b"),
    )
    assert figure.as_data()["rows"] == [{"a": 1.0, "b": "p"}, {"a": None, "b": None}]
    assert figure.as_data()["claims"][0] == {"what": "c", "paper": None, "ours": None, "interval": None, "unit": "%"}


# ---- the laboratory --------------------------------------------------------------------------------------------


def test_equal_runs_happen_once(tmp_path: Path) -> None:
    done: list[str] = []

    def counting(cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Outcome]]:
        for cell, outcome in here(cells, work):
            done.append(cell.policy)
            yield cell, outcome

    lab = Lab(TINY, tmp_path, Runner(counting))
    first = lab.compare("paper", ["sfs", "random"], [{"workload.rate_rps": 3.0}])
    again = lab.compare("paper", ["sfs"], [{"workload.rate_rps": 3.0}, {"workload.rate_rps": 4.0}])
    assert sorted(done) == ["random"] * 2 + ["sfs"] * 4
    assert np.array_equal(first[0]["sfs"].of("on_time_utility"), again[0]["sfs"].of("on_time_utility"))


def test_policies_meet_the_same_requests_and_seeds_differ(lab: Lab) -> None:
    group = lab.compare("paper", ["sfs", "round_robin"], [{"workload.rate_rps": 1.0}])[0]
    counts = {name: each.of("requests", "submitted").tolist() for name, each in group.items()}
    assert counts == {"sfs": [60.0, 60.0], "round_robin": [60.0, 60.0]}
    assert len(set(group["sfs"].of("on_time_utility"))) == 2


def test_other_work_is_kept_apart_from_plain_runs_and_a_failure_is_an_error(tmp_path: Path) -> None:
    lab = tiny_lab(tmp_path)
    ask = Ask("paper", ["round_robin"], [{}])
    lab.measure([ask])
    with pytest.raises(SimulationError, match=r"paper, round_robin, seed 1, .*: too bad"):
        lab.measure([ask], lambda _cell: CellFailure("too bad"), "failing")


def test_a_changed_recipe_is_the_shipped_one_but_for_the_change(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["outscale"] = 2.0

    path = write_recipe(tmp_path, "longer", change)
    recipe = load_recipe(path)
    shipped = load_recipe(Path(__file__).resolve().parents[2] / "traces" / "recipes" / "paper.yaml")
    changed = {"outscale": 2.0, "name": "longer"}
    assert recipe.model_dump() == shipped.model_dump() | changed


def test_without_load_the_credit_for_elapsed_time_changes_nothing(lab: Lab) -> None:
    scenario, path = lab.scenario("paper", {"workload.rate_rps": 3e-4, "routing.overlay": False})
    world = build_world(scenario, path)
    name = f"{SfsWithoutCredit.__module__}:{SfsWithoutCredit.__name__}"
    plain, without = (run_policy(scenario, world, policy).summary for policy in ("sfs", name))
    assert plain["on_time_utility"] == without["on_time_utility"]
    assert plain["estimators"]["sfs"]["mape"] == pytest.approx(without["estimators"][name]["mape"], rel=1e-6)


def test_under_load_a_snapshot_taken_for_the_present_expects_more(lab: Lab) -> None:
    fields = {"workload.rate_rps": 16.0, "routing.overlay": False, "routing.publish_delay_s": 0.05}
    scenario, path = lab.scenario("paper", {**fields, "workload.limit": 300})
    world = build_world(scenario, path)
    name = f"{SfsWithoutCredit.__module__}:{SfsWithoutCredit.__name__}"
    bias = {
        policy: run_policy(scenario, world, policy).summary["estimators"][policy]["bias"] for policy in ("sfs", name)
    }
    assert bias[name] > bias["sfs"] + 0.05


def test_the_overhead_is_measured_once_per_request(lab: Lab) -> None:
    times = estimate_times_us(*lab.scenario("paper", {}))
    assert times.shape == (60,)
    assert (times > 0).all()


def test_how_many_cells_there_will_be_is_known_before_the_first_runs(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    lab = Lab(TINY, tmp_path, Runner(here, on_progress=lambda done, total: told.append((done, total))))
    chosen = {key: FIGURES[key] for key in ("9", "12", "13")}
    figures = list(make_figures(lab, chosen))
    assert [figure.key for figure in figures] == ["9", "12", "13"]
    assert {total for _, total in told} == {told[-1][0]}  # all of them, from the first report on
    assert told[0][0] == 0
    assert told[-1][0] == (7 * 2 + 6 * 9 - 2) * TINY.seeds  # lambda 1e-4 at 5 requests/s is in both


# ---- gains -----------------------------------------------------------------------------------------------------


def test_gains_are_paired_and_say_where_sfs_plus_is_below_a_rival(tmp_path: Path) -> None:
    worth = {"sfs": 0.5, "sfs_plus": 0.6, "throughput": 0.4, "sfs:margin=0.9": 0.55}

    def made_up(cells: Sequence[Cell], _work: Work) -> Iterator[tuple[Cell, Outcome]]:
        for cell in cells:
            loose = cell.scenario.name == "paper-loose" and cell.scenario.workload.rate_rps == 12.0
            extra = 0.3 if loose and cell.policy == "throughput" else 0.0  # the one place where a rival is better
            yield cell, CellResult({"on_time_utility": worth[cell.policy] + extra + 0.001 * cell.scenario.seed}, {})

    figure = gains.figure_gains(Lab(TINY, tmp_path, Runner(made_up)))
    ours = figure.table.filter(policy="sfs_plus")["gain"].to_numpy()
    assert ours == pytest.approx(100 * 0.1 / 0.8015, rel=1e-9)  # seeds 301 and 302
    assert figure.claims[-1].ours == 1.0
    assert "of 9" in figure.claims[-1].what  # three scenarios at three rates


# ---- documents -------------------------------------------------------------------------------------------------


def test_tables_for_a_document_hold_the_main_claims_and_the_grid() -> None:
    gains_of = {"a": {8.0: 8.0, 2.0: 2.0}, "b": {8.0: -16.0, 2.0: -4.0}}
    rows = [
        {"who": who, "rate_rps": rate, "gain": gain, "gain_low": gain - 0.5, "gain_high": gain + 0.5}
        for who, found in gains_of.items()
        for rate, gain in found.items()
    ]
    figure = Figure(
        key="x",
        title="Some gains",
        table=pl.DataFrame([*rows, {"who": "c", "rate_rps": 2.0, "gain": 3.0, "gain_low": None, "gain_high": None}]),
        claims=[
            Claim("main", "+33 %", 12.345, Interval(11.0, 13.0), "%", is_main=True),
            Claim("aside", None, 1.0, None, ""),
            Claim("unknown", None, None, None, "", is_main=True),
        ],
        moved_by="much.",
        plot=Plot("rate_rps", "gain", "who"),
        moved_by_short="prices",
        grid=Grid(("who",), "rate_rps", "gain", "%"),
    )
    text = markdown([figure], 8, 2000, paper_command._ours, paper_command._short)
    lines = text.splitlines()
    assert lines[0].startswith("Measured on 2")
    assert lines[0].endswith(": 8 seeds of 2,000 requests; intervals of 95 % over seeds.")
    assert lines[2:] == [
        "| figure | what | paper | ours, 95 % interval | what moves it |",
        "| --- | --- | --- | --- | --- |",
        "| x | main | +33 % | 12.35 % (11 to 13) | prices |",
        "| x | unknown |  | - | prices |",
        "",
        "Some gains: %, half of the 95 % interval behind ±.",
        "",
        "| who | 2 | 8 |",
        "| --- | --- | --- |",
        "| a | 2.0±0.5 | 8.0±0.5 |",
        "| b | -4.0±0.5 | -16.0±0.5 |",
        "| c | 3 |  |",
    ]


@pytest.mark.parametrize("key", [*FIGURES, *BEYOND])
def test_every_figure_with_main_claims_says_in_a_few_words_what_moves_them(key: str, lab: Lab) -> None:
    figure = (FIGURES | BEYOND)[key](lab)
    if any(claim.is_main for claim in figure.claims):
        assert figure.moved_by_short


# ---- the command -----------------------------------------------------------------------------------------------


def test_the_command_prints_markdown_or_json_but_not_both() -> None:
    code, text, errors = run_command("paper", "13", "--quick", "--markdown", "-q", "--workers", "1")
    assert (code, errors) == (0, "")
    assert "| 13 | smallest lead of SFS over round_robin, shortest_queue, latency_agnostic" in text
    code, text, errors = run_command("paper", "13", "--markdown", "--json")
    assert (code, text, errors.count("\n")) == (2, "", 1)
    assert "--json and --markdown: choose one" in errors


def test_the_command_prints_one_json_object_and_writes_its_files(tmp_path: Path) -> None:
    out = tmp_path / "figures"
    code, text, errors = run_command("paper", "9", "10", "--quick", "--json", "--out", out)
    assert code == 0, errors
    printed = json.loads(text)
    assert list(printed["figures"]) == ["9", "10"]
    assert {"title", "claims", "moved_by", "rows"} == set(printed["figures"]["9"])
    assert {"schema_version", "paper", "scenario", "assumptions", "seeds", "requests", "figures"} == set(printed)
    assert printed["assumptions"]
    assert json.loads((out / "figures.json").read_text()) == printed
    assert (out / "figure-9.parquet").is_file()
    assert (out / "figure-10.parquet").is_file()


def test_the_command_shows_our_number_beside_the_papers() -> None:
    code, text, errors = run_command("paper", "9", "--quick")
    assert code == 0, errors
    for part in ("Figure 9", "about 10^4", "12,000 tokens", "this rests on:", "synthetic"):
        assert part in text


def test_an_unknown_figure_is_one_line_and_exit_code_2() -> None:
    code, text, errors = run_command("paper", "15")
    assert (code, text, errors.count("\n")) == (2, "", 1)
    assert "figure '15' is unknown" in errors


def test_without_matplotlib_there_are_tables_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab: Lab
) -> None:
    monkeypatch.setattr(catalogue, "can_draw", lambda: False)
    write_figure(FIGURES["9"](lab), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["figure-9.parquet"]
    monkeypatch.setattr("simcluster.cli.paper.can_draw", lambda: False)
    _, _, errors = run_command("paper", "9", "--quick", "--out", tmp_path / "out")
    assert [line for line in errors.splitlines() if line.startswith("no PNG")] == [NO_MATPLOTLIB]


@pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")
def test_equal_figures_give_equal_png_files(lab: Lab, tmp_path: Path) -> None:
    figure = FIGURES["5"](lab)
    for name in ("a.png", "b.png"):
        draw(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
