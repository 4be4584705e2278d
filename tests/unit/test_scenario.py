"""Scenario files: what is wrong is said in one line, what is right has an effect (C072)."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from simcluster.engine_options import EngineOptions
from simcluster.errors import ConfigError, SimclusterError
from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import (
    BelievedModelSpec,
    Instance,
    Measure,
    Noise,
    Output,
    PredictionError,
    Price,
    Routing,
    Scenario,
    Slo,
    TrueModelSpec,
    Workload,
    load_scenario,
    override,
)
from simcluster.shipped import shipped_names
from simcluster.yaml_files import load_yaml
from small_cluster import frame, make_card, make_world, scenario_data

GOOD = """\
name: good
workload: {trace: quickstart, limit: 3}
cluster:
  instances:
    - {card: qwen3-8b-h100, price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
"""
INSTANCE = "    - {card: qwen3-8b-h100, price"
NESTED = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
NESTED += [f"x{k}: &x{k} [{', '.join([f'*x{k - 1}'] * 9)}]" for k in range(1, 10)]

# what is wrong: (text of the file, what the message must contain)
BAD: dict[str, tuple[str | bytes, list[str]]] = {
    "an empty file": ("", ["found an empty file", "mapping with name, workload and cluster"]),
    "a list at the top": ("- a\n- b\n", ["found list", "must be a mapping"]),
    "a number at the top": ("5\n", ["found int", "must be a mapping"]),
    "garbage": ("{{{", ["not valid YAML", "line 1", "correct the file"]),
    "tabs": ("name: x\n\tworkload: {}\n", ["not valid YAML", "'\\t'", "line 2"]),
    "not UTF-8": (GOOD.encode() + b"description: \xff\n", ["cannot be read", "0xff", "give a YAML file"]),
    "a NUL byte": (GOOD + "description: a\0b\n", ["not valid YAML", "#x0000"]),
    "a key given twice": (GOOD + "name: again\n", ["the key name is given twice", "line 6"]),
    "a key given twice inside": (GOOD.replace("limit: 3", "limit: 3, limit: 4"), ["the key limit is given twice"]),
    "a key that is no text": (GOOD + "1: 2\n", ["the key 1 is not text"]),
    "two documents": (GOOD + "---\n" + GOOD, ["not valid YAML", "another document"]),
    "a Python object": (GOOD + "description: !!python/name:os.system\n", ["not valid YAML", "python/name"]),
    "an alias to nothing": (GOOD + "description: *nowhere\n", ["not valid YAML", "nowhere"]),
    "brackets without end": ("[" * 800, ["not valid YAML", "recursion"]),
    "a list of lists of lists": (
        "\n".join(NESTED) + "\n" + GOOD.replace("good", "*x9"),
        ["name = [[[", "valid string"],
    ),
    "a list that holds itself": (GOOD + "assumptions: &a [*a]\n", ["assumptions[0] = [", "must be a valid string"]),
    "half a surrogate pair": (GOOD + 'description: "\\ud800"\n', ["not valid YAML", "surrogates not allowed"]),
    "a tag that does not fit": (GOOD + "description: !!timestamp x\n", ["not valid YAML"]),
    "a truth value that is none": (GOOD + "description: !!bool maybe\n", ["not valid YAML"]),
    "a number without digits": (GOOD + 'seed: !!int ""\n', ["not valid YAML"]),
    "no workload": ("name: x\ncluster: {}\n", ["workload is missing", "required", "add it", "(and 1 more)"]),
    "no instance": (
        "name: x\nworkload: {trace: t}\ncluster: {instances: []}\n",
        ["cluster.instances = []", "at least 1 item"],
    ),
    "no price": (GOOD.replace("price: {", "xx: {"), ["cluster.instances[0].price is missing"]),
    "an empty section": (GOOD + "measure:\n", ["measure = None", "must be a mapping"]),
    "another version": (GOOD + "schema_version: 2\n", ["schema_version = 2", "must be 1"]),
    "a name with blanks": (GOOD.replace("good", "so good"), ["name = 'so good'", "pattern"]),
    "an unknown key": (GOOD + "sed: 1\n", ["sed = 1", "unknown key", "did you mean seed?"]),
    "an unknown key far from all": (GOOD + "output: {zzz: 1}\n", ["output.zzz = 1", "allowed here: decisions, "]),
    "an unknown engine option, C072": (
        GOOD.replace(INSTANCE, INSTANCE.replace("price", "engine: {max_num_seq: 8}, price")),
        ["cluster.instances[0].engine.max_num_seq = 8", "unknown key", "did you mean max_num_seqs?"],
    ),
    "an engine option of 0": (
        GOOD.replace(INSTANCE, INSTANCE.replace("price", "engine: {max_num_seqs: 0}, price")),
        ["cluster.instances[0].engine.max_num_seqs = 0", "must be greater than or equal to 1"],
    ),
    "a text for a number": (GOOD + "seed: one\n", ["seed = 'one'", "must be a valid integer", "correct the value"]),
    "a fraction for a count": (GOOD + "routing: {replicas: 1.5}\n", ["routing.replicas = 1.5", "valid integer"]),
    "yes for a number": (GOOD + "routing: {replicas: yes}\n", ["routing.replicas = 'yes'", "valid integer"]),
    "true for a number": (GOOD + "routing: {replicas: true}\n", ["routing.replicas = True", "valid integer"]),
    "a number for a switch": (GOOD + "measure: {drain: 1}\n", ["measure.drain = 1", "must be a valid boolean"]),
    "a date for a text": (GOOD + "description: 2030-01-01\n", ["description = datetime.date(2030", "valid string"]),
    "a huge number": (GOOD + f"seed: 0x{'f' * 5000}\n", ["seed = a huge number", "less than or equal to"]),
    "too many digits": (GOOD + f"seed: {'9' * 5000}\n", ["not valid YAML", "digits"]),
    "a negative number": (GOOD + "seed: -1\n", ["seed = -1", "must be greater than or equal to 0"]),
    "a negative price": (
        GOOD.replace("mtok: 1", "mtok: -1"),
        ["price.input_usd_per_mtok = -1", "greater than or equal"],
    ),
    "NaN": (GOOD + "measure: {horizon_s: .nan}\n", ["measure.horizon_s = nan", "must be a finite number"]),
    "infinity": (GOOD + "measure: {horizon_s: .inf}\n", ["measure.horizon_s = inf", "must be a finite number"]),
    "beyond all floats": (GOOD + "measure: {warmup_s: 1e999}\n", ["measure.warmup_s = inf", "finite"]),
    "beyond the clock": (GOOD + "measure: {horizon_s: 1e12}\n", ["measure.horizon_s = 1000000000000.0", "4000000"]),
    "a rate of 0": (GOOD.replace("limit: 3", "rate_scale: 0"), ["workload.rate_scale = 0", "must be greater than"]),
    "a rate of almost 0": (
        GOOD.replace("limit: 3", "rate_scale: 1e-300"),
        ["workload.rate_scale = 1e-300", "0.000001"],
    ),
    "no sampling interval": (
        GOOD + "output: {sample_interval_s: 1e-15}\n",
        ["output.sample_interval_s = 1e-15", "0.001"],
    ),
    "refreshes without pause": (
        GOOD + "routing: {refresh_interval_s: 1e-13}\n",
        ["routing: refresh_interval_s = 1e-13", "must be 0 or at least 1e-6"],
    ),
    "a publish delay of nothing": (
        GOOD + "routing: {publish_delay_s: 1e-13}\n",
        ["routing: publish_delay_s = 1e-13", "must be 0 or at least 1e-6"],
    ),
    "a warm-up as long as the run": (
        GOOD + "measure: {horizon_s: 5, warmup_s: 5}\n",
        ["measure: warmup_s = 5", "must be below horizon_s = 5", "change one"],
    ),
    "an unknown choice": (GOOD + "routing: {tie: best}\n", ["routing.tie = 'best'", "'index', 'rotate' or 'random'"]),
    "a wrong target": (
        GOOD + "slo: {ttft: fast}\n",
        ["slo.ttft = 'fast'", "'trace', 'paper' or 'none' or a valid number"],
    ),
    "a target of 0": (GOOD + "slo: {ttft: 0}\n", ["slo.ttft = 0", "or greater than 0"]),
    "one policy without a list": (GOOD + "routing: {policies: sfs}\n", ["routing.policies = 'sfs'", "valid list"]),
    "trace and recipe": (
        GOOD.replace("limit: 3", "recipe: quickstart"),
        ["workload: found both of trace and recipe", "give exactly one"],
    ),
    "neither trace nor recipe": (
        GOOD.replace("trace: quickstart, ", ""),
        ["workload: found neither of trace and recipe", "give exactly one"],
    ),
    # what shows only when the files that it names are read
    "an unknown card": (
        GOOD.replace("8b-h100", "8b-h10"),
        ["cluster.instances[0].card = 'qwen3-8b-h10'", "no such file", "did you mean qwen3-8b-h100?"],
    ),
    "an unknown trace": (
        GOOD.replace("quickstart", "quickstrat"),
        ["workload.trace = 'quickstrat'", "no such file", "did you mean quickstart?"],
    ),
    "a folder for a trace": (GOOD.replace("quickstart", "."), ["workload.trace = '.'", "is a folder", ".parquet"]),
    "a fit that the card lacks": (
        GOOD.replace(INSTANCE, INSTANCE.replace("qwen3-8b-h100", "u.json, true_model: {fit: hinge}, quality: 1")),
        ["cluster.instances[0].true_model.fit = 'hinge'", "the card u has eq9"],
    ),
    "an unknown fit": (
        GOOD.replace(INSTANCE, INSTANCE.replace("price", "believed_model: {fit: eq10}, price")),
        ["cluster.instances[0].believed_model.fit = 'eq10'", "must be 'eq9', 'hinge', 'extended' or 'eq9_served'"],
    ),
    "two instances of one name": (
        GOOD + INSTANCE + ": {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}\n",
        ["cluster.instances: the name 'qwen3-8b-h100' is used twice", "must differ", "give each entry a name"],
    ),
    "a model without a known quality": (
        GOOD.replace("qwen3-8b-h100", "u.json"),
        ["cluster.instances[0].quality is missing", "not for M", "add quality"],
    ),
    "a token budget below the longest prompt without chunks": (
        GOOD.replace(
            INSTANCE,
            INSTANCE.replace("price", "engine: {enable_chunked_prefill: false, max_num_batched_tokens: 9}, price"),
        ),
        ["cluster.instances[0].engine.max_num_batched_tokens = 9", "at least max_model_len = 40960", "raise it"],
    ),
}


# ---- what is wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", BAD)
def test_a_bad_scenario_is_an_error_of_one_line_that_names_file_place_and_fix(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, parts = BAD[what]
    monkeypatch.chdir(tmp_path)
    make_card(tmp_path)
    Path("s.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SimclusterError) as caught:
        build_world(*load_scenario("s.yaml"))
    message = str(caught.value)
    assert message.startswith("s.yaml: ")
    assert "\n" not in message
    assert len(message) < 400
    for part in parts:
        assert part in message


def test_the_good_scenario_of_these_tests_is_good(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(GOOD)
    assert len(build_world(*load_scenario(str(file))).known) == 3


def test_a_scenario_that_is_not_there_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quickstrt: no such file .*; did you mean quickstart\?"):
        load_scenario("quickstrt")
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file .*; shipped: .*quickstart"):
        load_scenario("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; give a \.yaml file"):
        load_scenario(str(tmp_path))


def test_options_of_the_command_line_obey_the_same_rules() -> None:
    scenario, _ = load_scenario("quickstart")
    with pytest.raises(ConfigError, match=r"option: workload\.rate_scale = 0; must be greater"):
        override(scenario, rate_scale=0)
    with pytest.raises(ConfigError, match=r"option: seed = -1; must be"):
        override(scenario, seed=-1)
    changed = override(scenario, rate_scale=2.0, seed=9, policies=["random"], decisions="off", trace=Path("t.parquet"))
    assert (changed.workload.rate_scale, changed.seed, changed.output.decisions) == (2.0, 9, "off")
    assert changed.routing.policies == ["random"]
    assert changed.workload.trace == str(Path("t.parquet").absolute())
    assert override(scenario) == scenario


# ---- what is read ----------------------------------------------------------------------------------------------


def read(tmp_path: Path, more: str) -> Scenario:
    file = tmp_path / "s.yaml"
    file.write_text(GOOD + more)
    return load_scenario(str(file))[0]


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    assert read(tmp_path, "routing: {cost_weight: 1e-4}\n").routing.cost_weight == 1e-4
    assert read(tmp_path, "routing: {cost_weight: 5.E-04}\n").routing.cost_weight == 5e-4
    assert read(tmp_path, "slo: {ttft: 2e-1}\n").slo.ttft == 0.2
    assert read(tmp_path, "measure: {horizon_s: 12}\n").measure.horizon_s == 12.0


def test_off_is_a_word_and_true_a_truth_value(tmp_path: Path) -> None:
    assert read(tmp_path, "output: {decisions: off}\n").output.decisions == "off"
    assert read(tmp_path, "description: no\n").description == "no"
    assert read(tmp_path, "measure: {drain: false}\n").measure.drain is False


def test_anchors_can_share_a_part(tmp_path: Path) -> None:
    more = "measure: &m {warmup_s: 3}\n"
    assert read(tmp_path, more).measure.warmup_s == 3
    text = GOOD.replace("price: {", "price: &p {") + "    - {card: qwen3-0.6b-h100, price: *p}\n"
    (tmp_path / "s.yaml").write_text(text)
    instances = load_scenario(str(tmp_path / "s.yaml"))[0].cluster.instances
    assert instances[0].price == instances[1].price


@pytest.mark.parametrize("name", shipped_names("scenarios", ".yaml"))
def test_a_scenario_with_its_defaults_filled_in_loads_again_as_the_same(name: str, tmp_path: Path) -> None:
    scenario, _ = load_scenario(name)
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(scenario.resolved(), sort_keys=False, allow_unicode=True))
    again, path = load_scenario(str(file))
    assert again == scenario
    assert again.digest() == scenario.digest()
    assert path == file


def test_the_digest_depends_on_every_value() -> None:
    scenario, _ = load_scenario("quickstart")
    assert override(scenario, seed=2).digest() != scenario.digest()


# ---- the schema ------------------------------------------------------------------------------------------------


def matches(value: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Return whether a value fits the parts of JSON Schema that pydantic writes for scenarios."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return any(matches(value, each, definitions) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kind = schema["type"]
    if kind in {"number", "integer"}:
        low, high = schema.get("minimum", -(10**400)), schema.get("maximum", 10**400)
        wanted = int if kind == "integer" else (int, float)
        return isinstance(value, wanted) and not isinstance(value, bool) and low <= value <= high
    if kind == "object":
        properties = schema["properties"]
        fits = isinstance(value, dict) and set(schema.get("required", [])) <= set(value) <= set(properties)
        return fits and all(matches(item, properties[key], definitions) for key, item in value.items())
    if kind == "array":
        return isinstance(value, list) and all(matches(item, schema["items"], definitions) for item in value)
    return isinstance(value, kinds[kind])


def test_the_json_schema_describes_the_shipped_scenarios_and_refuses_others() -> None:
    schema = json.loads(json.dumps(Scenario.model_json_schema()))
    for name in shipped_names("scenarios", ".yaml"):
        scenario, path = load_scenario(name)
        assert matches(scenario.resolved(), schema, schema["$defs"])
        assert matches(load_yaml(path), schema, schema["$defs"])
        for change in ({"seed": -1}, {"sed": 1}, {"measure": {"drain": "no"}}, {"routing": {"tie": "best"}}):
            assert not matches(scenario.resolved() | change, schema, schema["$defs"])
    objects = [each for each in [schema, *schema["$defs"].values()] if each["type"] == "object"]
    assert all(each["additionalProperties"] is False for each in objects)


# ---- every field has an effect, C072 ---------------------------------------------------------------------------

N = 24
COLUMNS: dict[str, Any] = {
    "arrival_ns": [17 * 10**6 * (k // 2) for k in range(N)],  # pairs, 17 ms apart; steps take 10 ms + 1 ms per token
    "prompt_tokens": [3 + 5 * (k % 4) for k in range(N)],
    "output_tokens": [2 + (7 * k) % 11 for k in range(N)],
    "slo_ttft_s": [0.03 + 0.01 * (k % 3) for k in range(N)],
    "task": ["short" if k % 4 < 2 else "long" for k in range(N)],
}
PRICE = {"input_usd_per_mtok": 10.0, "output_usd_per_mtok": 20.0}
TWO: list[dict[str, Any]] = [{"quality": 0.9, "price": PRICE}, {"quality": 0.8}]
SLO = {"ttft": "trace"}
STALE = {"refresh_interval_s": 0.05}

# field: (changed value, sections of the scenario on which it binds)
BINDING: dict[str, tuple[Any, dict[str, Any]]] = {
    "seed": (2, {"policy": "random"}),
    "workload.rate_scale": (2.0, {}),
    "workload.limit": (5, {}),
    "routing.objective": ("weighted", {"policy": "sfs"}),
    "routing.cost_weight": (2e-3, {"policy": "sfs"}),
    "routing.latency_weight": (0.1, {"policy": "sfs", "routing": {"objective": "weighted", "latency_weight": 5.0}}),
    "routing.tie": ("rotate", {"policy": "shortest_queue"}),
    "routing.refresh_interval_s": (0.05, {"policy": "shortest_queue"}),
    "routing.publish_delay_s": (0.05, {"policy": "shortest_queue"}),
    "routing.replicas": (2, {"policy": "shortest_queue", "routing": STALE}),
    "routing.overlay": (False, {"policy": "shortest_queue", "routing": STALE}),
    "routing.router_delay_s": (0.004, {}),
    "routing.prediction_error": ({"length_bias": 0.2, "length_sigma": 1.0}, {"policy": "sfs"}),
    "routing.prediction_error.length_bias": (0.2, {"policy": "sfs"}),
    "routing.prediction_error.length_sigma": (1.0, {"policy": "sfs"}),
    "measure.horizon_s": (0.1, {}),
    "measure.warmup_s": (0.1, {}),
    "measure.drain": (False, {}),
    "slo.ttft": (0.001, {}),
    "slo.ttft_scale": (0.1, {}),
    "slo.tpot_s": (0.012, {}),
    "output.decisions": ("full", {"policy": "sfs"}),
    "output.sample_interval_s": (0.02, {}),
    "output.estimators": (["throughput"], {}),
    "instance.name": ("z", {}),
    "instance.card": ("slow.json", {}),
    "instance.replicas": (2, {}),
    "instance.price": ({"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0}, {}),
    "instance.quality": (0.1, {}),
    "instance.engine": ({"max_num_seqs": 1}, {}),
    "instance.true_model": ({"noise": {"sigma": 0.5}}, {}),
    "instance.true_model.fit": ("hinge", {}),
    "instance.true_model.scale": (3.0, {}),
    "instance.true_model.noise": ({"sigma": 0.5}, {}),
    "instance.believed_model": ({"scale": 3.0}, {"policy": "sfs"}),
    "instance.believed_model.fit": ("hinge", {"policy": "sfs"}),
    "instance.believed_model.scale": (3.0, {"policy": "sfs"}),
}
# they name files, list what to run, describe or have one allowed value; tested elsewhere or without effect by design
NOT_HERE = {
    "schema_version",
    "name",
    "description",
    "assumptions",
    "workload.trace",
    "workload.recipe",
    "workload.rate_rps",  # these two need a recipe: test_paper_scenarios.py
    "workload.burst_ratio",
    "routing.policies",
    "routing.predictor",  # tests/unit/test_beliefs.py
    "routing.tokenizer",
    "instance.url",  # these and all of `live` concern real servers: tests/live
    "instance.snapshot",
}


def changed(data: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return the data with a field set; `instance` is the first instance."""
    copy: dict[str, Any] = json.loads(json.dumps(data))
    *path, last = field.split(".")
    place = copy
    for key in path:
        place = place["cluster"]["instances"][0] if key == "instance" else place.setdefault(key, {})
    place[last] = value
    return copy


def outcome(folder: Path, data: dict[str, Any], policy: str) -> dict[str, Any]:
    """Return what a run says, but for wall time."""
    steps = {
        form: {"b0_s": base, "b1_s": 0.001, "b2_s": 0.0, "b3_s": 0.0} for form, base in (("eq9", 0.01), ("hinge", 0.03))
    }
    make_card(folder, fits=steps)
    make_card(folder, "slow", fits=steps, host_time_s=0.005)
    run = run_policy(*make_world(folder, COLUMNS, data), policy)
    summary = {key: value for key, value in run.summary.items() if key != "mean_decision_us"}
    return {"summary": summary} | {name: frame(run, name).to_dict(as_series=False) for name in run.tables}


@pytest.mark.parametrize("field", BINDING)
def test_every_field_of_a_scenario_changes_the_run_where_it_binds(field: str, tmp_path: Path) -> None:
    value, sections = BINDING[field]
    sections = dict(sections)
    policy = sections.pop("policy", "round_robin")
    data = scenario_data(TWO, **({"slo": SLO} | sections))
    before, after = outcome(tmp_path, data, policy), outcome(tmp_path, changed(data, field, value), policy)
    assert before["summary"]["requests"]["submitted"] > 0
    assert before != after
    assert outcome(tmp_path, data, policy) == before


def test_no_field_of_a_scenario_is_left_out_of_these_tests() -> None:
    models: dict[str, type[BaseModel]] = {
        "": Scenario,
        "workload.": Workload,
        "routing.": Routing,
        "routing.prediction_error.": PredictionError,
        "measure.": Measure,
        "slo.": Slo,
        "output.": Output,
        "instance.": Instance,
        "instance.true_model.": TrueModelSpec,
        "instance.believed_model.": BelievedModelSpec,
    }
    fields = {f"{path}{name}" for path, model in models.items() for name in model.model_fields}
    sections = {"workload", "cluster", "routing", "measure", "slo", "output", "live"}
    assert fields - sections == set(BINDING) | NOT_HERE
    assert set(Price.model_fields) == set(PRICE)
    assert set(Noise.model_fields) == {"kind", "sigma"}


def test_off_keeps_no_decisions_and_full_keeps_every_candidate(tmp_path: Path) -> None:
    data = scenario_data(TWO, slo=SLO)
    kept = {
        level: outcome(tmp_path, changed(data, "output.decisions", level), "sfs") for level in ("off", "winner", "full")
    }
    assert "decisions" not in kept["off"]
    assert kept["winner"]["decisions"]["candidate_ttft_s"] == [None] * N
    assert all(len(each) == 2 for each in kept["full"]["decisions"]["candidate_ttft_s"])
    assert kept["off"]["requests"] == kept["winner"]["requests"] == kept["full"]["requests"]


def test_a_trace_without_a_drain_stops_at_the_last_arrival(tmp_path: Path) -> None:
    found = outcome(tmp_path, changed(scenario_data(TWO), "measure.drain", False), "round_robin")
    assert found["summary"]["requests"]["submitted"] == N
    assert found["summary"]["requests"]["unfinished"] > 0
    assert found["summary"]["window_s"] == [0.0, pytest.approx(0.017 * (N // 2 - 1))]


def test_an_engine_option_of_the_scenario_reaches_the_engine() -> None:
    """Each option's own effect is tested on the engine; here only that none is lost on the way."""
    scenario, path = load_scenario("quickstart")
    values: dict[str, Any] = {
        "max_num_batched_tokens": 50_000,
        "max_num_seqs": 11,
        "max_num_active_seqs": 7,
        "max_model_len": 9_000,
        "block_size": 32,
        "num_gpu_blocks_override": 777,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "long_prefill_token_threshold": 99,
        "long_prefill_token_threshold_adaptive": True,
        "scheduler_reserve_full_isl": False,
        "watermark": 0.25,
        "prefill_schedule_interval": 3,
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "vllm_version": "0.32",
    }
    assert set(values) == set(EngineOptions.model_fields)
    data = scenario.model_dump()
    data["cluster"]["instances"][0]["engine"] = values
    engine = build_world(Scenario.model_validate(data), path).instances[0].engine
    renamed = {"num_gpu_blocks_override": "num_gpu_blocks", "scheduling_policy": "policy"}
    for name, value in values.items():
        found = getattr(engine, renamed.get(name, name))
        assert getattr(found, "name", found) in (value, f"v{value}".replace(".", "_")), name
