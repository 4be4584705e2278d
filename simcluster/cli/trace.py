"""`simcluster trace`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from simcluster.cli.trace_tables import finding_lines
from simcluster.errors import ConfigError
from simcluster.scenario import load_scenario
from simcluster.workload import read_trace, write_trace
from simcluster.workload.doctor import cluster_groups, inspect_trace
from simcluster.workload.importing import AmbiguousTraceError, ImportOptions, ImportReport, TimeUnit, import_trace
from simcluster.workload.importing.options import FormatName
from simcluster.workload.synth import load_recipe, make_trace

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Import, inspect and make traces.")

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report.")]
_Out = Annotated[Path, typer.Option(help="Trace file to write (Parquet).")]
_Source = Annotated[Path, typer.Argument(help="CSV, JSONL (also .gz), Parquet, or a vllm bench serve result.")]
_Format = Annotated[FormatName | None, typer.Option("--format", help="Its format; default: recognise it.")]
_Map = Annotated[
    list[str] | None,
    typer.Option("--map", help="OURS=THEIRS, for example arrival=ts; durations with a unit: cancel=deadline:ms."),
]
_Unit = Annotated[str | None, typer.Option(help="Unit of the arrivals: s, ms, us, ns, date, or seconds per unit.")]
_HashBlock = Annotated[int | None, typer.Option(help="Prompt tokens that one prefix hash covers.")]
_Overflow = Annotated[
    Literal["engine", "drop"],
    typer.Option(help="Beyond the context: let the engine reject or clip, or drop (needs --max-model-len)."),
]
_Speed = Annotated[float, typer.Option(help="Divide intervals by this.")]
_MaxGap = Annotated[float | None, typer.Option(help="Cut longer gaps to this [s], before --speed.")]
_Start = Annotated[float | None, typer.Option(help="Leave out earlier rows [s after the first].")]
_End = Annotated[float | None, typer.Option(help="Leave out rows from here on [s after the first].")]
_ZeroOutput = Annotated[
    Literal["skip", "prefill"],
    typer.Option(help="Rows without output: skip them, or keep them as prefill with one token."),
]
_OnDuplicate = Annotated[
    Literal["error", "suffix"], typer.Option(help="A request id again: refuse it, or number it (a#2).")
]
_MissingOutput = Annotated[
    Literal["error", "drop"], typer.Option(help="No number of output tokens: refuse the file, or drop the row.")
]


@app.command("import", no_args_is_help=True)
def import_(
    file: _Source,
    out: _Out,
    layout: _Format = None,
    columns: _Map = None,
    time_unit: _Unit = None,
    hash_block: _HashBlock = None,
    overflow: _Overflow = "engine",
    max_model_len: Annotated[int | None, typer.Option(help="Context limit [tokens].")] = None,
    speed: _Speed = 1.0,
    max_gap: _MaxGap = None,
    start: _Start = None,
    end: _End = None,
    zero_output: _ZeroOutput = "skip",
    on_duplicate: _OnDuplicate = "error",
    missing_output: _MissingOutput = "error",
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Turn a foreign trace into a trace file, and say what was recognised, skipped and changed.

    Known formats: Azure 2023 and 2024, BurstGPT, Mooncake, timed traces and detailed results of `vllm bench serve`,
    and any table with columns of this project's names, or of any names with `--map`.

    Examples:
    * `simcluster trace import AzureLLMInferenceTrace_conv.csv --out conv.parquet`

    * `simcluster trace import log.csv --map arrival=ts --map prompt_tokens=in --map output_tokens=out --time-unit ms
    --out log.parquet`

    * `simcluster trace import toolagent_trace.jsonl --start 600 --end 1200 --speed 2 --out part.parquet`
    """
    options = ImportOptions(
        format=layout,
        columns=_mapping(columns or []),
        time_unit=None if time_unit is None else TimeUnit.parse(time_unit),
        hash_block=hash_block,
        overflow=overflow,
        max_model_len=max_model_len,
        speed=speed,
        max_gap_s=max_gap,
        start_s=start,
        end_s=end,
        zero_output=zero_output,
        on_duplicate=on_duplicate,
        missing_output=missing_output,
    )
    report = _import(file, out, options, quiet)
    if as_json:
        _print_json(report.as_data())
    elif not quiet:
        sys.stdout.write("\n".join(report.lines()) + "\n")


def _mapping(texts: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for text in texts:
        ours, mark, theirs = text.partition("=")
        if not (mark and ours and theirs):
            raise ConfigError(f"--map {text}; must be OURS=THEIRS, for example --map arrival=timestamp")
        if ours in columns:
            raise ConfigError(f"--map {text}; {ours} is mapped twice; give one column for it")
        columns[ours] = theirs
    return columns


def _import(file: Path, out: Path, options: ImportOptions, quiet: bool) -> ImportReport:
    """Import, and ask at a terminal as often as the file is unclear."""
    while True:
        try:
            with _progress(f"reading {file.name}", show=not quiet) as progress:
                return import_trace(file, out, options, progress)
        except AmbiguousTraceError as question:
            if not _can_ask():
                raise
            options = replace(options, **_ask(question))


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(question: AmbiguousTraceError) -> dict[str, Any]:
    """Let the person choose a reading; return the changes to the options."""
    typer.echo(f"{question.question}. Which is it?", err=True)
    for number, choice in enumerate(question.choices, start=1):
        typer.echo(f"  {number}. {choice.reading} (next time: {choice.option})", err=True)
    while True:
        answer: int = typer.prompt("number", type=int, err=True)
        if 1 <= answer <= len(question.choices):
            return question.choices[answer - 1].changes
        typer.echo(f"a number from 1 to {len(question.choices)}, please", err=True)


@app.command(no_args_is_help=True)
def inspect(
    file: Annotated[Path, typer.Argument(help="Trace file (Parquet).")],
    scenario: Annotated[
        str | None, typer.Option(help="Scenario whose cluster's load to estimate: a file or a shipped one's name.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Count what exceeds this context [tokens].")] = None,
    as_json: _Json = False,
) -> None:
    """Say what a trace is like before any run: rate, burstiness, lengths, gaps, sharing, and the load on a cluster.

    The load of a group of instances is rate x work / replicas, where the work of a request is the time of its steps
    (eq. 9) with a full batch sharing them; 1 is the point beyond which queues only grow.

    Examples:
    * `simcluster trace inspect conv.parquet`

    * `simcluster trace inspect conv.parquet --scenario quickstart --max-model-len 8192 --json`
    """
    groups = None
    if scenario is not None:
        loaded, path = load_scenario(scenario)
        groups = cluster_groups(loaded, path)
    with _progress(f"reading {file.name}", show=True, known=False):
        findings = inspect_trace(read_trace(file), max_model_len, groups)
    if as_json:
        _print_json({"file": str(file), **findings})
    else:
        sys.stdout.write("\n".join(finding_lines(str(file), findings)) + "\n")


@app.command(no_args_is_help=True)
def synth(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML).")],
    out: _Out,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed instead of the recipe's.")] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Make a synthetic trace from a recipe; the same recipe and seed give the same requests.

    Arrivals: poisson, gamma, constant, mmpp2, trace (replayed), servegen, closed (a loop of users). Requests: task
    mixes, drawn lengths, lengths of a file, ServeGen histograms; conversations of several turns.

    Examples:
    * `simcluster trace synth traces/recipes/quickstart.yaml --out quickstart.parquet`

    * `simcluster trace synth my_recipe.yaml --seed 7 --out mine.parquet`
    """
    loaded = load_recipe(recipe)
    if seed is not None:
        loaded = loaded.model_copy(update={"seed": seed})
    with _progress(f"drawing {loaded.name}", show=not quiet, known=False):
        trace = make_trace(loaded)
        write_trace(trace, out)
    if as_json:
        span_s = int(trace.arrival_ns[-1]) / 1e9
        _print_json({"out": str(out), "requests": len(trace), "span_s": span_s, "source": trace.metadata["source"]})
    elif not quiet:
        sys.stdout.write(f"{trace.metadata['source']}\n{out}: {len(trace):,} requests\n")


def _print_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


@contextmanager
def _progress(text: str, *, show: bool, known: bool = True) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal's standard error; known: how much is left is known."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=1.0 if known else None)
        yield lambda share: bar.update(task, completed=share)
