"""Tables of the log: what the dispatcher was told, as rows that can be told again, and decisions for people."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simcluster import _native
from simcluster.live.router.dispatcher import LiveDecision
from simcluster.live.router.own import OwnRequest
from simcluster.request import IntArray, Request
from simcluster.routers.base import NONE_HEALTHY

__all__ = [
    "DECIDED",
    "DECISIONS",
    "ENDED",
    "EVENTS",
    "FIRST_TOKEN",
    "FORGOTTEN",
    "OPEN",
    "RECONFIGURED",
    "SENT",
    "SHOWN",
    "Event",
    "EventRows",
    "Row",
    "outcome_of",
    "own_request",
]

SHOWN, DECIDED, SENT, FIRST_TOKEN, ENDED, RECONFIGURED, OPEN, FORGOTTEN = (
    *("shown", "decided", "sent", "first_token", "ended", "reconfigured"),
    "open",  # only in keyframes: an own request that was sent before,
    "forgotten",  # and one of these that the view has seen and sees no more
)
_TEXT, _INT, _FLOAT, _BYTES = pa.string(), pa.int64(), pa.float64(), pa.binary()

EVENTS: Final = pa.schema(
    [
        ("seq", _INT),  # the order; rows are stored so that snapshots of one instance are neighbours
        ("kind", _TEXT),
        ("keyframe", pa.bool_()),  # repeats what earlier files tell
        ("at_ps", _INT),
        ("instance", _INT),
        ("request", _INT),
        ("source", _TEXT),
        ("snapshot", _BYTES),  # Snapshot.to_bytes()
        ("options", _TEXT),  # JSON
        # of a decision: what it was made from; arrays as their bytes, one value per group of instances or per instance
        ("allowed", _BYTES),
        ("none_healthy", pa.bool_()),
        ("tiers", _BYTES),
        ("ages_ps", _BYTES),
        ("arrival_ps", _INT),
        ("max_tokens", _INT),
        ("priority", _INT),
        ("slo_ttft_ps", _INT),
        ("prompt_tokens", _BYTES),
        ("predicted_output_tokens", _BYTES),
        ("predicted_utility", _BYTES),
        ("predicted_quality", _BYTES),
        ("session_id", _TEXT),
        ("prefix_hashes", _BYTES),
        ("prefix_block_size", _INT),
        # and what came out, bit for bit
        ("predicted_ttft_s", _BYTES),
        ("score", _BYTES),
        ("reason", _TEXT),
        ("num_tied", _INT),
        ("fallback", _TEXT),
        ("beside", _BYTES),
    ]
)
DECISIONS: Final = pa.schema(
    [
        ("decision", _INT),  # number, from 0; rows come in the order in which requests end
        ("request_id", _TEXT),
        ("attempt", _INT),
        ("decided_wall_ns", _INT),
        ("decided_ns", _INT),
        ("policy", _TEXT),
        ("instance", _TEXT),
        ("model", _TEXT),
        ("prompt_tokens", _INT),
        ("predicted_output_tokens", _INT),
        ("predicted_utility", _FLOAT),
        ("slo_ttft_s", _FLOAT),
        ("reason", _TEXT),
        ("predicted_ttft_s", _FLOAT),
        ("score", _FLOAT),
        ("runner_up", _TEXT),
        ("margin", _FLOAT),
        ("num_tied", _INT),
        ("source", _TEXT),
        ("tier", _TEXT),
        ("snapshot_age_s", _FLOAT),
        ("fallback", _TEXT),
        ("t_route_us", _FLOAT),
        ("estimates_s", pa.map_(_TEXT, _FLOAT)),
        ("attempts", _INT),  # of the request; this and what follows is missing where it had not ended
        ("status", _TEXT),  # how it ended; `retried` where this attempt gave way to another
        ("status_reason", _TEXT),
        ("observed_ttft_s", _FLOAT),
        ("e2e_s", _FLOAT),
        ("output_tokens", _INT),
        ("server_counted", pa.bool_()),
    ]
)

Event = tuple[Any, ...]
Row = dict[str, Any]
Numbers = type[np.int64] | type[np.float64]
_ARRAYS: Final[dict[str, Numbers]] = {
    "prompt_tokens": np.int64,
    "predicted_output_tokens": np.int64,
    "predicted_utility": np.float64,
    "predicted_quality": np.float64,
}
_NUMBERS: Final = ("arrival_ps", "max_tokens", "priority", "slo_ttft_ps", "session_id", "prefix_block_size")


def _bytes(values: npt.ArrayLike | None, dtype: Numbers) -> bytes | None:
    return None if values is None else np.ascontiguousarray(values, dtype=dtype).tobytes()


class EventRows:
    """Events as rows, and back.

    Args:
        group_of_instance: (j,) where groups agree in what is known of a request, one value stands for all of one.
    """

    def __init__(self, group_of_instance: IntArray) -> None:
        self._groups = group_of_instance
        count = int(group_of_instance.max()) + 1
        self._first = np.array([int(np.flatnonzero(group_of_instance == g)[0]) for g in range(count)])
        self._makers: dict[str, Callable[..., Row]] = {
            SHOWN: _shown,
            DECIDED: self._decided,
            SENT: _moved,
            FIRST_TOKEN: _moved,
            ENDED: _moved,
            RECONFIGURED: lambda instance, options: {"instance": instance, "options": options},
            OPEN: _open,
            FORGOTTEN: lambda instance, request: {"instance": instance, "request": request},
        }

    def row(self, event: Event) -> Row:
        """Return an event (kind, keyframe, what belongs to it) as a row of EVENTS.

        Raises:
            ValueError: a snapshot cannot be written.
        """
        kind, keyframe, *rest = event
        return {"kind": kind, "keyframe": keyframe, **self._makers[kind](*rest)}

    def _decided(
        self, made: LiveDecision, allowed: Sequence[bool], tiers: Sequence[int], ages_ps: Sequence[int]
    ) -> Row:
        request, decision = made.request, made.decision
        return {
            "at_ps": made.decided_ps,
            "instance": made.instance,
            "request": request.index,
            "source": made.source,
            "allowed": bytes(allowed),
            "none_healthy": decision.reason == NONE_HEALTHY,
            "tiers": bytes(tiers),
            "ages_ps": _bytes(ages_ps, np.int64),
            **{name: getattr(request, name) for name in _NUMBERS},
            **{name: self._packed(getattr(request, name), dtype) for name, dtype in _ARRAYS.items()},
            "prefix_hashes": _bytes(request.prefix_hashes, np.int64),
            **outcome_of(made),
        }

    def _packed(self, values: Any, dtype: Numbers) -> bytes | None:
        """Return the bytes of (j,) values; of one for each group where that says all."""
        if values is None:
            return None
        values = np.ascontiguousarray(values, dtype=dtype)
        few = values[self._first]
        return bytes((few if np.array_equal(few[self._groups], values) else values).tobytes())

    def _unpacked(self, packed: bytes | None, dtype: Numbers) -> Any:
        if packed is None:
            return None
        values = np.frombuffer(packed, dtype)
        if len(values) == len(self._groups):
            return values.copy()
        if len(values) != len(self._first):
            raise ValueError(f"{len(values)} values for {len(self._groups)} instances")
        return values[self._groups]

    def request(self, row: Row) -> Request:
        """Return the request of a decision.

        Raises:
            ValueError: the row does not fit the instances.
        """
        hashes = row["prefix_hashes"]
        return Request(
            index=row["request"],
            **{name: row[name] for name in _NUMBERS},
            **{name: self._unpacked(row[name], dtype) for name, dtype in _ARRAYS.items()},
            prefix_hashes=None if hashes is None else np.frombuffer(hashes, np.int64).copy(),
        )


def outcome_of(made: LiveDecision) -> Row:
    """Return what came out of a decision, bit for bit."""
    decision = made.decision
    return {
        "instance": made.instance,
        "predicted_ttft_s": _bytes(decision.predicted_ttft_s, np.float64),
        "score": _bytes(decision.score, np.float64),
        "reason": decision.reason,
        "num_tied": int(decision.num_tied),
        "fallback": made.fallback,
        "source": made.source,
        "beside": _bytes(made.beside, np.float64),
    }


def _shown(instance: int, source: str, snapshot: _native.Snapshot) -> Row:
    return {"instance": instance, "source": source, "snapshot": snapshot.to_bytes()}


def _moved(request: int, instance: int, now_ps: int) -> Row:
    return {"request": request, "instance": instance, "at_ps": now_ps}


def _open(instance: int, own: OwnRequest) -> Row:
    return {
        "instance": instance,
        "request": own.id,
        "at_ps": own.at_ps,
        "arrival_ps": own.arrival_ps,
        "max_tokens": own.max_tokens,
        "priority": own.priority,
        "prompt_tokens": _bytes([own.prompt_tokens], np.int64),
        "predicted_output_tokens": _bytes([own.predicted_output], np.int64),
    }


def own_request(row: Row) -> OwnRequest:
    """Return the own request of a keyframe's row."""
    prompt, output = (int(np.frombuffer(row[name], np.int64)[0]) for name in list(_ARRAYS)[:2])
    return OwnRequest(
        row["request"], prompt, output, row["max_tokens"], row["priority"], row["arrival_ps"], row["at_ps"]
    )
