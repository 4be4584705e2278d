"""Counts the tokens of an answer while its bytes pass by, without taking every event apart."""

import json
from typing import Any, Final

from simcluster import _native

__all__ = ["Meter"]

_END: Final = b"\n\n"
_MOST_WHOLE: Final = 1 << 20  # bytes of an answer in one piece that are looked at


class Meter:
    """Watches one answer.

    A chat's first event carries the role and no token, and does not count. Each other event before the one with the
    usage counts as one token until that tells the true number.

    Attributes:
        counter: counts events where `feed` is not told of them.
        completion_tokens: as the server counts them; None before or without a usage.
        prompt_tokens: likewise.
        is_done: the stream ended as it should.
        error: the server reported an error inside of the stream.
    """

    def __init__(self, *, streams: bool) -> None:
        """Start.

        Args:
            streams: the answer comes in events, not in one piece.
        """
        self.counter = _native.EventCounter()
        self.completion_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.is_done = False
        self.error = False
        self._streams = streams
        self._head = b""  # what came before the first token
        self._whole = b""  # an answer in one piece

    def feed(self, piece: bytes) -> None:
        """Look at bytes that pass by."""
        if not self._streams:
            if len(self._whole) <= _MOST_WHOLE:
                self._whole += piece
        elif self.counter.events:
            self.counter.feed(piece)
        else:
            self._look_for_token(piece)
            self.counter.keep(piece)

    def _look_for_token(self, piece: bytes) -> None:
        self._head += piece
        *events, rest = self._head.split(_END)
        count = 0
        for event in events:
            if count or _has_token(event):
                count += 1
        self._head = b"" if count else rest
        self.counter.events = count

    def finish(self) -> None:
        """Read the end of the answer."""
        if not self._streams:
            if len(self._whole) <= _MOST_WHOLE:
                self._take(_parsed(self._whole))
            self.is_done = True
            return
        events = [each for each in self.counter.tail.split(_END) if each.strip()]
        if events and events[-1].strip() == b"data: [DONE]":
            self.is_done = True
            self.counter.events -= bool(self.counter.events)
            events.pop()
        for event in events[-2:]:
            if b'"usage"' in event or b'"error"' in event:
                self._take(_parsed(event.strip().removeprefix(b"data:")))

    def _take(self, body: Any) -> None:
        if not isinstance(body, dict):
            return
        self.error = self.error or "error" in body
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.completion_tokens = _count(usage.get("completion_tokens"))
            self.prompt_tokens = _count(usage.get("prompt_tokens"))

    @property
    def events(self) -> int:
        """Events with a token so far; the first token has come if it is above 0."""
        return self.counter.events

    @property
    def tokens(self) -> int:
        """Tokens of the answer: the server's count, else that of the events."""
        return self.events if self.completion_tokens is None else self.completion_tokens


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _has_token(event: bytes) -> bool:
    """Return whether an event carries a token: text, even an empty one, but for the chunk that only names the role."""
    body = _parsed(event.strip().removeprefix(b"data:"))
    if not isinstance(body, dict):
        return False
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    if "text" in choice:
        return True
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    carried = [name for name, value in delta.items() if name != "role" and value is not None]
    return any(name != "content" or delta[name] or "role" not in delta for name in carried)
