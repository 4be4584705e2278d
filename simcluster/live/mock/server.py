"""The HTTP side of a mock server: one aiohttp application per simulated instance."""

import time
import uuid
from dataclasses import dataclass

from aiohttp import web

import simcluster
from simcluster.live.api_errors import answer_errors
from simcluster.live.mock.hosted_engine import HostedEngine, Stream
from simcluster.live.mock.lengths import Lengths
from simcluster.live.mock.metrics import MockMetrics
from simcluster.live.mock.transit import Transit
from simcluster.live.openai_api import (
    CHAT,
    COMPLETIONS,
    DONE,
    MOST_BODY_BYTES,
    ApiError,
    Asked,
    Reply,
    Usage,
    error_body,
    parse_request,
    sse,
)
from simcluster.predict.tokens import Tokens

__all__ = ["MockServer"]

_WORD = " tok"  # what every token says


@dataclass(slots=True)
class MockServer:
    """Answers like vLLM in front of one simulated engine.

    Attributes:
        hosted: the engine.
        lengths: how long answers are.
        metrics: what `/metrics` shows.
        tokens: counts the tokens of prompts that come as text.
        transit: says when requests reach the engine.
    """

    hosted: HostedEngine
    lengths: Lengths
    metrics: MockMetrics
    tokens: Tokens
    transit: Transit

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": f"simcluster-mock {simcluster.__version__}"})

    async def _models(self, _: web.Request) -> web.Response:
        spec = self.hosted.spec
        entry = {
            "id": spec.model,
            "object": "model",
            "created": 0,
            "owned_by": "simcluster",
            "root": spec.model,
            "max_model_len": spec.engine.max_model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.hosted.wake()
        return web.Response(
            body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = parse_request(request.path, body)
        given = request.headers.get("X-Request-Id")
        name = given or uuid.uuid4().hex
        key, stream = self._submit(asked, given, name, self.transit.reach_ps(body))
        prefix = "chatcmpl" if asked.kind == "chat" else "cmpl"
        reply = Reply(asked.kind, f"{prefix}-{name}", asked.model, int(time.time()))
        try:
            if asked.stream:
                return await _in_chunks(request, stream, reply, include_usage=asked.include_usage)
            return await _in_one_piece(stream, reply)
        finally:
            self.hosted.cancel(key)  # the client has left; nothing to do if the request has ended

    def _submit(self, asked: Asked, given: str | None, name: str, reach_ps: int) -> tuple[int, Stream]:
        spec = self.hosted.spec
        if asked.model not in (spec.model, spec.name):
            raise ApiError(404, f"The model `{asked.model}` does not exist; must be {spec.model}", "model")
        prompt = asked.token_ids if asked.token_ids is not None else max(1, len(self.tokens.ids(asked.text or "")))
        limit = spec.engine.max_model_len
        if prompt >= limit:
            raise ApiError(
                400, f"The maximum context length is {limit} tokens, but the prompt alone has {prompt}", "prompt"
            )
        if asked.max_tokens is not None and asked.max_tokens > limit:
            raise ApiError(
                400, f"max_tokens = {asked.max_tokens}; the maximum context length is {limit} tokens", "max_tokens"
            )
        answer = self.lengths.of(given, asked)
        sent = self.hosted.submit(
            name,
            prompt,
            answer.output_tokens,
            answer.max_tokens,
            ends_by_length=answer.ends_by_length,
            priority=asked.priority,
            prompt=self.lengths.prompt_runs(given, prompt),
            reach_ps=reach_ps,
        )
        if sent is None:
            raise ApiError(400, f"the request does not fit: {prompt} prompt tokens, context of {limit}", "prompt")
        return sent


async def _in_chunks(request: web.Request, stream: Stream, reply: Reply, *, include_usage: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    first = reply.first()
    if first is not None:
        await response.write(first)
    told = 0
    while True:
        await stream.wait()
        new, ended = stream.tokens - told, stream.finish is not None
        if stream.finish == "failed":
            await response.write(sse(error_body(ApiError(500, "the engine gave the request up"))))
            break
        if new or ended:
            told = stream.tokens
            await response.write(reply.chunk(_WORD * new, stream.finish))
        if ended:
            if include_usage:
                await response.write(reply.usage(Usage(stream.prompt_tokens, told)))
            break
    await response.write(DONE)
    await response.write_eof()
    return response


async def _in_one_piece(stream: Stream, reply: Reply) -> web.Response:
    while stream.finish is None:
        await stream.wait()
    if stream.finish == "failed":
        raise ApiError(500, "the engine gave the request up")
    usage = Usage(stream.prompt_tokens, stream.tokens)
    return web.json_response(reply.whole(_WORD * stream.tokens, stream.finish, usage))
