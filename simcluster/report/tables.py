"""Tables for the terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["comparison", "composition_table", "footnotes", "number", "policy_table"]

_MISSING = "-"


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """Return a number as text; a dash where there is none."""
    return _MISSING if value is None else f"{value * scale:,.{digits}f}"


def policy_table(title: str) -> Table:
    """Return an empty table with a column for the policy."""
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    return table


def comparison(policies: dict[str, dict[str, Any]], title: str) -> Table:
    """Return one row per policy."""
    table = policy_table(title)
    for heading in (
        "finished",
        "rejected\nfail/unfin",
        "TTFT p50\nms",
        "TTFT p99\nms",
        "TPOT p50\nms",
        "E2E p50\ns",
        "in SLO\n%",
        "on-time\nutility",
        "U < 0\n%",
        "goodput\nreq/s",
        "cost\nu$/req",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    best = _best(policies)
    for name, summary in policies.items():
        counts = summary["requests"]
        lost = f"{counts['rejected']}/{counts['failed']}/{counts['unfinished']}"
        table.add_row(
            name + (" (stopped)" if summary.get("interrupted") else ""),
            f"{counts['finished']:,}",
            lost,
            number(summary["ttft_s"]["p50"], 1, 1e3),
            number(summary["ttft_s"]["p99"], 1, 1e3),
            number(summary["tpot_s"]["p50"], 2, 1e3),
            number(summary["e2e_s"]["p50"], 2),
            number(summary["slo_attainment"], 1, 100),
            number(summary["on_time_utility"], 4),
            number(summary["share_negative_utility"], 1, 100),
            number(summary["goodput_rps"], 2),
            number(summary["cost"]["token_cost_micro_usd_mean"], 0),
            style="bold green" if name == best else None,
        )
    return table


def _best(policies: dict[str, dict[str, Any]]) -> str | None:
    """Return the policy with the highest OnTimeUtility among those that can be run live."""
    scores = {
        name: summary["on_time_utility"]
        for name, summary in policies.items()
        if not summary.get("needs_truth") and summary["on_time_utility"] is not None
    }
    return max(scores, key=lambda name: scores[name]) if len(scores) > 1 else None


def composition_table(policies: dict[str, dict[str, Any]], instances: list[str]) -> Table:
    """Return where each policy sent what: shares of each task by instance."""
    groups = dict.fromkeys(group for summary in policies.values() for group in summary["composition"])
    table = policy_table(f"where requests went: % on {' / '.join(instances)}")
    for group in groups:
        table.add_column(group, justify="right", no_wrap=True)
    for name, summary in policies.items():
        cells = []
        for group in groups:
            shares = summary["composition"].get(group, {})
            cells.append("/".join(f"{shares.get(instance, 0):.0%}"[:-1] for instance in instances))
        table.add_row(name, *cells)
    return table


def footnotes(heading: str, lines: list[str], style: str = "dim") -> RenderableType:
    """Return a list of remarks."""
    return Group(Text(heading, style=style), *(Text(f"  {line}", style=style) for line in lines))
