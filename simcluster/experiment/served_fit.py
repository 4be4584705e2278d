"""Fit eq. 9 to steps that a simulated cluster served, as routers of a measured cluster would.

`python -m simcluster.experiment.served_fit SCENARIO CARDS_DIR`

A grid of composed steps is not what a router meets: served steps are mostly small decode batches, and prefills come
beside them. The scenario is run under round robin at the given rates, every engine step is recorded with its noise,
and eq. 9 is fitted to these with half of the weight on steps with a prefill. Equal input gives equal bytes.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster import _native
from simcluster.backends.simulated import SimulatedCluster
from simcluster.calibrate.fit import STEP_COLUMNS
from simcluster.calibrate.held_out import calibrate
from simcluster.card import Assumption, Card, StepTimeFit, Term, load_card, write_card
from simcluster.errors import SimclusterError
from simcluster.experiment.build import build_world
from simcluster.scenario import Scenario, load_scenario
from simcluster.units import PS_PER_S

__all__ = ["RATES_RPS", "card_with_served_fit", "main", "served_fit", "served_steps"]

RATES_RPS = (2.0, 5.0, 8.0)
_MOST_DECODE_STEPS = 8000  # of one instance and rate; every k-th of more
_TERMS: tuple[Term, ...] = ("b0_s", "b1_s", "b2_s", "b3_s")
_NOTE_FIELD = "fits.eq9_served"


def served_steps(scenario: Scenario, path: Path, rate_rps: float) -> dict[str, pl.DataFrame]:
    """Run a scenario under round robin at a rate and return the steps of each card's first instance.

    Args:
        scenario: a scenario with a recipe.
        path: where it was read.
        rate_rps: mean arrival rate [1/s].

    Returns:
        By card: `fit.STEP_COLUMNS` in the order of the steps; decode steps thinned out evenly.
    """
    data = scenario.model_dump()
    data["workload"]["rate_rps"] = rate_rps
    data["output"]["decisions"] = "off"
    at_rate = Scenario.model_validate(data)
    world = build_world(at_rate, path)
    engines: list[_native.Engine] = []

    def recording(
        config: _native.SchedulerConfig, step_time: _native.StepTimeModel, noise: _native.StepNoise | None
    ) -> _native.Engine:
        engines.append(_native.Engine(config, step_time, noise, record_steps=True))
        return engines[-1]

    SimulatedCluster(world, at_rate, "round_robin", build_engine=recording).run()
    tables: dict[str, pl.DataFrame] = {}
    for spec, engine in zip(world.instances, engines, strict=True):
        host = 0 if spec.engine.async_scheduling else spec.believed.host
        tables.setdefault(spec.card, _thinned(_table(engine.take_steps(), host)))
    return tables


def _table(rows: NDArray[np.int64], host_ps: int) -> pl.DataFrame:
    _, start, end, tokens, _, context, attention, prefills, *_ = rows.T
    return pl.DataFrame(
        {
            "n_tokens": tokens,
            "sum_decode_context": context,
            "prefill_attention": attention,
            "has_prefill": prefills > 0,
            "num_prefill_requests": prefills,
            "step_s": (end - start - host_ps) / PS_PER_S,
        }
    ).select(STEP_COLUMNS)


def _thinned(steps: pl.DataFrame) -> pl.DataFrame:
    decodes = np.flatnonzero(~steps["has_prefill"].to_numpy())
    stride = -(-len(decodes) // _MOST_DECODE_STEPS)
    left_out = np.setdiff1d(decodes, decodes[:: max(stride, 1)])
    return steps[np.setdiff1d(np.arange(len(steps)), left_out)]


def served_fit(steps: pl.DataFrame) -> StepTimeFit:
    """Fit eq. 9 with half of the weight on steps with a prefill, and round it.

    Raises:
        CalibrationError: the steps do not determine the coefficients.
    """
    prefills = steps["has_prefill"].to_numpy()
    weights = np.where(prefills, 0.5 / max(int(prefills.sum()), 1), 0.5 / max(int((~prefills).sum()), 1))
    fit = calibrate(steps, "eq9", weights)
    intervals = {term: (_rounded(low, 3), _rounded(high, 3)) for term, (low, high) in (fit.intervals or {}).items()}
    rounded: dict[str, object] = {term: _rounded(getattr(fit, term), 5) for term in _TERMS}
    for name in ("held_out_mape", "in_sample_mape"):
        rounded[name] = {kind: _rounded(error, 3) for kind, error in (getattr(fit, name) or {}).items()}
    return fit.model_copy(update={**rounded, "intervals": intervals})


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def card_with_served_fit(card: Card, steps: pl.DataFrame, scenario: str) -> Card:
    """Return a card with the fit `eq9_served`, and how it was made among its assumptions."""
    rates = ", ".join(f"{rate:g}" for rate in RATES_RPS)
    note = Assumption(
        field=_NOTE_FIELD,
        note=(
            f"fitted to {len(steps)} steps simulated with fits.{card.chosen_fit} and the scenario's noise (scenario "
            f"{scenario}, round robin at {rates} requests/s), half of the weight on steps with a prefill; nothing was "
            "measured, and its errors are against those steps, noise included"
        ),
    )
    others = [each for each in card.assumptions if each.field != _NOTE_FIELD]
    fits = {**card.fits, "eq9_served": served_fit(steps)}
    return card.model_copy(update={"fits": fits, "assumptions": [*others, note]})


def main(arguments: list[str] | None = None) -> int:
    """Add the fit to the cards of a scenario; return the exit code, 2 after a mistake told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m simcluster.experiment.served_fit",
        description="Fit eq. 9 to simulated served steps and add it to the cards as eq9_served.",
    )
    parser.add_argument("scenario", help="scenario with a recipe")
    parser.add_argument("cards", type=Path, help="folder of the cards to change")
    options = parser.parse_args(arguments)
    try:
        scenario, path = load_scenario(options.scenario)
        data = scenario.model_dump()
        for item in data["cluster"]["instances"]:
            item["believed_model"]["fit"] = "eq9"  # round robin believes nothing, and the new fit may not be there yet
        scenario = Scenario.model_validate(data)
        runs = [served_steps(scenario, path, rate) for rate in RATES_RPS]
        for name in runs[0]:
            file = options.cards / f"{name}.json"
            steps = pl.concat([run[name] for run in runs])
            write_card(card_with_served_fit(load_card(file), steps, scenario.name), file)
            sys.stdout.write(f"{file}\n")
    except SimclusterError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
