"""What one streamed answer says, and when: which of its chunks hold tokens, how many these are, and how it ends."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from simcluster.units import PS_PER_S

__all__ = ["CHUNKS", "SERVER", "TRACE", "Answer", "TokenSource", "clean_gaps"]

TokenSource = Literal["server", "chunks", "trace"]  # who counted tokens
SERVER: TokenSource = "server"
CHUNKS: TokenSource = "chunks"
TRACE: TokenSource = "trace"
_TEXTS = ("content", "reasoning_content", "reasoning")


@dataclass(slots=True)
class Answer:
    """A streamed answer, chunk by chunk.

    Attributes:
        chunk_ps: when each chunk came that holds a token or more [ps].
        finish: why it ended, as the server says; None before.
        usage: (prompt tokens, output tokens) as the server counts them, or None.
        error: what an error inside of the stream says, or None.
        done: the stream was closed with `[DONE]`.
    """

    chunk_ps: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int] | None = None
    error: str | None = None
    done: bool = False

    def take(self, event: str, at_ps: int) -> None:
        """Take the data of an event that came at an instant [ps].

        Raises:
            ValueError: it is not what this API sends.
        """
        if event.strip() == "[DONE]":
            self.done = True
            return
        body = json.loads(event)
        if not isinstance(body, dict):
            raise ValueError(f"an event that is no object: {event[:60]}")
        if body.get("error") is not None:
            error = body["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.usage = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        choices = body.get("choices") or []
        if choices and isinstance(choices[0], dict):
            if _holds_token(choices[0]):
                self.chunk_ps.append(at_ps)
            self.finish = choices[0].get("finish_reason") or self.finish

    @property
    def first_token_ps(self) -> int | None:
        """When the first token came [ps]; None before."""
        return self.chunk_ps[0] if self.chunk_ps else None

    @property
    def last_token_ps(self) -> int | None:
        """When the last token came [ps], which neither the chunk of the finish nor `[DONE]` moves; None before."""
        return self.chunk_ps[-1] if self.chunk_ps else None

    @property
    def output_tokens(self) -> tuple[int, TokenSource]:
        """Its length [tokens] as the server counts, else its chunks with tokens; and which of the two it is."""
        return (len(self.chunk_ps), CHUNKS) if self.usage is None else (self.usage[1], SERVER)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first [s], by the count of tokens; None for fewer than two."""
        tokens, _ = self.output_tokens
        if tokens < 2 or not self.chunk_ps:
            return None
        return (self.chunk_ps[-1] - self.chunk_ps[0]) / (tokens - 1) / PS_PER_S

    def chunk_gaps_s(self) -> list[float]:
        """Return the times between chunks with tokens [s]; a chunk may hold several tokens."""
        pairs = zip(self.chunk_ps, self.chunk_ps[1:], strict=False)
        return [(after - before) / PS_PER_S for before, after in pairs]


def _holds_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk holds tokens: text, an empty one too; not the role that precedes them in a chat."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return isinstance(choice.get("text"), str)
    texts = [delta[name] for name in _TEXTS if isinstance(delta.get(name), str)]
    return any(texts) if delta.get("role") is not None else bool(texts)


def clean_gaps(gaps_s: list[float]) -> tuple[list[float], int]:
    """Return the gaps that a clock can have measured, and how many others there are: the negative ones."""
    kept = [gap for gap in gaps_s if gap >= 0]
    return kept, len(gaps_s) - len(kept)
