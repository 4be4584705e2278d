"""What a recording runs fits the engine, depends on the seed alone, and says what it leaves out."""

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster import cli
from simcluster.calibrate.dummy_model import SHAPES, own_shape, write_model
from simcluster.calibrate.plan import PHASES, TASKS, Limits, Plan, build_plan
from simcluster.calibrate.record import Job, PlanSettings, attach_lines, prepare
from simcluster.errors import ConfigError

SMALL = Limits(8, 256, 1024, 65, 16)
limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 300),
    max_num_batched_tokens=st.integers(16, 8192),
    max_model_len=st.integers(64, 40_960),
    num_gpu_blocks=st.none() | st.integers(10, 5000),
    block_size=st.sampled_from([16, 32, 128]),
)


def blocks(shapes: tuple[tuple[int, int], ...], block_size: int) -> int:
    return sum(-(-(prompt + output) // block_size) for prompt, output in shapes)


@given(limits)
def test_no_batch_of_a_plan_exceeds_what_the_engine_can_hold(held: Limits) -> None:
    for phase in build_plan(held).phases:
        for batch in phase.batches:
            assert 1 <= len(batch) <= held.max_num_seqs
            assert all(prompt >= 1 and 2 <= output <= held.max_model_len - prompt for prompt, output in batch)
            if held.num_gpu_blocks is not None:
                assert blocks(batch, held.block_size) <= held.num_gpu_blocks - 1


@given(limits, st.integers(0, 5))
def test_every_drawn_request_can_run_alone(held: Limits, seed: int) -> None:
    plan = build_plan(held, seed=seed)
    for drawn in (plan.mixed(), plan.served(plan.phases[-1])):
        for prompt, output in itertools.islice(drawn, 50):
            assert prompt >= 4
            assert output >= 2
            assert prompt + output <= held.longest


def test_the_grids_reach_every_batch_size_and_the_longest_prompt() -> None:
    plan = build_plan(SMALL)
    warmup, lone, decode = (phase.batches for phase in plan.phases[:3])
    assert sorted(output for _, output in warmup[0]) == list(range(2, 10)), "one request ends per step, from 8 down"
    assert [batch[0][0] for batch in lone][-1] == 1022
    assert {len(batch) for batch in decode} == {1, 2, 4, 8}


def test_a_batch_of_the_decode_grid_decodes_together_for_sixteen_steps() -> None:
    for batch in build_plan(SMALL).phases[2].batches:
        (context, output), *_ = batch
        steps_to_enter = math.ceil(len(batch) * context / SMALL.max_num_batched_tokens)
        assert output - steps_to_enter == 16


def test_what_does_not_fit_the_kv_cache_is_named() -> None:
    assert build_plan(Limits(8, 8192, 1024, 8 * 64 + 1, 16)).skipped == ()
    decode_only, all_lengths = build_plan(Limits(8, 256, 1024, 33, 16)).skipped[::-1]
    assert all_lengths == "lone prompts beyond 510 tokens: the KV cache holds no more"
    assert decode_only == "6 points of the decode grid, from 1 requests x 512 tokens on: the KV cache does not hold it"


def test_the_time_is_divided_among_the_phases_that_are_wanted() -> None:
    assert build_plan(SMALL, minutes=3).seconds == pytest.approx(180)
    part = build_plan(SMALL, minutes=2, phases=("warmup", "decode"))
    assert [phase.name for phase in part.phases] == ["warmup", "decode"]
    assert part.seconds == pytest.approx(120)


def first_rounds(plan: Plan) -> list[object]:
    return [list(itertools.islice(plan.rounds(plan.phases[2]), 60)), list(itertools.islice(plan.mixed(), 20))]


def test_equal_seeds_draw_equal_plans_and_others_do_not() -> None:
    one, same, other = (first_rounds(build_plan(SMALL, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_each_round_of_a_grid_meets_every_batch_once() -> None:
    plan = build_plan(SMALL)
    count = len(plan.phases[2].batches)
    drawn = list(itertools.islice(plan.rounds(plan.phases[2]), 2 * count))
    assert sorted(drawn[:count]) == sorted(drawn[count:]) == sorted(plan.phases[2].batches)
    assert drawn[:count] != drawn[count:]


def test_the_served_mix_has_the_four_tasks_at_full_length_where_the_limit_allows() -> None:
    plan = build_plan(Limits(64, 8192, 40_960))
    shapes = list(itertools.islice(plan.served(plan.phases[-1]), 4000))
    expected = sum(task.prompt * math.exp(task.prompt_sigma**2 / 2) for task in TASKS.values()) / 4
    assert sum(prompt for prompt, _ in shapes) / len(shapes) == pytest.approx(expected, rel=0.1)


def test_short_tasks_stay_short_and_long_ones_long_where_the_limit_is_low() -> None:
    plan = build_plan(SMALL)
    prompts = sorted(prompt for prompt, _ in itertools.islice(plan.served(plan.phases[-1]), 1000))
    assert 8 <= prompts[100] <= 20
    assert 300 <= prompts[900] <= 800


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minutes": 0}, "minutes = 0; must be above 0"),
        ({"minutes": math.nan}, "minutes = nan; must be above 0"),
        ({"phases": ("decode", "decoding")}, "phase decoding: no such phase; take some of warmup, lone_prefill"),
        ({"phases": ()}, "phase none: no such phase"),
        ({"phases": ("served",)}, "phase served without saturation"),
        ({"loads": ()}, "loads = none; each must be above 0"),
        ({"loads": (0.5, -1.0)}, "loads = 0.5, -1; each must be above 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(SMALL, **arguments)  # type: ignore[arg-type]


def test_an_engine_that_holds_next_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="the engine holds requests of 16 tokens only"):
        build_plan(Limits(8, 256, 1024, 2, 16))


# ---- the command ---------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["simcluster", "calibrate", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_the_plan_is_printed_with_the_limits_that_are_given_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["record", "--plan", "--json", "--minutes", "1", "--max-num-seqs=4", "--max-model-len", "512"]
    assert run(monkeypatch, *words, "--out", str(tmp_path / "new")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [phase["name"] for phase in printed["phases"]] == list(PHASES)
    assert printed["seconds"] == pytest.approx(60)
    assert "of which 4 run" in printed["phases"][4]["does"]
    assert "1 to 510 tokens" in printed["phases"][1]["does"]
    assert list(tmp_path.iterdir()) == []


def test_the_plan_reads_the_context_limit_of_a_model_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", own_shape(limit=2048))
    assert run(monkeypatch, "record", "--plan", "--json", "--model", str(tmp_path / "model")) == 0
    assert "1 to 2,046 tokens" in json.loads(capsys.readouterr().out)["phases"][1]["does"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "OUT"], "--model is missing"),
        (["--model", "m"], "--out is missing"),
        (["--model", "m", "--out", "OUT", "--engine-arg", "max_num_seqs"], "must be key=value"),
        (["--model", "m", "--out", "OUT", "--loads", "half"], "must be numbers with commas between"),
        (["--model", "m", "--out", "OUT", "--scheduler_cls=x"], "the recorder sets it itself"),
        (["--model", "m", "--out", "OUT", "--no-async-scheduling"], "take --loop sync or --loop async"),
        (["--collect", "OUT"], "no engine_*.json"),
    ],
)
def test_a_wrong_command_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    assert run(monkeypatch, "record", *(word.replace("OUT", str(tmp_path / "new")) for word in words)) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_recording_never_overwrites_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        prepare(Job(tmp_path, "m", (), "sync", PlanSettings(0, 1.0)))


@pytest.mark.parametrize(
    ("loop", "flag", "kind"),
    [
        ("sync", "--no-async-scheduling", "RecordingScheduler"),
        ("async", "--async-scheduling", "RecordingAsyncScheduler"),
    ],
)
def test_the_lines_that_record_a_server_name_the_class_of_its_loop(
    tmp_path: Path, loop: str, flag: str, kind: str
) -> None:
    export, serve, collect = attach_lines(tmp_path / "new", "m", loop)
    assert export == f"export SIMCLUSTER_RECORD_DIR={tmp_path}/new/raw"
    assert f"vllm serve m {flag} --scheduler-cls simcluster.calibrate.recorder.{kind} " in serve
    assert collect == f"simcluster calibrate record --collect {tmp_path}/new"


# ---- models without weights ----------------------------------------------------------------------------------------


def test_a_hidden_size_of_1024_gives_layers_of_the_published_model() -> None:
    own, published = own_shape(layers=28, hidden=1024, vocabulary=151_936, limit=40_960), SHAPES["qwen3-0.6b"]
    assert own == published


def test_a_model_folder_is_written_once_and_never_over_another(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", own_shape(layers=2))
    assert write_model(folder, own_shape(layers=2)) == folder
    with pytest.raises(ConfigError, match="exists and is not this model"):
        write_model(folder, own_shape(layers=3))
    with pytest.raises(ConfigError, match="hidden = 100; must be a multiple of 128"):
        own_shape(hidden=100)
