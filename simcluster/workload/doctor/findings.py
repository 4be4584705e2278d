"""Everything that is worth knowing about a trace before a run, and what to beware of."""

from typing import Any

import numpy as np

from simcluster.workload.doctor.offered_load import Group, offered_load
from simcluster.workload.doctor.sharing import hit_rate_bound
from simcluster.workload.doctor.statistics import (
    arrival_statistics,
    length_statistics,
    repeated_rows,
    session_statistics,
)
from simcluster.workload.trace import Trace
from simcluster.workload.trace_columns import counted

__all__ = ["inspect_trace"]

_SLOW_START = 0.05  # of the peak rate
_LEAST_PEAK = 3  # requests that make a peak
_MANY_REPEATED = 0.05  # of the requests


def inspect_trace(trace: Trace, max_model_len: int | None = None, groups: list[Group] | None = None) -> dict[str, Any]:
    """Return statistics of a trace as plain data, with warnings for people.

    Args:
        trace: the requests.
        max_model_len: count what exceeds this context limit [tokens].
        groups: the cluster whose load to estimate.

    Returns:
        `requests`, `arrivals`, `lengths`, `repeated_rows`, `sessions`, `prefix`, `context`, `load`, `notes` of the
        reader and `warnings`; None stands for what the trace does not have or was not asked for.
    """
    findings: dict[str, Any] = {
        "requests": len(trace),
        "source": trace.metadata.get("source"),
        "arrivals": arrival_statistics(trace),
        "lengths": length_statistics(trace),
        "repeated_rows": repeated_rows(trace),
        "sessions": session_statistics(trace),
        "requests_that_wait": 0 if trace.after is None else int((trace.after >= 0).sum()),
        "prefix": hit_rate_bound(trace),
        "context": None if max_model_len is None else _context(trace, max_model_len),
        "load": None if groups is None else offered_load(trace, groups),
        "notes": list(trace.notes),
    }
    return findings | {"warnings": _warnings(findings)}


def _context(trace: Trace, limit: int) -> dict[str, int]:
    prompts, answers = trace.prompt_tokens, trace.output_tokens
    return {
        "max_model_len": limit,
        "prompt_too_long": int((prompts >= limit).sum()),
        "answer_cut": int(((prompts < limit) & (prompts + answers > limit)).sum()),
        "longest": int(np.max(prompts + answers)),
    }


def _warnings(findings: dict[str, Any]) -> list[str]:
    arrivals, load, context = findings["arrivals"], findings["load"], findings["context"]
    lines = []
    peak, first_half = arrivals["peak_rate_rps"], arrivals["first_half_rate_rps"]
    if peak is not None and arrivals["peak_requests"] >= _LEAST_PEAK and first_half < _SLOW_START * peak:
        lines.append(
            f"slow start: the first half of the span has {first_half:.3g} requests/s, less than 5 % of the peak "
            f"rate of {peak:.3g}; take a later part with `simcluster trace import --start`"
        )
    if findings["requests_that_wait"]:
        lines.append(
            f"{counted(findings['requests_that_wait'], 'request')} wait for an earlier one: their arrivals are "
            "nominal, as if answers took no time, and so are the rates"
        )
    if findings["repeated_rows"] > _MANY_REPEATED * findings["requests"]:
        lines.append(
            f"{counted(findings['repeated_rows'], 'request')} with arrival and lengths of an earlier one: was a file "
            "joined with itself?"
        )
    if context is not None and context["prompt_too_long"]:
        lines.append(
            f"{counted(context['prompt_too_long'], 'prompt')} fill the context of {context['max_model_len']:,} "
            "tokens: the engine will reject them"
        )
    if load is not None and (load["utilisation"] or 0) > 1:
        lines.append(f"the cluster cannot keep up: offered load {load['utilisation']:.2f}, above 1 queues only grow")
    for group in [] if load is None else load["groups"]:
        if group["too_long"]:
            lines.append(f"{group['name']}: {counted(group['too_long'], 'prompt')} fill its context")
    return lines
