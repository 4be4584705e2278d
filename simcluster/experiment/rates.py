"""Arrival rates of an experiment: the rate that a scenario has, and those that a user asks for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import Measure, Scenario, Workload
from simcluster.shipped import find_file
from simcluster.units import PS_PER_S
from simcluster.workload.recipe import Constant, Gamma, Mmpp2, Poisson, load_recipe
from simcluster.world import World

__all__ = ["BaseRate", "base_rate", "measure_extremes", "parse_rates", "spread_rates"]

_ALL_AT_ONCE = 1e6  # the largest rate_scale
_PROBED = 2000  # requests


@dataclass(frozen=True, slots=True)
class BaseRate:
    """The mean arrival rate of a scenario at rate_scale 1.

    Attributes:
        rate_rps: the rate [1/s]; None where arrivals have none (all at once, closed loops).
        source: how it is known, for people.
    """

    rate_rps: float | None
    source: str

    def scale_for(self, rate_rps: float) -> float:
        """Return the rate_scale that gives a rate.

        Raises:
            ConfigError: the scenario has no rate to scale.
        """
        if self.rate_rps is None:
            raise ConfigError(f"--rates: {self.source}; leave --rates out")
        return rate_rps / self.rate_rps

    def fields_for(self, rate_rps: float, workload: Workload) -> dict[str, float]:
        """Return the scenario fields that give a rate.

        Where the workload has a rate of its own, that is set: bursts then keep the times for which they last, which
        a scale would squeeze.

        Raises:
            ConfigError: the scenario has no rate to scale.
        """
        if workload.rate_rps is not None:
            return {"workload.rate_rps": rate_rps, "workload.rate_scale": 1.0}
        return {"workload.rate_scale": self.scale_for(rate_rps)}


def base_rate(scenario: Scenario, path: Path, world: World) -> BaseRate:
    """Return the mean rate of a scenario's arrivals before rate_scale.

    A recipe says its rate itself, so that it is the same for every seed; otherwise it is (n - 1) over the span.

    Args:
        scenario: the scenario.
        path: where it was read.
        world: its world; its arrivals are measured.
    """
    workload = scenario.workload
    if workload.rate_rps is not None:
        return BaseRate(workload.rate_rps, "workload.rate_rps")
    if workload.recipe is not None:
        recipe = load_recipe(
            find_file(workload.recipe, "traces/recipes", ".yaml", path.parent, f"{path}: workload.recipe")
        )
        if recipe.sessions is None and isinstance(recipe.process, Poisson | Gamma | Constant | Mmpp2):
            return BaseRate(recipe.process.rate_rps, f"mean rate of recipe {recipe.name}")
    arrivals = world.known.arrival_ps
    span_s = int(arrivals[-1] - arrivals[0]) / PS_PER_S * workload.rate_scale
    if span_s <= 0 or len(arrivals) < 2:
        return BaseRate(None, "all requests arrive at once or wait for others, so there is no rate to set")
    what = "trace" if workload.trace is not None else f"recipe's draw with seed {scenario.seed}"
    return BaseRate((len(arrivals) - 1) / span_s, f"{len(arrivals) - 1:,} gaps over {span_s:,.1f} s of the {what}")


def spread_rates(low: float, high: float, points: int) -> list[float]:
    """Return rates from the lower to the higher end, equally spaced, as they are: never rounded to whole ones."""
    low, high = sorted((low, high))
    return [float(rate) for rate in np.linspace(low, high, points)]


def parse_rates(text: str, measure: Callable[[], tuple[float, float]]) -> list[float]:
    """Read `--rates`: `R1,R2,...`, `LOW:HIGH:POINTS`, `auto` or `auto:POINTS`.

    Args:
        text: as written [1/s].
        measure: returns the rates of one request at a time and of all at once, for `auto`.

    Returns:
        Rates, ascending.

    Raises:
        ConfigError: it is none of these, or a rate is not above 0.
    """
    kind, _, points = text.strip().partition(":")
    if kind == "auto":
        return spread_rates(*measure(), _points(points or "5", text))
    pieces = text.split(":")
    if len(pieces) == 3:
        rates = spread_rates(_rate(pieces[0], text), _rate(pieces[1], text), _points(pieces[2], text))
    elif len(pieces) == 1:
        rates = sorted(_rate(piece, text) for piece in text.split(","))
    else:
        raise ConfigError(f"--rates = {text!r}; must be R1,R2,... or LOW:HIGH:POINTS or auto[:POINTS]")
    if len(set(rates)) < len(rates):
        raise ConfigError(f"--rates = {text!r}; a rate is given twice; leave one out")
    return rates


def _rate(piece: str, text: str) -> float:
    try:
        rate = float(piece)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rates = {text!r}: found {piece.strip()!r}; must be a rate above 0 in requests/s")
    return rate


def _points(piece: str, text: str) -> int:
    if not piece.strip().isdecimal() or not 2 <= int(piece) <= 1000:
        raise ConfigError(f"--rates = {text!r}: found {piece.strip()!r} points; must be a whole number from 2 to 1000")
    return int(piece)


def measure_extremes(scenario: Scenario, path: Path, base: BaseRate, policy: str) -> tuple[float, float]:
    """Run a scenario once with a minute between requests and once with all at once; return both rates [1/s].

    The first is 1 over the mean time of a request that meets nobody, the second the throughput of the batch.

    Raises:
        ConfigError: the scenario has no rate to scale, or no request finishes.
    """
    slow = base.scale_for(1 / 60)
    serial_s = _probe(scenario, path, policy, slow)["e2e_s"]["mean"]
    batch_rps = _probe(scenario, path, policy, _ALL_AT_ONCE)["request_throughput_rps"]
    if not serial_s or not batch_rps:
        raise ConfigError(f"--rates auto: no request finishes under {policy}; give the rates")
    return 1 / serial_s, batch_rps


def _probe(scenario: Scenario, path: Path, policy: str, rate_scale: float) -> dict[str, Any]:
    limit = min(scenario.workload.limit or _PROBED, _PROBED)
    workload = scenario.workload.model_copy(update={"rate_scale": rate_scale, "limit": limit})
    probe = scenario.model_copy(update={"workload": workload, "measure": Measure()})
    return run_policy(probe, build_world(probe, path), policy).summary
