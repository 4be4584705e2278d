"""Tables of estimator scores for the terminal."""

from typing import Any

from rich.table import Table

from simcluster.report.tables import number, policy_table

__all__ = ["estimator_table"]


def estimator_table(policies: dict[str, dict[str, Any]]) -> Table | None:
    """Return one row per policy and estimator, the policy's own first; None where nothing was estimated.

    "Wrongly on time": expected to meet the target, and late. Loads and lengths go from low to high.
    """
    if not any(summary.get("estimators") for summary in policies.values()):
        return None
    table = policy_table("TTFT, predicted against observed at the instance chosen")
    table.add_column("estimator", no_wrap=True)
    for heading in (
        "n",
        "un-\nbounded",
        "bias\n%",
        "MAPE\n%",
        "median\nAPE %",
        "rank\ntau",
        "wrongly\non time %",
        "MAPE % by\nload",
        "by prompt\nlength",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, summary in policies.items():
        for name, scores in (summary.get("estimators") or {}).items():
            table.add_row(
                policy,
                "its own" if name == policy else name,
                f"{scores['count']:,}",
                f"{scores['unbounded']:,}",
                number(scores["bias"], 1, 100),
                number(scores["mape"], 1, 100),
                number(scores["median_ape"], 1, 100),
                number(scores["kendall_tau"], 3),
                number(scores["false_on_time"], 1, 100),
                *("/".join(number(part["mape"], 0, 100) for part in scores[by]) for by in _PARTS),
            )
    return table


_PARTS = ("by_resident", "by_prompt_tokens")
