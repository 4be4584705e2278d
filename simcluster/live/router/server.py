"""The live router: an OpenAI-compatible server in front of the instances of a scenario."""

import asyncio
import random
from contextlib import AsyncExitStack

from aiohttp import web

from simcluster.backends.vllm_publisher import request_key
from simcluster.errors import ConfigError
from simcluster.live.api_errors import answer_errors
from simcluster.live.endpoints import METRICS, endpoints, require_urls
from simcluster.live.openai_api import CHAT, COMPLETIONS, ApiError, parse_request
from simcluster.live.router.background import meet_publishers, scrape, stopped, watch_stalls
from simcluster.live.router.core import RouterCore, RouterSetup, build_core
from simcluster.live.router.exchange import Exchange
from simcluster.live.router.outcome import CANCELLED, FINISHED, REJECTED
from simcluster.live.router.requests import TPOT_HEADER, PromptRequests, header_ms

__all__ = ["RouterServer"]

_LONGEST_ID = 200
_GRACE_S = 0.1  # for answers that were to be drained and were not


class RouterServer:
    """A router that listens.

    Attributes:
        core: what decides and counts, once started.
        num_open: requests that are being answered.
    """

    core: RouterCore

    def __init__(self, setup: RouterSetup) -> None:
        """Prepare a router; `start` does the rest.

        Raises:
            ConfigError: the scenario does not say where an instance is.
            PredictorError: the predictor or the tokenizer cannot be used.
        """
        self._setup = setup
        self._live = setup.scenario.live
        self._endpoints = endpoints(setup.scenario, setup.path)
        self._urls = list(setup.urls) or require_urls(self._endpoints, setup.path)
        self._requests = setup.requests or PromptRequests(setup.scenario, setup.path, setup.world)
        self.num_open = 0
        self._exchanges: set[Exchange] = set()
        self._numbers: set[int] = set()
        self._stops = False
        self._exit = AsyncExitStack()

    # -- start and stop

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address; with port 0 the system chooses one.

        Raises:
            ConfigError: the port is taken, or the policy is unknown.
        """
        self.core = core = await build_core(self._setup, self._endpoints, self._urls, self._requests)
        self._exit.callback(core.patience.close)
        self._exit.callback(core.relay.close)
        self._exit.push_async_callback(core.upstreams.close)
        metered = [j for j, each in enumerate(self._endpoints) if each.source == METRICS]
        for run in (watch_stalls(self._exchanges, core), meet_publishers(core), *(scrape(core, j) for j in metered)):
            self._exit.push_async_callback(stopped, asyncio.create_task(run))
        limit = self._live.max_header_bytes
        runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_GRACE_S,
            max_line_size=limit,
            max_field_size=limit,
        )
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            await self._exit.aclose()
            raise ConfigError(f"{host}:{port}: {error.strerror}; give another --host or --port") from None
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Take no more requests, let open answers end, but not for longer than the scenario allows."""
        self._stops = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._live.drain_s
        while self.num_open and loop.time() < deadline:
            await asyncio.sleep(0.02)
        await self._exit.aclose()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self._live.max_body_bytes, middlewares=[answer_errors])
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    # -- requests

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if self._stops or self.num_open >= self._live.max_streams:
            self.core.count(-1, REJECTED)
            reason = "the router stops" if self._stops else f"{self.num_open} requests are open, no more are taken"
            raise ApiError(503, reason, headers={"Retry-After": "1"})
        self.num_open += 1
        try:
            try:
                exchange = await self._understand(http)
            except (ApiError, web.HTTPException):
                self.core.count(-1, REJECTED)
                raise
            except BaseException:
                self.core.count(-1, CANCELLED)
                raise
            return await self._exchange(exchange)
        finally:
            self.num_open -= 1

    async def _exchange(self, exchange: Exchange) -> web.StreamResponse:
        outcome = exchange.outcome
        self._exchanges.add(exchange)
        try:
            return await exchange.run()
        except ApiError as error:
            outcome.status, outcome.reason = REJECTED, outcome.reason or f"status_{error.status}"
            raise
        except asyncio.CancelledError:
            if outcome.status != FINISHED:
                outcome.status, outcome.reason = CANCELLED, "shutdown" if self._stops else "client_left"
            raise
        finally:
            self._exchanges.discard(exchange)
            self._numbers.discard(exchange.number)
            self.core.account(outcome, exchange.tpot_s)

    async def _understand(self, http: web.Request) -> Exchange:
        """Read a request.

        Raises:
            ApiError: it makes no sense.
        """
        if http.content.is_eof():  # all of it is there, as it nearly always is
            body = await http.read()
        else:
            try:
                async with self.core.patience.limit(self._live.stall_timeout_s):
                    body = await http.read()
            except TimeoutError:
                raise ApiError(408, "the body did not come") from None
        asked = parse_request(http.path, body)
        self.core.candidates(asked.model)
        tpot_ms = header_ms(http.headers, TPOT_HEADER)
        request_id = http.headers.get("X-Request-Id", "")[:_LONGEST_ID] or _new_id()
        number = request_key(request_id)
        while number in self._numbers:  # a client may use one id for several open requests
            request_id = f"{request_id[:_LONGEST_ID]}-{_new_id()[:8]}"
            number = request_key(request_id)
        self._numbers.add(number)
        return Exchange(self.core, http, body, asked, request_id, number, None if tpot_ms is None else tpot_ms / 1e3)

    # -- the other pages

    async def _models(self, _: web.Request) -> web.Response:
        names = self.core.model_names()
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "simcluster"} for name in names]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        now = self.core.clock.now_ps()
        well = sum(each.may_be_asked(now) for each in self.core.dispatcher.health)
        status = 503 if self._stops or not well else 200
        return web.json_response({"healthy": well, "instances": len(self._urls), "stops": self._stops}, status=status)

    async def _metrics(self, _: web.Request) -> web.Response:
        if self._setup.journal is not None:
            self.core.metrics.lost(self._setup.journal.num_lost)
        text = self.core.metrics.text(self.core.dispatcher, self.core.clock.now_ps())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _new_id() -> str:
    """Return an id that no other request has; nothing rests on its being hard to guess."""
    return f"{random.getrandbits(128):032x}"
