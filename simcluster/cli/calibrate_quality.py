"""`simcluster calibrate quality`."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from simcluster.calibrate.quality import Endpoint, Plan, Result, collect, read_prompts
from simcluster.cli.wide import print_wide
from simcluster.errors import ConfigError

__all__ = ["quality"]

_SHOWN_FAILURES = 5


_Prompts = Annotated[
    Path, typer.Argument(help="Parquet, CSV or JSONL with the column prompt; optional: prompt_id, task, reference.")
]
_Model = Annotated[
    list[str],
    typer.Option("--model", help="NAME=URL of a running OpenAI-compatible server, up to /v1; once per model."),
]
_Judge = Annotated[str, typer.Option(help="MODEL=URL of the judge, any OpenAI-compatible server.")]
_Out = Annotated[Path, typer.Option(help="Table to write (Parquet, CSV or JSONL), for `predictors train`.")]
_Work = Annotated[
    Path | None, typer.Option(help="Folder of all answers and scores; default: OUT with `.work` appended.")
]
_ServedAs = Annotated[
    list[str] | None,
    typer.Option("--served-as", help="NAME=ID: what the server of NAME calls the model; default: NAME."),
]
_KeyEnv = Annotated[str | None, typer.Option(help="Environment variable with the key of the models' servers.")]
_JudgeKeyEnv = Annotated[str | None, typer.Option(help="Environment variable with the judge's key.")]
_Map = Annotated[
    list[str] | None, typer.Option("--map", help="OURS=THEIRS, for example prompt=question; several times.")
]
_Body = Annotated[str, typer.Option(help="JSON object with further fields of the models' requests, for example top_p.")]
_Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Order in which the judge sees answers.")]
_Attempts = Annotated[int, typer.Option(min=1, max=20, help="Attempts for one request, or one judgement.")]


def quality(
    prompts: _Prompts,
    model: _Model,
    judge: _Judge,
    out: _Out,
    work: _Work = None,
    served_as: _ServedAs = None,
    key_env: _KeyEnv = None,
    judge_key_env: _JudgeKeyEnv = None,
    columns: _Map = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer [tokens].")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of the models; the judge's is 0.")] = 0.0,
    body: _Body = "{}",
    seed: _Seed = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once, for each server.")] = 8,
    attempts: _Attempts = 4,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Limit of one request [s].")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report.")] = False,
) -> None:
    """Have running models answer prompts and a judge score the answers: the table that predictors are trained on.

    The judge scores all answers to a prompt in one call, without their models' names and in a drawn order. Every
    answer and score is kept at once: repeat a stopped command and it goes on; what failed is tried again. The exit
    code is 1 where something failed; the table then holds the rest.

    Example:
    * `simcluster calibrate quality prompts.jsonl --model Qwen3-8B=http://127.0.0.1:8000/v1
      --model Qwen3-32B=http://127.0.0.1:8001/v1 --judge gpt-5=https://api.openai.com/v1
      --judge-key-env OPENAI_API_KEY --out answers.parquet`
    """
    ids = dict(_pair("--served-as", text, "NAME=ID") for text in served_as or [])
    models = [_endpoint("--model", text, key_env, ids) for text in model]
    unknown = sorted(set(ids) - {each.name for each in models})
    if unknown:
        raise ConfigError(f"--served-as {unknown[0]}=...; must name one of the models: {', '.join(_names(models))}")
    _check_out(out)
    plan = Plan(
        prompts=read_prompts(prompts, dict(_pair("--map", text, "OURS=THEIRS") for text in columns or []), limit),
        models=models,
        judge=_endpoint("--judge", judge, judge_key_env, {}),
        max_tokens=max_tokens,
        temperature=temperature,
        body=_object(body),
        seed=seed,
        concurrency=concurrency,
        attempts=attempts,
        timeout_s=timeout_s,
    )
    folder = work or out.with_name(f"{out.name}.work")
    with _progress(show=not quiet) as progress:
        result = collect(plan, folder, progress)
    _write(result.table, out)
    _report(result, plan, out, folder, as_json=as_json, quiet=quiet)
    if result.failures:
        raise typer.Exit(1)


def _names(models: list[Endpoint]) -> list[str]:
    return [each.name for each in models]


def _pair(option: str, text: str, shape: str) -> tuple[str, str]:
    left, _, right = text.partition("=")
    if not (left and right):
        raise ConfigError(f"{option} {text}; must be {shape}")
    return left, right


def _endpoint(option: str, text: str, key_env: str | None, ids: dict[str, str]) -> Endpoint:
    name, url = _pair(option, text, "NAME=URL, for example Qwen3-8B=http://127.0.0.1:8000/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{option} {text}; the URL must begin with http:// or https://")
    return Endpoint(name=name, url=url, model=ids.get(name, name), key_env=key_env)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--body {text}; must be a JSON object, for example '{{\"top_p\": 0.9}}'")
    taken = sorted({"model", "messages", "stream", "max_tokens", "temperature"} & set(found))
    if taken:
        raise ConfigError(f"--body has {taken[0]}, which is set already; leave it out")
    return found


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in (".parquet", ".csv", ".jsonl"):
        raise ConfigError(f"--out {out}; must be a .parquet, .csv or .jsonl file")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: cannot be written there; give a file in an existing folder")


def _write(table: pl.DataFrame, out: Path) -> None:
    """Write the table in one move."""
    writers: dict[str, Callable[[str], Any]] = {
        ".parquet": table.write_parquet,
        ".csv": table.write_csv,
        ".jsonl": table.write_ndjson,
    }
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    os.close(handle)
    try:
        writers[out.suffix.lower()](temporary)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _report(result: Result, plan: Plan, out: Path, work: Path, *, as_json: bool, quiet: bool) -> None:
    failures = [{"prompt_id": name, "of": who, "reason": why} for (name, who), why in sorted(result.failures.items())]
    means = {
        str(row[0]): {"answers": row[1], "score": row[2], "output_tokens": row[3], "cut_at_max_tokens": row[4]}
        for row in result.table.group_by("model", maintain_order=True)
        .agg(
            pl.len(),
            pl.col("score").mean().alias("mean_score"),
            pl.col("output_tokens").mean().alias("mean_tokens"),
            (pl.col("finish_reason") == "length").sum().alias("cut"),
        )
        .iter_rows()
    }
    if as_json:
        summary = {"out": str(out), "work": str(work), **result.counts, "models": means, "failures": failures}
        sys.stdout.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        return
    if quiet:
        return
    table = Table(title=f"{out}: {len(plan.prompts):,} prompts, judged by {plan.judge.name}", title_justify="left")
    for heading in ("model", "answers", "mean score", "mean answer [tokens]", "cut at the limit"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, row in means.items():
        score = "-" if row["score"] is None else f"{row['score']:.3f}"
        table.add_row(
            name, f"{row['answers']:,}", score, f"{row['output_tokens']:.0f}", f"{row['cut_at_max_tokens']:,}"
        )
    print_wide(table)
    for each in failures[:_SHOWN_FAILURES]:
        sys.stdout.write(f"failed: prompt {each['prompt_id']}, {each['of']}: {each['reason']}\n")
    if failures:
        sys.stdout.write(f"{len(failures):,} failed in all; repeat the command to try them again\n")


@contextmanager
def _progress(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, completed=done)
            bar.update(tasks[stage], completed=done)

        yield update
