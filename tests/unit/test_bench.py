"""`simcluster bench`: what is compared with what, and what a person and a program are told.

No test here looks at how long anything took.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from command_line import run_command
from simcluster import _native
from simcluster.backends.simulated import SimulatedCluster
from simcluster.bench import cost, figures, live, run_figures
from simcluster.bench.engine_figures import core_rate
from simcluster.bench.figures import FIGURES, Benchmark, Figure, chosen
from simcluster.bench.measure import Goal, Measured, ratio
from simcluster.bench.states import burst_view, decoding_engine, engines_for, run_states
from simcluster.bench.stepper import PlainStepper
from simcluster.bench.workload import Requests, bench_scenario, engine_parts, requests
from simcluster.errors import ConfigError, SimulationError

TIMED = [name for name, each in FIGURES.items() if not each.counts_instructions]


def rows_of(asked: Requests) -> list[tuple[int, int, int]]:
    return list(zip(asked.prompt_tokens.tolist(), asked.output_tokens.tolist(), asked.at_ps.tolist(), strict=True))


# ---- the plain Python stepper ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8192, 256])
@pytest.mark.parametrize("seats", [1024, 24])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_the_plain_python_stepper_makes_the_steps_that_the_engine_makes(budget: int, seats: int, load: float) -> None:
    config, model = engine_parts(max_num_batched_tokens=budget, max_num_seqs=seats)
    engine = _native.Engine(config, model, record_steps=True)
    stepper = PlainStepper(config, model, record_steps=True)
    for number, (prompt, output, at) in enumerate(rows_of(requests(300, 1, load))):
        output = min(output, 200)  # noqa: PLW2901  (so that the test is short)
        engine.submit(number, prompt, output, at)
        stepper.advance_to(at)
        stepper.submit(number, prompt, output, at)
    engine.drain()
    stepper.advance_to(_native.NEVER)
    steps = [tuple(row[1:8]) for row in engine.take_steps().tolist()]
    events = engine.take_events().tolist()
    assert len(steps) > 900
    assert stepper.steps == steps
    assert stepper.num_steps == engine.num_steps
    assert stepper.first_tokens == [(e[0], e[1]) for e in events if e[3] == _native.EventKind.first_token]
    assert stepper.ends == [(e[0], e[1]) for e in events if e[3] == _native.EventKind.finished]


def test_the_plain_python_stepper_says_so_when_it_would_have_to_preempt() -> None:
    config, model = engine_parts()
    config.num_gpu_blocks = 12
    stepper = PlainStepper(config, model)
    for number in range(2):
        stepper.submit(number, 64, 200, 0)
    with pytest.raises(SimulationError, match="out of KV blocks"):
        stepper.advance_to(_native.NEVER)


# ---- the workload ------------------------------------------------------------------------------------------------


def test_the_workload_has_the_lengths_and_the_rate_that_it_promises() -> None:
    asked = requests(200_000, 1)
    assert asked.prompt_tokens.mean() == pytest.approx(512, rel=0.01)
    assert asked.output_tokens.mean() == pytest.approx(256, rel=0.01)
    for column in (asked.prompt_tokens, asked.output_tokens):
        assert np.log(column).std() == pytest.approx(0.8, rel=0.02)
    assert len(asked) / asked.at_ps[-1] * 1e12 == pytest.approx(30.3, rel=0.01)
    gaps = np.diff(asked.at_ps)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.02)


def test_the_rate_of_the_workload_is_four_fifths_of_what_one_instance_can_serve() -> None:
    asked = requests(40_000, 1)
    config, model = engine_parts()
    engine = _native.Engine(config, model)
    for number, (prompt, output, _) in enumerate(rows_of(asked)):
        engine.submit(number, prompt, output, 0)
    engine.drain()
    events = engine.take_events()
    ends = np.sort(events[events[:, 3] == _native.EventKind.finished][:, 1]) / 1e12
    first, last = len(ends) // 5, 4 * len(ends) // 5
    capacity = (last - first) / (ends[last] - ends[first])
    assert capacity == pytest.approx(30.3 / 0.8, rel=0.02)


def test_the_load_stays_where_instances_are_added() -> None:
    one, many = requests(1000, 1), requests(1000, 16)
    assert np.array_equal(one.prompt_tokens, many.prompt_tokens)
    assert np.allclose(one.at_ps / 16, many.at_ps, atol=1000)
    scenario, _ = bench_scenario(100, 50)
    assert scenario.cluster.instances[0].replicas == scenario.workload.rate_scale == 100
    assert scenario.workload.limit == 50


def test_a_workload_longer_than_its_recipe_goes_on_with_the_same_gaps_and_lengths() -> None:
    asked = requests(1_000_010, 1)
    assert np.array_equal(asked.prompt_tokens[-10:], asked.prompt_tokens[:10])
    assert (np.diff(asked.at_ps) >= 0).all()
    gaps = np.diff(asked.at_ps)
    assert np.allclose(gaps[-9:], gaps[:9], atol=1000)


# ---- the states that figures are about ---------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [0, 1, 50, 300])
def test_a_burst_leaves_as_many_running_and_waiting_as_asked_for(waiting: int) -> None:
    config, model = engine_parts(max_num_batched_tokens=2048)
    view, snapshot, at = burst_view(config, model, 128, waiting)
    assert (view.num_running, view.num_waiting, view.num_dispatched_since) == (128, waiting, 0)
    assert snapshot.taken_at == at
    first = _native.bench_estimates(view, snapshot, 512, 256, at, 2)
    assert first == _native.bench_estimates(view, None, 512, 256, at, 1)
    assert at < first < _native.NEVER


def test_every_step_of_a_decoding_engine_is_made() -> None:
    config, model = engine_parts()
    config.num_gpu_blocks = 200_000
    engine = decoding_engine(config, model, 8)
    before, start = engine.num_steps, engine.now
    engine.advance_to(start + 10**12)
    assert engine.num_running == 8
    model_steps = 10**12 / model.period(model.device_time([], [engine.num_steps] * 8), True)
    assert engine.num_steps - before == pytest.approx(model_steps, rel=0.02)


def test_states_of_a_run_are_those_of_an_instance_under_load() -> None:
    config, model = engine_parts()
    found = [view.num_running for view, _, _ in run_states(config, model, rows_of(requests(1500, 1)), 1000, 50)]
    assert len(found) == 10
    assert 80 < np.median(found) < 160


def test_the_native_loop_does_what_submitting_one_by_one_does() -> None:
    config, model = engine_parts()
    asked = requests(400, 3)
    engines = engines_for(config, model, 3)
    seen = sum(
        _native.bench_round_robin(engines, asked.prompt_tokens, asked.output_tokens, asked.at_ps, first, 200)
        for first in (0, 200)
    )
    others = engines_for(config, model, 3)
    for number, (prompt, output, at) in enumerate(rows_of(asked)):
        others[number % 3].advance_to(at)
        others[number % 3].submit(number, prompt, output, at)
    assert seen == sum(len(engine.take_events()) for engine in others)
    for one, other in zip(engines, others, strict=True):
        assert (one.now, one.num_steps, one.running_ids) == (other.now, other.num_steps, other.running_ids)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 11), (8, 3)])
def test_the_native_loop_refuses_requests_that_are_not_there(first: int, count: int) -> None:
    config, model = engine_parts()
    asked = requests(10, 1)
    with pytest.raises(ValueError, match="not all there"):
        _native.bench_round_robin(
            engines_for(config, model, 1), asked.prompt_tokens, asked.output_tokens, asked.at_ps, first, count
        )


def test_what_runs_under_callgrind_imports_nothing_that_is_slow_to_start() -> None:
    program = "import sys, simcluster.bench.counted; print({'numpy', 'pydantic', 'polars'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- goals, units, spread ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(1.2, at_least=False), 1.2, True),
        (Goal(1.2, at_least=False), 1.21, False),
        (Goal(8, at_least=True), 8, True),
        (Goal(8, at_least=True), 7.9, False),
    ],
)
def test_a_goal_includes_its_limit(goal: Goal, value: float, met: bool) -> None:
    assert goal.met(value) is met


def test_a_goal_is_written_as_a_person_would() -> None:
    assert str(Goal(4e6, at_least=True)) == ">= 4,000,000"
    assert str(Goal(1.2, at_least=False)) == "<= 1.2"


def test_a_figure_is_the_median_with_the_smallest_and_the_largest() -> None:
    measured = Measured((3.0, 1.0, 10.0, 2.0), "four")
    assert (measured.low, measured.value, measured.high) == (1.0, 2.5, 10.0)


def test_a_ratio_is_taken_pair_by_pair() -> None:
    assert ratio([8, 30], [2, 3]) == (4, 10)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_a_figure_of_another_size_than_its_goal_is_not_judged() -> None:
    benchmark = Benchmark("x", "CPU s", Goal(12, at_least=False), lambda _: Measured((1.0,), "small", judged=False))
    assert Figure("x", benchmark, benchmark.measure(True)).met is None
    assert Figure("x", benchmark, Measured((13.0,), "full")).met is False
    assert Figure("x", benchmark, Measured((12.0,), "full")).met is True


def test_every_goal_is_that_of_the_issue() -> None:
    goals = {name: str(each.goal) for name, each in FIGURES.items()}
    assert goals["step-growth"] == "<= 1.2"
    assert goals["instructions"] == "<= 1,500"
    assert goals["against-cpp"] == ">= 8"
    assert goals["against-python"] == ">= 300"
    assert goals["core-16"] == ">= 4,000,000"
    assert goals["core-1000"] == ">= 2,500,000"
    assert goals["simpy"] == ">= 200,000"
    assert goals["run"] == "<= 12"
    assert goals["sfs-snapshot"] == "<= 1.5"
    assert goals["sfs-snapshot-p99"] == "<= 6"
    assert goals["sfs-frontier"] == "<= 15"
    assert goals["python-step"] == "<= 25"
    assert goals["run-memory"] == "<= 1"
    assert goals["live-bytes"] == "<= 200"
    assert goals["run-sfs"] == "<= 40"
    assert goals["python-policy"] == ">= 30,000"
    assert goals["decide-exact"] == goals["decide-exact-alike"] == "<= 12"
    assert goals["decide-pruned"] == goals["decide-pruned-alike"] == "<= 0.6"
    assert goals["routed-1000"] == ">= 80,000"
    assert goals["decide-published"] == goals["decide-live"] == "<= 50"
    assert goals["predict"] == "<= 300"
    assert goals["router-cpu"] == "<= 0.5"
    assert goals["router-cpu-paced"] == "<= 1.2"
    assert goals["router-ttft"] == "<= 1"
    assert len(goals) == 27


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found(power: float) -> None:
    sizes = (0, 1, 10, 100)
    assert cost.exponent(sizes, tuple(3 * max(size, 0.1) ** power for size in sizes)) == pytest.approx(power, abs=1e-9)


# ---- every figure, tiny ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIMED)
def test_every_figure_can_be_measured(name: str) -> None:
    (figure,) = figures.measure_figures([name], quick=True)
    data = figure.as_dict()
    assert set(data) == {"name", "what", "value", "low", "high", "unit", "goal", "met", "size"}
    assert data["name"] == name
    assert 0 < data["low"] <= data["value"] <= data["high"] < math.inf
    assert any(letter.isdigit() for letter in data["size"])


def test_through_simpy_every_end_is_heard_of_when_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int]] = []
    hear = SimulatedCluster._hear

    def note(self: SimulatedCluster, told: list[tuple[int, int, int]], now: int) -> None:
        heard.extend((seen_ps, now) for _, _, seen_ps in told)
        hear(self, told, now)

    monkeypatch.setattr(SimulatedCluster, "_hear", note)
    run_figures.loop_seconds("round_robin", 16, 2000, 1)
    assert heard == []
    run_figures.loop_seconds("round_robin", 16, 2000, 1, ends_on_time=True)
    assert len(heard) == 2000
    assert all(now <= end_ps for end_ps, now in heard)


def test_bytes_of_live_requests_are_those_of_requests_that_are_all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 64 < live.live_bytes(quick=True).value < 1000  # a request's state alone takes 64 bytes
    monkeypatch.setattr(SimulatedCluster, "num_open", 5)
    with pytest.raises(SimulationError, match="5 of 640 requests were live"):
        live._run(640)


def test_bytes_of_live_requests_need_a_system_that_tells_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live, "_STATM", tmp_path / "missing")
    with pytest.raises(ConfigError, match="measure it on Linux"):
        live.live_bytes(quick=True)


def test_a_thousand_instances_are_warmed_up_before_they_are_measured() -> None:
    measured = core_rate(200, quick=True)
    assert measured.size == "200 instances, 3 x 4,000 requests after 20,000"


def test_a_run_that_fails_is_an_error_and_not_a_figure() -> None:
    with pytest.raises(SimulationError, match=r"simcluster run .* exit code 2 \(error: .*nonsense"):
        run_figures._whole_run("nonsense", 1, 10)


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_prints_figures_for_programs() -> None:
    code, out, err = run_command("bench", "step-growth", "--quick", "--json", "--quiet")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert set(report) == {"date", "machine", "figures"}
    assert set(report["machine"]) == {"cpu", "cores", "system", "compiler", "python"}
    (figure,) = report["figures"]
    assert {"name", "value", "unit", "goal", "met"} <= set(figure)
    assert figure["met"] is (figure["value"] <= 1.2)


def test_the_command_prints_figures_for_people_and_for_documents() -> None:
    code, out, _ = run_command("bench", "step-growth", "--quick", "--quiet")
    assert code == 0
    assert "step cost at batch 256 over batch 16" in out
    assert "<= 1.2" in out
    code, out, _ = run_command("bench", "step-growth", "--quick", "--markdown", "--quiet")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1


def test_the_growth_of_cost_is_printed_for_programs_and_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "AXES", {name: cost.AXES[name] for name in ("batch", "queue")})
    code, out, err = run_command("bench", "cost", "--quick", "--json", "--quiet")
    assert (code, err) == (0, "")
    growth = json.loads(out)["growth"]
    assert [each["name"] for each in growth] == ["batch", "queue"]
    assert [row["size"] for row in growth[1]["rows"]] == [0, 10, 50]
    for each in growth:
        assert math.isfinite(each["exponent"])
        assert all(0 < row["low"] <= row["value"] <= row["high"] for row in each["rows"])
    code, out, _ = run_command("bench", "cost", "--quick", "--markdown", "--quiet")
    assert code == 0
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + 2 + 3


@pytest.mark.parametrize("axis", ["requests", "run-requests", "instances"])
def test_cost_can_be_measured_along_every_axis(axis: str) -> None:
    measured = cost.AXES[axis].measure(1 if axis == "instances" else 500, True)
    assert 0 < measured.low <= measured.value <= measured.high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["core16"], "error: bench core16: no figure has this name; did you mean core-16?\n"),
        (["cots"], "error: bench cots: no figure has this name; did you mean cost?\n"),
        (["instructions"], "error: bench instructions: counts instructions under valgrind; add --instructions\n"),
        (["cost", "run"], "error: bench cost run: cost is measured alone; leave out the other names\n"),
        (["--json", "--markdown"], "error: options --json and --markdown: choose one of them\n"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], message: str) -> None:
    assert run_command("bench", *arguments) == (2, "", message)


def test_a_name_that_is_like_no_figure_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"no figure has this name; there are step-growth, .*, and cost"):
        chosen(["xyzzy"], count_instructions=False)


def test_without_names_everything_is_measured_but_what_valgrind_counts() -> None:
    assert chosen([], count_instructions=False) == TIMED
    assert chosen([], count_instructions=True) == list(FIGURES)
    assert chosen(["run", "core-16", "run"], count_instructions=False) == ["run", "core-16"]


def test_counting_without_valgrind_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = run_command("bench", "instructions", "--instructions")
    assert (code, out) == (2, "")
    assert err == "error: --instructions: valgrind was not found; it counts the instructions; install it\n"
