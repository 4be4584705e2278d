"""The report card of `simcluster calibrate fit`, as tables."""

from collections.abc import Iterator
from typing import Any

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["print_report", "source_table"]

_SCALE = {"s": (1e3, "ms"), "s/token": (1e6, "us/token"), "s/token^2": (1e9, "ns/token^2"), "tokens": (1, "tokens")}
_SMALL = {"b2_s": (1e9, "ns/token"), "b4_s": (1e9, "ns/token")}
_WIDE = Console(width=400)


def print_report(report: dict[str, Any]) -> None:
    """Print the report, tables first."""
    for part in _parts(report):
        # Wider than the terminal rather than with numbers cut off.
        needed = Measurement.get(_WIDE, _WIDE.options, part).maximum if isinstance(part, Table) else 0
        Console(width=max(Console().width, needed)).print(part)


def _parts(report: dict[str, Any]) -> Iterator[RenderableType]:
    yield _coefficients(report)
    yield _errors(report)
    if report["choice"] is not None:
        yield _candidates(report["choice"])
    yield _residuals(report["residuals"])
    yield _worst(report["residuals"])
    yield _coverage(report["coverage"])
    if report["coverage"].get("map") is not None:
        yield _map(report["coverage"]["map"])
    yield from _lines(report)


def _table(title: str, first: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _coefficients(report: dict[str, Any]) -> Table:
    steps = sum(source["fitted"] for source in report["sources"])
    target = f", {report['target']} time" if report["target"] else ""
    title = f"step time, {report['chosen']} fit to {steps:,} steps{target}"
    table = _table(title, "coefficient", ("value", "95 % interval", "unit", "plain eq. 9"))
    for row in report["coefficients"]:
        scale, unit = _SMALL.get(row["term"], _SCALE[row["unit"]])
        low_high = "-" if row["interval"] is None else " to ".join(f"{scale * end:.4g}" for end in row["interval"])
        value = f"{scale * row['value']:.5g}" if row["identified"] else "not identified"
        table.add_row(
            row["term"].removesuffix("_s"),
            value,
            low_high,
            unit,
            "-" if row["eq9"] is None else f"{scale * row['eq9']:.5g}",
        )
    return table


def _errors(report: dict[str, Any]) -> Table:
    title = "relative error of the step time (MAPE)"
    if report["blocks"]:
        title += f"; held out: {report['blocks']}"
    headings = ("steps", "held out", "every step\nalike", "other runs", "in sample", "plain eq. 9,\nheld out")
    table = _table(title, "kind", headings)
    for row in report["errors"]:
        keys = ("held_out", "held_out_every_step_alike", "other_runs", "in_sample", "eq9_held_out")
        table.add_row(row["kind"], f"{row['steps']:,}", *(_percent(row[key]) for key in keys))
    return table


def _candidates(choice: dict[str, Any]) -> Table:
    headings = ("coefficients", "held out", "decode", "other runs", "behind the best", "noise", "")
    table = _table("which terms the steps ask for", "model", headings)
    for row in choice["candidates"]:
        held = row["held_out"] or {}
        note = "chosen" if row["chosen"] else ("cannot be told" if row["note"] else "")
        table.add_row(
            row["name"],
            str(row["coefficients"]),
            _percent(held.get("all")),
            _percent(held.get("decode")),
            _percent((row["other_runs"] or {}).get("all")),
            _percent(row["behind"]),
            _percent(row["noise"]),
            note,
        )
    return table


def _residuals(residuals: dict[str, Any]) -> Table:
    kind = "held-out" if residuals["held_out"] else "fitted"
    table = _table(
        f"recorded over {kind} step time; the rows below it: the steps in eight parts, in their order",
        "steps",
        (*residuals["quantiles"], "MAPE"),
    )
    table.add_row("all", *(f"{value:.3f}" for value in residuals["quantiles"].values()), "")
    for part in residuals["over_time"]:
        cells = [f"{part['median_ratio']:.3f}" if name == "p50" else "" for name in residuals["quantiles"]]
        table.add_row(f"{part['from']:,} to {part['to']:,}", *cells, _percent(part["mape"]))
    return table


def _worst(residuals: dict[str, Any]) -> Table:
    headings = ("tokens", "decoding", "context", "prefilling", "recorded ms", "predicted ms", "ratio")
    table = _table("worst rows", "row", headings)
    for row in residuals["worst"]:
        table.add_row(
            f"{row['row']} of {row['source']}",
            f"{row['n_tokens']:,}",
            "-" if row["n_decode"] is None else f"{row['n_decode']:,}",
            f"{row['sum_decode_context']:,}",
            f"{row['num_prefill_requests']:,}",
            f"{1e3 * row['step_s']:.4g}",
            f"{1e3 * row['predicted_s']:.4g}",
            f"{row['ratio']:.3f}",
        )
    return table


def _coverage(coverage: dict[str, Any]) -> Table:
    table = _table("coverage; beyond it a prediction extrapolates", "of a step", ("from", "to"))
    for name, value in coverage.items():
        if isinstance(value, list):
            table.add_row(name.replace("_", " "), *(f"{end:,.6g}" for end in value))
    return table


def _map(found: dict[str, Any]) -> Table:
    """Return the map without empty rows and columns at its ends."""
    columns = [number for number in range(len(found["mean_decode_context"])) if any(r[number] for r in found["steps"])]
    columns = list(range(columns[0], columns[-1] + 1))
    headings = tuple(f"{found['mean_decode_context'][number]:,}+" for number in columns)
    table = _table("steps by decoding requests and mean context (with a prefill)", "decoding", headings)
    for batch, line, beside in zip(found["batch_size"], found["steps"], found["with_prefill"], strict=True):
        if any(line):
            cells = (f"{line[n]:,} ({beside[n]:,})" if line[n] else "." for n in columns)
            table.add_row(f"{batch:,}+" if batch else "0", *cells)
    return table


def _lines(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the choice, what was left out, what else was measured, and warnings."""
    lines = [report["choice"]["reason"]] if report["choice"] else []
    for source in report["sources"]:
        left = ", ".join(f"{count:,} {name}" for name, count in source["left_out"].items())
        lines.append(
            f"{source['name']}: {source['fitted']:,} of {source['steps']:,} steps" + (f", without {left}" * bool(left))
        )
    lines += [f"{name}: {text}" for name, text in report["rules"].items()]
    lines.append(f"weights: {report['weights']}")
    if report["contention"]:
        found = report["contention"]
        lines.append(
            f"contention: wall time {found['wall_over_cpu']:.2f} times the worker's CPU time, "
            f"{found['disturbed_share']:.1%} of the steps disturbed" + ", left out" * found["excluded"]
        )
    if report["card"]:
        lines += _card_lines(report["card"])
    lines += report["notes"]
    yield Text("\n".join(f"- {line}" for line in lines), style="dim")
    for warning in report["warnings"]:
        yield Text(f"warning: {warning}", style="yellow")


def _card_lines(card: dict[str, Any]) -> list[str]:
    front = card["front_end"]
    lines = [
        f"host time {1e3 * card['host_time_s']:.3g} ms a step; front end {1e3 * front['request_s']:.3g} ms + "
        f"{1e6 * front['per_prompt_token_s']:.3g} us per prompt token, output {1e3 * front['output_s']:.3g} ms"
    ]
    rates = card.get("service_rates")
    if rates:
        lines.append(
            f"prefill {rates['prefill_throughput_tps']:,.5g} tokens/s, decode step "
            f"{1e3 * rates['mean_decode_step_s']:.4g} ms, service rate {rates['service_rate_rps']:.4g} requests/s, "
            f"parallelism {rates['parallelism']:.3g}; {rates['method']}"
        )
    lines += card.get("notes", [])
    return lines + [f"assumed: {each['field']}: {each['note']}" for each in card["assumptions"]]


def source_table(steps: pl.DataFrame, title: str) -> Table:
    """Return a table of imported steps by kind: how many, their tokens and their times."""
    composed = "step_ms" in steps.columns
    ms = steps["step_ms"] if composed else steps["step_s"] * 1e3
    tokens = steps["prefill_tokens"] + steps["n_decode"] if composed else steps["n_tokens"]
    prefills = steps["n_prefill_seqs" if composed else "num_prefill_requests"] > 0
    kind = pl.DataFrame({"prefills": prefills, "decodes": steps["n_decode"] > 0, "tokens": tokens, "ms": ms})
    table = _table(title, "kind", ("steps", "tokens", "ms"))
    for name, rows in (
        ("decode", kind.filter(~pl.col("prefills"))),
        ("prefill", kind.filter(pl.col("prefills") & ~pl.col("decodes"))),
        ("mixed", kind.filter(pl.col("prefills") & pl.col("decodes"))),
    ):
        if len(rows):
            values = [rows[column].cast(pl.Float64).to_numpy() for column in ("tokens", "ms")]
            spans = (f"{each.min():,.6g} to {each.max():,.6g}" for each in values)
            table.add_row(name, f"{len(rows):,}", *spans)
    return table
