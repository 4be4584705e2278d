"""Tables of `simcluster validate` for the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from simcluster.report.tables import number

__all__ = ["print_verdict"]

_SIDES = ("observed", "simulated")


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
        console.print(_points(summary["points"]))
        return
    console.print(_latencies(summary))
    if summary["over_time"]:
        console.print(_load(summary["over_time"]))
    if summary["split"]:
        console.print(_split(summary["split"]))
    if summary["estimators"]:
        console.print(_estimators(summary["estimators"]))


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _points(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "closed loop, prompt+answer x concurrency",
        "point",
        ["TPOT real\nms", "simulated", "error\n%", "TTFT real\nms", "simulated", "error\n%"],
    )
    for row in rows:
        cells = [
            number(row[what][side], 2 if side != "error" else 1, 1e3 if side != "error" else 100)
            for what in ("tpot_s", "ttft_s")
            for side in (*_SIDES, "error")
        ]
        table.add_row(row["point"], *cells)
    return table


def _latencies(summary: dict[str, Any]) -> Table:
    title = f"{summary['run']}: {summary['requests']:,} requests, {summary['loop']} loop; real / simulated"
    table = _table(title, "", ["MAPE\n%", "median\nAPE %", "bias\n%", "mean", "p50", "p90", "p99"])
    for key, label in (("ttft_s", "TTFT ms"), ("tpot_s", "TPOT ms"), ("e2e_s", "E2E s")):
        scores = summary[key]
        scale = 1.0 if key == "e2e_s" else 1e3
        cells = [_pair(scores[name], 2, scale) for name in ("mean", "p50", "p90", "p99")]
        table.add_row(label, *(number(scores[name], 1, 100) for name in ("mape", "median_ape", "bias")), *cells)
    rate = summary["output_throughput_tps"]
    table.add_row("tokens/s", "", "", number(rate["error"], 1, 100), _pair(rate, 1), "", "", "")
    return table


def _pair(value: dict[str, Any] | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else " / ".join(number(value[side], digits, scale) for side in _SIDES)


def _load(found: dict[str, Any]) -> Table:
    table = _table("load over time, real / simulated", "", ["mean |difference|", "mean", "p50", "p90", "p99"])
    for name, scores in found.items():
        if scores is None:
            table.add_row(name, *["unknown"] * 5)
            continue
        scale = 100.0 if name == "kv_usage" else 1.0
        cells = [_pair(scores[label], 1, scale) for label in ("mean", "p50", "p90", "p99")]
        label = "KV cache %" if name == "kv_usage" else name
        table.add_row(label, number(scores["mean_absolute_difference"], 2, scale), *cells)
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
