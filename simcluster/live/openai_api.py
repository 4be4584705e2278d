"""The OpenAI-compatible API as vLLM speaks it: what requests may hold, answers in one piece and in chunks, errors."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DONE",
    "MOST_BODY_BYTES",
    "ApiError",
    "Asked",
    "Reply",
    "Usage",
    "error_body",
    "parse_request",
    "renamed",
    "sse",
]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
MOST_BODY_BYTES = 64 * 2**20
_MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*"[^"\\]*"')
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
_NAMES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

Kind = Literal["chat", "completion"]


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        param: the field of the body that is wrong, or None.
        headers: further headers of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Make an error.

        Args:
            status: HTTP status.
            message: what was found, what is allowed.
            param: the field of the body that is wrong.
            headers: further headers of the answer.
        """
        super().__init__(message)
        self.status, self.param, self.headers = status, param, dict(headers or {})


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error as vLLM writes it."""
    kind = _NAMES.get(error.status, "InvalidRequestError")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for.

    Attributes:
        kind: which of the two calls.
        model: as the client names it.
        text: the prompt as text; None where token ids were given.
        token_ids: number of prompt tokens that were given as ids; None where text was given.
        max_tokens: limit of the answer [tokens]; None: up to the context's end.
        ignore_eos: the answer ends at its limit.
        stream: answer in chunks.
        include_usage: a last chunk has the token counts.
        priority: smaller is served earlier.
    """

    kind: Kind
    model: str
    text: str | None
    token_ids: int | None
    max_tokens: int | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    priority: int


def parse_request(path: str, raw: bytes) -> Asked:
    """Read a body.

    Raises:
        ApiError: 400, with what is wrong.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    chat = path == CHAT
    model = _field(body, "model", str, "")
    if not model:
        raise ApiError(400, "model is missing; must name a model of /v1/models", "model")
    for name in ("n", "best_of"):
        if _field(body, name, int, 1) != 1:
            raise ApiError(400, f"{name} = {body[name]}; must be 1", name)
    limit = body.get("max_completion_tokens") if chat else None
    limit = limit if limit is not None else body.get("max_tokens")
    if limit is None:
        max_tokens = None if chat else _COMPLETION_MAX_TOKENS
    elif isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ApiError(400, f"max_tokens = {limit!r}; must be a whole number of at least 1", "max_tokens")
    else:
        max_tokens = limit
    text, token_ids = _chat_text(body) if chat else _prompt(body)
    options = _field(body, "stream_options", dict, {})
    return Asked(
        kind="chat" if chat else "completion",
        model=model,
        text=text,
        token_ids=token_ids,
        max_tokens=max_tokens,
        ignore_eos=_field(body, "ignore_eos", bool, False),
        stream=_field(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
        priority=_field(body, "priority", int, 0),
    )


def renamed(body: bytes, model: str) -> bytes:
    """Return a request's body with another model; all else stays as the client wrote it where that is plain to see."""
    if body.count(b'"model"') == 1 and b"\\u00" not in body:  # an escape may stand for a letter of the key
        head, *rest = _MODEL.split(body)
        if rest:
            return b'%b"model":%b%b' % (head, json.dumps(model).encode(), rest[0])
    content = json.loads(body)
    content["model"] = model
    return json.dumps(content, separators=(",", ":")).encode()


def _field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(400, f"{name} = {str(value)[:60]!r}; must be of type {kind.__name__}", name)
    return value


def _prompt(body: dict[str, Any]) -> tuple[str | None, int | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and set(map(type, prompt)) == {int} and min(prompt) >= 0:
        return None, len(prompt)
    raise ApiError(400, "prompt must be one text or one list of token ids, and not empty", "prompt")


def _chat_text(body: dict[str, Any]) -> tuple[str, None]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", "messages")
    parts = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ApiError(400, f"messages[{number}] must be an object with a role", "messages")
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(text for text in texts if isinstance(text, str))
        if content is not None and not isinstance(content, str):
            raise ApiError(400, f"messages[{number}].content must be text", "messages")
        parts.append(f"{role}\n{content or ''}\n")
    return "".join(parts), None


def sse(body: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        """Return it as answers have it."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """Makes the bodies of one answer.

    Attributes:
        kind: which of the two calls.
        id: of the answer.
        model: as the client named it.
        created: when [s since 1970].
    """

    kind: Kind
    id: str
    model: str
    created: int

    def whole(self, text: str, finish: str | None, usage: Usage) -> dict[str, Any]:
        """Return the answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {**self._head(""), "choices": [choice], "usage": usage.body()}

    def first(self) -> bytes | None:
        """Return what comes before the first token, if anything."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.kind == "chat" else None

    def chunk(self, text: str, finish: str | None) -> bytes:
        """Return a piece of the answer."""
        return self._chunk({"delta": {"content": text}} if self.kind == "chat" else {"text": text}, finish)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that ends a stream with token counts."""
        return sse({**self._head(".chunk"), "choices": [], "usage": usage.body()})

    def _chunk(self, content: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return sse({**self._head(".chunk"), "choices": [choice]})

    def _head(self, suffix: str) -> dict[str, Any]:
        name = f"chat.completion{suffix}" if self.kind == "chat" else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}
