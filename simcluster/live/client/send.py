"""Send one request, read its stream, and say what became of it; whatever goes wrong is an outcome."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from simcluster.live.client.answer import CHUNKS, TRACE, Answer, TokenSource
from simcluster.live.client.events import EventReader
from simcluster.live.client.prompts import prompt_ids
from simcluster.live.clock import LiveClock
from simcluster.live.openai_api import COMPLETIONS
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["Outcome", "Sender"]

_CONNECT_S = 10.0
_HEADER = "X-Request-Id"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request; instants are the client's.

    Attributes:
        index: number of the request.
        due_ps: when it was to be sent [ps].
        sent_ps: when it was [ps].
        end_ps: when its last token came, or whatever ended it [ps]; None while it is open.
        answer: its stream.
        output_tokens: length of the answer [tokens].
        token_source: who counted them.
        prompt_tokens: length of the prompt [tokens].
        prompt_token_source: who counted them.
        status: finished, rejected, failed or unfinished.
        reason: why.
        message: what the server or the connection said, for people.
    """

    index: int
    due_ps: int
    sent_ps: int
    end_ps: int | None = None
    answer: Answer = field(default_factory=Answer)
    output_tokens: int = 0
    token_source: TokenSource = CHUNKS
    prompt_tokens: int = 0
    prompt_token_source: TokenSource = TRACE
    status: str = "unfinished"
    reason: str = "in_transit"
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From the sending to the first token [s]; None without one."""
        first = self.answer.first_token_ps
        return None if first is None else (first - self.sent_ps) / PS_PER_S


class _ServerError(Exception):
    """The answer is an error."""

    def __init__(self, status: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(slots=True)
class Sender:
    """Sends requests of a world to one URL.

    Attributes:
        world: the requests.
        clock: the client's time.
        session: of HTTP.
        url: of a router or a server.
        model: what requests name.
        timeout_s: longest silence of a server [s of wall-clock time].
        body: makes further fields of a request's body.
    """

    world: World
    clock: LiveClock
    session: aiohttp.ClientSession
    url: str
    model: str
    timeout_s: float = 600.0
    body: Callable[[int], dict[str, Any]] = lambda _: {}
    _bodies: dict[int, bytes] = field(default_factory=dict)

    def prepare(self, index: int) -> None:
        """Build the body of a request, so that sending it takes no time for that; a client has its prompt."""
        if index not in self._bodies:
            self._bodies[index] = self._body(index, int(self.world.known.prompt_tokens[index, 0]))

    async def send(self, index: int, due_ps: int) -> Outcome:
        """Send a request and read its answer to the end; being cancelled leaves it unfinished.

        Args:
            index: number of the request.
            due_ps: when it was to be sent [ps].
        """
        prompt = int(self.world.known.prompt_tokens[index, 0])
        self.prepare(index)
        data = self._bodies.pop(index)
        sent_ps = self.clock.now_ps()
        outcome = Outcome(index=index, due_ps=due_ps, sent_ps=sent_ps)
        cancel_ps = int(self.world.truth.cancel_after_ps[index])
        deadline = None if cancel_ps < 0 else self.clock.loop_time(sent_ps + cancel_ps)
        try:
            async with asyncio.timeout_at(deadline) as patience:
                await self._exchange(outcome, data)
        except asyncio.CancelledError:
            outcome.reason = "running" if outcome.answer.chunk_ps else outcome.reason
        except _ServerError as error:
            self._end(outcome, error.status, error.reason, str(error))
        except TimeoutError as error:
            reason = "cancelled" if patience.expired() else "timeout"
            self._end(outcome, "failed", reason, "" if patience.expired() else str(error))
        except aiohttp.ClientConnectorError as error:
            self._end(outcome, "failed", "connection", str(error))
        except (aiohttp.ClientError, OSError) as error:
            self._end(outcome, "failed", "cut" if outcome.reason != "in_transit" else "connection", str(error))
        except (ValueError, KeyError, TypeError) as error:
            self._end(outcome, "failed", "not_the_api", str(error))
        outcome.output_tokens, outcome.token_source = outcome.answer.output_tokens
        usage = outcome.answer.usage
        outcome.prompt_tokens, outcome.prompt_token_source = (
            (prompt, "trace") if usage is None else (usage[0], "server")
        )
        return outcome

    async def _exchange(self, outcome: Outcome, data: bytes) -> None:
        headers = {_HEADER: str(self.world.request_id[outcome.index]), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self.timeout_s)
        async with self.session.post(self.url + COMPLETIONS, data=data, headers=headers, timeout=timeout) as response:
            outcome.reason = "waiting"
            if response.status != 200:
                status = "rejected" if response.status < 500 else "failed"
                text = (await response.text())[:300]
                raise _ServerError(status, f"http_{response.status}", text)
            reader, answer = EventReader(), outcome.answer
            async for piece in response.content.iter_any():
                now = self.clock.now_ps()
                for event in reader.feed(piece):
                    answer.take(event, now)
        if answer.error is not None:
            raise _ServerError("failed", "error_event", answer.error)
        if answer.finish is None and not answer.done:
            raise _ServerError("failed", "cut", "the stream ended before the answer did")
        if answer.finish == "abort":
            raise _ServerError("failed", "abort", "the server gave the request up")
        self._end(outcome, "finished", answer.finish or "unknown", "", answer.last_token_ps)

    def _body(self, index: int, prompt_tokens: int) -> bytes:
        known = self.world.known
        body = {
            "model": self.model,
            "prompt": prompt_ids(self.world, index, prompt_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        limit, priority = int(known.max_tokens[index]), int(known.priority[index])
        if limit > 0:
            body["max_tokens"] = limit
        if priority:
            body["priority"] = priority
        return json.dumps(body | self.body(index), separators=(",", ":")).encode()

    def _end(self, outcome: Outcome, status: str, reason: str, message: str, at_ps: int | None = None) -> None:
        outcome.status, outcome.reason, outcome.message = status, reason, message
        outcome.end_ps = self.clock.now_ps() if at_ps is None else at_ps
