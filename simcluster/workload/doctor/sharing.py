"""How much of the prompts could come from a prefix cache."""

from typing import Any

import numpy as np

from simcluster.workload.trace import Trace
from simcluster.workload.trace_columns import IntArray

__all__ = ["hit_rate_bound", "shared_prefix_tokens"]


def hit_rate_bound(trace: Trace, block_size: int = 16) -> dict[str, Any] | None:
    """Return an upper bound of the prefix hit rate: that of a cache without end, shared by all requests.

    Whole blocks hit, and at most floor((p - 1) / block) of a prompt of p tokens, since the engine must compute at
    least one token. Blocks are in the cache as soon as an earlier request has arrived.

    Args:
        trace: the requests; without prefix hashes nothing can be said.
        block_size: tokens per block of the cache.

    Returns:
        `hit_tokens`, `prompt_tokens`, `hit_rate` (their ratio), `block_size`, and `requests_with_hits`; or None
        without hashes.

    Source: vLLM's prefix caching, see docs/scheduler.md.
    """
    shared = shared_prefix_tokens(trace)
    if shared is None:
        return None
    prompts = trace.prompt_tokens
    hits = np.minimum(shared // block_size, (prompts - 1) // block_size) * block_size
    return {
        "block_size": block_size,
        "hit_tokens": int(hits.sum()),
        "prompt_tokens": int(prompts.sum()),
        "hit_rate": float(hits.sum() / prompts.sum()),
        "requests_with_hits": int((hits > 0).sum()),
    }


def shared_prefix_tokens(trace: Trace) -> IntArray | None:
    """Return how many leading tokens of each prompt an earlier request has had [tokens], shape (n,).

    Hashes are compared as paths, block by block: equal tokens count only after an equal beginning. A last block that
    is not full matches as far as both prompts reach into it. A turn that waits for an earlier one (`after`) shares its
    answer too, but for the last token, which is never fed back.

    Args:
        trace: the requests.

    Returns:
        Tokens, or None without prefix hashes.
    """
    offsets, values, block = trace.prefix_offsets, trace.prefix_values, trace.prefix_block_size
    if offsets is None or values is None or block is None:
        return None
    counts = np.diff(offsets)
    _, ids = np.unique(values, return_inverse=True)
    width = len(ids) + 1
    shared = np.zeros(len(trace), dtype=np.int64)
    rows = np.flatnonzero(counts > 0)  # requests that still have company on their path
    node = np.zeros(len(rows), dtype=np.int64)
    matched = np.ones(len(rows), dtype=np.bool_)
    for level in range(int(counts.max(initial=0))):
        _, node = np.unique(node * width + ids[offsets[rows] + level], return_inverse=True)
        reach = np.minimum(trace.prompt_tokens[rows] - level * block, block)
        common = np.minimum(_most_before(node, reach, block), reach)
        shared[rows] += np.where(matched, common, 0)
        matched &= common == block
        goes_on = (np.bincount(node)[node] > 1) & (counts[rows] > level + 1)
        rows, node, matched = rows[goes_on], node[goes_on], matched[goes_on]
        if len(rows) == 0:
            break
    return np.maximum(shared, _shared_with_answers(trace, offsets, values))


def _most_before(node: IntArray, reach: IntArray, block: int) -> IntArray:
    """Return for each request the furthest that an earlier one reaches into the same block, 0 if there is none."""
    order = np.argsort(node, kind="stable")
    base = node[order] * (block + 1)  # grows from node to node, so one running maximum serves all of them
    most = np.maximum.accumulate(base + reach[order])
    before = np.concatenate([[0], most[:-1]]) - base
    result = np.empty(len(node), dtype=np.int64)
    result[order] = np.maximum(before, 0)
    return result


def _shared_with_answers(trace: Trace, offsets: IntArray, values: IntArray) -> IntArray:
    """Return what a turn shares with the turn before it, answer included, if its prompt begins with that prompt."""
    result = np.zeros(len(trace), dtype=np.int64)
    if trace.after is None:
        return result
    rows = np.flatnonzero(trace.after >= 0)
    before = trace.after[rows]
    counts = np.diff(offsets)
    fits = (counts[before] > 0) & (counts[before] <= counts[rows])
    rows, before = rows[fits], before[fits]
    lengths = counts[before]
    owner = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    same = values[offsets[rows][owner] + position] == values[offsets[before][owner] + position]
    whole = np.bincount(owner[~same], minlength=len(rows)) == 0
    known = trace.prompt_tokens[before] + trace.output_tokens[before] - 1
    result[rows[whole]] = np.minimum(trace.prompt_tokens[rows], known)[whole]
    return result
