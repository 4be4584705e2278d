"""`simcluster calibrate`."""

import typer

from simcluster.cli import calibrate_fit, calibrate_import, calibrate_quality, calibrate_record

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Measure running models: how fast they serve, and what their answers are worth."
)
app.command("record", no_args_is_help=True, context_settings=calibrate_record.CONTEXT)(calibrate_record.record)
app.command("fit", no_args_is_help=True)(calibrate_fit.fit)
app.command("import", no_args_is_help=True)(calibrate_import.import_)
app.command("dummy-model", no_args_is_help=True)(calibrate_record.dummy_model)
app.command("quality", no_args_is_help=True)(calibrate_quality.quality)
