"""Verdicts in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simcluster.report.paired import Difference

__all__ = ["Finding", "Outcome", "verdict", "winner_text"]

Outcome = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about a policy and its reference.

    Attributes:
        policy: the policy.
        reference: what it is compared with.
        outcome: what is shown.
        difference: policy minus reference.
        relative: the difference as a share of the reference, or None.
        pairs_needed: pairs below which the test cannot be significant; 0 for one trace.
    """

    policy: str
    reference: str
    outcome: Outcome
    difference: Difference
    relative: float | None
    pairs_needed: int


def _decimals(finding: Finding) -> int:
    """Return how many decimals show two digits of the interval's half width."""
    interval = finding.difference.interval
    width = abs(finding.difference.value) if interval is None else (interval.high - interval.low) / 2
    return 4 if width <= 0 else min(max(1 - math.floor(math.log10(width)), 0), 9)


def verdict(finding: Finding) -> str:
    """Say in one sentence which policy is better by how much, or that no difference is shown.

    Args:
        finding: what was found.
    """
    each = finding.difference
    digits = _decimals(finding)
    sign = math.copysign(1.0, each.value) if finding.outcome != "no difference shown" else 1.0
    shown_sign = "+" if finding.outcome == "no difference shown" else ""
    by = f"{sign * each.value:{shown_sign},.{digits}f}"
    share = "" if finding.relative is None else f" ({100 * finding.relative:+.3g} %)"
    if each.interval is None:
        interval = "no interval from one pair"
    else:
        ends = sorted(sign * end for end in each.interval)
        interval = f"95 % interval {ends[0]:,.{digits}f} to {ends[1]:,.{digits}f}"
    if finding.outcome == "no difference shown":
        text = f"no difference shown between {finding.policy} and {finding.reference}: {by}{share}, {interval}"
        if 0 < each.pairs < finding.pairs_needed:
            text += f"; {each.pairs} seeds can never show one here, at least {finding.pairs_needed} are needed"
        return text
    return f"{finding.policy} {finding.outcome} than {finding.reference} by {by}{share}, {interval}"


def winner_text(best: str, tied: Sequence[str]) -> str:
    """Say who wins, or who shares the first place."""
    if not tied:
        return f"winner: {best}"
    return f"best on average: {best}; not shown to be worse: {', '.join(tied)}"
