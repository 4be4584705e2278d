"""Tables of `simcluster validate` for the terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from simcluster.cli.wide import print_wide
from simcluster.report.tables import number

__all__ = ["print_verdict"]

_SIDES = ("observed", "simulated")
_STATISTICS = ("mean", "p50", "p90", "p99")
_POINT_TIMES = ("tpot_s", "ttft_s")
_LONG_S = 10.0  # from here on a time is told in seconds


def print_verdict(summary: dict[str, Any]) -> None:
    """Print what a comparison found, the badge first."""
    console = Console()
    console.print(f"card {summary['card']}: {summary['badge']}", highlight=False, soft_wrap=True, markup=False)
    if summary["tuned"]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in summary["tuned"].items())
        console.print(f"tuned on {summary['tuned_on']} -> {values}", highlight=False, markup=False)
    for note in summary.get("notes", []):
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    if "points" in summary:
        print_wide(_points(summary["points"]))
        return
    print_wide(_latencies(summary))
    if summary["over_time"]:
        print_wide(_load(summary["over_time"]))
    if summary["split"]:
        print_wide(_split(summary["split"]))
    if summary["estimators"]:
        print_wide(_estimators(summary["estimators"]))


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _unit(largest_s: float) -> tuple[str, float]:
    """Return the unit in which a time [s] and what is below it are short, and how many of it a second has."""
    return ("s", 1.0) if largest_s >= _LONG_S else ("ms", 1e3)


def _points(rows: list[dict[str, Any]]) -> Table:
    largest = {what: max(row[what][side] or 0.0 for row in rows for side in _SIDES) for what in _POINT_TIMES}
    units = {what: _unit(value) for what, value in largest.items()}
    headings = []
    for what, (unit, _) in units.items():
        name = what.removesuffix("_s").upper()
        headings += [f"{name} {unit}\nreal", "\nsimulated", "error\n%"]
    table = _table("mean of each point: prompt+answer tokens x requests in flight", "point", headings)
    for row in rows:
        cells = []
        for what, (_, scale) in units.items():
            cells += [number(row[what][side], 2, scale) for side in _SIDES]
            cells.append(number(row[what]["error"], 1, 100))
        table.add_row(row["point"], *cells)
    return table


def _latencies(summary: dict[str, Any]) -> Table:
    """Real and simulated values stand one below the other: side by side they do not fit a narrow terminal."""
    title = f"{summary['run']}: {summary['requests']:,} requests, {summary['loop']} loop"
    table = _table(title, "", ["", *_STATISTICS, "MAPE\n%", "median\nAPE %", "bias\n%"])
    for key, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        scores = summary[key]
        known = [scores[name] for name in _STATISTICS if scores[name] is not None]
        largest = max((each[side] for each in known for side in _SIDES), default=0.0)
        unit, scale = _unit(largest)
        digits = 2 if largest < 1 or scale == 1.0 else 1
        errors = [number(scores[name], 1, 100) for name in ("mape", "median_ape", "bias")]
        _two_rows(table, f"{label} {unit}", scores, digits, scale, errors)
    rate = summary["output_throughput_tps"]
    table.add_row("tokens/s", "real", number(rate["observed"], 1))
    table.add_row("", "simulated", number(rate["simulated"], 1), "", "", "", "", "", number(rate["error"], 1, 100))
    return table


def _two_rows(table: Table, label: str, scores: dict[str, Any], digits: int, scale: float, errors: list[str]) -> None:
    for side in _SIDES:
        values = [scores[name] and number(scores[name][side], digits, scale) for name in _STATISTICS]
        first = side == _SIDES[0]
        name = "real" if first else side
        table.add_row(label if first else "", name, *(value or "-" for value in values), *(() if first else errors))


def _load(found: dict[str, Any]) -> Table:
    table = _table("load over time", "", ["", *_STATISTICS, "mean\n|difference|"])
    for name, scores in found.items():
        label = "KV cache %" if name == "kv_usage" else name
        if scores is None:
            table.add_row(label, "unknown")
            continue
        scale = 100.0 if name == "kv_usage" else 1.0
        _two_rows(table, label, scores, 1, scale, [number(scores["mean_absolute_difference"], 2, scale)])
    return table


def _split(found: dict[str, Any]) -> Table:
    table = _table("where the error comes from", "part", ["what", "value"])
    free, steps, front = found["scheduling"], found["step_time"], found["front_end"]
    table.add_row("scheduling", "steps with the recorded batch %", number(free["same_composition"], 2, 100))
    table.add_row("", "first tokens in the recorded step %", number(free["first_token_in_recorded_step"], 2, 100))
    for cause, count in {**free["misses_by_cause"], **free["late_by_cause"]}.items():
        table.add_row("", f"missed: {cause}", str(count))
    for kind, error in steps["mape"].items():
        table.add_row("step time" if kind == "all" else "", f"MAPE of {kind} steps %", number(error, 1, 100))
    table.add_row("", "median APE %", number(steps["median_ape"], 1, 100))
    table.add_row("", "bias of the sum %", number(steps["bias"], 1, 100))
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        if name in steps:
            table.add_row(
                "", f"{name.removesuffix('_s').upper()} MAPE in the engine %", number(steps[name]["mape"], 1, 100)
            )
    labels = {"request_s": "to the idle engine", "output_s": "to the client", "host_s": "loop, per step"}
    for number_of, (name, label) in enumerate(labels.items()):
        cell = f"{number(front[name]['measured'], 2, 1e3)} / {number(front[name]['card'], 2, 1e3)}"
        table.add_row("front end" if number_of == 0 else "", f"{label}, measured / card ms", cell)
    return table


def _estimators(found: dict[str, Any]) -> Table:
    table = _table(
        "TTFT predicted at each arrival, from the arrival at the engine",
        "estimator",
        ["n", "MAPE\n%", "median\nAPE %", "bias\n%", "MAPE % by load\nlow/mid/high"],
    )
    for name, scores in found.items():
        by_load = "/".join(number(part["mape"], 0, 100) for part in scores.get("by_resident", []))
        table.add_row(
            "sfs, recorded step times" if name == "sfs_measured" else name,
            f"{scores['count']:,}",
            number(scores["mape"], 2, 100),
            number(scores.get("median_ape"), 1, 100),
            number(scores.get("bias"), 1, 100),
            by_load,
        )
    front = found["sfs_measured"]["front_end_s"]
    if front is not None:
        table.caption = (
            f"front end on top: mean {front['mean'] * 1e3:.1f}, p50 {front['p50'] * 1e3:.1f}, p90 "
            f"{front['p90'] * 1e3:.1f} ms"
        )
    return table
