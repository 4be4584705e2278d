"""Figures 9 and 10: the lengths of prompts and answers in the synthetic mix."""

import numpy as np
import numpy.typing as npt
import polars as pl

from simcluster.paper.figure import Claim, Figure, FloatArray, Plot
from simcluster.paper.lab import Lab
from simcluster.shipped import find_file
from simcluster.workload import Trace
from simcluster.workload.recipe import load_recipe
from simcluster.workload.synth import make_trace

__all__ = ["figure_9", "figure_10"]

_QUANTILES = {"p1": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
_SYNTHETIC = (
    "Everything: the mix is synthetic. The paper shows its lengths as figures only; ours are log-normals whose "
    "medians are read off them or taken from public prompts (traces/README.md)."
)


def _trace(lab: Lab) -> Trace:
    recipe = load_recipe(find_file("paper", "traces/recipes", ".yaml"))
    return make_trace(recipe.model_copy(update={"requests": lab.sizes.requests * lab.sizes.seeds}))


def _quantiles(values: FloatArray) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()} | {"mean": float(values.mean())}


def _by_task(trace: Trace) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which requests belong to each task."""
    assert trace.task is not None  # the mix has tasks
    return {name: trace.task == number for number, name in enumerate(trace.task_names)}


def figure_9(lab: Lab) -> Figure:
    """Return the distribution of prompt lengths by task."""
    trace = _trace(lab)
    rows = [
        {"task": task, **_quantiles(trace.prompt_tokens[chosen].astype(np.float64))}
        for task, chosen in _by_task(trace).items()
    ]
    prompts = trace.prompt_tokens
    return Figure(
        key="9",
        title="Prompt tokens by task, synthetic mix",
        table=pl.DataFrame(rows),
        claims=[
            Claim("shortest prompt", "about 10", float(prompts.min()), None, "tokens"),
            Claim("longest prompt", "about 10^4", float(prompts.max()), None, "tokens"),
        ],
        moved_by=_SYNTHETIC,
        plot=Plot("quantile", "tokens", "task", log="y"),
        points=pl.DataFrame(rows).unpivot(
            list(_QUANTILES), index="task", variable_name="quantile", value_name="tokens"
        ),
    )


def figure_10(lab: Lab) -> Figure:
    """Return the distribution of answer lengths by task and model."""
    trace = _trace(lab)
    rows = [
        {"task": task, "model": model, **_quantiles(lengths[chosen].astype(np.float64))}
        for task, chosen in _by_task(trace).items()
        for model, lengths in trace.output_tokens_by_model.items()
    ]
    table = pl.DataFrame(rows)
    return Figure(
        key="10",
        title="Answer tokens by task and model, synthetic mix",
        table=table,
        claims=[
            Claim(
                "smallest median of a task and model",
                "about 10^2",
                float(table["p50"].to_numpy().min()),
                None,
                "tokens",
            ),
            Claim(
                "largest median of a task and model", "about 10^3", float(table["p50"].to_numpy().max()), None, "tokens"
            ),
        ],
        moved_by=_SYNTHETIC,
        plot=Plot("quantile", "tokens", "task", panel="model", log="y"),
        points=table.unpivot(list(_QUANTILES), index=["task", "model"], variable_name="quantile", value_name="tokens"),
    )
