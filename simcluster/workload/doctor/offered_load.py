"""Offered load: how busy a cluster would be with a trace, before any run.

For one group of equal instances and the trace's arrival rate `rate`, if the group got all requests:

    utilisation = rate * work / replicas
    work  = steps * overhead + b1 * tokens + b1x * above + b2 * context + b3 * attention
            + b4 * context * mixed + b5 * chunks
    steps = max(decodes / seats, tokens / budget)
    seats = min(max_num_seqs, KV tokens / mean tokens that a resident request holds)
    mixed = min(chunks / steps, 1), the share of steps with a prefill
    above = steps * (mixed * max(d + p / (mixed * steps) - hinge, 0) + (1 - mixed) * max(d - hinge, 0)),
            d = decodes / steps, the tokens beyond the hinge

with means per request: prompt p, answer o, `tokens` = p + o - 1, `decodes` = o - 1, `context` = the sum of the decodes'
contexts, `attention` = p*(p+1)/2, `chunks` = ceil(p / budget). `overhead` is b0, plus the host time in the synchronous
loop; in the asynchronous loop a step takes at least the host time. It is the work of a full batch: what b0 costs a
request depends on how many share a step, so a lightly loaded instance looks busier than this, and one above 1 cannot
keep up. Prefix hits are left out.

With requests spread so that all groups are equally busy, the cluster's utilisation is 1 / sum(1 / utilisation).

Source: eq. 9 of the paper, summed over the steps of a request.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simcluster.card import StepTimeFit, load_card
from simcluster.engine_options import resolve_engine_options
from simcluster.errors import ConfigError
from simcluster.scenario import Scenario
from simcluster.shipped import find_file
from simcluster.workload.trace import Trace
from simcluster.workload.trace_columns import IntArray

__all__ = ["Group", "cluster_groups", "offered_load", "work_per_request_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal instances of a cluster.

    Attributes:
        name: the scenario's name for them, or the card's.
        model: the served model.
        replicas: how many there are.
        fit: their step-time model [s].
        scale: factor on its coefficients, the host time excepted.
        host_s: host time per step [s].
        is_async: whether the host works while the device does.
        budget: tokens per step.
        max_seqs: requests that run at once.
        kv_tokens: tokens that the KV cache holds.
        max_model_len: context limit [tokens].
    """

    name: str
    model: str
    replicas: int
    fit: StepTimeFit
    scale: float
    host_s: float
    is_async: bool
    budget: int
    max_seqs: int
    kv_tokens: int
    max_model_len: int


def cluster_groups(scenario: Scenario, path: Path) -> list[Group]:
    """Return the instances of a scenario with their true step times.

    Args:
        scenario: the scenario.
        path: where it was read; cards are looked up beside it.

    Raises:
        ConfigError: an instance or option is wrong.
        CardError: a card cannot be read.
    """
    groups = []
    for number, item in enumerate(scenario.cluster.instances):
        where = f"{path}: cluster.instances[{number}]"
        card = load_card(find_file(item.card, "calibration", ".json", path.parent))
        engine, _ = resolve_engine_options(item.engine, card, f"{where}.engine")
        form = item.true_model.fit or card.chosen_fit
        if form not in card.fits:
            raise ConfigError(f"{where}.true_model.fit = {form!r}; the card {card.name} has {', '.join(card.fits)}")
        groups.append(
            Group(
                name=item.name or card.name,
                model=card.model,
                replicas=item.replicas,
                fit=card.fits[form],
                scale=item.true_model.scale,
                host_s=card.host_time_s,
                is_async=engine.async_scheduling,
                budget=engine.max_num_batched_tokens,
                max_seqs=engine.max_num_active_seqs or engine.max_num_seqs,
                kv_tokens=(engine.num_gpu_blocks - 1) * engine.block_size,
                max_model_len=engine.max_model_len,
            )
        )
    return groups


def work_per_request_s(group: Group, prompts: IntArray, answers: IntArray) -> float:
    """Return the mean work of these requests on a full instance [s]; the module says by which formula.

    Args:
        group: the instance.
        prompts: prompt lengths [tokens], shape (n,).
        answers: answer lengths [tokens], 1 or more, shape (n,).
    """
    p, o = prompts.astype(np.float64), answers.astype(np.float64)
    decodes, tokens = float((o - 1).mean()), float((p + o - 1).mean())
    held = float(((p + o / 2) * o).sum() / o.sum())  # a request holds its blocks for about o steps
    seats = max(min(float(group.max_seqs), group.kv_tokens / held), 1.0)
    steps = max(decodes / seats, tokens / group.budget)
    context = float(((o - 1) * p + (o - 1) * o / 2).mean())
    chunks = float(np.ceil(p / group.budget).mean())
    mixed = min(chunks / steps, 1.0)
    fit = group.fit
    device_s = group.scale * (
        steps * fit.b0_s
        + fit.b1_s * tokens
        + fit.b1x_s * _above_hinge(fit.hinge_tokens, steps, mixed, decodes, float(p.mean()))
        + fit.b2_s * context
        + fit.b3_s * float((p * (p + 1) / 2).mean())
        + fit.b4_s * context * mixed
        + fit.b5_s * chunks
    )
    host_s = steps * group.host_s
    return max(device_s, host_s) if group.is_async else device_s + host_s


def _above_hinge(hinge: int, steps: float, mixed: float, decodes: float, prompt: float) -> float:
    """Return a request's tokens beyond the hinge, over its share of steps with and without a prefill."""
    alone = decodes / steps
    beside = alone + prompt / (mixed * steps)
    return steps * (mixed * max(beside - hinge, 0.0) + (1 - mixed) * max(alone - hinge, 0.0))


def offered_load(trace: Trace, groups: list[Group]) -> dict[str, Any]:
    """Return tokens per second that a trace asks for, and how busy each group and the cluster would be.

    Args:
        trace: the requests; those whose prompt fills a group's context are left out there, longer answers are cut.
        groups: the cluster.

    Returns:
        `prompt_tokens_per_s` and `output_tokens_per_s`; per group its `capacity_rps` and its `utilisation` if it got
        every request; the cluster's `utilisation` with the load spread evenly. Rates are None where requests wait
        for earlier ones or all arrive at once: then the load depends on the cluster.
    """
    span_s = int(trace.arrival_ns[-1] - trace.arrival_ns[0]) / 1e9
    rate = (len(trace) - 1) / span_s if span_s > 0 and trace.after is None else None
    found = [_group_load(trace, group, rate) for group in groups]
    inverse = [1 / entry["utilisation"] for entry in found if entry["utilisation"]]
    return {
        "rate_rps": rate,
        "prompt_tokens_per_s": None if rate is None else rate * float(trace.prompt_tokens.mean()),
        "output_tokens_per_s": None if rate is None else rate * float(trace.output_tokens.mean()),
        "groups": found,
        "utilisation": 1 / sum(inverse) if inverse else None,
    }


def _group_load(trace: Trace, group: Group, rate: float | None) -> dict[str, Any]:
    prompts = trace.prompt_tokens_by_model.get(group.model, trace.prompt_tokens)
    answers = trace.output_tokens_by_model.get(group.model, trace.output_tokens)
    fits = prompts < group.max_model_len
    entry: dict[str, Any] = {
        "name": group.name,
        "model": group.model,
        "replicas": group.replicas,
        "too_long": int((~fits).sum()),
        "capacity_rps": None,
        "utilisation": None,
    }
    if fits.any():
        cut = np.minimum(answers, group.max_model_len - prompts)[fits]
        work_s = work_per_request_s(group, prompts[fits], cut)
        entry["work_s"] = work_s
        entry["capacity_rps"] = group.replicas / work_s
        entry["utilisation"] = None if rate is None else rate * float(fits.mean()) * work_s / group.replicas
    return entry
