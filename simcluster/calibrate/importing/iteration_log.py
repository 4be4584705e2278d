"""Reads what `vllm serve --enable-logging-iteration-details` logs: one line per step, with counts and elapsed time.

The log has no context lengths. What suffices: b0 and b1 (and b5) of the step time. What does not: b2 and b3, which
need the contexts of decodes and the tokens before each prefill chunk; a recording has them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from simcluster.errors import CalibrationError

__all__ = ["read_iteration_logs"]

_LINE = re.compile(
    r"Iteration\((?P<step>\d+)\): (?P<ctx_requests>\d+) context requests, (?P<ctx_tokens>\d+) context tokens, "
    r"(?P<gen_requests>\d+) generation requests, (?P<gen_tokens>\d+) generation tokens, "
    r"iteration elapsed time: (?P<ms>\d+(?:\.\d+)?) ms(?P<dummy> \(dummy\))?"
)


def read_iteration_logs(files: Sequence[Path]) -> tuple[pl.DataFrame, list[str]]:
    """Return the steps of logs with `STEP_COLUMNS`, `n_decode` and `contexts_known`, and what is worth knowing.

    Lines of other kinds, dummy steps of data parallelism and steps of 0.00 ms are left out.

    Raises:
        CalibrationError: a file is unreadable or has no such line.
    """
    rows: list[tuple[int, float, float, bool, int, float, int, bool]] = []
    dummies = zeros = 0
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise CalibrationError(f"{file}: cannot be read ({error.strerror}); give vLLM's log") from None
        before = len(rows) + dummies + zeros
        for match in _LINE.finditer(text):
            context, tokens = int(match["ctx_requests"]), int(match["ctx_tokens"])
            decodes, ms = int(match["gen_requests"]), float(match["ms"])
            if match["dummy"] or tokens + decodes == 0:
                dummies += 1
            elif ms == 0:
                zeros += 1
            else:
                total = tokens + int(match["gen_tokens"])
                rows.append((total, 0.0, 0.0, context > 0, context, ms / 1e3, decodes, False))
        if len(rows) + dummies + zeros == before:
            raise CalibrationError(
                f"{file}: no line 'Iteration(n): ... context requests, ...'; start vLLM with "
                "--enable-logging-iteration-details and give its log"
            )
    if not rows:
        raise CalibrationError(f"{files[0]}: no step but dummies and steps of 0.00 ms")
    names = (
        "n_tokens",
        "sum_decode_context",
        "prefill_attention",
        "has_prefill",
        "num_prefill_requests",
        "step_s",
        "n_decode",
        "contexts_known",
    )
    notes = ["no contexts in the log: b2 and b3 cannot be fitted; fit with --allow-partial, or make a recording"]
    if dummies:
        notes.append(f"{dummies:,} dummy steps are left out")
    if zeros:
        notes.append(f"{zeros:,} steps of 0.00 ms are left out: the log rounds to 0.01 ms")
    return pl.DataFrame(rows, schema=list(names), orient="row"), notes
