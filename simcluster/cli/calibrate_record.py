"""`simcluster calibrate record`: run a plan on a real vLLM and store every step."""

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from simcluster.calibrate.collect import Collected, collect
from simcluster.calibrate.dummy_model import SHAPES, own_shape, write_model
from simcluster.calibrate.plan import PHASES, Limits, Plan, build_plan
from simcluster.calibrate.record import EngineProcess, Job, PlanSettings, attach_lines, prepare, raise_on_signals
from simcluster.errors import CalibrationError, ConfigError

__all__ = ["CONTEXT", "dummy_model", "record"]

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
_MINUTES, _QUICK_MINUTES = 10.0, 2.0
_START = "starting"
_NO_LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 40_960, "block_size": 16}
_WHY_SYNC = (
    "The synchronous loop is the default, since there a step's time is what lies between the end of schedule() and the "
    "results; in the asynchronous loop two batches are under way and single step times are too noisy to fit."
)


def record(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model folder or hub name.")] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the recording.")] = None,
    loop: Annotated[Literal["sync", "async"], typer.Option(help="Engine loop.")] = "sync",
    minutes: Annotated[float | None, typer.Option(help="Time for all phases; default 10, with --quick 2.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short plan: enough for a try, not for a card.")] = False,
    phases: Annotated[str | None, typer.Option(help=f"Only these, of {','.join(PHASES)}.")] = None,
    loads: Annotated[str, typer.Option(help="Of the served phase, as shares of the service rate.")] = "0.5,0.7,0.9",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the model in the recording, if not vLLM's.")] = "",
    engine_arg: Annotated[list[str] | None, typer.Option(help="Engine option as key=value; repeatable.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would run and how long; start nothing.")] = False,
    attach: Annotated[bool, typer.Option("--attach", help="Print how to record a server that you start.")] = False,
    collected: Annotated[
        Path | None, typer.Option("--collect", help="Turn what an attached or killed recorder left into a recording.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run a plan on a real vLLM and store the composition and time of every step.

    Any further option is handed to vLLM under its own name, as in `vllm serve`: --max-num-seqs, --max-model-len,
    --kv-cache-memory-bytes, --load-format dummy, ... Prefix caching is off unless --enable-prefix-caching is given.
    Ctrl-C keeps what was recorded. vLLM runs in processes of its own, and none of them outlives this command.

    The synchronous loop is the default, since there a step's time is what lies between the end of schedule() and the
    results; in the asynchronous loop two batches are under way and single step times are too noisy to fit.

    Example: `simcluster calibrate record --model Qwen/Qwen3-8B --max-model-len 16384 --out qwen3-8b-h100`, then
    `simcluster calibrate fit qwen3-8b-h100 --out card.json`
    """
    if collected is not None:
        _print_collected(collect(collected), as_json)
        return
    words = [*context.args, *_as_options(engine_arg or [])]
    settings = PlanSettings(
        seed=seed,
        minutes=minutes if minutes is not None else (_QUICK_MINUTES if quick else _MINUTES),
        phases=tuple(phases.split(",")) if phases is not None else PHASES,
        loads=_numbers(loads),
    )
    limits = _expected_limits(words, model)
    intended = build_plan(limits, **_plan_arguments(settings))
    if plan:
        _print_plan(intended, as_json)
        return
    if model is None or out is None:
        missing = "--model" if model is None else "--out"
        raise ConfigError(f"{missing} is missing; give the model and a new folder for the recording")
    if attach:
        for line in attach_lines(out, model, loop):
            sys.stdout.write(line + "\n")
        return
    job = Job(out, model, tuple(words), loop, settings, name)
    finished = _run(job, intended, quiet=quiet)
    if not (finished or any(file.stat().st_size for file in out.glob("raw/steps_*.bin"))):
        sys.stderr.write(f"stopped before the engine ran a step; {out} holds nothing but vLLM's log\n")
        raise typer.Exit(130)
    _print_collected(collect(out), as_json)
    if not finished:
        raise typer.Exit(130)


def dummy_model(
    folder: Annotated[Path, typer.Argument(help="New folder for the model.")],
    like: Annotated[str | None, typer.Option(help=f"One of {', '.join(SHAPES)}, instead of the sizes.")] = None,
    layers: Annotated[int, typer.Option(help="Layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size; 1024 gives layers of Qwen3-0.6B's shape.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Token ids.")] = 8192,
    limit: Annotated[int, typer.Option(help="Context limit [tokens].")] = 8192,
) -> None:
    """Write a model folder of Qwen3's kind without weights, for a recording with --load-format dummy.

    Example: `simcluster calibrate dummy-model small`, then `simcluster calibrate record --model small --load-format
    dummy --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 256M --quick --out first`
    """
    if like is not None and like not in SHAPES:
        raise ConfigError(f"--like {like}: not a known shape; take one of {', '.join(SHAPES)}, or give the sizes")
    shape = SHAPES[like] if like else own_shape(layers=layers, hidden=hidden, vocabulary=vocabulary, limit=limit)
    write_model(folder, shape)
    text = f"{folder}: {shape.layers} layers of hidden size {shape.hidden}; record it with --load-format dummy"
    sys.stdout.write(f"{text}\n")


# ---- options -----------------------------------------------------------------------------------------------------


def _as_options(pairs: list[str]) -> list[str]:
    words = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip("-"):
            raise ConfigError(f"--engine-arg {pair}: must be key=value, such as max_num_seqs=64")
        words.append(f"--{key.strip('-').replace('_', '-')}={value}")
    return words


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError:
        raise ConfigError(f"--loads {text}: must be numbers with commas between, such as 0.5,0.9") from None


def _plan_arguments(settings: PlanSettings) -> dict[str, Any]:
    return {"seed": settings.seed, "minutes": settings.minutes, "phases": settings.phases, "loads": settings.loads}


def _expected_limits(words: list[str], model: str | None) -> Limits:
    """Read the limits that are given; what is left to vLLM is known once the engine is up."""
    given = dict(_NO_LIMITS)
    if model is not None:
        try:
            config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
            given["max_model_len"] = int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a hub name, or a model that says it elsewhere
    blocks = None
    for place, word in enumerate(words):
        key, equals, value = word.removeprefix("--").replace("-", "_").partition("=")
        value = value if equals else words[place + 1] if place + 1 < len(words) else ""
        if value.isdigit() and int(value) > 0:
            if key in given:
                given[key] = int(value)
            elif key == "num_gpu_blocks_override":
                blocks = int(value)
    return Limits(num_gpu_blocks=blocks, **given)


# ---- the run -----------------------------------------------------------------------------------------------------


def _run(job: Job, intended: Plan, *, quiet: bool) -> bool:
    """Run a job to its end; False if somebody stopped it."""
    file = prepare(job)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    progress = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
    with raise_on_signals(), EngineProcess(file) as engine, progress if not quiet else nullcontext():
        bar = progress.add_task(_START, total=intended.seconds, note="vLLM comes up")
        try:
            _follow(engine.events(), intended, progress, bar, console, quiet=quiet)
        except KeyboardInterrupt:
            progress.update(bar, description="stopping", note="what was recorded is kept")
            engine.stop()
            return False
        except CalibrationError:
            if not list(job.folder.glob("raw/steps_*.bin")):
                raise
            raise CalibrationError(
                f"{_message()}; what was recorded before: simcluster calibrate record --collect {job.folder}"
            ) from None
    return True


def _message() -> str:
    return str(sys.exc_info()[1])


def _follow(
    events: Iterable[dict[str, Any]], plan: Plan, progress: Progress, bar: TaskID, console: Console, *, quiet: bool
) -> None:
    before, phase = 0.0, ""
    lengths = {each.name: each.seconds for each in plan.phases}
    for event in events:
        if event["event"] == "plan" and not quiet:
            for line in event["skipped"]:
                console.print(f"left out: {line}", style="yellow", highlight=False, markup=False)
        elif event["event"] == "progress":
            if event["phase"] != phase:
                before += lengths.get(phase, 0.0)
                phase = event["phase"]
                if not quiet and not console.is_terminal:
                    console.print(
                        f"{phase}, at most {lengths[phase]:.0f} s and what is then under way", highlight=False
                    )
            done = before + min(event["seconds"], lengths[phase])
            note = f"{event['requests']:,} requests, {event['tokens']:,} tokens"
            progress.update(bar, description=phase, completed=done, note=note)


# ---- what is printed ---------------------------------------------------------------------------------------------


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        content = {
            "seconds": plan.seconds,
            "phases": [{"name": each.name, "seconds": each.seconds, "does": each.summary} for each in plan.phases],
            "left_out": list(plan.skipped),
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return
    console = Console(highlight=False)
    table = Table("phase", "at most", "what", box=None)
    for phase in plan.phases:
        table.add_row(phase.name, f"{phase.seconds:.0f} s", phase.summary)
    console.print(table)
    for line in plan.skipped:
        console.print(f"left out: {line}")
    limits = plan.limits
    cache = "its size is known once vLLM is up" if limits.num_gpu_blocks is None else f"{limits.num_gpu_blocks} blocks"
    console.print(
        f"{plan.seconds / 60:.1f} min, and vLLM's start; for {limits.max_num_seqs} requests at once, "
        f"{limits.max_num_batched_tokens:,} tokens a step, {limits.max_model_len:,} tokens a request; KV cache: {cache}"
    )
    console.print(_WHY_SYNC)


def _print_collected(found: Collected, as_json: bool) -> None:
    if as_json:
        content = found._asdict() | {"folder": str(found.folder)}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return
    phases = ", ".join(f"{name} {count:,}" for name, count in found.phases.items())
    sys.stdout.write(
        f"{found.folder}: {found.steps:,} steps ({phases}) and {found.requests:,} requests on {found.device}"
        f"{'' if found.complete else '; the plan was not completed'}\n"
        f"{found.preemptions:,} preemptions; {found.worker_steps:,} steps with times inside of the worker; recording "
        f"a step took {found.recording_us:.0f} us\n"
    )
