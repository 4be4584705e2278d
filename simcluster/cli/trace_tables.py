"""The trace doctor's findings as text."""

from collections.abc import Iterator
from typing import Any

__all__ = ["finding_lines"]


def finding_lines(file: str, findings: dict[str, Any]) -> list[str]:
    """Write what `inspect_trace` returns for people, one fact per line.

    Args:
        file: the trace, as the user named it.
        findings: what was found.
    """
    lines = [f"{file}: {findings['requests']:,} requests" + _after(findings["source"])]
    lines.extend(_arrivals(findings["arrivals"]))
    lines.extend(_lengths(findings["lengths"]))
    lines.append(f"repeated rows: {findings['repeated_rows']:,} with arrival and lengths of an earlier one")
    lines.extend(_sessions(findings["sessions"]))
    lines.append(_sharing(findings["prefix"]))
    lines.extend(_context(findings["context"]))
    lines.extend(_load(findings["load"]))
    lines.extend(f"note: {note}" for note in findings["notes"])
    lines.extend(f"warning: {warning}" for warning in findings["warnings"])
    return lines


def _after(text: str | None) -> str:
    return "" if text is None else f" ({text})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _quantiles(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in values.items())


def _arrivals(found: dict[str, Any]) -> Iterator[str]:
    yield f"arrivals: {_number(found['rate_rps'])} requests/s over {found['span_s']:,.6g} s, (n - 1) / span"
    if found["gaps_s"] is not None:
        yield f"gaps [s]: {_quantiles(found['gaps_s'])}"
        longest = found["longest_gap"]
        gap_s, end_s = longest["gap_s"], longest["ends_at_s"]
        yield f"longest gap: {gap_s:,.6g} s, before request {longest['row']:,} at {end_s:,.6g} s"
    yield f"burstiness: CV of gaps {_number(found['gap_cv'])} (Poisson: 1)"
    if found["dispersion"]:
        sizes = ", ".join(f"{window}: {value:,.4g}" for window, value in found["dispersion"].items())
        yield f"index of dispersion of counts (Poisson: 1): {sizes}"
    yield f"equal arrivals: {found['equal_arrivals']:,} at the instant of the one before"
    if found["peak_rate_rps"] is not None:
        peak, half = found["peak_rate_rps"], found["first_half_rate_rps"]
        yield f"peak: {_number(peak)} requests/s in the busiest hundredth; first half {_number(half)} requests/s"


def _lengths(found: dict[str, Any]) -> Iterator[str]:
    for name, label in (("prompt_tokens", "prompts"), ("output_tokens", "answers")):
        yield f"{label} [tokens]: {_quantiles(found[name])}; {found[f'total_{name}']:,} in all"


def _sessions(found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield (
        f"sessions: {found['sessions']:,} with {found['requests_in_sessions']:,} requests, turns mean "
        f"{found['turns_mean']:.3g}, most {found['turns_max']:,}; {found['requests_that_wait']:,} wait for an earlier "
        "one"
    )


def _sharing(found: dict[str, Any] | None) -> str:
    if found is None:
        return "prefix sharing: not known, the trace has no hashes"
    return (
        f"prefix sharing: at most {found['hit_rate']:.2%} of the prompt tokens can hit (blocks of "
        f"{found['block_size']}, a cache without end), in {found['requests_with_hits']:,} requests"
    )


def _context(found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield (
        f"context of {found['max_model_len']:,} tokens: {found['prompt_too_long']:,} prompts fill it (rejected), "
        f"{found['answer_cut']:,} answers run into it (cut); the longest request has {found['longest']:,} tokens"
    )


def _load(found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    if found["rate_rps"] is not None:
        yield (
            f"offered: {found['prompt_tokens_per_s']:,.4g} prompt and {found['output_tokens_per_s']:,.4g} answer "
            "tokens/s"
        )
    for group in found["groups"]:
        replicas = f" x {group['replicas']}" if group["replicas"] > 1 else ""
        busy = "" if group["utilisation"] is None else f"; utilisation {group['utilisation']:.4g} if it got all"
        yield f"  {group['name']}{replicas}: holds {_number(group['capacity_rps'])} requests/s with full batches{busy}"
    if found["utilisation"] is None:
        yield "load: depends on the cluster, since requests wait for earlier ones or all come at once"
    else:
        yield (
            f"load: {found['utilisation']:.4g} of what the cluster holds, spread evenly; rate x work / replicas, work "
            "= a request's step times in full batches without prefix hits (eq. 9)"
        )
