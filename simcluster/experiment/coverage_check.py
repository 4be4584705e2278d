"""Whether a run stayed within the batches that its cards were fitted to.

The engines of a run keep no batches: they skip whole stretches of steps at once. So a bounded sample is looked at: of
each instance the stretch of requests that came to it most densely, replayed alone with every step recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster import _native
from simcluster.card import Coverage
from simcluster.experiment.run import PolicyRun
from simcluster.units import PS_PER_NS
from simcluster.world import World

__all__ = ["SAMPLE", "Beyond", "beyond_coverage", "coverage_warnings"]

SAMPLE = 300  # requests of each instance that are replayed
_LEAST_SHARE = 0.01  # of the time of the checked steps, from which on it is worth a warning
_COLUMNS = ("instance", "arrival_ns", "prompt_tokens", "output_tokens", "first_token_ns")

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Beyond:
    """What an instance did beyond its card's coverage.

    Attributes:
        instance: its name.
        share: share of the time of the checked steps that lies beyond [fraction].
        features: by feature, the largest value met and the largest one fitted.
        requests: how many requests were replayed.
    """

    instance: str
    share: float
    features: dict[str, tuple[float, float]]
    requests: int


def coverage_warnings(world: World, runs: Sequence[PolicyRun]) -> list[str]:
    """Return a line for each instance that left its card's coverage, under the policy where it did so most."""
    worst: dict[str, tuple[Beyond, str]] = {}
    for run in runs:
        for each in beyond_coverage(world, run):
            if each.instance not in worst or each.share > worst[each.instance][0].share:
                worst[each.instance] = each, run.policy
    return [
        f"{name}: {found.share:.0%} of its step time under {policy} is beyond what its card was fitted to: "
        + ", ".join(f"{feature} up to {high:,.6g} ({fitted:,.6g} fitted)" for feature, (high, fitted) in parts)
        + f"; step times are extrapolated there (checked: the {found.requests} densest requests, replayed)"
        for name, (found, policy) in worst.items()
        for parts in [found.features.items()]
    ]


def beyond_coverage(world: World, run: PolicyRun) -> list[Beyond]:
    """Return the instances that left their card's coverage for at least 1 % of the time of the checked steps."""
    requests = run.frame("requests", _COLUMNS).filter(pl.col("first_token_ns").is_not_null()).sort("arrival_ns")
    found = []
    for number, spec in enumerate(world.instances):
        coverage = world.coverages[number] if world.coverages else None
        own = requests.filter(pl.col("instance") == spec.name)
        if coverage is None or own.is_empty():
            continue
        sample = own[_densest(own["arrival_ns"].to_numpy())]
        steps = _replay(world, number, sample)
        beyond = _compared(steps, coverage, prefills=world.true_models[number].step_time.b5 > 0)
        if beyond is not None and beyond[0] >= _LEAST_SHARE:
            found.append(Beyond(spec.name, beyond[0], beyond[1], len(sample)))
    return found


def _densest(arrivals: Array) -> Array:
    """Return the rows of the `SAMPLE` consecutive arrivals that span the least time."""
    if len(arrivals) <= SAMPLE:
        return np.arange(len(arrivals))
    spans = arrivals[SAMPLE - 1 :] - arrivals[: len(arrivals) - SAMPLE + 1]
    first = int(np.argmin(spans))
    return np.arange(first, first + SAMPLE)


def _replay(world: World, number: int, sample: pl.DataFrame) -> Array:
    """Return the steps of an instance that meets these requests alone, without noise."""
    engine = _native.Engine(
        world.instances[number].engine, world.true_models[number].step_time, None, record_steps=True
    )
    start = int(sample["arrival_ns"][0])
    for index, row in enumerate(sample.iter_rows(named=True)):
        at = (row["arrival_ns"] - start) * PS_PER_NS
        engine.submit(index, row["prompt_tokens"], max(row["output_tokens"], 1), at)
    engine.drain()
    return engine.take_steps()


def _compared(
    steps: Array, coverage: Coverage, *, prefills: bool
) -> tuple[float, dict[str, tuple[float, float]]] | None:
    """Return the share of the time of the steps beyond the coverage and by how much, or None for no steps."""
    if not len(steps):
        return None
    _, start, end, tokens, decodes, context, attention, prefilling, *_ = steps.T
    features = {
        "tokens": (tokens, coverage.n_tokens[1]),
        "decoding requests": (decodes, coverage.batch_size[1]),
        "decode context": (context, coverage.sum_decode_context[1]),
        "mean decode context": (context / np.maximum(decodes, 1), coverage.mean_decode_context[1]),
        "prefill attention": (attention, coverage.prefill_attention[1]),
    }
    if prefills:
        features["prefilling requests"] = (prefilling, coverage.num_prefill_requests[1])
    out = np.zeros(len(steps), dtype=bool)
    left: dict[str, tuple[float, float]] = {}
    for name, (values, highest) in features.items():
        beyond = values > highest
        if beyond.any():
            left[name] = float(values.max()), float(highest)
            out |= beyond
    time = (end - start).astype(np.float64)
    return float(time[out].sum() / time.sum()), left
