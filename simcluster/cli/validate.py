"""`simcluster validate`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from simcluster.card import Card, load_card, write_card
from simcluster.cli.validate_tables import print_verdict
from simcluster.engine_options import EngineOptions
from simcluster.errors import ConfigError
from simcluster.shipped import find_file
from simcluster.validate.points import is_points_file, read_points
from simcluster.validate.runs import read_run
from simcluster.validate.simulate import Tuning
from simcluster.validate.tune import tune_on_points, tune_on_run, tuned_card
from simcluster.validate.validate import Verdict, validate_points, validate_run
from simcluster.validation import explain

__all__ = ["validate"]


def validate(
    card: Annotated[str, typer.Argument(help="Calibration card: a file, or the name of a shipped one.")],
    run: Annotated[
        Path,
        typer.Argument(
            help="Real run: a recording's folder, a run directory of one policy (`live-compare --out`), a result of "
            "`vllm bench serve --save-detailed`, a table of runs, or a table of points (mean latencies)."
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--run", help="Which run of a table of runs, or instance of a run directory.")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option(help="COLUMN=VALUE: score these points only; may be given several times.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Leave out points that may need more tokens of KV cache.", min=1)
    ] = None,
    tune: Annotated[
        str | None, typer.Option(help="First fit these numbers of the card: scale, host, b0, b1, or several.")
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(help="What to fit them on: COLUMN=VALUE of points, or first=N requests of a run; not scored."),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="OPTION=VALUE by vLLM's names, instead of the run's; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write summary.json and tables (steps, estimates, requests) here.")
    ] = None,
    write: Annotated[bool, typer.Option(help="Store the result in the card, for all outputs that use it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a card with a real run: TTFT, TPOT, E2E, throughput and load, and where the error comes from.

    The run's requests are sent at their recorded times to an engine that follows the card. Of a recording the error
    is split into scheduling, step time and front end, and the TTFT estimators are scored at every arrival.

    Examples:
    * `simcluster validate my-card.json runs/recording --out figures`

    * `simcluster validate my-card.json llmservingsim_vllm_runs.parquet --run RTXPRO6000_Qwen3-32B`

    * `simcluster validate qwen3-32b-tp2-h100 points.parquet --tune scale,host --on isl=1024 --select isl=4096`
    """
    file = find_file(card, "calibration", ".json")
    loaded = load_card(file)
    options = _engine_options(engine or [])
    console = Console(stderr=True)
    with console.status("simulating"):
        verdict, tuning = _compare(loaded, run, name, select or [], max_tokens, tune, on or [], options)
    judged = tuned_card(loaded, tuning, verdict.validation.tuned_on)
    others = [each for each in loaded.validations or [] if each.run != verdict.validation.run]
    judged = judged.model_copy(update={"validations": [*(others if judged == loaded else []), verdict.validation]})
    summary = {**verdict.summary, "badge": verdict.validation.text}
    if out is not None:
        _write_tables(out, summary, verdict)
    if write:
        write_card(judged, file)
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    else:
        print_verdict(summary)
    if write:
        console.print(f"stored in {file}", style="dim", highlight=False, markup=False)
    if out is not None:
        console.print(f"written to {out}", style="dim", highlight=False, markup=False)


def _compare(
    card: Card,
    path: Path,
    name: str | None,
    select: list[str],
    max_tokens: int | None,
    tune: str | None,
    on: list[str],
    options: dict[str, Any],
) -> tuple[Verdict, Tuning]:
    what = [each for each in (tune or "").split(",") if each]
    if bool(what) != bool(on):
        raise ConfigError("--tune and --on belong together: what to fit, and on what; give both or none")
    tuning = Tuning()
    tuned_on = f"{', '.join(on)}: {', '.join(what)}" if what else None
    if is_points_file(path):
        fitted: list[dict[str, Any]] = []
        if what:
            points = read_points(path, card, _pairs(on, "--on"), max_tokens)
            tuning = tune_on_points(card, points, what, options)
            fitted = [point.columns for point in points]
        points = read_points(path, card, _pairs(select, "--select"), max_tokens)
        points = [point for point in points if point.columns not in fitted]
        if not points:
            raise ConfigError(f"{path}: --on takes every point, so that none is left to score; name fewer")
        label = path.stem + (f" {' '.join(select)}" if select else "")
        return validate_points(card, points, label, tuning, options, tuned_on), tuning
    if select or max_tokens:
        raise ConfigError(f"{path}: --select and --max-tokens are for tables of points; leave them out")
    run = read_run(path, name)
    skip = 0
    if what:
        skip = _first(on, len(run.requests.arrival_s))
        tuning = tune_on_run(card, run, skip, what, options)
    return validate_run(card, run, tuning, options, skip, tuned_on), tuning


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in texts)
    if any("=" not in text for text in texts):
        raise ConfigError(f"{option} {' '.join(texts)}: must be COLUMN=VALUE; correct it")
    return pairs


def _first(on: list[str], most: int) -> int:
    found = _pairs(on, "--on")
    text = found.get("first", "")
    if len(found) != 1 or not text.isdigit() or not 0 < int(text) < most:
        raise ConfigError(f"--on {' '.join(on)}: for a run it must be first=N, N from 1 to {most - 1}; correct it")
    return int(text)


def _engine_options(texts: list[str]) -> dict[str, Any]:
    found = {key: yaml.safe_load(value) for key, value in _pairs(texts, "--engine").items()}
    try:
        EngineOptions.model_validate(found)
    except ValidationError as error:
        raise ConfigError(f"--engine: {explain(error, EngineOptions)}") from None
    return found


def _write_tables(folder: Path, summary: dict[str, Any], verdict: Verdict) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stem, table in verdict.tables.items():
            table.write_parquet(folder / f"{stem}.parquet")
        text = json.dumps(summary, indent=2, allow_nan=False)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None
