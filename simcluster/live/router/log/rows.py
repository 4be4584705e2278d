"""Rows of the table of decisions, which people read."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from simcluster.instance import InstanceSpec
from simcluster.live.router.dispatcher import LiveDecision
from simcluster.live.router.outcome import Outcome
from simcluster.live.router.sight import TIERS
from simcluster.request import FloatArray
from simcluster.routers.base import SHED
from simcluster.units import PS_PER_NS, PS_PER_S

__all__ = ["Noted", "decision_row"]

_RETRIED = "retried"


@dataclass(slots=True)
class Noted:
    """A decision whose request has not ended.

    Attributes:
        made: the decision.
        attempt: number of the decision for its request, from 1.
        wall_ns: when it was made [ns since 1970].
        route_s: how long it took [s].
    """

    made: LiveDecision
    attempt: int
    wall_ns: int
    route_s: float = float("nan")


def decision_row(
    noted: Noted, outcome: Outcome | None, policy: str, instances: tuple[InstanceSpec, ...], estimators: tuple[str, ...]
) -> dict[str, Any]:
    """Return a decision as a row.

    Args:
        noted: the decision.
        outcome: how its request ended, or None.
        policy: who decided.
        instances: (j,).
        estimators: names of those beside the policy.
    """
    made, j = noted.made, noted.made.instance
    request, decision = made.request, made.decision
    row: dict[str, Any] = {
        "decision": made.number,
        "attempt": noted.attempt,
        "decided_wall_ns": noted.wall_ns,
        "decided_ns": made.decided_ps // PS_PER_NS,
        "policy": policy,
        "slo_ttft_s": request.slo_ttft_ps / PS_PER_S if request.slo_ttft_ps >= 0 else None,
        "reason": decision.reason,
        "num_tied": int(decision.num_tied),
        "fallback": made.fallback or None,
        "t_route_us": _finite(1e6 * noted.route_s),
    }
    if j != SHED:
        row |= {
            "instance": instances[j].name,
            "model": instances[j].model,
            "prompt_tokens": int(request.prompt_tokens[j]),
            "predicted_output_tokens": int(request.predicted_output_tokens[j]),
            "predicted_utility": _finite(request.predicted_utility[j]),
            "predicted_ttft_s": _finite(made.predicted_ttft_s),
            "source": made.source or None,
            "tier": TIERS[made.tier] if made.source else None,
            "snapshot_age_s": made.age_ps / PS_PER_S if made.age_ps >= 0 else None,
            "estimates_s": [(name, _finite(value)) for name, value in zip(estimators, made.beside, strict=True)],
        }
        if decision.score is not None:
            row |= _comparison(decision.score, j, instances)
    if outcome is not None:
        row |= _end(made, outcome)
    return row


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


def _comparison(score: FloatArray, chosen: int, instances: tuple[InstanceSpec, ...]) -> dict[str, Any]:
    own = float(score[chosen])
    others = np.array(score, dtype=np.float64)
    others[chosen] = -np.inf
    second = int(others.argmax())
    if not np.isfinite(others[second]):
        return {"score": _finite(own)}
    return {"score": _finite(own), "runner_up": instances[second].name, "margin": _finite(own - float(others[second]))}


def _end(made: LiveDecision, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"request_id": outcome.request_id, "attempts": outcome.attempts}
    if outcome.made is not made:
        return row | {"status": _RETRIED}
    first = outcome.first_token_ps
    return row | {
        "status": outcome.status,
        "status_reason": outcome.reason or None,
        "observed_ttft_s": (first - outcome.arrival_ps) / PS_PER_S if first >= 0 else None,
        "e2e_s": (outcome.end_ps - outcome.arrival_ps) / PS_PER_S,
        "output_tokens": outcome.output_tokens,
        "server_counted": outcome.server_counted,
    }
