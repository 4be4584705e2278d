"""Tables of comparisons and sweeps for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["load_table", "rate_name", "sweep_table"]

_MISSING = "-"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return _MISSING if value is None else f"{value * scale:,.{digits}f}"


def rate_name(rate_rps: float | None) -> str:
    """Write a load down."""
    return "the scenario's load" if rate_rps is None else f"{rate_rps:.6g} req/s"


def _table(title: str, first: Sequence[str], others: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in first:
        table.add_column(heading, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _difference(pair: Mapping[str, Any] | None, metric: str, scale: float, digits: int) -> str:
    """Write a difference from the reference with its interval."""
    found = None if pair is None else pair["metrics"].get(metric)
    if found is None:
        return ""
    text = f"{found['difference'] * scale:+,.{digits}f}"
    if found["interval"] is None:
        return text
    low, high = found["interval"]
    return f"{text} [{low * scale:+,.{digits}f}, {high * scale:+,.{digits}f}]"


_COLUMNS = (  # metric, heading, digits, scale
    ("on_time_utility", "on-time\nutility", 4, 1.0),
    ("slo_attainment", "in SLO\n%", 1, 100.0),
    ("ttft_p99_s", "TTFT p99\nms", 1, 1e3),
    ("share_negative_utility", "U < 0\n%", 1, 100.0),
    ("cost_micro_usd", "cost\nu$/req", 0, 1.0),
)
_LOST = ("rejected", "failed", "unfinished")


def load_table(loads: Sequence[Mapping[str, Any]], metric: str, title: str) -> Table:
    """Return one row per load and policy, with the difference in one metric from the reference.

    Args:
        loads: as `compare` returns them.
        metric: whose difference is shown.
        title: above the table.
    """
    digits, scale = {name: (digits, scale) for name, _, digits, scale in _COLUMNS}.get(metric, (4, 1.0))
    change = f"difference in {metric} from\nthe reference [95 % interval]"
    headings = [heading for _, heading, _, _ in _COLUMNS]
    table = _table(title, ["load", "policy"], [*headings, "rejected\nfail/unfin", change])
    for load in loads:
        pairs = {pair["policy"]: pair for pair in load["pairs"]}
        winner = load["winner"] or {"policy": None, "tied": []}
        for number, (policy, metrics) in enumerate(load["metrics"].items()):
            lost = load["lost"][policy]
            first = winner["policy"] == policy
            table.add_row(
                rate_name(load["rate_rps"]) if number == 0 else "",
                policy,
                *(_number(metrics[name]["mean"], places, factor) for name, _, places, factor in _COLUMNS),
                "/".join(f"{lost[name]:,.4g}" for name in _LOST),
                _difference(pairs.get(policy), metric, scale, digits),
                style="bold green" if first else "green" if policy in winner["tied"] else None,
                end_section=number == len(load["metrics"]) - 1,
            )
    return table


def sweep_table(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], title: str) -> Table:
    """Return one row per point and policy: means with 95 % intervals over seeds.

    Args:
        rows: as `summary_rows` returns them.
        fields: names of the swept fields.
        title: above the table.
    """
    headings = [f"{heading}\n[95 % interval]" if k == 0 else heading for k, (_, heading, _, _) in enumerate(_COLUMNS)]
    table = _table(title, [*fields, "rate", "policy"], ["seeds", *headings, "rejected\nfail/unfin"])
    for row in rows:
        cells = [_number(row[name], digits, scale) for name, _, digits, scale in _COLUMNS]
        if row["on_time_utility_low"] is not None:
            cells[0] += f" [{row['on_time_utility_low']:.4f}, {row['on_time_utility_high']:.4f}]"
        table.add_row(
            *(str(row[name]) for name in fields),
            "" if row["rate_rps"] is None else f"{row['rate_rps']:.6g}",
            row["policy"],
            str(row["seeds"]),
            *cells,
            "/".join("-" if row[name] is None else f"{row[name]:,.4g}" for name in _LOST),
        )
    return table
