"""Scenario fields by their path, and rates: what can be swept, and what is said about what cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiment_files import write_experiment
from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.experiment.fields import Axis, combine, parse_axis, with_fields
from simcluster.experiment.plan import make_points
from simcluster.experiment.rates import BaseRate, base_rate, measure_extremes, parse_rates, spread_rates
from simcluster.routers.names import split_list
from simcluster.scenario import Scenario, load_scenario, override
from small_cluster import make_card, scenario_data
from trace_files import write_file


def never() -> tuple[float, float]:
    raise AssertionError("nothing is measured for given rates")


@pytest.fixture
def scenario() -> Scenario:
    return Scenario.model_validate(scenario_data(2))


def test_fields_are_set_by_path_and_read_as_in_a_scenario_file(scenario: Scenario) -> None:
    axis = parse_axis("cluster.instances[1].true_model.scale=1e-1,2", scenario)
    assert axis == Axis("cluster.instances[1].true_model.scale", (0.1, 2))
    changed = with_fields(scenario, {axis.path: 0.1, "output.decisions": "off"})
    assert [item.true_model.scale for item in changed.cluster.instances] == [1.0, 0.1]
    assert changed.output.decisions == "off"
    assert scenario.cluster.instances[1].true_model.scale == 1.0


def test_a_star_stands_for_every_instance(scenario: Scenario) -> None:
    changed = with_fields(scenario, {"cluster.instances[*].price.input_usd_per_mtok": 2.0})
    assert [item.price.input_usd_per_mtok for item in changed.cluster.instances] == [2.0, 2.0]


def test_what_is_null_can_be_set_inside(scenario: Scenario) -> None:
    assert scenario.cluster.instances[0].true_model.noise is None
    changed = with_fields(scenario, {"cluster.instances[0].true_model.noise.sigma": 0.1})
    noise = changed.cluster.instances[0].true_model.noise
    assert noise is not None
    assert noise.sigma == 0.1


def test_values_may_hold_commas_in_brackets_and_quotes(scenario: Scenario) -> None:
    assert parse_axis("assumptions=[a, b],[c]", scenario).values == (["a", "b"], ["c"])
    assert parse_axis("description='x, y',z", scenario).values == ("x, y", "z")
    assert parse_axis("measure.horizon_s=null,5", scenario).values == (None, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("routing.refresh_interval=0", "did you mean routing.refresh_interval_s?"),
        ("refresh_interval_s=0", "did you mean routing.refresh_interval_s?"),
        ("cluster.instances[2].replicas=1", "did you mean cluster.instances[1].replicas?"),
        ("cluster.instances[0].engine.max_num_seq=1", "did you mean cluster.instances[0].engine.max_num_seqs?"),
        ("cluster.instance[*].replicas=1", "did you mean cluster.instances[1].replicas?"),
        ("zzz=1", "see `simcluster scenario show`"),
        ("seed=1,2", "is set by --seeds and --seed"),
        ("routing.policies=sfs", "is set by --policies or -p"),
        ("routing.tie", "must be FIELD=VALUE"),
    ],
)
def test_a_field_that_cannot_be_set_is_told_in_one_line(scenario: Scenario, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_axis(text, scenario)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_a_value_that_the_scenario_does_not_allow_is_named_with_its_field(scenario: Scenario) -> None:
    with pytest.raises(ConfigError, match=r"--set routing.tie=coin: routing.tie = 'coin'; must be 'index', 'rotate'"):
        with_fields(scenario, {"routing.tie": "coin"})


def test_a_trace_takes_the_place_of_a_recipe_and_the_other_way_round(scenario: Scenario) -> None:
    drawn = with_fields(scenario, {"workload.recipe": "r.yaml"})
    assert (drawn.workload.trace, drawn.workload.recipe) == (None, "r.yaml")
    assert with_fields(drawn, {"workload.trace": "t.parquet"}).workload.recipe is None


def test_a_trace_takes_the_place_of_a_recipe_with_a_rate_of_its_own(tmp_path: Path) -> None:
    scenario, _ = load_scenario("paper-mmpp")
    for replayed in (
        with_fields(scenario, {"workload.trace": "quickstart"}),
        override(scenario, trace=tmp_path / "t.parquet"),
    ):
        assert replayed.workload.trace is not None
        assert (replayed.workload.recipe, replayed.workload.rate_rps, replayed.workload.burst_ratio) == (
            None,
            None,
            1.0,
        )
    with pytest.raises(ConfigError, match="rate_rps = 2; needs a recipe"):  # it is asked for
        with_fields(scenario, {"workload.trace": "quickstart", "workload.rate_rps": 2.0})


def test_axes_make_a_grid_or_are_zipped() -> None:
    axes = [Axis("a", (1, 2)), Axis("b", ("x", "y"))]
    grid = [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert combine(axes, zipped=False) == grid
    assert combine(axes, zipped=True) == [grid[0], grid[3]]
    assert combine([], zipped=False) == [{}]


def test_unequal_axes_cannot_be_zipped_and_none_is_given_twice() -> None:
    with pytest.raises(ConfigError, match="a has 1, b has 2 values; must be equally many"):
        combine([Axis("a", (1,)), Axis("b", (1, 2))], zipped=True)
    with pytest.raises(ConfigError, match="--set a: is given twice"):
        combine([Axis("a", (1,)), Axis("a", (2,))], zipped=False)


# ---- rates -------------------------------------------------------------------------------------------------------


def test_rates_below_one_stay_what_they_are() -> None:
    # C042
    assert spread_rates(0.21, 0.425, 3) == [0.21, 0.3175, 0.425]
    assert spread_rates(0.425, 0.21, 3) == [0.21, 0.3175, 0.425]
    assert parse_rates("0.21:0.425:3", never) == [0.21, 0.3175, 0.425]
    assert parse_rates("auto:3", lambda: (0.21, 0.425)) == [0.21, 0.3175, 0.425]
    assert parse_rates("auto:3", lambda: (0.425, 0.21)) == [0.21, 0.3175, 0.425]
    assert len(parse_rates("auto", lambda: (0.21, 0.425))) == 5


def test_rates_are_sorted_numbers() -> None:
    assert parse_rates("8, 0.5,2", never) == [0.5, 2.0, 8.0]


@pytest.mark.parametrize(
    "text", ["0", "-1,2", "nan", "inf", "x", "", "2,2", "1:2", "1:2:1", "1:2:x", "0:2:3", "1:2:3:4", "auto:1", "auto:x"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        parse_rates(text, lambda: (1.0, 2.0))


def loaded(path: Path, **fields: Any) -> tuple[Scenario, Path]:
    scenario, where = load_scenario(str(path))
    return with_fields(scenario, fields), where


def test_the_base_rate_is_that_of_the_recipe_whatever_the_seed_and_scale(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    for seed in (1, 2):
        scenario, where = loaded(path, **{"workload.rate_scale": 3.0})
        scenario = scenario.model_copy(update={"seed": seed})
        base = base_rate(scenario, where, build_world(scenario, where))
        assert base == BaseRate(10.0, "mean rate of recipe drawn")


def test_the_base_rate_of_a_trace_is_its_gaps_over_its_span(tmp_path: Path) -> None:
    make_card(tmp_path)
    write_file(tmp_path / "t.parquet", arrival_ns=[0, 4 * 10**9, 10 * 10**9])
    scenario = Scenario.model_validate(scenario_data(1, workload={"trace": "t.parquet", "rate_scale": 4.0}))
    where = tmp_path / "s.yaml"
    base = base_rate(scenario, where, build_world(scenario, where))
    assert base.rate_rps == pytest.approx(2 / 10)
    point = make_points(scenario, [{}], [0.5], base)[0]
    world = build_world(point.scenario, where)
    assert np.diff(world.known.arrival_ps).sum() / 1e12 == pytest.approx(2 / 0.5)


def test_arrivals_all_at_once_have_no_rate_to_set(tmp_path: Path) -> None:
    make_card(tmp_path)
    write_file(tmp_path / "t.parquet", arrival_ns=[0, 0, 0])
    scenario = Scenario.model_validate(scenario_data(1))
    base = base_rate(scenario, tmp_path / "s.yaml", build_world(scenario, tmp_path / "s.yaml"))
    with pytest.raises(ConfigError, match=r"--rates: all requests arrive at once .* leave --rates out"):
        make_points(scenario, [{}], [1.0], base)
    assert make_points(scenario, [{}], None, base)[0].rate_rps is None


def test_a_rate_of_the_scenario_itself_is_set_and_bursts_keep_the_times_for_which_they_last() -> None:
    scenario, where = load_scenario("paper-mmpp")
    base = base_rate(scenario, where, build_world(scenario, where))
    points = make_points(scenario, [{"workload.burst_ratio": 6.0, "workload.rate_scale": 2.0}], [7.0, 14.0], base)
    assert [point.scenario.workload.rate_rps for point in points] == [7.0, 14.0]
    assert [point.scenario.workload.rate_scale for point in points] == [1.0, 1.0]
    spread = []
    for point in points:
        asked = with_fields(point.scenario, {"workload.rate_rps": point.rate_rps, "workload.rate_scale": 1.0})
        arrivals = build_world(point.scenario, where).known.arrival_ps
        assert np.array_equal(arrivals, build_world(asked, where).known.arrival_ps)
        counts = np.bincount(arrivals // 10**12)  # per second
        spread.append(np.corrcoef(counts[:-1], counts[1:])[0, 1])
    # A scale of 2 instead would halve the time for which a rate lasts: another process, not this one.
    squeezed = with_fields(scenario, {"workload.burst_ratio": 6.0, "workload.rate_scale": 2.0})
    assert not np.array_equal(build_world(squeezed, where).known.arrival_ps, arrivals)
    assert min(spread) > 0.2  # seconds next to each other are alike, at either rate


def test_points_say_the_rate_that_their_own_fields_set() -> None:
    scenario, where = load_scenario("paper")
    base = base_rate(scenario, where, build_world(scenario, where))
    fields = [{}, {"workload.rate_rps": 4.0}, {"workload.rate_rps": 4.0, "workload.rate_scale": 2.0}]
    assert [point.rate_rps for point in make_points(scenario, fields, None, base)] == [8.0, 4.0, 8.0]


def test_auto_rates_reach_from_one_request_at_a_time_to_all_at_once(tmp_path: Path) -> None:
    # Prompt 4, answer 3 under 10 ms + 1 ms per token: alone 14 + 11 + 11 = 36 ms. At once, the second one comes 1 us
    # later, when the first's step has begun: 14 + 15 + 12 + 11 = 52 ms.
    make_card(tmp_path)
    columns = {"arrival_ns": [0, 10**9], "prompt_tokens": [4, 4], "output_tokens": [3, 3]}
    write_file(tmp_path / "t.parquet", **columns)
    scenario, where = Scenario.model_validate(scenario_data(1)), tmp_path / "s.yaml"
    base = base_rate(scenario, where, build_world(scenario, where))
    serial, batch = measure_extremes(scenario, where, base, "round_robin")
    assert serial == pytest.approx(1 / 0.036)
    assert batch == pytest.approx(2 / 0.052)


# ---- lists of policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sfs,random", ["sfs", "random"]),
        ("power_of_two:load=tokens,d=3,sfs", ["power_of_two:load=tokens,d=3", "sfs"]),
        ("epsilon(shortest_queue,p=0.1),admission(sfs)", ["epsilon(shortest_queue,p=0.1)", "admission(sfs)"]),
        ("epsilon(power_of_two:load=tokens,d=3):p=0.1,x.py:A:most=3,sfs", None),
        (" sfs , ,random,", ["sfs", "random"]),
    ],
)
def test_a_list_of_policies_splits_between_policies_only(text: str, expected: list[str] | None) -> None:
    wanted = expected or ["epsilon(power_of_two:load=tokens,d=3):p=0.1", "x.py:A:most=3", "sfs"]
    assert split_list(text) == wanted
