"""Pairs of prompt and answer lengths from any file that is known, with or without arrivals."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from simcluster.errors import TraceError
from simcluster.workload.importing.detect import find_columns
from simcluster.workload.importing.formats import FORMATS
from simcluster.workload.importing.sources import open_source
from simcluster.workload.importing.values import BadValueError, as_integers
from simcluster.workload.trace_columns import IntArray
from simcluster.workload.trace_schema import MAX_TOKENS

__all__ = ["read_length_pairs"]

_NEEDED = ("prompt_tokens", "output_tokens")


def read_length_pairs(path: Path) -> tuple[IntArray, IntArray]:
    """Return prompt and answer lengths [tokens], int64, shape (n,) each, in order of the file.

    Rows without a prompt or an answer are left out.

    Raises:
        TraceError: the file is unreadable, has no such columns, no row is left, or a value is not allowed.
    """
    source = open_source(path)
    for layout in FORMATS.values():
        columns = find_columns(source, layout, {})
        if all(ours in columns for ours in _NEEDED):
            break
    else:
        raise TraceError(
            f"{path}: found no columns of prompt and output tokens among {', '.join(source.names)}; "
            "call them prompt_tokens and output_tokens"
        )
    parts: dict[str, list[IntArray]] = {ours: [] for ours in _NEEDED}
    for block in source.blocks({columns[ours]: (pa.int64(),) for ours in _NEEDED}):
        for ours in _NEEDED:
            try:
                values = as_integers(block.columns[columns[ours]]).fill_null(0).to_numpy(zero_copy_only=False)
                bad = np.flatnonzero((values < 0) | (values > MAX_TOKENS))
                if len(bad):
                    raise BadValueError(int(bad[0]), str(values[bad[0]]), f"allowed is 0 to {MAX_TOKENS}")
            except BadValueError as error:
                where = f"{path}: {columns[ours]}, {source.place} {block.places[error.index]}"
                raise TraceError(f"{where}: found {error.found}; {error.allowed}") from None
            parts[ours].append(values)
    prompts, answers = (np.concatenate([np.zeros(0, dtype=np.int64), *parts[ours]]) for ours in _NEEDED)
    if len(prompts) != len(answers):
        raise TraceError(f"{path}: found {len(prompts)} prompt and {len(answers)} output lengths; allowed are pairs")
    kept = (prompts > 0) & (answers > 0)
    if not kept.any():
        raise TraceError(f"{path}: found no row with both prompt and output tokens; give a file with lengths")
    return prompts[kept], answers[kept]
