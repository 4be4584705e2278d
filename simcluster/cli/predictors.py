"""`simcluster predictors`."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from simcluster.cli.predictor_tables import comparison_table, error_tables
from simcluster.errors import ConfigError, PredictorError
from simcluster.predict.apply import predicted_table
from simcluster.predict.beliefs import ROOM
from simcluster.predict.evaluate import evaluate as score
from simcluster.predict.heads import GENTLE, Rounds
from simcluster.predict.predictor import Predictor, Split, load_predictor
from simcluster.predict.table import read_table
from simcluster.predict.train import train_predictor
from simcluster.shipped import find_file

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Train, score and use predictors of answer quality and length.")

_WIDE = Console(width=400)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report.")]
_File = Annotated[str, typer.Argument(help="Predictor file, or a shipped one's name.")]
_Table = Annotated[
    Path, typer.Argument(help="Parquet, CSV or JSONL with prompt, model, score, output_tokens; or a trace.")
]
_Map = Annotated[
    list[str] | None, typer.Option("--map", help="OURS=THEIRS, for example score=judge; may be given several times.")
]
_ScoreMax = Annotated[float, typer.Option(help="The score that means quality 1, for example 10.")]
_Tokenizer = Annotated[
    Path | None, typer.Option(help="tokenizer.json to count with (extra `tokenizers`); default: an estimate.")
]
_AllowUnseen = Annotated[bool, typer.Option(help="Predict models that were not trained on, flagged as unseen.")]


@app.command(no_args_is_help=True)
def train(
    table: _Table,
    out: Annotated[Path, typer.Option(help="Predictor file to write (JSON).")],
    columns: _Map = None,
    score_max: _ScoreMax = 1.0,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of prompts to keep for `evaluate`.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Chooses these prompts.")] = 1,
    start: Annotated[
        Literal["nothing", "task_means"],
        typer.Option(help="task_means: correct the means of the column task, which every use must then have."),
    ] = "nothing",
    most_trees: Annotated[int | None, typer.Option("--trees", min=1, max=5000, help="Trees of a head at most.")] = None,
    tokenizer: _Tokenizer = None,
    source: Annotated[str | None, typer.Option(help="What the table is, for the file; default: its name.")] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the table, for the file.")] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Train an accuracy head (from scores) and a length head (from output tokens), and keep them in one file.

    No prompt is both trained on and held out. The same table and options give the same file, byte for byte.

    Examples:
    * `simcluster predictors train answers.parquet --out mine.json`

    * `simcluster predictors train judged.csv --map score=rating --score-max 10 --start task_means --out mine.json`
    """
    _check_score_max(score_max)
    rounds = Rounds() if start == "nothing" else GENTLE
    if most_trees is not None:
        rounds = replace(rounds, most=most_trees)
    _check_writable(out)
    with _progress(f"training on {table.name}", show=not quiet) as progress:
        answers = read_table(table, _mapping(columns or []), score_max)
        try:
            predictor = train_predictor(
                answers,
                source=source or table.name,
                licence=licence,
                split=Split(seed=seed, held_out=held_out, validation=0.125),
                start=start,
                tokenizer=tokenizer,
                rounds=rounds,
                progress=progress,
            )
        except PredictorError as error:
            raise PredictorError(f"{table}: {error}") from None
        predictor.save(out)
    summary: dict[str, Any] = {
        "out": str(out),
        "prompts": predictor.origin.prompts,
        "rows": predictor.origin.rows,
        "held_out_prompts": len(answers.prompts) - predictor.origin.prompts,
        "models": [each.name for each in predictor.models],
        "tokens": predictor.tokens.name,
        "trees": {kind: head.best_iteration for kind, head in predictor.heads.items()},
    }
    if as_json:
        _print_json(summary)
    elif not quiet:
        trees = ", ".join(f"{kind} head of {count} trees" for kind, count in summary["trees"].items())
        sys.stdout.write(
            f"{out}: {trees}, {len(predictor.models)} models; trained on {summary['prompts']:,} prompts, "
            f"{summary['held_out_prompts']:,} held out for `simcluster predictors evaluate`; tokens: "
            f"{predictor.tokens.name}\n"
        )


@app.command(no_args_is_help=True)
def evaluate(
    file: _File,
    table: _Table,
    columns: _Map = None,
    score_max: _ScoreMax = 1.0,
    tokenizer: _Tokenizer = None,
    allow_unseen: _AllowUnseen = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Score a predictor on held-out prompts: errors by model and task beside those of means, and calibration.

    A prompt is held out by a hash of its text, so none that was trained on is scored, in whatever table it comes.

    Example: `simcluster predictors evaluate mine.json answers.parquet --json`
    """
    _check_score_max(score_max)
    predictor, name = _load(file, tokenizer)
    with _progress(f"scoring {name}", show=not quiet) as progress:
        answers = read_table(table, _mapping(columns or []), score_max)
        try:
            found = score(predictor, answers, allow_unseen=allow_unseen, progress=progress)
        except PredictorError as error:
            raise PredictorError(f"{name} on {table}: {error}") from None
    if as_json:
        _print_json({"file": name, "table": str(table), **found})
        return
    title = f"{name} on {found['held_out_prompts']:,} held-out prompts of {table.name}"
    parts = [comparison_table(found, title), *([] if quiet else error_tables(found))]
    for part in parts:  # wider than the terminal rather than with numbers cut off
        needed = Measurement.get(_WIDE, _WIDE.options, part).maximum
        Console(width=max(Console().width, needed)).print(part)


@app.command(no_args_is_help=True)
def predict(
    file: _File,
    table: _Table,
    out: Annotated[Path, typer.Option(help="Table to write (Parquet, CSV or JSONL, by its suffix).")],
    columns: _Map = None,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", help="MODEL=IN/OUT in USD per million tokens; all models need one for costs."),
    ] = None,
    tokenizer: _Tokenizer = None,
    allow_unseen: _AllowUnseen = False,
    quiet: _Quiet = False,
) -> None:
    """Predict quality, answer length and, with prices, cost for every row of a table of prompts and models.

    Example: `simcluster predictors predict mine.json asked.csv --price Qwen3-8B=0.18/0.70 --out told.csv`
    """
    predictor, name = _load(file, tokenizer)
    prices = dict(_price(text) for text in price or [])
    _check_writable(out)
    with _progress(f"predicting {table.name}", show=not quiet) as progress:
        answers = read_table(table, _mapping(columns or []), float("inf"))
        try:
            found = predicted_table(predictor, answers, allow_unseen=allow_unseen, prices=prices, progress=progress)
        except PredictorError as error:
            raise PredictorError(f"{name} on {table}: {error}") from None
        _write(found, out)
    if not quiet:
        sys.stdout.write(f"{out}: {len(found):,} rows\n")


def _load(file: str, tokenizer: Path | None) -> tuple[Predictor, str]:
    path = find_file(file, ROOM, ".json")
    return load_predictor(path, tokenizer), path.name


def _check_score_max(value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"--score-max {value:g}; must be above 0; give the score that means quality 1")


def _check_writable(out: Path) -> None:
    """Refuse an impossible place before anything is computed."""
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: cannot be written there; give a file in an existing folder")


def _mapping(texts: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for text in texts:
        ours, mark, theirs = text.partition("=")
        if not (mark and ours and theirs) or ours in columns:
            raise ConfigError(
                f"--map {text}; must be OURS=THEIRS, once for each of ours, for example --map score=rating"
            )
        columns[ours] = theirs
    return columns


def _price(text: str) -> tuple[str, tuple[float, float]]:
    model, _, numbers = text.rpartition("=")
    price_in, _, price_out = numbers.partition("/")
    try:
        pair = (float(price_in), float(price_out))
    except ValueError:
        pair = (-1.0, -1.0)
    if not model or not all(0 <= each < float("inf") for each in pair):
        raise ConfigError(f"--price {text}; must be MODEL=IN/OUT, for example --price Qwen3-8B=0.18/0.70")
    return model, pair


def _write(table: Any, out: Path) -> None:
    """Write a table in one move."""
    writers = {".parquet": table.write_parquet, ".csv": table.write_csv, ".jsonl": table.write_ndjson}
    writer = writers.get(out.suffix.lower())
    if writer is None:
        raise ConfigError(f"--out {out}; must be a .parquet, .csv or .jsonl file")
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    os.close(handle)
    try:
        writer(temporary)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _print_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


@contextmanager
def _progress(text: str, *, show: bool) -> Iterator[Callable[[float], None]]:
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=1.0)
        yield lambda share: bar.update(task, completed=share)
