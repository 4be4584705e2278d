"""The scenarios of the paper: what they assume, what they draw, what their routers believe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simcluster.card import load_card
from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import Scenario, load_scenario
from simcluster.workload import Trace, read_trace, write_trace
from simcluster.workload.recipe import Mix, Recipe, load_recipe
from simcluster.workload.synth import make_trace

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "traces" / "recipes" / "paper.yaml"
NAMES = sorted(path.stem for path in (ROOT / "scenarios").glob("paper*.yaml"))
DIFFERENCE: dict[str, dict[str, Any]] = {  # what each changes of `paper`, names and assumptions apart
    "paper-literal": {"routing.cost_weight": 5e-4},
    "paper-loose": {"slo.ttft_scale": 2.0},
    "paper-cn": {
        "routing.cost_weight": 5e-4,
        "cluster.instances.0.price.input_usd_per_mtok": 0.044,
        "cluster.instances.0.price.output_usd_per_mtok": 0.17,
        "cluster.instances.1.price.input_usd_per_mtok": 0.072,
        "cluster.instances.1.price.output_usd_per_mtok": 0.287,
        "cluster.instances.2.price.input_usd_per_mtok": 0.287,
        "cluster.instances.2.price.output_usd_per_mtok": 1.147,
    },
    "paper-2048": {f"cluster.instances.{j}.engine.max_num_batched_tokens": 2048 for j in range(3)},
    "paper-mmpp": {"workload.rate_rps": 7.0, "workload.burst_ratio": 3.0},
}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings and lists by their dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {
        name: leaf for key, each in items for name, leaf in flat(each, f"{path}.{key}" if path else str(key)).items()
    }


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(RECIPE)


@pytest.fixture(scope="module")
def mix(recipe: Recipe) -> Mix:
    assert recipe.mix is not None
    return recipe.mix


@pytest.fixture(scope="module")
def large(recipe: Recipe) -> Trace:
    return make_trace(recipe.model_copy(update={"requests": 40_000}))


def smaller(scenario: Scenario, **workload: Any) -> Scenario:
    data = scenario.model_dump()
    data["workload"] |= {"limit": 200, **workload}
    return Scenario.model_validate(data)


# ---- the scenarios ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_of_the_paper_says_what_it_assumes_about_what_the_paper_leaves_open(name: str) -> None:
    scenario, path = load_scenario(str(ROOT / "scenarios" / f"{name}.yaml"))
    assert path.read_text().startswith("# The paper's ")
    said = " ".join(scenario.assumptions)
    for what in ("prices", "lambda", "synthetic", "KV caches", "TTFT targets", "eq. 9", "noise", "answers are 1.5"):
        assert what in said
    world = build_world(smaller(scenario), path)
    assert world.warnings == ()
    assert run_policy(smaller(scenario), world, "sfs").summary["requests"]["finished"] == 200


@pytest.mark.parametrize("name", DIFFERENCE)
def test_a_variant_differs_from_the_scenario_paper_in_what_it_says_and_nothing_else(name: str) -> None:
    skipped = ("name", "description", "assumptions")
    paper, variant = (
        {key: leaf for key, leaf in flat(load_scenario(each)[0].resolved()).items() if not key.startswith(skipped)}
        for each in (str(ROOT / "scenarios" / "paper.yaml"), str(ROOT / "scenarios" / f"{name}.yaml"))
    )
    assert paper.keys() == variant.keys()
    assert {key: leaf for key, leaf in variant.items() if leaf != paper[key]} == DIFFERENCE[name]


def test_every_variant_is_compared_with_the_scenario_paper() -> None:
    assert set(NAMES) == set(DIFFERENCE) | {"paper"}


def test_the_rate_and_the_burst_ratio_of_a_scenario_replace_the_arrivals_of_its_recipe() -> None:
    scenario, path = load_scenario(str(ROOT / "scenarios" / "paper.yaml"))
    worlds = {
        key: build_world(smaller(scenario, limit=2000, rate_rps=rate, burst_ratio=ratio), path)
        for key, rate, ratio in (("slow", 4.0, 1.0), ("fast", 8.0, 1.0), ("bursty", 4.0, 6.0))
    }
    spans = {key: world.known.arrival_ps[-1] / 1e12 for key, world in worlds.items()}
    assert spans["slow"] == pytest.approx(500, rel=0.07)
    assert spans["fast"] == pytest.approx(spans["slow"] / 2, rel=1e-6)
    gaps = {key: np.diff(world.known.arrival_ps) for key, world in worlds.items()}
    assert gaps["slow"].std() / gaps["slow"].mean() == pytest.approx(1, abs=0.08)
    assert gaps["bursty"].std() / gaps["bursty"].mean() > 1.3
    assert np.array_equal(worlds["slow"].known.prompt_tokens, worlds["bursty"].known.prompt_tokens)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"trace": "quickstart", "rate_rps": 2.0}, "rate_rps = 2; needs a recipe; use rate_scale with a trace"),
        ({"recipe": "paper", "burst_ratio": 3.0}, "burst_ratio = 3; needs rate_rps"),
    ],
)
def test_rates_that_nothing_can_have_are_refused(workload: dict[str, Any], message: str) -> None:
    data = load_scenario("quickstart")[0].model_dump()
    data["workload"] = workload
    with pytest.raises(ValueError, match=message):
        Scenario.model_validate(data)


def test_a_rate_for_a_recipe_without_a_number_of_requests_is_an_error(tmp_path: Path) -> None:
    scenario, _ = load_scenario("quickstart")
    data = scenario.model_dump()
    data["workload"] = {"recipe": "r.yaml", "rate_rps": 2.0}
    (tmp_path / "r.yaml").write_text(
        "name: r\nseed: 1\narrivals: {kind: trace, file: t.parquet}\n"
        "lengths: {kind: drawn, prompt: {median: 9, sigma: 1}, answer: {median: 9, sigma: 1}}\n"
    )
    with pytest.raises(ConfigError, match=r"r\.yaml: requests is missing; workload\.rate_rps needs it"):
        build_world(Scenario.model_validate(data), tmp_path / "s.yaml")


# ---- the recipe ------------------------------------------------------------------------------------------------


def test_the_recipe_of_the_paper_draws_the_requests_of_the_quickstart_recipe(recipe: Recipe) -> None:
    other = load_recipe(RECIPE.with_name("quickstart.yaml"))
    skipped = {"name": True, "predictions": True}
    assert recipe.model_dump(exclude=skipped) == other.model_dump(exclude=skipped)
    assert other.predictions is None


def test_predicted_lengths_have_the_mean_of_the_answers_and_know_half_of_their_deviation(
    large: Trace, mix: Mix
) -> None:
    assert large.task is not None
    for number, name in enumerate(large.task_names):
        rows, sigma = large.task == number, mix.tasks[name].answer.sigma
        for model, truth in large.output_tokens_by_model.items():
            expected = large.predicted_output_tokens_by_model[model]
            assert expected[rows].mean() == pytest.approx(truth[rows].mean(), rel=0.03)
            logs = np.log(expected[rows])
            assert logs.std() == pytest.approx(np.hypot(0.5 * sigma, 0.15), rel=0.04)
            slope = np.polyfit(np.log(truth[rows]), logs, 1)[0]
            assert slope == pytest.approx(0.5, abs=0.03)


def test_predicted_qualities_know_half_of_the_shared_and_less_of_the_own_difficulty(large: Trace, mix: Mix) -> None:
    assert large.task is not None
    rows = large.task == large.task_names.index("writingprompts")  # far from both ends, where nothing is clipped
    errors = {}
    for model, truth in large.quality_by_model.items():
        expected = large.predicted_quality_by_model[model]
        assert expected[rows].mean() == pytest.approx(mix.tasks["writingprompts"].quality[model], abs=0.005)
        assert expected[rows].std() == pytest.approx(np.sqrt(0.06**2 + 0.03**2 + 0.04**2), rel=0.04)
        errors[model] = (truth - expected)[rows]
    # What is left: half of the shared part, 0.7 of the own part and the noise; the first is common to the models.
    assert errors["Qwen3-8B"].std() == pytest.approx(np.sqrt(0.06**2 + 0.07**2 + 0.04**2), rel=0.04)
    common = np.corrcoef(errors["Qwen3-8B"], errors["Qwen3-32B"])[0, 1]
    assert common == pytest.approx(0.06**2 / (0.06**2 + 0.07**2 + 0.04**2), abs=0.04)


def test_predictions_survive_the_way_through_a_file(recipe: Recipe, tmp_path: Path) -> None:
    trace = make_trace(recipe.model_copy(update={"requests": 50}))
    write_trace(trace, tmp_path / "t.parquet")
    again = read_trace(tmp_path / "t.parquet")
    assert again.equals(trace)
    assert again.predicted_quality_by_model.keys() == trace.quality_by_model.keys()


def test_predictions_have_a_random_stream_of_their_own(recipe: Recipe) -> None:
    blind = recipe.model_copy(update={"predictions": None})
    told, untold = make_trace(recipe), make_trace(blind)
    assert untold.predicted_quality_by_model == untold.predicted_output_tokens_by_model == {}
    for model in told.quality_by_model:
        assert np.array_equal(told.quality_by_model[model], untold.quality_by_model[model])
        assert np.array_equal(told.output_tokens_by_model[model], untold.output_tokens_by_model[model])
    assert np.array_equal(told.arrival_ns, untold.arrival_ns)


def test_predictions_belong_to_tasks(tmp_path: Path) -> None:
    text = (
        "name: r\nseed: 1\nrequests: 3\nrate_rps: 1\n"
        "lengths: {kind: drawn, prompt: {median: 9, sigma: 1}, answer: {median: 9, sigma: 1}}\n"
        "predictions:\n  length: {known: 0.5, noise: 0.1}\n"
        "  quality: {known_shared: 1, known_own: 1, noise: 0}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match="predictions belongs to tasks; give either tasks or lengths"):
        load_recipe(tmp_path / "r.yaml")


def test_routers_know_what_the_trace_predicts_and_the_rest_by_its_means() -> None:
    scenario, path = load_scenario(str(ROOT / "scenarios" / "paper.yaml"))
    world = build_world(smaller(scenario), path)
    trace = make_trace(load_recipe(RECIPE)).head(200)
    models = [spec.model for spec in world.instances]
    for column, model in enumerate(models):
        expected = trace.predicted_output_tokens_by_model[model]
        assert np.array_equal(world.known.predicted_output_tokens[:, column], expected)
        assert np.array_equal(world.known.predicted_quality[:, column], trace.predicted_quality_by_model[model])
    assert "routers know the quality as the trace predicts it per request" in world.assumptions
    assert not any("means" in text for text in world.assumptions)
    plain = build_world(*load_scenario("quickstart"))
    assert "routers predict the quality by the trace's own means per task and model" in plain.assumptions


# ---- the belief ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-0.6b-h100", "qwen3-8b-h100", "qwen3-32b-tp2-h100"])
def test_the_served_fit_is_plain_eq_9_and_within_five_percent_of_served_steps(name: str) -> None:
    card = load_card(ROOT / "calibration" / f"{name}.json")
    fit = card.fits["eq9_served"]
    assert fit.b1x_s == fit.b4_s == fit.b5_s == 0
    assert fit.held_out_mape is not None
    assert 0.02 < fit.held_out_mape["all"] < 0.05  # noise alone makes 0.024
    assert any(each.field == "fits.eq9_served" and "simulated" in each.note for each in card.assumptions)


def test_the_slope_of_the_targets_is_a_field_of_the_recipe(recipe: Recipe) -> None:
    printed, steep = make_trace(recipe), make_trace(recipe.model_copy(update={"slo_ms_per_token": 0.0965}))
    ms = steep.slo_ttft_ns / 1e6
    line = 155 + 0.0965 * steep.prompt_tokens
    inside = line < 1050
    assert np.allclose(ms[inside], line[inside], rtol=0.03, atol=5)
    assert ms.max() == 1120
    assert printed.slo_ttft_ns.max() / 1e6 < 210
