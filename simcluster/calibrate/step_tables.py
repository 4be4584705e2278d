"""What a fit is made from: recordings, or any table of steps, brought into one form and checked.

A row that cannot be used is left out by a named rule, and the number of such rows is kept.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate.composed import COMPOSED_COLUMNS, read_composed
from simcluster.calibrate.fit import check_steps
from simcluster.calibrate.recording import EngineInfo, Recording, load_recording
from simcluster.calibrate.step_errors import step_kinds
from simcluster.errors import CalibrationError

__all__ = ["CLEAN_RULES", "FitOptions", "StepTable", "Target", "check_alike", "joined", "load_table"]

Target = Literal["wall", "worker-cpu"]

CLEAN_RULES = {
    "skipped": "among the first steps, as asked for by --skip-steps",
    "warm-up": "recorded while shapes were warmed up (phase warmup)",
    "first-seen": "the first of their number of tokens, whose kernels are set up then",
    "disturbed": "disturbed by other work: wall time above 1.15 times the worker's CPU time + 0.5 ms",
}
_DISTURBED_FACTOR, _DISTURBED_S = 1.15, 0.5e-3
_OPTIONAL = ("n_decode", "phase", "wall_s", "worker_cpu_s", "worker_wall_s", "host_s")
# Options that may differ between the runs of one fit: they change which batches come, not how long one takes.
_FREE_OPTIONS = frozenset({"num_gpu_blocks", "max_num_seqs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Which steps of a source are fitted, and to which of their times.

    Attributes:
        target: the wall time of a step, or the CPU time of the worker, which contention does not touch.
        exclude_disturbed: leave out steps whose wall time is far above the worker's CPU time.
        skip_steps: leave out this many steps at the beginning of each source.
        keep_first_seen: keep steps that are the first of their number of tokens.
        model: of a table of several models, this one.
    """

    target: Target = "wall"
    exclude_disturbed: bool = False
    skip_steps: int = 0
    keep_first_seen: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Steps of one source.

    Attributes:
        name: a short name for tables.
        path: where it was read.
        sha256: of the file with the steps.
        steps: `STEP_COLUMNS`, `row` (number in the source) and, null where unknown, `n_decode`, `phase`, `wall_s`,
            `worker_cpu_s`, `worker_wall_s` and `host_s` (the loop's time beside the step) [s].
        left_out: rows left out, by rule of `CLEAN_RULES`.
        warnings: what looks wrong.
        recording: the recording it is from, or None.
        composed: whether the times are sums of kernel times.
        num_gpus: GPUs of the instance, or None where the source does not say.
    """

    name: str
    path: Path
    sha256: str
    steps: pl.DataFrame
    left_out: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    recording: Recording | None = None
    composed: bool = False
    num_gpus: int | None = None


def load_table(path: Path, options: FitOptions) -> StepTable:
    """Read a recording or a table of steps, and leave out what the options say.

    Args:
        path: the folder of a recording, its steps_X.parquet of the older form, a Parquet file with `STEP_COLUMNS`, or
            a table of composed steps.
        options: which steps are kept.

    Raises:
        CalibrationError: the source is unreadable, cannot be true, lacks what the target needs, or nothing is left.
    """
    path = Path(path)
    if path.is_dir() or path.with_suffix(".meta.json").is_file():
        return _cleaned(_from_recording(load_recording(path), options), options)
    try:
        columns = pl.read_parquet_schema(path)
    except FileNotFoundError:
        raise CalibrationError(f"{path}: no such file; give a recording or a Parquet file of steps") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise CalibrationError(
            f"{path}: cannot be read ({reason}); it is truncated or not Parquet; record again, or copy it anew"
        ) from None
    if set(COMPOSED_COLUMNS) <= set(columns):
        return _cleaned(_from_composed(path, options), options)
    return _cleaned(_from_file(path, contexts_known="contexts_known" not in columns), options)


def joined(tables: Sequence[StepTable]) -> pl.DataFrame:
    """Return the steps of all sources, one below the other, with `source` (number of the source)."""
    return pl.concat([table.steps.with_columns(source=pl.lit(number, pl.Int64)) for number, table in enumerate(tables)])


def check_alike(tables: Sequence[StepTable]) -> list[str]:
    """Refuse recordings of different things in one fit; return what differs but may.

    Raises:
        CalibrationError: model, device, version or an option that changes a step's time differs.
    """
    recordings = [table.recording for table in tables if table.recording is not None]
    if not recordings:
        return []
    first, notes = recordings[0], []
    for other in recordings[1:]:
        for name in ("model", "device", "vllm_version", "loop"):
            _same(name, getattr(first.info, name), getattr(other.info, name), first, other)
        mine, theirs = _options(first.info.engine), _options(other.info.engine)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in _FREE_OPTIONS:
                _same(name, mine.get(name), theirs.get(name), first, other)
            elif mine.get(name) != theirs.get(name):
                notes.append(f"{name} is {mine.get(name)} in {first.name} and {theirs.get(name)} in {other.name}")
    if notes and len(recordings) < len(tables):
        notes.append("recordings and other tables are fitted together")
    return notes


def _same(name: str, mine: object, theirs: object, first: Recording, other: Recording) -> None:
    if mine != theirs:
        raise CalibrationError(
            f"{other.path}: {name} = {theirs!r}, but {mine!r} in {first.path}; one card holds one of them; fit them "
            "apart"
        )


def _options(engine: EngineInfo) -> dict[str, object]:
    return engine.model_dump()


def _from_recording(recording: Recording, options: FitOptions) -> StepTable:
    steps = recording.steps
    wall = recording.step_seconds()
    rest_ms = steps["sched_ms"].to_numpy() + steps["upd_ms"].to_numpy()
    busy = steps["n_running"].shift(1).fill_null(0).to_numpy() > 0
    busy &= recording.info.loop == "sync"  # the asynchronous loop does this beside the step before
    gap = np.where(busy, steps["gap_ms"].cast(pl.Float64).fill_null(np.nan).to_numpy(), np.nan)
    table = pl.DataFrame(
        {
            "n_tokens": steps["tokens"],
            "sum_decode_context": steps["decode_ctx"],
            "prefill_attention": steps["prefill_attn"],
            "has_prefill": steps["n_prefill_reqs"] > 0,
            "num_prefill_requests": steps["n_prefill_reqs"],
            "n_decode": steps["decode_reqs"],
            "phase": steps["phase"].cast(pl.String),
            "wall_s": wall,
            "worker_cpu_s": steps["w_cpu_ms"].cast(pl.Float64) / 1e3,
            "worker_wall_s": steps["w_total_ms"].cast(pl.Float64) / 1e3,
            "host_s": pl.Series((rest_ms + gap) / 1e3).fill_nan(None),
        }
    )
    column = "wall_s" if options.target == "wall" else "worker_cpu_s"
    if options.target == "worker-cpu" and table["worker_cpu_s"].null_count():
        raise CalibrationError(
            f"{recording.path}: no CPU time of the worker (w_cpu_ms); record with it, or fit --target wall"
        )
    return StepTable(
        name=recording.name,
        path=recording.path,
        sha256=_sha256(recording.path / "steps.parquet" if recording.path.is_dir() else recording.path),
        steps=_in_form(table.with_columns(step_s=pl.col(column))),
        warnings=_recording_warnings(recording, options),
        recording=recording,
        num_gpus=recording.info.engine.tensor_parallel_size,
    )


def _recording_warnings(recording: Recording, options: FitOptions) -> tuple[str, ...]:
    warnings = []
    if options.target == "worker-cpu" and "cpu" not in recording.info.device.lower():
        warnings.append(
            f"{recording.name}: on {recording.info.device} the worker's CPU time is not the time of a step: it "
            "runs beside the kernels; fit --target wall"
        )
    if recording.info.loop == "async":
        warnings.append(
            f"{recording.name}: recorded in the asynchronous loop: single step times are noisy there, since the next "
            "batch is scheduled while one runs; calibrate with --no-async-scheduling"
        )
    if not recording.info.complete:
        warnings.append(f"{recording.name}: the recording was cut short; its plan did not run to its end")
    return tuple(warnings)


def _from_composed(path: Path, options: FitOptions) -> StepTable:
    steps = read_composed(path)
    models = sorted(set(steps["model"].to_list()))
    wanted = options.model
    if wanted is None and len(models) > 1:
        raise CalibrationError(f"{path}: steps of {len(models)} models; give --model, one of {', '.join(models)}")
    name = models[0] if wanted is None else wanted.rsplit("/", maxsplit=1)[-1]
    if name not in models:
        raise CalibrationError(f"{path}: no steps of model {wanted}; it has {', '.join(models)}")
    chosen = steps.with_row_index("row").filter(pl.col("model") == name)
    sizes = sorted(set(chosen["tp"].to_list()))
    if len(sizes) > 1:
        raise CalibrationError(f"{path}: steps of {name} on {', '.join(map(str, sizes))} GPUs; keep those of one tp")
    return StepTable(
        name=f"{path.stem} {name}",
        path=path,
        sha256=_sha256(path),
        steps=_in_form(chosen),
        composed=True,
        num_gpus=sizes[0],
    )


def _from_file(path: Path, *, contexts_known: bool) -> StepTable:
    warnings = () if contexts_known else (f"{path.name}: contexts are not in this source: b2 and b3 cannot be fitted",)
    steps = _in_form(pl.read_parquet(path), str(path))
    return StepTable(name=path.stem, path=path, sha256=_sha256(path), steps=steps, warnings=warnings)


def _in_form(table: pl.DataFrame, where: str = "steps") -> pl.DataFrame:
    """Check the columns that a fit needs, and add as null those that are not there."""
    check_steps(table, where)
    types: dict[str, pl.DataType] = {name: pl.Float64() for name in _OPTIONAL}
    types |= {"phase": pl.String(), "n_decode": pl.Int64()}
    if "n_decode" not in table.columns:
        # A step that only decodes has one token per request; beside a prefill the number is not known.
        only = (~pl.col("has_prefill").cast(pl.Boolean)).fill_null(value=False)
        table = table.with_columns(n_decode=pl.when(only).then(pl.col("n_tokens")).otherwise(None))
    if "row" not in table.columns:
        table = table.with_row_index("row")
    missing = [name for name in _OPTIONAL if name not in table.columns]
    table = table.with_columns(pl.lit(None, types[name]).alias(name) for name in missing)
    counts = ("n_tokens", "sum_decode_context", "num_prefill_requests", "n_decode", "row")
    return table.select(
        *(pl.col(name).cast(pl.Int64) for name in counts),
        pl.col("prefill_attention").cast(pl.Float64),
        pl.col("has_prefill").cast(pl.Boolean),
        pl.col("phase").cast(pl.String),
        *(pl.col(name).cast(pl.Float64) for name in ("step_s", *_OPTIONAL[2:])),
    )


def _cleaned(table: StepTable, options: FitOptions) -> StepTable:
    steps, warnings = table.steps, list(table.warnings)
    rules: dict[str, NDArray[np.bool_]] = {
        "skipped": np.arange(len(steps)) < options.skip_steps,
        "warm-up": (steps["phase"].fill_null("") == "warmup").to_numpy(),
    }
    if table.recording is not None and not options.keep_first_seen:
        rules["first-seen"] = _first_seen(steps, rules["skipped"] | rules["warm-up"], table.name, warnings)
    if options.exclude_disturbed:
        if steps["worker_cpu_s"].null_count():
            raise CalibrationError(
                f"{table.path}: no CPU time of the worker; without it nobody can tell which steps were disturbed"
            )
        rules["disturbed"] = disturbed(steps)
    out = np.zeros(len(steps), dtype=bool)
    left_out = {}
    for name, rows in rules.items():
        left_out[name] = int((rows & ~out).sum())
        out |= rows
    if out.all():
        parts = ", ".join(f"{count} {name}" for name, count in left_out.items() if count)
        raise CalibrationError(f"{table.path}: no step is left of {len(steps)} ({parts}); leave out less")
    return StepTable(
        name=table.name,
        path=table.path,
        sha256=table.sha256,
        steps=steps.filter(~out),
        left_out={name: count for name, count in left_out.items() if count},
        warnings=tuple(warnings),
        recording=table.recording,
        composed=table.composed,
        num_gpus=table.num_gpus,
    )


def disturbed(steps: pl.DataFrame) -> NDArray[np.bool_]:
    """Return which steps (n,) took far longer by the wall clock than the worker computed."""
    wall, cpu = (steps[name].fill_null(np.nan).to_numpy() for name in ("wall_s", "worker_cpu_s"))
    rows: NDArray[np.bool_] = wall >= _DISTURBED_FACTOR * cpu + _DISTURBED_S
    return rows


def _first_seen(steps: pl.DataFrame, gone: NDArray[np.bool_], name: str, warnings: list[str]) -> NDArray[np.bool_]:
    """Return the steps that are the first of their number of tokens; of a kind that has hardly others, none."""
    first: NDArray[np.bool_] = steps["n_tokens"].is_first_distinct().to_numpy()
    kinds = step_kinds(steps)
    for kind in np.unique(kinds):
        rows = (kinds == kind) & ~gone
        if (rows & first).sum() > 0.5 * rows.sum():
            warnings.append(
                f"{name}: {(rows & first).sum()} of {rows.sum()} {kind} steps are the first of their number of tokens; "
                "they are kept, since too few would be left, and may be slow from setting up kernels"
            )
            first &= kinds != kind
    return first


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
