"""Published measurements: mean latencies at a number of concurrent requests, or of many that come at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from simcluster import _native
from simcluster.card import Card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.errors import CalibrationError, ConfigError
from simcluster.validate.simulate import WAVES, Tuning, is_synchronous, play_closed

__all__ = ["Point", "is_points_file", "play_points", "read_points", "score_points"]

_SILICON = (
    "system",
    "backend",
    "backend_version",
    "model_path",
    "tp_size",
    "isl",
    "osl",
    "concurrency",
    "tpot_mean_ms",
)
_LAB = ("model", "engine", "version", "n", "max_concurrency", "input_tokens", "output_tokens", "tpot_mean_ms")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement with so many requests always in flight, or with all of them sent at once.

    Attributes:
        label: for tables.
        prompt_tokens: of each request [tokens]; the mean, where they differ.
        output_tokens: likewise.
        concurrency: requests in flight.
        at_once: whether no other request follows them.
        ttft_s: mean TTFT [s]; nan where not known.
        tpot_s: mean TPOT [s].
        vllm_version: of the engine.
        columns: all columns of its row.
    """

    label: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    at_once: bool
    ttft_s: float
    tpot_s: float
    vllm_version: str
    columns: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Most tokens that can be in the KV cache at once."""
        return self.concurrency * (self.prompt_tokens + self.output_tokens)


def _table(path: Path) -> pl.DataFrame | None:
    try:
        if path.suffix == ".csv":
            return pl.read_csv(path)
        return pl.read_parquet(path) if path.suffix == ".parquet" else None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise CalibrationError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); give a table of points"
        ) from None


def is_points_file(path: Path) -> bool:
    """Tell tables of closed-loop measurements from those of single requests."""
    if not path.is_file() or path.name.startswith("steps_"):
        return False
    table = _table(path)
    return table is not None and any(set(names) <= set(table.columns) for names in (_SILICON, _LAB))


def read_points(
    path: Path, card: Card, where: dict[str, str] | None = None, max_tokens: int | None = None
) -> list[Point]:
    """Read the measurements of a card's model, number of GPUs and device, served by vLLM in bfloat16.

    Args:
        path: table with the columns of aiconfigurator's silicon samples or of gpustack's performance lab.
        card: whose model is looked for.
        where: columns and values that rows must have besides.
        max_tokens: leave out points that may need more tokens of KV cache.

    Raises:
        CalibrationError: the file is unreadable or has no such rows.
        ConfigError: a column does not exist.
    """
    table = _table(path)
    assert table is not None  # is_points_file has looked
    for name in where or {}:
        if name not in table.columns:
            raise ConfigError(f"{path}: no column {name}; it has {', '.join(table.columns)}")
    silicon = set(_SILICON) <= set(table.columns)
    rows = _silicon_rows(table, card) if silicon else _lab_rows(table, card)
    for name, value in (where or {}).items():
        rows = rows.filter(pl.col(name).cast(pl.String) == value)
    points = [_point(row, silicon=silicon) for row in rows.iter_rows(named=True)]
    if max_tokens is not None:
        points = [point for point in points if point.tokens <= max_tokens]
    if not points:
        raise CalibrationError(
            f"{path}: no point of {card.model} on {card.num_gpus} {card.device} served by vLLM"
            + (f" with {', '.join(f'{k} = {v}' for k, v in where.items())}" if where else "")
            + "; name other columns with --select, or another card"
        )
    return points


def _silicon_rows(table: pl.DataFrame, card: Card) -> pl.DataFrame:
    return table.filter(
        pl.col("model_path").str.ends_with(card.model)
        & (pl.col("tp_size") == card.num_gpus)
        & pl.col("system").str.starts_with(card.device.lower())
        & (pl.col("backend") == "vllm")
        & (pl.col("gemm_quant") == "bf16")
    )


def _lab_rows(table: pl.DataFrame, card: Card) -> pl.DataFrame:
    """A row whose command shards, quantises or speculates is not the card's instance.

    One without a limit of requests in flight sent all of them at once.
    """
    return table.filter(
        pl.col("model").str.ends_with(card.model)
        & (pl.col("engine") == "vllm")
        & pl.col("hardware").str.contains(card.device)
        & pl.col("serve_cmd").str.contains(r"FP8|speculative|tensor-parallel|quantization").not_()
    )


def _point(row: dict[str, Any], *, silicon: bool) -> Point:
    if silicon:
        prompt, output, concurrency = row["isl"], row["osl"], row["concurrency"]
        version = row["backend_version"]
    else:
        prompt, output = (round(row[name] / row["n"]) for name in ("input_tokens", "output_tokens"))
        concurrency, version = int(row["max_concurrency"] or row["n"]), row["version"]
    ttft = row.get("ttft_mean_ms")
    at_once = not silicon and row["max_concurrency"] is None
    return Point(
        label=f"{prompt}+{output} x{concurrency}" + (" once" if at_once else ""),
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=concurrency,
        at_once=at_once,
        ttft_s=float("nan") if ttft is None else ttft / 1e3,
        tpot_s=row["tpot_mean_ms"] / 1e3,
        vllm_version=str(version),
        columns=row,
    )


def play_points(
    card: Card, points: list[Point], tuning: Tuning, options: dict[str, Any] | None = None
) -> list[tuple[float, float]]:
    """Return the mean (TTFT, TPOT) [s] of each point on a card."""
    model = tuning.model(card)
    found = []
    for point in points:
        played = play_closed(
            model,
            _config(card, point, options or {}),
            card.front_end,
            point.prompt_tokens,
            point.output_tokens,
            point.concurrency,
            waves=1 if point.at_once else WAVES,
        )
        found.append((float(np.nanmean(played.ttft_s)), float(np.nanmean(played.tpot_s))))
    return found


def _config(card: Card, point: Point, options: dict[str, Any]) -> _native.SchedulerConfig:
    loop = {"async_scheduling": False} if is_synchronous(point.vllm_version) else {}
    native, _ = resolve_engine_options(EngineOptions.model_validate(loop | options), card, "engine")
    native.shared_prefixes = False
    return native


def score_points(points: list[Point], found: list[tuple[float, float]]) -> dict[str, Any]:
    """Compare points with what was simulated; plain data, errors as shares."""
    rows: list[dict[str, Any]] = []
    for point, (ttft_s, tpot_s) in zip(points, found, strict=True):
        known = np.isfinite(point.ttft_s) and point.ttft_s > 0
        rows.append(
            {
                "point": point.label,
                "concurrency": point.concurrency,
                "prompt_tokens": point.prompt_tokens,
                "output_tokens": point.output_tokens,
                "tpot_s": {"observed": point.tpot_s, "simulated": tpot_s, "error": tpot_s / point.tpot_s - 1},
                "ttft_s": {
                    "observed": point.ttft_s if known else None,
                    "simulated": ttft_s,
                    "error": ttft_s / point.ttft_s - 1 if known else None,
                },
            }
        )
    tpot = [abs(row["tpot_s"]["error"]) for row in rows]
    ttft = [abs(row["ttft_s"]["error"]) for row in rows if row["ttft_s"]["error"] is not None]
    return {
        "points": rows,
        "tpot_mape": float(np.mean(tpot)),
        "ttft_mape": float(np.mean(ttft)) if ttft else None,
    }
