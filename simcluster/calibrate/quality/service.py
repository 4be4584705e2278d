"""Chat completions from OpenAI-compatible servers, with retries."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from simcluster.errors import CalibrationError
from simcluster.validation import one_line

__all__ = ["Chat", "Completion", "Endpoint", "Unanswered"]

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_HOPELESS = {401: "the key is refused", 403: "the key is refused", 404: "no such model or path there"}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0


class Unanswered(Exception):  # noqa: N818 - an outcome of one request, which is counted; never leaves this package
    """One request got no usable answer; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A model behind an OpenAI-compatible server.

    Attributes:
        name: what the table calls the model.
        url: base URL, up to and including /v1.
        model: what the server calls it.
        key_env: environment variable that holds the key, or None.
    """

    name: str
    url: str
    model: str
    key_env: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, with token counts as the server gives them."""

    text: str
    output_tokens: int
    prompt_tokens: int
    finish_reason: str | None


class Chat:
    """Asks one endpoint, at most so many requests at once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        *,
        body: Mapping[str, Any],
        concurrency: int,
        attempts: int,
    ) -> None:
        """Prepare to ask.

        Args:
            session: carries the time limits.
            endpoint: whom to ask.
            body: further fields of every request, for example temperature.
            concurrency: requests at once.
            attempts: how often to try one request.

        Raises:
            CalibrationError: the variable that shall hold the key is not set.
        """
        self.endpoint = endpoint
        self._session = session
        self._body = dict(body)
        self._slots = asyncio.Semaphore(concurrency)
        self._attempts = attempts
        self._headers = {}
        if endpoint.key_env is not None:
            key = os.environ.get(endpoint.key_env)
            if not key:
                raise CalibrationError(
                    f"{endpoint.name}: the variable {endpoint.key_env} is not set; put the key there"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Completion:
        """Return the answer to a conversation.

        Raises:
            Unanswered: no usable answer after all attempts.
            CalibrationError: no request to this endpoint can succeed.
        """
        body = {**self._body, "model": self.endpoint.model, "messages": list(messages), "stream": False}
        pause = _FIRST_PAUSE_S
        async with self._slots:
            for attempt in range(1, self._attempts + 1):
                try:
                    return await self._once(body)
                except _Again as trouble:
                    if attempt == self._attempts:
                        raise Unanswered(f"{trouble}, {attempt} times") from None
                    wait = trouble.after_s if trouble.after_s is not None else pause
                await asyncio.sleep(min(wait, _LONGEST_PAUSE_S))
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, body: dict[str, Any]) -> Completion:
        url = f"{self.endpoint.url.rstrip('/')}/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=self._headers) as response:
                if response.status in _RETRIED:
                    raise _Again(f"status {response.status}", _seconds(response.headers.get("Retry-After")))
                if response.status in _HOPELESS:
                    why = _HOPELESS[response.status]
                    raise CalibrationError(f"{self.endpoint.name}: {url} answers {response.status}: {why}")
                if response.status != 200:
                    text = one_line(await response.text())[:200]
                    raise Unanswered(f"status {response.status}: {text}")
                reply = await response.json(content_type=None)
        except TimeoutError:
            raise _Again("no answer in time") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Again(f"{type(error).__name__}: {one_line(str(error))[:160]}") from None
        except ValueError:
            raise Unanswered("the answer is not JSON") from None
        return _completion(reply)


class _Again(Exception):  # noqa: N818
    """Worth another attempt, after so many seconds if the server says so."""

    def __init__(self, text: str, after_s: float | None = None) -> None:
        super().__init__(text)
        self.after_s = after_s


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value <= _LONGEST_PAUSE_S else None


def _completion(reply: Any) -> Completion:
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
        counts = usage["completion_tokens"], usage["prompt_tokens"]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Unanswered("the answer has no choices[0].message.content or no usage") from None
    if not isinstance(text, str) or not text.strip():
        raise Unanswered("the answer is empty")
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        raise Unanswered("usage has no token counts")
    return Completion(
        text=text, output_tokens=counts[0], prompt_tokens=counts[1], finish_reason=finish if finish else None
    )
