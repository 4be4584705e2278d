"""What routers believe in a run: means, a predictor's outputs, errors on purpose."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor_tables import predictor
from simcluster.errors import ConfigError, PredictorError
from simcluster.experiment.build import build_world
from simcluster.predict.heads import Rounds
from simcluster.predict.predictor import Predictor
from simcluster.predict.train import train_predictor
from simcluster.scenario import Scenario, load_scenario
from simcluster.world import World
from small_cluster import make_card, make_world, scenario_data

PRICE = {"input_usd_per_mtok": 10.0, "output_usd_per_mtok": 20.0}
N = 40


def columns(trained: Predictor | None, texts: tuple[str, ...] = ()) -> dict[str, Any]:
    base: dict[str, Any] = {
        "arrival_ns": [k * 10**8 for k in range(N)],
        "prompt_tokens": [20 + k for k in range(N)],
        "output_tokens": [5 + k for k in range(N)],
        "task": ["easy", "hard"] * (N // 2),
    }
    return base if trained is None else base | {"prompt": list(texts[:N])}


def world(folder: Path, trace: dict[str, Any], models: tuple[str, ...] = ("m1", "m2"), **routing: Any) -> World:
    return scenario_and_world(folder, trace, models, **routing)[1]


def scenario_and_world(
    folder: Path, trace: dict[str, Any], models: tuple[str, ...] = ("m1", "m2"), **routing: Any
) -> tuple[Scenario, World]:
    for model in models:
        if not (folder / f"{model}.json").exists():
            make_card(folder, model, model=model)
    instances = [{"card": f"{model}.json", "price": PRICE} for model in models]
    return make_world(folder, trace, scenario_data(instances, routing=routing))


def per_instance(found: World, values: Any) -> Any:
    return values[:, found.known.group_of_instance]


def lengths(found: World) -> Any:
    return per_instance(found, found.known.predicted_output_tokens)


def test_it_is_told_how_far_predicting_is_and_nothing_without_a_predictor(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    trained.save(tmp_path / "p.json")
    trace = columns(trained, table.prompts)
    routings: tuple[tuple[dict[str, str], list[tuple[int, int]]], ...] = (({"predictor": "p.json"}, [(1, N)]), ({}, []))
    for routing, expected in routings:
        scenario, _ = scenario_and_world(tmp_path, trace, **routing)
        told: list[tuple[int, int]] = []
        build_world(scenario, tmp_path / "small.yaml", lambda done, total, to=told: to.append((done, total)))  # type: ignore[misc]
        assert told == expected


def test_a_predictor_fills_what_routers_believe(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    trained.save(tmp_path / "p.json")
    found = world(tmp_path, columns(trained, table.prompts), ("m2", "m1", "m2"), predictor="p.json", cost_weight=1e-3)
    predict = trained.for_models(["m2", "m1", "m2"])
    qualities = per_instance(found, found.known.predicted_quality)
    utilities = per_instance(found, found.known.predicted_utility)
    for k in range(N):
        quality, length = predict(table.prompts[k], None)
        expected = np.maximum(np.rint(length), 1)
        assert lengths(found)[k].tolist() == expected.tolist()
        assert qualities[k].tolist() == quality.tolist()
        cost = (20 + k) * 10.0 + expected * 20.0
        assert utilities[k] == pytest.approx(quality - 1e-3 * cost)
    assert found.inputs["predictor_sha256"] == hashlib.sha256((tmp_path / "p.json").read_bytes()).hexdigest()
    assert any("by p.json, trained on a test" in note for note in found.assumptions)


def test_what_is_true_does_not_depend_on_what_is_believed(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    trained.save(tmp_path / "p.json")
    trace = columns(trained, table.prompts)
    means, told = world(tmp_path, trace), world(tmp_path, trace, predictor="p.json")
    assert np.array_equal(means.truth.output_tokens, told.truth.output_tokens)
    assert np.array_equal(means.truth.quality, told.truth.quality)
    assert not np.array_equal(lengths(means), lengths(told))


def test_predictions_do_not_look_at_the_true_answers(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    trained.save(tmp_path / "p.json")
    trace = columns(trained, table.prompts)
    other = trace | {"output_tokens": [900 - k for k in range(N)]}
    found = [world(tmp_path, each, predictor="p.json") for each in (trace, other)]
    assert np.array_equal(lengths(found[0]), lengths(found[1]))


def test_answers_are_expected_to_end_at_the_clients_limit(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    trained.save(tmp_path / "p.json")
    trace = columns(trained, table.prompts) | {"max_tokens": [3] * N}
    assert lengths(world(tmp_path, trace, predictor="p.json")).max() == 3


def test_a_trace_without_prompts_cannot_be_predicted(tmp_path: Path) -> None:
    predictor(tmp_path)[0].save(tmp_path / "p.json")
    with pytest.raises(PredictorError, match=r"routing.predictor = 'p.json'; the trace has no column prompt"):
        world(tmp_path, columns(None), predictor="p.json")


def test_a_model_that_the_predictor_does_not_know_is_named(tmp_path: Path) -> None:
    trained, table = predictor(tmp_path)
    trained.save(tmp_path / "p.json")
    with pytest.raises(PredictorError, match=r"small.yaml: routing.predictor = 'p.json'; the model 'm7' was not in"):
        world(tmp_path, columns(trained, table.prompts), ("m1", "m7"), predictor="p.json")


def test_a_predictor_that_does_not_exist_is_an_error_that_lists_what_is_shipped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"routing.predictor = 'nothing'; .*synthetic-mix"):
        world(tmp_path, columns(None), predictor="nothing")


def test_a_predictor_that_corrects_task_means_is_told_the_task_of_each_request(tmp_path: Path) -> None:
    _, table = predictor(tmp_path)
    trained = train_predictor(table, source="a test", start="task_means", rounds=Rounds(most=5))
    trained.save(tmp_path / "p.json")
    trace = columns(trained, table.prompts)
    found = world(tmp_path, trace, predictor="p.json")
    predict = trained.for_models(["m1", "m2"])
    expected = [np.rint(predict(table.prompts[k], ("easy", "hard")[k % 2])[1]).tolist() for k in range(N)]
    assert lengths(found).tolist() == expected
    with pytest.raises(PredictorError, match="it corrects task means, and the trace has no column task"):
        world(tmp_path, {name: values for name, values in trace.items() if name != "task"}, predictor="p.json")


# ---- errors on purpose -----------------------------------------------------------------------------------------


def long_answers(**more: Any) -> dict[str, Any]:
    n = 4000
    return {
        "arrival_ns": [k * 10**6 for k in range(n)],
        "prompt_tokens": [20] * n,
        "output_tokens": [100_000] * n,
    } | more


def ratio(folder: Path, trace: dict[str, Any], models: tuple[str, ...], **error: float) -> Any:
    return lengths(world(folder, trace, models, prediction_error=error)) / 100_000


def test_biased_lengths_are_the_unbiased_ones_times_the_bias(tmp_path: Path) -> None:
    assert (ratio(tmp_path, long_answers(), ("m1", "m2"), length_bias=0.5) == 0.5).all()


def test_noisy_lengths_have_the_given_spread_and_the_bias_as_their_mean(tmp_path: Path) -> None:
    found = ratio(tmp_path, long_answers(), ("m1", "m2"), length_bias=2.0, length_sigma=0.5)
    logs = np.log(found)
    n = found.size
    assert abs(logs.std() - 0.5) < 4 * 0.5 / np.sqrt(2 * n)
    assert abs(found.mean() - 2) < 4 * found.std() / np.sqrt(n)
    assert abs(np.corrcoef(logs.T)[0, 1]) < 4 / np.sqrt(len(found))


def test_an_error_belongs_to_the_request_and_the_model(tmp_path: Path) -> None:
    trace = long_answers()
    error = {"length_sigma": 0.5}
    both = ratio(tmp_path, trace, ("m1", "m2"), **error)
    assert np.array_equal(ratio(tmp_path, trace, ("m2", "m1", "m2"), **error), both[:, [1, 0, 1]])
    first = {name: values[:100] for name, values in trace.items()}
    assert np.array_equal(ratio(tmp_path, first, ("m1", "m2"), **error), both[:100])
    noisier = ratio(tmp_path, trace, ("m1", "m2"), length_sigma=1.0)
    assert np.corrcoef(np.log(noisier[:, 0]), np.log(both[:, 0]))[0, 1] > 0.999  # the same draws, scaled


def test_errors_say_so_and_leave_quality_and_truth_alone(tmp_path: Path) -> None:
    trace = long_answers()
    right, wrong = (
        world(tmp_path, trace, prediction_error={"length_bias": bias, "length_sigma": 0.3}) for bias in (1.0, 0.5)
    )
    assert np.array_equal(right.known.predicted_quality, wrong.known.predicted_quality)
    assert np.array_equal(right.truth.output_tokens, wrong.truth.output_tokens)
    assert any("wrong on purpose: times 0.5, log-normal 0.3" in note for note in wrong.assumptions)
    assert not any("on purpose" in note for note in world(tmp_path, trace).assumptions)


def test_means_are_the_default() -> None:
    scenario, _ = load_scenario("quickstart")
    assert scenario.routing.predictor == "means"
    assert scenario.routing.prediction_error.length_bias == 1
