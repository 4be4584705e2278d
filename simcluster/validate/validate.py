"""Compare a card with a real run or with published points: the whole answer as plain data."""

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from simcluster.card import Card, Measure, Validation
from simcluster.validate.compare import compare_requests, compare_series
from simcluster.validate.estimators import compare_estimators
from simcluster.validate.points import Point, play_points, score_points
from simcluster.validate.runs import RealRun, Requests
from simcluster.validate.scheduling import replay_scheduling
from simcluster.validate.simulate import Tuning, engine_config, play
from simcluster.validate.split import split_error, step_points

__all__ = ["Verdict", "validate_points", "validate_run"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found.

    Attributes:
        summary: plain data without NaN, as `validate --json` prints it.
        tables: by file stem, what `--out` writes.
        validation: what the card keeps of it.
    """

    summary: dict[str, Any]
    validation: Validation
    tables: dict[str, pl.DataFrame] = field(default_factory=dict)


def validate_run(
    card: Card,
    run: RealRun,
    tuning: Tuning | None = None,
    options: dict[str, Any] | None = None,
    skip: int = 0,
    tuned_on: str | None = None,
) -> Verdict:
    """Replay a run's arrivals on a card.

    Args:
        card: the card.
        run: the real run.
        tuning: what is changed about the card.
        options: engine options instead of the run's.
        skip: leave this many first requests out of the comparison, since the card was tuned on them.
        tuned_on: what it was tuned on, in words.

    Raises:
        ConfigError, CalibrationError: the run and the card do not fit together.
    """
    tuning = tuning or Tuning()
    config = engine_config(card, run, options)
    played, series = play(tuning.model(card), config, card.front_end, run.requests, with_series=run.series is not None)
    real, ours = _rest(run.requests, skip), _rest(played, skip)
    errors = compare_requests(real, ours)
    summary: dict[str, Any] = {
        "card": card.name,
        "run": run.name,
        "source": run.source,
        "loop": "async" if config.async_scheduling else "sync",
        "tuned": tuning.as_dict() or None,
        "tuned_on": tuned_on,
        "notes": list(run.notes),
        **errors,
        "over_time": None,
        "split": None,
        "estimators": None,
    }
    tables = {"requests": _request_rows(run.requests, played)}
    if run.series is not None and series is not None:
        summary["over_time"] = compare_series(run.series, series, run.requests.duration_s)
    if run.recording is not None:
        replay = replay_scheduling(run.recording)
        summary["split"] = split_error(card, run.recording, replay, tuning)
        tables["steps"] = step_points(card, run.recording, tuning)
        scored = compare_estimators(card, run.recording, replay, tuning)
        if scored is not None:
            summary["estimators"], tables["estimates"] = scored
    found: dict[Measure, float | None] = {
        "ttft_mape": errors["ttft_s"]["mape"],
        "tpot_mape": errors["tpot_s"]["mape"],
        "e2e_mape": errors["e2e_s"]["mape"],
    }
    validation = Validation(
        run=run.name,
        requests=errors["requests"],
        errors={name: value for name, value in found.items() if value is not None},
        tuned=tuning.as_dict(),
        tuned_on=tuned_on,
    )
    return Verdict(summary, validation, tables)


def validate_points(
    card: Card,
    points: list[Point],
    name: str,
    tuning: Tuning | None = None,
    options: dict[str, Any] | None = None,
    tuned_on: str | None = None,
) -> Verdict:
    """Simulate the closed loop of published points on a card.

    Raises:
        CalibrationError: a request of a point does not fit into the engine.
    """
    tuning = tuning or Tuning()
    scores = score_points(points, play_points(card, points, tuning, options))
    summary = {
        "card": card.name,
        "run": name,
        "source": "points",
        "tuned": tuning.as_dict() or None,
        "tuned_on": tuned_on,
        **scores,
    }
    errors: dict[Measure, float] = {"tpot_mape": scores["tpot_mape"]}
    validation = Validation(run=name, points=len(points), errors=errors, tuned=tuning.as_dict(), tuned_on=tuned_on)
    rows = [
        {
            "point": row["point"],
            **{
                f"{what}_{side}": row[what][side]
                for what in ("tpot_s", "ttft_s")
                for side in ("observed", "simulated", "error")
            },
        }
        for row in scores["points"]
    ]
    return Verdict(summary, validation, {"points": pl.DataFrame(rows)})


def _rest(requests: Requests, skip: int) -> Requests:
    if not skip:
        return requests
    return Requests(
        requests.arrival_s[skip:],
        requests.prompt_tokens[skip:],
        requests.output_tokens[skip:],
        requests.ttft_s[skip:],
        requests.e2e_s[skip:],
    )


def _request_rows(real: Requests, ours: Requests) -> pl.DataFrame:
    columns = {"arrival_s": real.arrival_s, "prompt_tokens": real.prompt_tokens, "output_tokens": real.output_tokens}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        columns[f"{name}_observed"] = getattr(real, name)
        columns[f"{name}_simulated"] = getattr(ours, name)
    return pl.DataFrame(columns)
