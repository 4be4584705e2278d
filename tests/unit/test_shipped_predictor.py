"""The shipped predictor: made again byte for byte, and used in a run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from command_line import run_command
from simcluster.experiment.build import build_world
from simcluster.predict.predictor import load_predictor
from simcluster.predict.tokens import EstimatedTokens
from simcluster.scenario import load_scenario
from simcluster.workload.synth import load_recipe, make_trace

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "traces" / "predictors" / "synthetic-mix.json"


def test_the_documented_commands_make_the_shipped_predictor_again_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FILE.parent / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block is not None
    commands = [shlex.split(line) for line in block.group(1).splitlines()]
    made = tmp_path / FILE.relative_to(ROOT)
    made.parent.mkdir(parents=True)
    (tmp_path / "traces" / "recipes").symlink_to(ROOT / "traces" / "recipes")
    monkeypatch.chdir(tmp_path)
    for name, *arguments in commands:
        assert name == "simcluster"
        assert run_command(*arguments, "--quiet") == (0, "", "")
    assert made.read_bytes() == FILE.read_bytes()
    assert len(FILE.read_bytes()) < 2**20


def test_it_says_that_it_was_trained_on_synthetic_prompts() -> None:
    assert "synthetic mix" in load_predictor(FILE).origin.source
    assert "invented" in load_predictor(FILE).origin.source


def test_training_and_runs_draw_different_requests_of_the_same_mix() -> None:
    training, runs = (
        load_recipe(ROOT / f"traces/recipes/{name}.yaml") for name in ("predictor-training", "quickstart-prompts")
    )
    quickstart = load_recipe(ROOT / "traces/recipes/quickstart.yaml")
    assert training.mix == runs.mix == quickstart.mix
    assert training.seed != load_scenario("quickstart-predictor")[0].seed
    assert runs.seed == quickstart.seed
    with_texts, without = make_trace(runs), make_trace(quickstart)
    assert np.array_equal(with_texts.output_tokens, without.output_tokens)
    assert np.array_equal(with_texts.arrival_ns, without.arrival_ns)


def test_invented_prompts_have_the_tokens_of_their_requests_and_sometimes_state_a_length() -> None:
    trace = make_trace(
        load_recipe(ROOT / "traces/recipes/quickstart-prompts.yaml").model_copy(update={"requests": 400})
    )
    assert trace.prompt is not None
    counts = np.array([len(EstimatedTokens().ids(text)) for text in trace.prompt])
    # an instruction may have one token more than the shortest prompts, a prompt of one more token no second sentence
    assert np.abs(counts - trace.prompt_tokens).max() <= 1
    stated = [re.search(r"Use about (\d+) words\.$", text) for text in trace.prompt]
    rows = [k for k, found in enumerate(stated) if found]
    assert 0.4 < len(rows) / len(trace) < 0.6
    words = np.array([int(found.group(1)) for found in stated if found])
    answers = np.exp(np.mean([np.log(values[rows]) for values in trace.output_tokens_by_model.values()], axis=0))
    assert np.corrcoef(np.log(words), np.log(answers))[0, 1] > 0.97
    longer = make_trace(
        load_recipe(ROOT / "traces/recipes/quickstart-prompts.yaml").model_copy(update={"requests": 500})
    )
    assert longer.prompt is not None
    assert longer.prompt[:400].tolist() == trace.prompt.tolist()


def test_a_run_with_it_predicts_lengths_better_than_the_means_do() -> None:
    scenario, path = load_scenario("quickstart-predictor")
    means = scenario.model_copy(update={"routing": scenario.routing.model_copy(update={"predictor": "means"})})
    errors = {}
    for name, each in (("predictor", scenario), ("means", means)):
        world = build_world(each, path)
        lengths = world.known.predicted_output_tokens
        errors[name] = float(np.mean((lengths - world.truth.output_tokens) ** 2.0))
        assert ("predictor_sha256" in world.inputs) == (name == "predictor")
    assert errors["predictor"] < 0.8 * errors["means"]
