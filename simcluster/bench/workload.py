"""The workload of the figures: scenarios/bench, for any number of instances and requests."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from simcluster import _native
from simcluster.card import load_card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.instance import step_time_model
from simcluster.request import IntArray
from simcluster.scenario import Scenario, load_scenario
from simcluster.shipped import find_file
from simcluster.units import PS_PER_NS
from simcluster.workload import Trace
from simcluster.workload.synth import load_recipe, make_trace

__all__ = ["SCENARIO", "Requests", "bench_scenario", "engine_parts", "requests"]

SCENARIO = "bench/poisson-8b"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of arrival.

    Attributes:
        prompt_tokens: (n,) int64.
        output_tokens: (n,) int64.
        at_ps: (n,) int64, when they reach their engines [ps].
    """

    prompt_tokens: IntArray
    output_tokens: IntArray
    at_ps: IntArray

    def __len__(self) -> int:
        return len(self.at_ps)


@cache
def _trace() -> Trace:
    return make_trace(load_recipe(find_file("bench", "traces/recipes", ".yaml")))


@cache
def requests(count: int, instances: int, load: float = 0.8) -> Requests:
    """Return the first requests of the workload for so many instances.

    After the recipe's last request its lengths and gaps come again.

    Args:
        count: how many.
        instances: how many instances share them.
        load: arrival rate over what the instances can serve.
    """
    trace = _trace()
    place = np.arange(count) % len(trace)
    gaps = np.diff(trace.arrival_ns, prepend=0)[place]
    at_ns = np.rint(np.cumsum(gaps) / (instances * load / 0.8)).astype(np.int64)
    return Requests(
        np.ascontiguousarray(trace.prompt_tokens[place]),
        np.ascontiguousarray(trace.output_tokens[place]),
        at_ns * PS_PER_NS,
    )


def engine_parts(**options: Any) -> tuple[_native.SchedulerConfig, _native.StepTimeModel]:
    """Return the resolved options and the true step times of the workload's card; its steps have no noise here.

    Args:
        options: engine options by vLLM's names, instead of the defaults.
    """
    scenario, path = load_scenario(SCENARIO)
    card = load_card(find_file(scenario.cluster.instances[0].card, "calibration", ".json"))
    config, _ = resolve_engine_options(EngineOptions(**options), card, f"{path}: cluster.instances[0].engine")
    config.shared_prefixes = False
    return config, step_time_model(card.fits[card.chosen_fit], card.host_time_s)


def bench_scenario(instances: int, count: int) -> tuple[Scenario, Path]:
    """Return the scenario for so many instances and requests at the same load per instance, and where it lies."""
    scenario, path = load_scenario(SCENARIO)
    data = scenario.model_dump()
    data["cluster"]["instances"][0]["replicas"] = instances
    data["workload"] |= {"rate_scale": float(instances), "limit": count}
    return Scenario.model_validate(data), path
