"""The fluid bound: what no policy can beat on average, however it routes.

Requests become divisible and time a budget. With x_ij the share of request i at instance j, maximise
`sum x_ij * E[U_ij | predictions]` so that every request is sent at most once (dropping is free), every instance is
given no more work than it has time, and only instances that meet the target when idle are used.

The work of a request is the least time that it takes from an instance: the marginal time of its prefill, of each
decode token, and of each decode token the share c / KV of a step's fixed time, since a batch of more context than the
KV cache holds cannot be. The value is an upper bound but for end effects (a run goes on after its last arrival, the
budget ends there), the error of the regressions that stand for the expectations, and noise in step times.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from simcluster.errors import SimulationError
from simcluster.request import FloatArray
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["Bound", "fluid_bound", "fluid_optimum", "idle_ttft_s", "work_s"]

_SLACK = 0.03  # share of a target by which noise may help an idle instance


class Bound(NamedTuple):
    """The bound of a world.

    Attributes:
        on_time_utility: largest mean utility per request (eq. 4).
        shares: (j,) share of all requests at each instance.
        load: (j,) share of its time that each instance works.
    """

    on_time_utility: float
    shares: FloatArray
    load: FloatArray


def fluid_optimum(utility: FloatArray, work: FloatArray, time: FloatArray, allowed: npt.NDArray[np.bool_]) -> Bound:
    """Solve the linear program.

    Args:
        utility: (n, j) what request i brings at instance j.
        work: (n, j) time that it takes there [s].
        time: (j,) time that instance j has [s].
        allowed: (n, j) pairs that may be used.

    Raises:
        SimulationError: the solver gives up.

    Source: routing as a fluid, HiGHS by scipy.
    """
    n, instances = utility.shape
    request, instance = np.nonzero(allowed & (utility > 0))  # anything else is dropped for free
    if len(request) == 0:
        return Bound(0.0, np.zeros(instances), np.zeros(instances))
    gain, takes = utility[request, instance], work[request, instance]
    pairs = np.arange(len(request))
    limits: Any = coo_array(  # what the stubs of linprog do not know
        (
            np.concatenate([np.ones(len(pairs)), takes]),
            (np.concatenate([request, n + instance]), np.concatenate([pairs, pairs])),
        ),
        shape=(n + instances, len(pairs)),
    ).tocsr()
    result = linprog(-gain, A_ub=limits, b_ub=np.concatenate([np.ones(n), time]), bounds=(0, 1), method="highs")
    if result.status != 0:
        raise SimulationError(f"fluid bound: the solver gives up ({result.message}); choose fewer requests")
    sent = np.asarray(result.x)
    return Bound(
        float(gain @ sent) / n,
        np.bincount(instance, weights=sent, minlength=instances) / n,
        np.bincount(instance, weights=sent * takes, minlength=instances) / time,
    )


def fluid_bound(world: World) -> Bound:
    """Return the bound of a world: true step times without noise, expectations by regression on the predictions.

    Raises:
        SimulationError: the solver gives up, or the requests arrive all at once.
    """
    known, truth = world.known, world.truth
    span_s = (known.arrival_ps[-1] - known.arrival_ps[0]) / PS_PER_S
    if not span_s > 0:
        raise SimulationError("fluid bound: all requests arrive at one instant; there is no time to share")
    price_in = np.array([spec.price_in for spec in world.instances])
    price_out = np.array([spec.price_out for spec in world.instances])
    group = known.group_of_instance
    cost = known.prompt_tokens[:, group] * price_in + truth.output_tokens[:, group] * price_out
    features = np.concatenate([known.predicted_quality, np.log(known.predicted_output_tokens)], axis=1)
    utility = _expected(truth.quality[:, group] - world.cost_weight * cost, features, world.task)
    work = np.maximum(_expected(work_s(world), features, world.task), _prefill_s(world))
    targets = np.where(known.slo_ttft_ps < 0, np.inf, known.slo_ttft_ps / PS_PER_S)
    allowed = idle_ttft_s(world) <= targets[:, None] * (1 + _SLACK)
    return fluid_optimum(utility, work, np.full(len(world.instances), span_s), allowed)


def _expected(values: FloatArray, features: FloatArray, task: npt.NDArray[np.object_] | None) -> FloatArray:
    """Return the least-squares prediction of values (n, j) from features (n, f), per task."""
    labels = np.zeros(len(values)) if task is None else np.unique(task, return_inverse=True)[1]
    expected = np.empty(values.shape)
    for label in np.unique(labels):
        rows = labels == label
        design = np.column_stack([np.ones(int(rows.sum())), features[rows]])
        expected[rows] = design @ np.linalg.lstsq(design, values[rows], rcond=None)[0]
    return expected


# ---- what a request takes ----------------------------------------------------------------------------------------


def _coefficients(world: World, name: str) -> FloatArray:
    return np.array([getattr(model.step_time, name) / PS_PER_S for model in world.true_models])


def _base_s(world: World) -> FloatArray:
    """Return the fixed time of a step, (j,): the asynchronous loop hides the host's behind the device's."""
    return _coefficients(world, "b0") + np.where(_is_async(world), 0.0, _coefficients(world, "host"))


def _is_async(world: World) -> npt.NDArray[np.bool_]:
    return np.array([spec.engine.async_scheduling for spec in world.instances])


def _prefill_s(world: World) -> FloatArray:
    """Return the time that each prompt adds to the steps of an instance [s], (n, j)."""
    prompt = world.known.prompt_tokens[:, world.known.group_of_instance].astype(np.float64)
    budget = np.array([spec.engine.max_num_batched_tokens for spec in world.instances], dtype=np.float64)
    hinge = np.array([model.step_time.hinge_tokens for model in world.true_models], dtype=np.float64)
    chunks = np.ceil(prompt / budget)
    last = prompt - (chunks - 1) * budget
    above = (chunks - 1) * np.maximum(budget - hinge, 0) + np.maximum(last - hinge, 0)
    time: FloatArray = (
        _coefficients(world, "b1") * prompt
        + _coefficients(world, "b1x") * above
        + _coefficients(world, "b3") * prompt * (prompt + 1) / 2
        + _coefficients(world, "b5") * chunks
    )
    return time


def work_s(world: World) -> FloatArray:
    """Return the least time that each request takes from an instance [s], (n, j), by its true answer length.

    The first token comes with the prefill; token k of the rest is decoded with k + p - 1 tokens of context.
    """
    group = world.known.group_of_instance
    prompt = world.known.prompt_tokens[:, group].astype(np.float64)
    decodes = np.maximum(world.truth.output_tokens[:, group] - 1, 0).astype(np.float64)
    context = decodes * prompt + decodes * (decodes + 1) / 2
    engines = [spec.engine for spec in world.instances]
    capacity = np.array([(each.num_gpu_blocks - 1) * each.block_size for each in engines], dtype=np.float64)
    seats = np.array([each.max_num_seqs for each in engines], dtype=np.float64)
    shared = _base_s(world) * np.maximum(context / capacity, decodes / seats)
    decode = _coefficients(world, "b1") * decodes + _coefficients(world, "b2") * context
    return _prefill_s(world) + decode + shared


def idle_ttft_s(world: World) -> FloatArray:
    """Return the TTFT of each request on an instance that has nothing else to do [s], (n, j), without noise.

    A prompt beyond the context limit or the KV cache is inf.
    """
    prompt = world.known.prompt_tokens[:, world.known.group_of_instance]
    engines = [spec.engine for spec in world.instances]
    budget = np.array([each.max_num_batched_tokens for each in engines])
    chunks = -(-prompt // budget)
    fits = np.array([min(each.max_model_len - 1, (each.num_gpu_blocks - 1) * each.block_size) for each in engines])
    way = np.array([each.front_end.request_s + each.front_end.output_s for each in world.instances])
    per_token = np.array([each.front_end.per_prompt_token_s for each in world.instances])
    least = chunks * np.where(_is_async(world), _coefficients(world, "host"), 0.0)  # no step is shorter than the host's
    time = np.maximum(_prefill_s(world) + chunks * _base_s(world), least) + way + per_token * prompt
    return np.where(prompt <= fits, time, np.inf)
