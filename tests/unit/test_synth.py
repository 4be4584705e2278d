from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from scipy import stats

from command_line import run_command
from shared_data import shared_data
from simcluster.errors import ConfigError
from simcluster.rng import Stream, generator
from simcluster.workload import (
    DEFAULT_QUALITY,
    Trace,
    poisson_arrivals_ns,
    read_trace,
    ttft_targets_s,
    write_trace,
)
from simcluster.workload.recipe import Mix, Recipe
from simcluster.workload.synth import load_recipe, make_trace
from simcluster.workload.tasks import draw_mix

TRACES = Path(__file__).resolve().parents[2] / "traces"
RECIPE = TRACES / "recipes" / "quickstart.yaml"


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


def rows_of(trace: Trace, task: str) -> Trace:
    assert trace.task is not None
    return trace.take(trace.task == trace.task_names.index(task))


# ---- the committed file --------------------------------------------------------------------------


def test_the_recipe_gives_the_committed_trace(recipe: Recipe) -> None:
    assert make_trace(recipe).equals(read_trace(TRACES / "quickstart.parquet"))


def test_the_recipe_gives_the_committed_file_byte_for_byte(recipe: Recipe, tmp_path: Path) -> None:
    committed, made = TRACES / "quickstart.parquet", tmp_path / "made.parquet"
    write_trace(make_trace(recipe), made)
    writers = [pq.ParquetFile(path).metadata.created_by for path in (committed, made)]
    if writers[0] != writers[1]:
        pytest.skip(f"written by {writers[0]}, and {writers[1]} may encode the same rows otherwise")
    assert made.read_bytes() == committed.read_bytes()


def test_the_committed_trace_is_small_and_complete() -> None:
    path = TRACES / "quickstart.parquet"
    trace = read_trace(path)
    assert path.stat().st_size < 200_000
    assert len(trace) == 2_000
    assert trace.notes == ()
    assert trace.task_names == ("alpaca", "govreport", "hotpotqa", "writingprompts")
    assert set(trace.output_tokens_by_model) == set(trace.quality_by_model) == set(DEFAULT_QUALITY)
    assert (trace.slo_ttft_ns > 0).all()
    assert "synthetic" in trace.metadata["source"]
    assert trace.metadata["seed"] == "1"
    kept = Recipe.model_validate_json(trace.metadata["recipe"])
    assert kept.model_dump() == load_recipe(RECIPE).model_dump()


def test_default_qualities_are_the_means_over_the_tasks_of_the_recipe(mix: Mix) -> None:
    for model, quality in DEFAULT_QUALITY.items():
        means = [task.quality[model] for task in mix.tasks.values()]
        assert quality == pytest.approx(np.mean(means), abs=1e-12)


# ---- the distributions ---------------------------------------------------------------------------


def test_tasks_come_in_the_shares_of_their_weights(large: Trace, mix: Mix) -> None:
    for name, task in mix.tasks.items():
        # Standard error 0.0022.
        assert len(rows_of(large, name)) / len(large) == pytest.approx(task.weight, abs=0.009)


def test_lengths_have_the_medians_and_spreads_of_the_recipe(large: Trace, mix: Mix) -> None:
    for name, task in mix.tasks.items():
        rows = rows_of(large, name)
        assert np.median(rows.prompt_tokens) == pytest.approx(task.prompt.median, rel=0.04)
        assert task.prompt.high is not None
        assert rows.prompt_tokens.min() >= task.prompt.low
        assert rows.prompt_tokens.max() <= task.prompt.high
        for model, factor in mix.length_factor.items():
            answers = rows.output_tokens_by_model[model]
            median = task.answer.median * mix.outscale * factor
            assert np.median(answers) == pytest.approx(median, rel=0.04)
            assert np.log(answers).std() == pytest.approx(task.answer.sigma, rel=0.04)


def test_the_answers_of_two_models_share_the_recipes_part_of_their_variance(large: Trace, mix: Mix) -> None:
    rows = rows_of(large, "writingprompts")
    logs = [np.log(rows.output_tokens_by_model[model]) for model in mix.length_factor]
    for other in logs[1:]:
        correlation = np.corrcoef(logs[0], other)[0, 1]
        assert correlation == pytest.approx(mix.length_spread.shared**2, abs=0.03)


def test_output_tokens_are_those_of_the_model_that_the_recipe_names(large: Trace) -> None:
    assert np.array_equal(large.output_tokens, large.output_tokens_by_model["Qwen3-8B"])


def test_quality_has_the_means_of_the_recipe_and_stays_within_0_and_1(large: Trace, mix: Mix) -> None:
    for name, task in mix.tasks.items():
        rows = rows_of(large, name)
        for model, mean in task.quality.items():
            quality = rows.quality_by_model[model]
            assert quality.min() >= 0
            assert quality.max() <= 1
            # Clipping at 1 takes up to 0.02 from the best models' means.
            assert quality.mean() == pytest.approx(mean, abs=0.025)
    middle = rows_of(large, "hotpotqa").quality_by_model["Qwen3-0.6B"]
    assert middle.std() == pytest.approx(np.hypot(0.12, 0.10), abs=0.005)


def test_targets_are_those_of_the_papers_rule_for_the_recipes_seed(large: Trace, recipe: Recipe) -> None:
    targets_s = ttft_targets_s(large.prompt_tokens, recipe.seed)
    assert np.array_equal(large.slo_ttft_ns, np.rint(targets_s * 1e9))


def test_a_longer_trace_begins_with_the_same_requests(large: Trace, recipe: Recipe) -> None:
    short = make_trace(recipe)
    head = large.head(len(short))
    for name in ("arrival_ns", "prompt_tokens", "output_tokens", "task", "slo_ttft_ns"):
        assert np.array_equal(getattr(short, name), getattr(head, name))
    assert np.array_equal(short.quality_by_model["Qwen3-8B"], head.quality_by_model["Qwen3-8B"])


def test_each_kind_of_draw_has_its_own_stream(recipe: Recipe, mix: Mix) -> None:
    # C043, the part before the router: what belongs to a request does not depend on the rest of the recipe.
    base = draw_mix(mix, 500, recipe.seed)
    softer = recipe.model_copy(update={"rate_rps": 2.0, "outscale": 1.0, "slo_scale": 2.0})
    assert softer.mix is not None
    other = draw_mix(softer.mix, 500, recipe.seed)
    assert np.array_equal(base.task, other.task)
    assert np.array_equal(base.prompt_tokens, other.prompt_tokens)
    assert np.array_equal(base.quality["Qwen3-8B"], other.quality["Qwen3-8B"])
    replica = draw_mix(mix, 500, recipe.seed, replication=1)
    assert not np.array_equal(base.prompt_tokens, replica.prompt_tokens)


# ---- public prompts ------------------------------------------------------------------------------


def public_prompts(name: str) -> dict[str, list[str | int]]:
    data = shared_data()
    if data is None:
        pytest.skip("the shared data is not here")
    columns: dict[str, list[str | int]] = pq.read_table(data / "prompts" / name).to_pydict()
    return columns


def test_hotpotqa_prompts_have_the_median_of_the_public_set_within_5_percent(
    large: Trace,
) -> None:
    public = public_prompts("hotpotqa_distractor_100.parquet")["prompt_tokens_qwen"]
    ours = np.median(rows_of(large, "hotpotqa").prompt_tokens)
    assert ours == pytest.approx(float(np.median(np.array(public, dtype=int))), rel=0.05)


def test_alpaca_prompts_have_the_median_of_the_public_set_in_its_template_within_5_percent(
    large: Trace,
) -> None:
    public = public_prompts("alpaca.parquet")
    # Alpaca's own prompt template takes 24 tokens around an instruction and 36 around an
    # instruction with an input; counted with the Qwen3 tokenizer, its BPE merges included.
    template = np.array([36 if text else 24 for text in public["input"]])
    whole = np.array(public["prompt_tokens_qwen"], dtype=int) + template
    ours = np.median(rows_of(large, "alpaca").prompt_tokens)
    assert ours == pytest.approx(float(np.median(whole)), rel=0.05)


# ---- arrivals ------------------------------------------------------------------------------------


def test_poisson_gaps_are_exponential_with_the_mean_of_the_rate() -> None:
    arrivals = poisson_arrivals_ns(8.0, 20_000, generator(5, Stream.ARRIVALS))
    gaps_s = np.diff(arrivals, prepend=0) / 1e9
    assert arrivals.dtype == np.int64
    assert (gaps_s >= 0).all()
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=4 / np.sqrt(20_000))
    assert stats.kstest(gaps_s, "expon", args=(0, 1 / 8)).pvalue > 0.01


def test_a_higher_rate_is_the_same_process_in_faster_time() -> None:
    slow = poisson_arrivals_ns(2.0, 100, generator(1, Stream.ARRIVALS))
    fast = poisson_arrivals_ns(8.0, 100, generator(1, Stream.ARRIVALS))
    assert np.abs(slow - 4 * fast).max() <= 4


def test_no_arrivals_are_an_empty_array() -> None:
    assert poisson_arrivals_ns(1.0, 0, generator(1, Stream.ARRIVALS)).tolist() == []


@pytest.mark.parametrize(
    ("rate", "n", "message"),
    [
        (0.0, 1, "rate_rps = 0.0; must be"),
        (-1.0, 1, "must be a finite number"),
        (float("nan"), 1, "must be a finite number"),
        (1.0, -1, "n = -1; must be"),
        (1e-9, 10, "too late"),
    ],
)
def test_bad_arrival_arguments_are_refused(rate: float, n: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        poisson_arrivals_ns(rate, n, generator(1, Stream.ARRIVALS))


# ---- recipes and the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 1", "sed: 1", "seed is missing; it is required; add it (and 1 more)"),
        ("seed: 1", "seed: true", "seed = True; must be a valid integer; correct the value"),
        ("requests: 2000", "", "requests is missing; it is required; add the number of requests"),
        ("rate_rps: 8.0", "rate_rps: 0", "rate_rps = 0; must be greater than 0; correct the value"),
        ("rate_rps: 8.0", "", "give exactly one of rate_rps and arrivals"),
        ("outscale: 1.5", "outscale: .inf", "outscale = inf; must be a finite number"),
        ("weight: 0.25", "wait: 1", "tasks.alpaca.weight is missing"),
        ("low: 12,", "low: 401,", "tasks.alpaca.prompt: high = 400 is below low = 401"),
        ("Qwen3-8B: 0.80", "Qwen3-9B: 0.80", "tasks.alpaca.quality names"),
        ("Qwen3-8B: 0.80", "Qwen3-8B: 1.2", "tasks.alpaca.quality.Qwen3-8B = 1.2; must be less"),
        ("output_tokens_of: Qwen3-8B", "output_tokens_of: x", "output_tokens_of = 'x'; must be one of"),
        ("output_tokens_of: Qwen3-8B", "", "output_tokens_of is missing; it is required without lengths"),
        ("own: 0.6}", "own: 0.7}", "shared^2 + own^2 = 1.13; must be 1"),
        ("seed: 1", "seed: 1\nmore: 2", "more = 2; unknown key; allowed here: arrivals, length_factor"),
        ("seed: 1", "seed: 1\nseed: 2", "the key seed is given twice"),
        ("tasks:", "lengths: {kind: file, file: x}\ntasks:", "belongs to tasks; give either tasks or lengths"),
        ("rate_rps: 8.0", "arrivals: {kind: gama, rate_rps: 1}", "arrivals.kind = 'gama'; must be one of 'poisson', "),
        ("rate_rps: 8.0", "arrivals: {rate_rps: 1}", "arrivals.kind is missing; it is required"),
        ("rate_rps: 8.0", "arrivals: {kind: gamma, rate_rps: 1, bursty: 1}", "arrivals.burstiness is missing"),
        (
            "rate_rps: 8.0",
            "arrivals: {kind: constant, rate_rps: 1, rte: 1}",
            "arrivals.rte = 1; unknown key; allowed",
        ),
        (
            "rate_rps: 8.0",
            "arrivals: {kind: closed, concurrency: 2}\nsessions: {turns: {median: 2, sigma: 0}}",
            "arrivals of kind closed have no conversations",
        ),
        ("tasks:", "tasks: [", "not valid YAML"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = RECIPE.read_text()
    assert old in text
    path = tmp_path / "r.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there_or_not_a_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="found list; must be a mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="found an empty file"):
        load_recipe(tmp_path / "empty.yaml")


def test_the_command_writes_a_trace_and_reports_errors_in_one_line(tmp_path: Path) -> None:
    small = yaml.safe_load(RECIPE.read_text()) | {"requests": 5}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(small))
    code, text, errors = run_command("trace", "synth", tmp_path / "r.yaml", "--out", tmp_path / "t.parquet")
    assert (code, errors) == (0, "")
    assert "5 requests" in text
    assert len(read_trace(tmp_path / "t.parquet")) == 5
    code, text, errors = run_command("trace", "synth", tmp_path / "none.yaml", "--out", tmp_path / "u.parquet")
    assert (code, text) == (2, "")
    assert errors.count("\n") == 1
    assert "none.yaml" in errors
    assert not (tmp_path / "u.parquet").exists()


def test_the_command_replaces_the_seed(tmp_path: Path) -> None:
    small = yaml.safe_load(RECIPE.read_text()) | {"requests": 5}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(small))
    for seed in (1, 7):
        run_command("trace", "synth", tmp_path / "r.yaml", "--seed", seed, "--out", tmp_path / f"{seed}.parquet", "-q")
    seven = read_trace(tmp_path / "7.parquet")
    assert seven.metadata["seed"] == "7"
    assert not np.array_equal(seven.prompt_tokens, read_trace(tmp_path / "1.parquet").prompt_tokens)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(small | {"seed": 7}))
    run_command("trace", "synth", tmp_path / "r.yaml", "--out", tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "7.parquet").read_bytes()
