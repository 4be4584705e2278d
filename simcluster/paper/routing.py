"""Figures 5, 6, 7, 12, 13 and 14: what the policies are worth."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from simcluster.paper.figure import Claim, Figure, FloatArray, Plot, gain, mean_of, spread
from simcluster.paper.lab import Lab, Runs
from simcluster.report.statistics import Interval, area_under

__all__ = [
    "BASELINES",
    "RATES_RPS",
    "at_equal_ttft",
    "best_baseline",
    "figure_5",
    "figure_6",
    "figure_7",
    "figure_12",
    "figure_13",
    "figure_14",
    "headline",
    "smallest_lead",
]

RATES_RPS = (1.0, 3.0, 5.0, 8.0, 10.0, 12.0)
BASELINES = ("round_robin", "shortest_queue", "latency_agnostic")
FURTHER = (
    "throughput",
    "lps",
    "sfs:margin=0.9",
    "sfs_plus",
    "oracle",
)  # not policies of its figures
_DELTAS = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_FEW_DELTAS = (0.0, 0.7, 1.0, 1.5, 3.0, 10.0)
_LAMBDAS = (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3)
_RATIOS, _MMPP_RATES = (3.0, 6.0), (6.0, 7.0, 8.0)

Group = Mapping[str, Runs]


def best_baseline(groups: Sequence[Group], rates: Sequence[float]) -> tuple[str, dict[str, FloatArray]]:
    """Return the baseline with the largest area under OnTimeUtility over the rates, and each policy's areas by seed."""
    policies = list(groups[0])
    areas = {
        policy: area_under(rates, np.stack([group[policy].of("on_time_utility") for group in groups]))
        for policy in policies
    }
    best = max((policy for policy in BASELINES if policy in areas), key=lambda policy: float(areas[policy].mean()))
    return best, areas


def gain_over_best(group: Group, policy: str = "sfs") -> tuple[str, float, Interval | None]:
    """Return the best baseline under one setting and by how many percent a policy's OnTimeUtility is above it."""
    values = {name: runs.of("on_time_utility") for name, runs in group.items()}
    best = max(BASELINES, key=lambda name: float(values[name].mean()))
    return best, *gain(values[policy], values[best])


def smallest_lead(groups: Mapping[Any, Group], metric: str, rivals: Sequence[str] = BASELINES) -> tuple[str, Claim]:
    """Return where SFS is least above any rival, and by how much, as a claim; below 0 it is not above."""
    leads = {
        (where, rival): group["sfs"].of(metric) - group[rival].of(metric)
        for where, group in groups.items()
        for rival in rivals
    }
    where, rival = min(leads, key=lambda key: float(leads[key].mean()))
    mean, interval = mean_of(leads[where, rival])
    text = f"smallest lead of SFS over {', '.join(rivals)} (at {where}, over {rival})"
    return str(where), Claim(text, "above 0", mean, interval, "", is_main=rivals == BASELINES)


def headline(groups: Sequence[Group], rates: Sequence[float]) -> list[Claim]:
    """Return the paper's claims about figure 5: the gain in area, and at 5 and 8 requests/s."""
    best, areas = best_baseline(groups, rates)
    claims = [
        Claim(
            f"area under OnTimeUtility, SFS over {best}", "+33 %", *gain(areas["sfs"], areas[best]), "%", is_main=True
        )
    ]
    for rate, paper in ((5.0, "+46 %"), (8.0, None)):
        if rate in rates:
            rival, percent, interval = gain_over_best(groups[list(rates).index(rate)])
            text = f"OnTimeUtility at {rate:g} requests/s, SFS over {rival}"
            claims.append(Claim(text, paper, percent, interval, "%", is_main=paper is not None))
    return claims


def _rates(lab: Lab) -> list[dict[str, Runs]]:
    policies = (*BASELINES, "sfs", *FURTHER)
    return lab.compare("paper", policies, [{"workload.rate_rps": rate} for rate in RATES_RPS])


def _table(groups: Mapping[Any, Group], column: str) -> pl.DataFrame:
    """Return one row per setting and policy."""
    rows = [
        {
            column: where,
            "policy": policy,
            **spread("on_time_utility", runs.of("on_time_utility")),
            **spread("slo_attainment", runs.of("slo_attainment")),
            **spread("mean_utility", runs.of("mean_utility")),
            "ttft_mean_s": float(runs.of("ttft_s", "mean").mean()),
            "ttft_p99_s": float(runs.of("ttft_s", "p99").mean()),
            "share_negative_utility": float(runs.of("share_negative_utility").mean()),
            "cost_micro_usd": float(runs.of("cost", "token_cost_micro_usd_mean").mean()),
        }
        for where, group in groups.items()
        for policy, runs in group.items()
    ]
    return pl.DataFrame(rows)


def figure_5(lab: Lab) -> Figure:
    """Return OnTimeUtility over the arrival rate."""
    groups = _rates(lab)
    by_rate = dict(zip(RATES_RPS, groups, strict=True))
    _, areas = best_baseline(groups, RATES_RPS)
    others = [
        Claim(
            f"area under OnTimeUtility, {policy} over sfs", None, *gain(areas[policy], areas["sfs"]), "%", is_main=True
        )
        for policy in FURTHER
    ]
    lead = smallest_lead({f"{rate:g} requests/s": group for rate, group in by_rate.items()}, "on_time_utility")[1]
    return Figure(
        key="5",
        title="OnTimeUtility over the arrival rate",
        table=_table(by_rate, "rate_rps"),
        claims=[*headline(groups, RATES_RPS), lead, *others],
        moved_by=(
            "Prices times lambda and the length of answers: there is a gain where the model that looks best when "
            "latency is ignored saturates inside these rates. At international prices and the paper's lambda of 5e-4 "
            "long answers of large models cost more than they are worth, everybody takes small models, and the gain "
            "is gone (figure assumptions)."
        ),
        moved_by_short="prices times lambda, answer lengths, target slope",
        plot=Plot("rate_rps", "on_time_utility", "policy"),
        shown=("rate_rps", "policy", "on_time_utility", "ttft_p99_s", "share_negative_utility", "cost_micro_usd"),
    )


def figure_13(lab: Lab) -> Figure:
    """Return SLO attainment over the arrival rate."""
    by_rate = dict(zip(RATES_RPS, _rates(lab), strict=True))
    named = {f"{rate:g} requests/s": group for rate, group in by_rate.items()}
    return Figure(
        key="13",
        title="SLO attainment over the arrival rate",
        table=_table(by_rate, "rate_rps"),
        claims=[
            smallest_lead(named, "slo_attainment")[1],
            smallest_lead(named, "slo_attainment", ("throughput", "lps"))[1],
        ],
        moved_by=(
            "The margin of the estimate: eq. 3 fills every instance up to the deadline, so an estimate that is "
            "unbiased or low misses some targets. Eq. 6 estimates too much for long prompts, which are near their "
            "targets, and too little for short ones, which are not: it errs on the safe side and attains more."
        ),
        moved_by_short="the margin of the estimate",
        plot=Plot("rate_rps", "slo_attainment", "policy"),
        shown=("rate_rps", "policy", "slo_attainment"),
    )


def figure_14(lab: Lab) -> Figure:
    """Return the share of each instance by task at 8 requests/s."""
    group = dict(zip(RATES_RPS, _rates(lab), strict=True))[8.0]
    shown = ("round_robin", "shortest_queue", "latency_agnostic", "sfs")
    tasks = sorted(group["sfs"].summaries[0]["composition"])
    names = sorted({name for runs in group.values() for each in runs.summaries for name in each["composition"]["all"]})
    rows, largest = [], {}
    for policy in shown:
        shares = {
            (task, name): np.array([each["composition"][task].get(name, 0.0) for each in group[policy].summaries])
            for task in tasks
            for name in names
        }
        rows += [
            {"policy": policy, "task": task, "instance": name, **spread("share", values)}
            for (task, name), values in shares.items()
        ]
        stacked = np.stack([[shares[task, name] for task in tasks if task != "all"] for name in names])
        largest[policy] = mean_of((stacked.max(axis=1) - stacked.min(axis=1)).max(axis=0))
    text = "largest difference between two tasks in an instance's share, {}"
    return Figure(
        key="14",
        title="Routing composition by task at 8 requests/s",
        table=pl.DataFrame(rows),
        claims=[
            Claim(text.format("sfs"), "depends on the task", *largest["sfs"], "", is_main=True),
            Claim(text.format("shortest_queue"), "none", *largest["shortest_queue"], "", is_main=True),
        ],
        moved_by=(
            "The slope of the TTFT targets (B.2, 3.5e-3 ms per token as printed): an idle 32B cannot meet the target "
            "of a long prompt, so no report goes there."
        ),
        moved_by_short="target slope: no long prompt fits the 32B",
        plot=Plot("instance", "share", "policy", panel="task", kind="bars"),
    )


def figure_6(lab: Lab) -> Figure:
    """Return utility against TTFT over delta at 8 requests/s."""
    deltas = _DELTAS if lab.sizes.dense else _FEW_DELTAS
    weighted = [
        {"workload.rate_rps": 8.0, "routing.objective": "weighted", "routing.latency_weight": delta} for delta in deltas
    ]
    found = lab.compare("paper", ["sfs"], weighted)
    fixed = lab.compare("paper", BASELINES, [{"workload.rate_rps": 8.0}])[0]
    runs: dict[tuple[str, float | None], Runs] = {
        ("sfs", delta): group["sfs"] for delta, group in zip(deltas, found, strict=True)
    }
    runs |= {(policy, None): each for policy, each in fixed.items()}
    rows = [
        {
            "policy": policy,
            "delta": delta,
            **spread("ttft_mean_s", each.of("ttft_s", "mean")),
            **spread("mean_utility", each.of("mean_utility")),
            **spread("on_time_utility", each.of("on_time_utility")),
        }
        for (policy, delta), each in runs.items()
    ]
    frontier_s = np.stack([group["sfs"].of("ttft_s", "mean") for group in found])
    frontier_u = np.stack([group["sfs"].of("mean_utility") for group in found])
    queue_s, queue_u = fixed["shortest_queue"].of("ttft_s", "mean"), fixed["shortest_queue"].of("mean_utility")
    reached = np.array([at_equal_ttft(frontier_s[:, k], frontier_u[:, k], queue_s[k]) for k in range(len(queue_s))])
    return Figure(
        key="6",
        title="Mean utility against mean TTFT over delta (eq. 5) at 8 requests/s",
        table=pl.DataFrame(rows, infer_schema_length=None),
        claims=[
            Claim(
                "utility at shortest_queue's mean TTFT, SFS over it",
                "+40 %",
                *gain(reached, queue_u),
                "%",
                is_main=True,
            )
        ],
        moved_by=(
            "Prices times lambda, which set what shortest_queue's leaning to small models costs; and the load: the "
            "frontier is steep where the large models saturate, and small deltas lose utility and time at once."
        ),
        moved_by_short="prices times lambda",
        plot=Plot("ttft_mean_s", "mean_utility", "policy", log="x"),
        shown=("policy", "delta", "ttft_mean_s", "mean_utility", "on_time_utility"),
    )


def at_equal_ttft(ttft_s: FloatArray, utility: FloatArray, target_s: float) -> float:
    """Return the best utility of a frontier at a TTFT, interpolated; its fastest point if all are slower."""
    order = np.argsort(ttft_s, kind="stable")
    return float(np.interp(target_s, ttft_s[order], np.maximum.accumulate(utility[order])))


def figure_7(lab: Lab) -> Figure:
    """Return OnTimeUtility under bursty arrivals."""
    settings = {
        (ratio, rate): {"workload.rate_rps": rate, "workload.burst_ratio": ratio}
        for ratio in _RATIOS
        for rate in _MMPP_RATES
    }
    groups = lab.compare("paper-mmpp", (*BASELINES, "sfs", *FURTHER), list(settings.values()))
    tables, named = [], {}
    for (ratio, rate), group in zip(settings, groups, strict=True):
        tables.append(_table({rate: group}, "rate_rps").insert_column(0, pl.lit(ratio).alias("burst_ratio")))
        named[f"ratio {ratio:g}, {rate:g} requests/s"] = group
    return Figure(
        key="7",
        title="OnTimeUtility under MMPP-2 arrivals",
        table=pl.concat(tables),
        claims=[
            smallest_lead(named, "on_time_utility")[1],
            *(
                Claim(f"OnTimeUtility, SFS over {rival}, {where}", None, percent, interval, "%")
                for where, group in named.items()
                for rival, percent, interval in [gain_over_best(group)]
                if where.endswith("8 requests/s")
            ),
        ],
        moved_by="As figure 5; bursts of a ratio of 6 cost every policy more than they change the order.",
        moved_by_short="as figure 5",
        plot=Plot("rate_rps", "on_time_utility", "policy", panel="burst_ratio"),
        shown=("burst_ratio", "rate_rps", "policy", "on_time_utility", "slo_attainment"),
    )


def figure_12(lab: Lab) -> Figure:
    """Return OnTimeUtility over lambda at 5 requests/s."""
    settings = [{"workload.rate_rps": 5.0, "routing.cost_weight": value} for value in _LAMBDAS]
    groups = lab.compare("paper", ["latency_agnostic", "sfs"], settings)
    by_lambda = dict(zip(_LAMBDAS, groups, strict=True))
    leads = {
        value: mean_of(group["sfs"].of("on_time_utility") - group["latency_agnostic"].of("on_time_utility"))
        for value, group in by_lambda.items()
    }
    above = [value for value, (mean, ends) in leads.items() if mean > 0 and (ends is None or ends.low > 0)]
    claims = [
        Claim(
            f"lead of SFS over latency_agnostic at 5 requests/s, lambda {value:g}",
            "above 0",
            *leads[value],
            "",
            is_main=True,
        )
        for value in _LAMBDAS
    ]
    return Figure(
        key="12",
        title="OnTimeUtility over lambda at 5 requests/s",
        table=_table(by_lambda, "cost_weight"),
        claims=[
            *claims,
            Claim("lambdas at which SFS is above, of those shown", "all", 100 * len(above) / len(leads), None, "%"),
        ],
        moved_by=(
            "Prices: at international prices lambda 5e-4 and more make the fastest model the most useful one too, and "
            "the two policies choose the same."
        ),
        moved_by_short="prices",
        plot=Plot("cost_weight", "on_time_utility", "policy", log="x"),
        shown=("cost_weight", "policy", "on_time_utility", "share_negative_utility"),
    )
