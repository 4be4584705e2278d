"""Fit a few numbers of a card to a real run or to published points."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from simcluster.card import Adjustment, Card
from simcluster.errors import ConfigError
from simcluster.request import FloatArray
from simcluster.validate.points import Point, play_points
from simcluster.validate.runs import RealRun
from simcluster.validate.simulate import TUNABLE, Tuning, engine_config, play

__all__ = ["tune_on_points", "tune_on_run", "tuned_card"]

_UNITS = {"scale": 1.0, "host": 1e-3, "b0": 1e-3, "b1": 1e-5}
_DIFFERENCE = {"scale": 0.05, "host": 0.25, "b0": 0.25, "b1": 0.25}  # wide, since a simulated latency has small jumps
_EVALUATIONS = 15


def tune_on_points(card: Card, points: Sequence[Point], what: Sequence[str], options: dict[str, Any] | None) -> Tuning:
    """Fit numbers of a card to the TPOT of points: the least mean squared relative error.

    Args:
        card: the card.
        points: what to fit to.
        what: names of `TUNABLE`.
        options: engine options of the user.

    Raises:
        ConfigError: a name is unknown.
    """
    observed = np.array([point.tpot_s for point in points])

    def errors(tuning: Tuning) -> FloatArray:
        found = np.array([tpot for _, tpot in play_points(card, list(points), tuning, options)])
        result: FloatArray = found / observed - 1
        return result

    return _search(card, what, errors)


def tune_on_run(card: Card, run: RealRun, rows: int, what: Sequence[str], options: dict[str, Any] | None) -> Tuning:
    """Fit numbers of a card to the TPOT and E2E of a run's first requests.

    All requests are played, since the later ones slow the first ones down; only the first `rows` count.

    Raises:
        ConfigError: a name is unknown.
    """
    config, real = engine_config(card, run, options), run.requests

    def errors(tuning: Tuning) -> FloatArray:
        played, _ = play(tuning.model(card), config, card.front_end, real)
        return np.concatenate(
            [_shares(getattr(real, name), getattr(played, name), rows) for name in ("tpot_s", "e2e_s")]
        )

    return _search(card, what, errors)


def _shares(real: FloatArray, ours: FloatArray, rows: int) -> FloatArray:
    known = np.isfinite(real[:rows]) & np.isfinite(ours[:rows]) & (real[:rows] > 0)
    shares: FloatArray = ours[:rows][known] / real[:rows][known] - 1
    return shares


def _search(card: Card, what: Sequence[str], errors: Callable[[Tuning], FloatArray]) -> Tuning:
    unknown = [name for name in what if name not in TUNABLE]
    if unknown or not what:
        raise ConfigError(f"--tune {','.join(what)}: allowed are {', '.join(TUNABLE)}; correct the names")
    start = {"scale": 1.0, "host": max(card.host_time_s / _UNITS["host"], 0.2), "b0": 2.0, "b1": 2.0}

    def tuning_at(values: FloatArray) -> Tuning:
        at = {name: float(value) * _UNITS[name] for name, value in zip(what, values, strict=True)}
        return Tuning(scale=at.get("scale", 1.0), host_s=at.get("host"), b0_s=at.get("b0", 0.0), b1_s=at.get("b1", 0.0))

    def cost(values: FloatArray) -> FloatArray:
        return errors(tuning_at(values))

    found = least_squares(
        cost,
        [start[name] for name in what],
        bounds=([1e-3 if name == "scale" else 0.0 for name in what], np.inf),
        diff_step=[_DIFFERENCE[name] for name in what],
        max_nfev=_EVALUATIONS,
        xtol=1e-3,
    )
    return tuning_at(found.x)


def tuned_card(card: Card, tuning: Tuning, tuned_on: str | None) -> Card:
    """Return a card with the changes made to it, and told of in its adjustments."""
    changes = tuning.as_dict()
    if not changes:
        return card
    reason = f"tuned on {tuned_on}: " + ", ".join(f"{name} = {value:.4g}" for name, value in changes.items())
    adjustments = [*card.adjustments, Adjustment(field=f"fits.{card.chosen_fit}", factor=tuning.scale, reason=reason)]
    return card.model_copy(
        update={
            "fits": {**card.fits, card.chosen_fit: tuning.fit(card)},
            "host_time_s": card.host_time_s if tuning.host_s is None else tuning.host_s,
            "adjustments": adjustments,
        }
    )
