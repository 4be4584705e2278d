"""How a request through the router ended."""

from dataclasses import dataclass

from simcluster.live.router.dispatcher import LiveDecision

__all__ = ["CANCELLED", "FAILED", "FINISHED", "REJECTED", "Outcome"]

FINISHED, FAILED, REJECTED, CANCELLED = "finished", "failed", "rejected", "cancelled"


@dataclass(slots=True)
class Outcome:
    """How a request ended, as the router saw it.

    Attributes:
        request_id: the client's.
        status: FINISHED, FAILED, REJECTED or CANCELLED.
        reason: why, where it is not FINISHED.
        made: the last decision, or None.
        attempts: servers that were asked.
        arrival_ps: arrival at the router [ps]; -1 if the request was not understood.
        first_token_ps: when the first token was passed on [ps]; -1: none was, or it came in one piece.
        end_ps: when it ended [ps].
        output_tokens: tokens passed on.
        server_counted: the server told that number.
    """

    request_id: str
    status: str = FAILED
    reason: str = ""
    made: LiveDecision | None = None
    attempts: int = 0
    arrival_ps: int = -1
    first_token_ps: int = -1
    end_ps: int = -1
    output_tokens: int = 0
    server_counted: bool = False
