"""Which policy is better, by how much, and is it sure: from the metrics of paired runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcluster.report.paired import Difference, Values
from simcluster.report.statistics import LEVEL, holm, pairs_needed
from simcluster.report.verdicts import Finding, Outcome, verdict, winner_text

__all__ = ["BEST", "METRICS", "Metric", "area_comparison", "load_comparison", "metric_value"]

BEST = "best"  # in place of a reference
MetricValues = Mapping[str, Values | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that policies are compared by.

    Attributes:
        name: key in results.
        path: where a run's summary has it.
        label: for people.
        higher_is_better: its good direction.
    """

    name: str
    path: tuple[str, ...]
    label: str
    higher_is_better: bool


METRICS = {
    metric.name: metric
    for metric in (
        Metric("on_time_utility", ("on_time_utility",), "on-time utility", True),
        Metric("slo_attainment", ("slo_attainment",), "SLO attainment", True),
        Metric("ttft_p50_s", ("ttft_s", "p50"), "median TTFT [s]", False),
        Metric("ttft_p99_s", ("ttft_s", "p99"), "p99 TTFT [s]", False),
        Metric("share_negative_utility", ("share_negative_utility",), "share with U < 0", False),
        Metric("cost_micro_usd", ("cost", "token_cost_micro_usd_mean"), "token cost [micro-USD/request]", False),
    )
}


def metric_value(summary: Mapping[str, Any], metric: Metric) -> float | None:
    """Return a metric of a run's summary; None where it has none."""
    value: Any = summary
    for key in metric.path:
        value = value[key]
    return None if value is None else float(value)


def _difference(values: MetricValues, reference: MetricValues, name: str) -> Difference | None:
    mine, other = values.get(name), reference.get(name)
    return None if mine is None or other is None else mine.minus(other)


def _compared(
    policies: Mapping[str, MetricValues], reference: str, names: Sequence[str]
) -> dict[str, dict[str, tuple[Difference, float | None]]]:
    """Subtract the reference from every other policy, by metric, with p adjusted over the policies."""
    found: dict[str, dict[str, tuple[Difference, float | None]]] = {p: {} for p in policies if p != reference}
    for name in names:
        pairs = {p: _difference(policies[p], policies[reference], name) for p in found}
        known = {p: each for p, each in pairs.items() if each is not None and each.p is not None}
        adjusted = dict(zip(known, holm([each.p for each in known.values() if each.p is not None]), strict=True))
        for policy, each in pairs.items():
            if each is not None:
                found[policy][name] = each, adjusted.get(policy)
    return found


def _outcome(each: Difference, p_holm: float | None, metric: Metric) -> Outcome:
    """Decide: a difference is shown where the interval leaves out 0 and the adjusted test agrees."""
    if each.interval is None or p_holm is None or p_holm > 1 - LEVEL or each.interval.low <= 0 <= each.interval.high:
        return "no difference shown"
    return "better" if (each.value > 0) == metric.higher_is_better else "worse"


def _as_dict(each: Difference, p_holm: float | None, reference_mean: float) -> dict[str, Any]:
    return {
        "difference": each.value,
        "relative": each.value / reference_mean if reference_mean > 0 else None,
        "interval": None if each.interval is None else list(each.interval),
        "pairs": each.pairs,
        "p": each.p,
        "p_holm": p_holm,
    }


def _pairs(
    policies: Mapping[str, MetricValues], reference: str, metric: Metric, names: Sequence[str], is_one_trace: bool
) -> list[dict[str, Any]]:
    compared = _compared(policies, reference, names)
    result = []
    for policy, found in compared.items():
        metrics = {}
        for name, (each, p_holm) in found.items():
            base = policies[reference][name]
            assert base is not None  # a difference was found
            metrics[name] = _as_dict(each, p_holm, base.mean)
        row: dict[str, Any] = {"policy": policy, "reference": reference, "metrics": metrics}
        if metric.name in found:
            each, p_holm = found[metric.name]
            outcome = _outcome(each, p_holm, metric)
            needed = 0 if is_one_trace else pairs_needed(len(compared))
            finding = Finding(policy, reference, outcome, each, metrics[metric.name]["relative"], needed)
            row |= {"outcome": outcome, "verdict": verdict(finding)}
        else:
            row |= {"outcome": "unknown", "verdict": f"{policy} and {reference} have no {metric.label} to compare"}
        result.append(row)
    return result


def _best(policies: Mapping[str, MetricValues], metric: Metric, needs_truth: Sequence[str]) -> str | None:
    means: dict[str, float] = {}
    for policy, values in policies.items():
        found = values.get(metric.name)
        if policy not in needs_truth and found is not None:
            means[policy] = found.mean
    choose: Callable[..., str] = max if metric.higher_is_better else min
    return choose(means, key=means.__getitem__) if means else None


def _reference(
    policies: Mapping[str, MetricValues], reference: str, metric: Metric, needs_truth: Sequence[str]
) -> str | None:
    """Return whom to compare with: a policy by name, or the best; None where it has no results."""
    if reference == BEST:
        return _best(policies, metric, needs_truth)
    return reference if reference in policies else None


def _winner(
    policies: Mapping[str, MetricValues], metric: Metric, needs_truth: Sequence[str], is_one_trace: bool
) -> dict[str, Any] | None:
    """Return who is best, and who is not shown to be worse."""
    best = _best(policies, metric, needs_truth)
    if best is None:
        return None
    rivals = {p: v for p, v in policies.items() if p == best or p not in needs_truth}
    pairs = _pairs(rivals, best, metric, [metric.name], is_one_trace)
    tied = [pair["policy"] for pair in pairs if pair["outcome"] != "worse"]
    return {"policy": best, "tied": tied, "verdict": winner_text(best, tied), "pairs": pairs}


def load_comparison(
    policies: Mapping[str, MetricValues],
    reference: str,
    metric: Metric,
    needs_truth: Sequence[str] = (),
    *,
    is_one_trace: bool = False,
) -> dict[str, Any]:
    """Compare policies at one load.

    Args:
        policies: metrics of each policy; None where a metric cannot be computed.
        reference: the policy that others are compared with; `best`: the best one here.
        metric: what verdicts and the winner are about.
        needs_truth: policies that cannot be run live; they are compared, but do not win.
        is_one_trace: whether pairs are blocks of one trace, not seeds.

    Returns:
        Plain data: means with intervals, pairs against the reference, the winner, verdicts.
    """
    means: dict[str, Any] = {}
    for policy, values in policies.items():
        means[policy] = {}
        for name in METRICS:
            found = values.get(name)
            interval = None if found is None else found.interval()
            means[policy][name] = {
                "mean": None if found is None else found.mean,
                "interval": None if interval is None else list(interval),
            }
    against = _reference(policies, reference, metric, needs_truth)
    pairs = [] if against is None else _pairs(policies, against, metric, list(METRICS), is_one_trace)
    winner = _winner(policies, metric, needs_truth, is_one_trace)
    verdicts = [*([winner["verdict"]] if winner else []), *(pair["verdict"] for pair in pairs)]
    return {"metrics": means, "pairs": pairs, "winner": winner, "verdicts": verdicts}


def area_comparison(
    loads: Sequence[Mapping[str, MetricValues]],
    rates: Sequence[float],
    reference: str,
    metric: Metric,
    needs_truth: Sequence[str] = (),
    *,
    is_one_trace: bool = False,
) -> dict[str, Any] | None:
    """Compare the areas under the metric over the rate (trapezoid); None below two rates.

    Args:
        loads: metrics of each policy at each rate, by ascending rate.
        rates: (r,) rates [1/s].
        reference: the policy that others are compared with; `best`: the best one here.
        metric: which metric.
        needs_truth: policies that cannot be run live.
        is_one_trace: whether pairs are blocks of one trace, not seeds.
    """
    if len(rates) < 2:
        return None
    areas: dict[str, MetricValues] = {}
    for policy in loads[0]:
        curve = [load.get(policy, {}).get(metric.name) for load in loads]
        known = [values for values in curve if values is not None]
        if len(known) == len(rates):
            areas[policy] = {metric.name: known[0].area_with(known[1:], rates)}
    means = {}
    for policy, by_name in areas.items():
        area = by_name[metric.name]
        assert area is not None  # put in above
        interval = area.interval()
        means[policy] = {"mean": area.mean, "interval": None if interval is None else list(interval)}
    about = Metric(metric.name, metric.path, f"area under {metric.label} over rate", metric.higher_is_better)
    against = _reference(areas, reference, about, needs_truth)
    pairs = [] if against is None else _pairs(areas, against, about, [metric.name], is_one_trace)
    return {"rates_rps": list(rates), "areas": means, "pairs": pairs, "verdicts": [pair["verdict"] for pair in pairs]}
