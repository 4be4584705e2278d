"""`simcluster calibrate`."""

import typer

from simcluster.cli import calibrate_quality

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure running models: what their answers are worth.")
app.command("quality", no_args_is_help=True)(calibrate_quality.quality)
