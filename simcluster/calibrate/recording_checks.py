"""Whether the rows of a recording can be true."""

import itertools
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.errors import CalibrationError

__all__ = ["check_requests", "check_times"]

_LONGEST_STEP_NS = 600 * 10**9  # beyond, the clock jumped or the machine slept


def check_times(file: Path, steps: pl.DataFrame) -> None:
    """Refuse steps that are missing, have no length, or whose times run backwards or jump.

    Raises:
        CalibrationError: one line with the first such step.
    """
    numbers = steps["step"].to_numpy()
    times = {name: steps[name].to_numpy() for name in ("t_sched0", "t_sched1", "t_upd0", "t_upd1")}

    def refuse(rows: NDArray[np.bool_], what: str) -> None:
        if rows.any():
            row = int(np.flatnonzero(rows)[0])
            more = int(rows.sum()) - 1
            raise CalibrationError(f"{file}: step {numbers[row]} {what} (and {more} more); record again")

    gaps = np.diff(numbers, prepend=numbers[0] - 1) != 1
    refuse(gaps, "does not follow the step before it; steps are missing, or two runs are mixed")
    refuse(times["t_upd0"] == times["t_sched1"], "has no length, t_upd0 = t_sched1; the clock is too coarse")
    order = list(times.values())
    back = np.logical_or.reduce([later < earlier for earlier, later in itertools.pairwise(order)])
    refuse(back, "has times that run backwards; the clock jumped")
    for name in ("t_sched0", "t_upd0"):
        stuck = np.diff(times[name], prepend=times[name][0] - 1) <= 0
        refuse(stuck, f"has {name} no later than the step before; the clock jumped")
    slow = times["t_upd1"] - times["t_sched0"] > _LONGEST_STEP_NS
    refuse(slow, "took over 600 s; the clock jumped or the machine slept")


def check_requests(file: Path, steps_file: Path, steps: pl.DataFrame, requests: pl.DataFrame) -> None:
    """Refuse requests that are doubled, empty, unknown, or later than the steps that compute them.

    Raises:
        CalibrationError: one line with the first such request.
    """
    doubled = requests.filter(pl.col("request_id").is_duplicated())
    if len(doubled):
        raise CalibrationError(f"{file}: request {doubled['request_id'][0]} is listed twice; two runs are mixed")
    for name in ("prompt_tokens", "max_tokens"):
        bad = requests.filter(pl.col(name) < 1)
        if len(bad):
            raise CalibrationError(
                f"{file}: request {bad['request_id'][0]} has {name} = {bad[name][0]}; must be at least 1; record again"
            )
    entries = steps.select("step", "t_sched0", "comp").explode("comp").unnest("comp")
    first = entries.group_by("request_id", maintain_order=True).first()
    arrived = first.join(requests.select("request_id", "t_add_ns"), on="request_id", how="left", maintain_order="left")
    unknown = arrived.filter(pl.col("t_add_ns").is_null())
    if len(unknown):
        raise CalibrationError(
            f"{file}: {len(unknown)} requests of {steps_file.name} are unknown, the first is "
            f"{unknown['request_id'][0]} in step {unknown['step'][0]}; the two files are not of one run"
        )
    early = arrived.filter(pl.col("t_add_ns") > pl.col("t_sched0"))
    if len(early):
        raise CalibrationError(
            f"{file}: request {early['request_id'][0]} arrives after step {early['step'][0]}, which computes it; the "
            "clock jumped, or the two files are not of one run"
        )
