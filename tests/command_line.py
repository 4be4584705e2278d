"""The command line inside the test's own process."""

import contextlib
import io
import sys

import pytest

from simcluster.cli import main

__all__ = ["run_command"]


def run_command(*arguments: object) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    text, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["simcluster", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return code, text.getvalue(), errors.getvalue()
