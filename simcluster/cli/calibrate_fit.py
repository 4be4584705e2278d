"""`simcluster calibrate fit`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from simcluster.calibrate.fit_card import CardNames, make_card
from simcluster.calibrate.fit_report import fit_report
from simcluster.calibrate.fit_sources import fit_sources
from simcluster.calibrate.step_tables import FitOptions, Target
from simcluster.card import Card, load_card, write_card
from simcluster.cli.fit_tables import print_report
from simcluster.shipped import find_file

__all__ = ["fit"]


_Sources = Annotated[
    list[Path],
    typer.Argument(metavar="STEPS...", help="Recordings (folders, or steps_X.parquet of the older form) or tables."),
]
_Out = Annotated[Path | None, typer.Option(help="Write the card here; without, only the report is shown.")]
_Name = Annotated[str | None, typer.Option(help="Name of the card; default: its file's.")]
_Model = Annotated[
    str | None, typer.Option(help="Served model, as the card shall call it; of a table of several, this one.")
]
_Device = Annotated[str | None, typer.Option(help="Kind of device, as the card shall call it.")]
_Base = Annotated[
    str | None,
    typer.Option(help="Card to take KV cache, context limit, host time and front end from, where STEPS lack them."),
]
_TargetOption = Annotated[
    Target, typer.Option(help="The wall time of a step, or the worker's CPU time, which contention leaves alone.")
]
_ExcludeDisturbed = Annotated[
    bool, typer.Option("--exclude-disturbed", help="Leave out steps that other work on the machine slowed down.")
]
_Skip = Annotated[int, typer.Option(min=0, help="Leave out this many steps at the beginning of each source.")]
_KeepFirstSeen = Annotated[
    bool, typer.Option("--keep-first-seen", help="Keep steps that are the first of their number of tokens (warm-up).")
]
_EqualWeights = Annotated[
    bool, typer.Option("--equal-weights", help="Every step counts alike, even if a served phase was recorded.")
]
_AllowPartial = Annotated[
    bool, typer.Option("--allow-partial", help="Fit what the steps can tell, hold the rest at 0 and flag it.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def fit(
    sources: _Sources,
    out: _Out = None,
    name: _Name = None,
    model: _Model = None,
    device: _Device = None,
    base: _Base = None,
    target: _TargetOption = "wall",
    exclude_disturbed: _ExcludeDisturbed = False,
    skip_steps: _Skip = 0,
    keep_first_seen: _KeepFirstSeen = False,
    equal_weights: _EqualWeights = False,
    allow_partial: _AllowPartial = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Fit the step-time model to recorded steps, and say how far to trust it.

    Plain eq. 9 is compared with every optional term on steps and runs that the fit has not seen; the simplest model
    within noise of the best is taken. Coefficients are never negative, errors are relative, outliers count less.

    Examples:
    * `simcluster calibrate fit recording/ --out card.json`

    * `simcluster calibrate fit monday/ tuesday/ --target worker-cpu --exclude-disturbed --out card.json`

    * `simcluster calibrate fit steps.parquet --base qwen3-8b-h100 --out card.json --json`
    """
    base_card = None if base is None else load_card(find_file(base, "calibration", ".json", None, "--base"))
    options = FitOptions(
        target=target,
        exclude_disturbed=exclude_disturbed,
        skip_steps=skip_steps,
        keep_first_seen=keep_first_seen,
        model=model,
    )
    with _progress(show=not quiet) as stage:
        fitted = fit_sources(sources, options, allow_partial=allow_partial, equal_weights=equal_weights, on_stage=stage)
    card: Card | None = None
    if out is not None:
        names = CardNames(
            name=name or out.stem,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            model=model,
            device=device,
            base=base_card,
        )
        card = make_card(fitted, names)
        write_card(card, out)
    report = fit_report(fitted, card)
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2, allow_nan=False) + "\n")
    else:
        print_report(report)
    if out is not None and not quiet:
        Console(stderr=True).print(f"written to {out}", style="dim", highlight=False, markup=False)


@contextmanager
def _progress(*, show: bool) -> Iterator[Callable[[str], None]]:
    if not show:
        yield lambda _stage: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fitting", total=None)
        yield lambda stage: bar.update(task, description=f"fitting: {stage}")
