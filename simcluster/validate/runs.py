"""Real runs in one form, and where they are read from: recordings, run directories, vLLM's benchmark, tables."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from simcluster.calibrate.recording import Recording, load_recording
from simcluster.errors import CalibrationError, ConfigError
from simcluster.request import FloatArray, IntArray

__all__ = ["RealRun", "Requests", "Series", "observed_times", "read_run", "recorded_run"]

_PUBLISHED = ("run", "arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")
_DIRECTORY = ("instance", "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s")
_BENCH = ("input_lens", "output_lens", "ttfts", "itls")
_IDLE_S = 1e-3  # between two steps of a busy engine there is less
_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching")


@dataclass(frozen=True, slots=True)
class Requests:
    """What n requests met, by arrival. What did not come or is not known is nan.

    Attributes:
        arrival_s: (n,) sent by the client [s], from the first one.
        prompt_tokens: (n,) [tokens].
        output_tokens: (n,) true answer lengths [tokens].
        ttft_s: (n,) from the sending to the first token [s].
        e2e_s: (n,) from the sending to the last token [s].
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    ttft_s: FloatArray
    e2e_s: FloatArray

    @property
    def tpot_s(self) -> FloatArray:
        """Time per output token after the first (n,) [s]: (E2E - TTFT) / (tokens - 1)."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        times: FloatArray = (self.e2e_s - self.ttft_s) / gaps
        return times

    @property
    def duration_s(self) -> float:
        """From the first sending to the last token [s]."""
        return float(np.nanmax(self.arrival_s + self.e2e_s) - self.arrival_s.min())


@dataclass(frozen=True, slots=True)
class Series:
    """The load of an instance over time; each value holds from its instant to the next.

    Attributes:
        at_s: (k,) from the first sending [s], ascending.
        running: (k,) running requests.
        waiting: (k,) waiting requests.
        kv_usage: (k,) share of the KV cache in use; nan where unknown.
    """

    at_s: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_usage: FloatArray

    @classmethod
    def of_steps(
        cls, start_s: FloatArray, end_s: FloatArray, running: FloatArray, waiting: FloatArray, kv_usage: FloatArray
    ) -> "Series":
        """Return the load during steps (k,); between two that do not follow each other at once there is none."""
        gap = np.append(start_s[1:] > end_s[:-1] + _IDLE_S, True)
        at = np.concatenate([start_s, end_s[gap]])
        order = np.argsort(at, kind="stable")
        nothing = np.zeros(int(gap.sum()))
        values = [np.concatenate([each, nothing])[order] for each in (running, waiting, kv_usage)]
        return cls(at[order], values[0], values[1], values[2])

    def sampled(self, at_s: FloatArray) -> "Series":
        """Return what held at some instants (m,); nothing before the first one."""
        place = np.searchsorted(self.at_s, at_s, side="right") - 1

        def pick(values: FloatArray) -> FloatArray:
            return np.where(place >= 0, values[np.maximum(place, 0)], 0.0)

        return Series(at_s, pick(self.running), pick(self.waiting), pick(self.kv_usage))


@dataclass(frozen=True, slots=True)
class RealRun:
    """One run of a real engine.

    Attributes:
        name: for tables and badges.
        source: kind of file.
        requests: what the requests met.
        engine: engine options by vLLM's names, as far as the run tells them.
        vllm_version: of the engine, or "".
        series: load over time, or None.
        recording: the steps, if they were recorded.
        notes: what the reader should know.
    """

    name: str
    source: str
    requests: Requests
    engine: dict[str, Any] = field(default_factory=dict)
    vllm_version: str = ""
    series: Series | None = None
    recording: Recording | None = None
    notes: tuple[str, ...] = ()


def read_run(path: Path, which: str | None = None) -> RealRun:
    """Read a run with times of single requests.

    Args:
        path: a recording, a run directory of one policy, a result of `vllm bench serve --save-result --save-detailed`
            (JSON), or a table of runs (Parquet with run, arrival_s, prompt_tokens, output_tokens, first_token_s,
            last_token_s).
        which: name of the run, if the file holds several; of a run directory, the instance.

    Raises:
        CalibrationError: the file is not one of these, or is broken.
        ConfigError: the file holds several runs and none, or an unknown one, is named.
    """
    if path.is_dir() and (any(path.glob("*/manifest.json")) or (path / "manifest.json").is_file()):
        return _run_directory(path, which)
    if path.is_dir() or path.name.startswith("steps_"):
        return recorded_run(load_recording(path))
    if path.suffix == ".json":
        return _bench_result(path)
    if path.suffix == ".parquet":
        return _published_run(path, which)
    raise CalibrationError(
        f"{path}: not a run; give a recording's folder, a run directory, a result of `vllm bench serve "
        "--save-detailed` (.json), or a table of runs (.parquet)"
    )


# ---- recordings ------------------------------------------------------------------------------------------------


def recorded_run(recording: Recording) -> RealRun:
    """Return what the requests of a recording met.

    Tokens count when the client has them; where no client was recorded, when the engine has processed the step.
    """
    table, steps = recording.requests, recording.steps
    sent, ttft, e2e = observed_times(recording)
    origin = float(sent.min())
    order = np.argsort(sent, kind="stable")
    info = recording.info
    notes = []
    if table["t_first_token_ns"].is_null().all():
        notes.append("no client was recorded: tokens count when the engine has processed their step")
    usable = info.engine.num_gpu_blocks - 1
    return RealRun(
        name=recording.name,
        source="recording",
        requests=Requests(
            (sent - origin)[order],
            table["prompt_tokens"].to_numpy()[order],
            table["output_tokens"].to_numpy()[order],
            ttft[order],
            e2e[order],
        ),
        engine=info.engine.model_dump(),
        vllm_version=info.vllm_version,
        series=Series.of_steps(
            steps["t_sched1"].to_numpy() / 1e9 - origin,
            steps["t_upd1"].to_numpy() / 1e9 - origin,
            steps["n_running"].to_numpy().astype(np.float64),
            steps["n_waiting"].to_numpy().astype(np.float64),
            1 - steps["free_blocks"].to_numpy() / usable,
        ),
        recording=recording,
        notes=tuple(notes),
    )


def observed_times(recording: Recording) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return when each request was sent, its TTFT and its E2E, (n,) each [s], in the recording's order.

    One that nobody saw being sent counts from its arrival at the engine.
    """
    table = recording.requests
    first, last = _token_times(recording)
    sent = _known(table["t_sent_ns"], table["t_add_ns"].to_numpy().astype(np.float64))
    ttft = _known(table["t_first_token_ns"], first) - sent
    e2e = _known(table["t_last_token_ns"], last) - sent
    return sent / 1e9, ttft / 1e9, e2e / 1e9


def _known(column: pl.Series, otherwise: FloatArray) -> FloatArray:
    """Return a column's values, and others where it has none."""
    values = column.cast(pl.Float64).to_numpy()
    found: FloatArray = np.where(np.isnan(values), otherwise, values)
    return found


def _token_times(recording: Recording) -> tuple[FloatArray, FloatArray]:
    """Return when the engine had each request's first and last token, (n,) each [ns]."""
    tokens = (
        recording.steps.select("t_upd1", "comp")
        .explode("comp")
        .unnest("comp")
        .filter(pl.col("produces_token"))
        .group_by("request_id")
        .agg(pl.col("t_upd1").min().alias("first"), pl.col("t_upd1").max().alias("last"))
    )
    both = recording.requests.select("request_id").join(tokens, on="request_id", how="left", maintain_order="left")
    first, last = (both[name].cast(pl.Float64).to_numpy() for name in ("first", "last"))
    return first, last


# ---- run directories -------------------------------------------------------------------------------------------


def _run_directory(path: Path, which: str | None) -> RealRun:
    """Read what one instance did in a run of one policy, as the client measured it."""
    if not (path / "manifest.json").is_file():
        folders = sorted(each.parent for each in path.glob("*/manifest.json"))
        if len(folders) > 1:
            raise ConfigError(
                f"{path}: holds {', '.join(each.name for each in folders)}; give the folder of one policy"
            )
        path = folders[0]
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        names = [str(each["name"]) for each in manifest["instances"]]
        entries = [each for each in manifest["scenario"]["cluster"]["instances"] for _ in range(each["replicas"])]
        table = pl.read_parquet(path / "requests.parquet", columns=list(_DIRECTORY))
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise CalibrationError(f"{path}: cannot be read ({str(error).splitlines()[0]}); give a run directory") from None
    if which is None and len(names) > 1:
        raise ConfigError(f"{path}: has the instances {', '.join(names)}; name one with --run")
    if which is not None and which not in names:
        raise ConfigError(f"{path}: no instance {which}; it has {', '.join(names)}")
    name = which or names[0]
    there = table.filter(pl.col("instance") == name)
    rows = there.filter(pl.col("output_tokens") > 0).sort("arrival_s", maintain_order=True)
    if rows["e2e_s"].is_null().all():
        raise CalibrationError(f"{path}: no request was finished at {name}; there is nothing to compare")
    cut, live = rows["e2e_s"].null_count(), manifest.get("live")
    notes = [f"{cut} requests that did not finish there count with the tokens that came of them"] * (cut > 0)
    if lost := there.height - rows.height:
        notes.append(f"{lost} requests of which no token came are left out")
    arrival, ttft, e2e = (rows[each].cast(pl.Float64).to_numpy() for each in ("arrival_s", "ttft_s", "e2e_s"))
    return RealRun(
        name=f"{path.name}/{name}" if len(names) > 1 else path.name,
        source=f"run directory, {live['servers']}" if live else "run directory of a simulation",
        requests=Requests(
            arrival - arrival[0], rows["prompt_tokens"].to_numpy(), rows["output_tokens"].to_numpy(), ttft, e2e
        ),
        engine={key: value for key, value in entries[names.index(name)]["engine"].items() if value is not None},
        notes=tuple(notes),
    )


# ---- vLLM's benchmark ------------------------------------------------------------------------------------------


def _bench_result(path: Path) -> RealRun:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read ({error.strerror}); give a benchmark's result") from None
    except ValueError as error:
        raise CalibrationError(f"{path}: not valid JSON ({error}); give a benchmark's result") from None
    missing = [name for name in (*_BENCH, "start_times") if not isinstance(found, dict) or name not in found]
    if missing:
        raise CalibrationError(
            f"{path}: no {', '.join(missing)}; run `vllm bench serve` with --save-result --save-detailed, of a version "
            "that stores start_times"
        )
    lengths = {name: len(found[name]) for name in (*_BENCH, "start_times")}
    if len(set(lengths.values())) != 1:
        raise CalibrationError(f"{path}: lists of different lengths ({lengths}); the file is damaged")
    try:
        start, ttft = (np.array(found[name], dtype=np.float64) for name in ("start_times", "ttfts"))
        prompt, output = (np.array(found[name], dtype=np.int64) for name in ("input_lens", "output_lens"))
        decode = np.array([float(sum(each)) for each in found["itls"]])
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"{path}: a list holds something else than numbers ({error}); correct it") from None
    served = (output > 0) & (ttft > 0)
    if not served.any():
        raise CalibrationError(f"{path}: no request was served; there is nothing to compare")
    order = np.flatnonzero(served)[np.argsort(start[served], kind="stable")]
    failed = int((~served).sum())
    return RealRun(
        name=path.stem,
        source="vllm bench",
        requests=Requests(
            start[order] - start[order[0]], prompt[order], output[order], ttft[order], (ttft + decode)[order]
        ),
        notes=(f"{failed} failed requests are left out",) if failed else (),
    )


# ---- published runs --------------------------------------------------------------------------------------------


def _published_run(path: Path, which: str | None) -> RealRun:
    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise CalibrationError(f"{path}: cannot be read ({str(error).splitlines()[0]}); give a table of runs") from None
    missing = [name for name in _PUBLISHED if name not in table.columns]
    if missing:
        raise CalibrationError(f"{path}: no column {', '.join(missing)}; a table of runs has {', '.join(_PUBLISHED)}")
    names = table["run"].unique(maintain_order=True).to_list()
    if which is None and len(names) > 1:
        raise ConfigError(f"{path}: holds the runs {', '.join(names)}; name one with --run")
    if which is not None and which not in names:
        raise ConfigError(f"{path}: no run {which}; it holds {', '.join(names)}")
    rows = table.filter(pl.col("run") == (which or names[0])).sort("arrival_s", maintain_order=True)
    arrival = rows["arrival_s"].cast(pl.Float64).to_numpy()
    meta = _beside(path, which or names[0])
    options = meta.get("engine_kwargs", {}) | meta.get("kv_cache", {})
    engine = {name: options[name] for name in (*_OPTIONS, "num_gpu_blocks", "block_size") if options.get(name)}
    return RealRun(
        name=which or names[0],
        source="published run",
        requests=Requests(
            arrival - arrival[0],
            rows["prompt_tokens"].to_numpy().astype(np.int64),
            rows["output_tokens"].to_numpy().astype(np.int64),
            rows["first_token_s"].to_numpy() - arrival,
            rows["last_token_s"].to_numpy() - arrival,
        ),
        engine=engine,
        vllm_version=str(meta.get("vllm_version", "")),
        series=_series_beside(path, which or names[0], float(arrival[0])),
    )


def _beside(path: Path, name: str) -> dict[str, Any]:
    """Return what RUNS_meta.json says about a run."""
    file = path.with_name(f"{path.stem}_meta.json")
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes()).get(name, {})
    except (OSError, ValueError, AttributeError) as error:
        raise CalibrationError(f"{file}: cannot be read ({error}); correct it or take it away") from None
    return dict(found)


def _series_beside(path: Path, name: str, origin_s: float) -> Series | None:
    """Return the load over time from X_timeseries.parquet beside X_runs.parquet."""
    file = path.with_name(path.name.replace("_runs", "_timeseries"))
    if file == path or not file.is_file():
        return None
    rows = pl.read_parquet(file).filter(pl.col("run") == name).sort("t")
    if rows.is_empty():
        return None
    columns = [rows[column].cast(pl.Float64).to_numpy() for column in ("t", "running", "waiting", "kv_cache_pct")]
    return Series(columns[0] - origin_s, columns[1], columns[2], columns[3] / 100)
