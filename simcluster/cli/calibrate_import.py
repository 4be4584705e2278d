"""`simcluster calibrate import`."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import polars as pl
import typer
from rich.console import Console

from simcluster.calibrate.importing.iteration_log import read_iteration_logs
from simcluster.calibrate.importing.kernels import compose, read_kernels, step_grid
from simcluster.calibrate.importing.llmservingsim import compose_profile
from simcluster.calibrate.importing.models import model_shape
from simcluster.cli.fit_tables import source_table
from simcluster.cli.wide import print_wide
from simcluster.errors import CalibrationError

__all__ = ["import_"]

Format = Literal["iteration-log", "kernels", "llmservingsim"]


def import_(
    layout: Annotated[Format, typer.Argument(metavar="FORMAT", help="iteration-log, kernels or llmservingsim.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The files; their columns tell them apart.")],
    out: Annotated[Path, typer.Option(help="Table of steps to write (Parquet).")],
    model: Annotated[str | None, typer.Option(help="Model to compose, for example Qwen3-8B.")] = None,
    config: Annotated[Path | None, typer.Option(help="The model's config.json, if its name is not known.")] = None,
    num_gpus: Annotated[int, typer.Option("--tp", min=1, help="GPUs of one instance (tensor parallel).")] = 1,
    max_tokens: Annotated[int, typer.Option(min=16, help="Largest step to compose [tokens].")] = 8192,
    bandwidth: Annotated[
        float, typer.Option(min=1, help="Memory bandwidth of a GPU [GB/s], for kernels that only move bytes.")
    ] = 3350.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn somebody else's measurements into a table of steps that `calibrate fit` takes.

    * `iteration-log`: the log of `vllm serve --enable-logging-iteration-details`. It has counts and times but no
    contexts: b0 and b1 can be fitted (`--allow-partial`), b2 and b3 cannot.

    * `kernels`: tables of GEMM, prefill attention, decode attention and all-reduce as aiconfigurator and aisimulate
    ship them; steps are composed from the model's dimensions.

    * `llmservingsim`: the profiles dense, attention and per_sequence of one model; steps are composed.

    Examples:
    * `simcluster calibrate import iteration-log vllm.log --out steps.parquet`

    * `simcluster calibrate import kernels gemm.parquet context.parquet generation.parquet --model Qwen3-8B --out
    steps.parquet`
    """
    notes: list[str]
    if layout == "iteration-log":
        steps, notes = read_iteration_logs(files)
    else:
        shape = model_shape(model, config)
        if layout == "kernels":
            steps = compose(read_kernels(files), shape, num_gpus, step_grid(max_tokens), bandwidth)
            notes = ["composed from measured kernels; norms, activation and rotary embedding are estimated"]
        else:
            steps, notes = compose_profile(files, shape, num_gpus)
            notes.insert(0, "composed from measured layers, not a serving run")
    _write(steps, out)
    if as_json:
        found = {"steps": len(steps), "columns": steps.columns, "notes": notes, "out": str(out)}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    print_wide(source_table(steps, str(out)))
    for note in notes:
        Console(stderr=True).print(f"note: {note}", style="yellow", highlight=False, markup=False)


def _write(steps: pl.DataFrame, out: Path) -> None:
    """Write a table in one move, so that nothing is left half written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        os.close(handle)
        try:
            steps.write_parquet(temporary, compression="zstd")
            Path(temporary).chmod(0o644)
            Path(temporary).replace(out)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CalibrationError(f"{out}: cannot be written ({error.strerror}); give a folder that is writable") from None
