"""`simcluster router replay`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from simcluster.live.router.log.replay import Report, replay

__all__ = ["replay_log"]


def replay_log(
    log: Annotated[Path, typer.Argument(help="Folder of `router --log`.")],
    start: Annotated[
        int | None, typer.Option("--from", min=1, help="Number of the first file; default: the first there is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> int:
    """Decide everything in a log anew and compare, bit for bit.

    The router is built from the log's manifest alone and told what the live one was told, in order. Exit code 0: all
    decisions are identical; 1: some differ; 2: the log cannot be replayed.

    Examples:
    * `simcluster router mine.yaml --log decisions/ & ... ; simcluster router replay decisions/`
    """
    report = replay(log, start)
    if as_json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        sys.stdout.write(_text(report))
    return 0 if report.identical == report.decisions else 1


def _text(report: Report) -> str:
    lines = [f"{report.decisions:,} decisions replayed, {report.identical:,} identical ({report.events:,} events)"]
    found = report.first_difference
    if found is not None:
        lines += [
            f"first difference: decision {found.decision} in {found.file}, request {found.request}: {found.field}",
            f"  logged   {found.logged}",
            f"  replayed {found.replayed}",
        ]
    return "\n".join([*lines, *(f"note: {each}" for each in report.notes)]) + "\n"
