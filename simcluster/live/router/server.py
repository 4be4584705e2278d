"""The live router: an OpenAI-compatible server in front of the instances of a scenario."""

import asyncio
import json
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from aiohttp import web

from simcluster.backends.vllm_publisher import request_key
from simcluster.errors import ConfigError
from simcluster.live.api_errors import answer_errors
from simcluster.live.clock import LiveClock
from simcluster.live.endpoints import METRICS, Endpoint, endpoints, require_urls
from simcluster.live.openai_api import CHAT, COMPLETIONS, ApiError, Asked, parse_request
from simcluster.live.router.background import scrape, served_name, stopped, watch_stalls
from simcluster.live.router.dispatcher import Dispatcher, Journal, LiveDecision
from simcluster.live.router.exchange import CANCELLED, REJECTED, Exchange, Outcome
from simcluster.live.router.metrics import RouterMetrics
from simcluster.live.router.own import OwnRequests
from simcluster.live.router.requests import TPOT_HEADER, PromptRequests, RequestBuilder, header_ms
from simcluster.live.router.sight import LiveSight, SightLog
from simcluster.live.router.upstream import Upstreams
from simcluster.request import Request
from simcluster.routers.base import ClusterView
from simcluster.scenario import Scenario
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["AUTO", "RouterServer", "RouterSetup"]

AUTO = "auto"  # as a model: the router chooses
_LONGEST_ID = 200


@dataclass(slots=True, kw_only=True)
class RouterSetup:
    """What a router is made of.

    Attributes:
        scenario: instances, routing and live settings.
        path: where it was read.
        world: its instances and means.
        policy: who decides.
        speed: seconds of the router's clock per second; 1 but in front of mock servers.
        requests: makes requests; None: from prompts, as anybody sends them.
        rewrite: changes the body for the chosen instance; None: only the model's name, where it must.
        on_decision: told every decision.
        on_end: told every outcome.
        journal: told everything that decisions depend on, or None.
        urls: where the instances are, instead of the scenario's.
    """

    scenario: Scenario
    path: Path
    world: World
    policy: str
    speed: float = 1.0
    requests: RequestBuilder | None = None
    rewrite: Callable[[bytes, Request, int], bytes] | None = None
    on_decision: Callable[[LiveDecision], None] = lambda _: None
    on_end: Callable[[Outcome], None] = lambda _: None
    journal: "LiveJournal | None" = None
    urls: list[str] = field(default_factory=list)


class LiveJournal(Journal, SightLog):
    """Is told what happens, and what is seen."""


class RouterServer:
    """A router that listens.

    Attributes:
        policy: who decides.
        live: its settings.
        clock: its time.
        loop: its event loop.
        dispatcher: decides.
        sight: what it sees.
        upstreams: the servers.
        metrics: what it tells about itself.
        requests: makes requests.
        exchanges: requests that were understood and are being answered.
        num_open: requests that are being answered.
        ended: how many requests ended, by status.
    """

    dispatcher: Dispatcher
    sight: LiveSight
    upstreams: Upstreams
    clock: LiveClock
    loop: asyncio.AbstractEventLoop

    def __init__(self, setup: RouterSetup) -> None:
        """Prepare a router; `start` does the rest.

        Raises:
            ConfigError: the scenario does not say where an instance is, or the policy is unknown.
            PredictorError: the predictor or the tokenizer cannot be used.
        """
        scenario, world = setup.scenario, setup.world
        self._setup = setup
        self.policy, self.live = setup.policy, scenario.live
        self._endpoints: list[Endpoint] = endpoints(scenario, setup.path)
        self._urls = setup.urls or require_urls(self._endpoints, setup.path)
        self.requests = setup.requests or PromptRequests(scenario, setup.path, world)
        self.metrics = RouterMetrics(setup.policy, [spec.name for spec in world.instances])
        self._served = [spec.model for spec in world.instances]  # as the servers name it
        self._generations = [0] * len(world.instances)
        self.num_open = 0
        self.ended: dict[str, int] = {}
        self.exchanges: set[Exchange] = set()
        self._numbers: set[int] = set()
        self._stops = False
        self._exit = AsyncExitStack()
        self._candidates: dict[str, tuple[bool, ...]] = {}

    # -- start and stop

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address; with port 0 the system chooses one.

        Raises:
            ConfigError: the port is taken, or the policy is unknown.
        """
        setup, world = self._setup, self._setup.world
        self.loop = asyncio.get_running_loop()
        self.clock = LiveClock(setup.speed)
        self.dispatcher = Dispatcher(world, setup.scenario, setup.policy, self._build_sight, setup.journal)
        self.upstreams = Upstreams(self._urls, self.live)
        self._exit.push_async_callback(self.upstreams.close)
        specs = world.instances
        self._served = await asyncio.gather(
            *(served_name(self.upstreams, j, spec.model) for j, spec in enumerate(specs))
        )
        metered = [j for j, each in enumerate(self._endpoints) if each.source == METRICS]
        for run in (watch_stalls(self), *(scrape(self, j) for j in metered)):
            task = self.loop.create_task(run)
            self._exit.push_async_callback(stopped, task)
        limit = self.live.max_header_bytes
        runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
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
        deadline = self.loop.time() + self.live.drain_s
        while self.num_open and self.loop.time() < deadline:
            await asyncio.sleep(0.02)
        await self._exit.aclose()

    def _build_sight(self, view: ClusterView, own: OwnRequests) -> LiveSight:
        setup = self._setup
        self.sight = LiveSight(
            view.instances,
            view.views,
            own,
            self._endpoints,
            self.live,
            _mean_tokens(setup.world),
            self.clock.origin_ns,
            setup.speed,
            setup.journal,
        )
        return self.sight

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self.live.max_body_bytes, middlewares=[answer_errors])
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    # -- requests

    def candidates(self, model: str) -> tuple[bool, ...]:
        """Return which instances serve what a client calls a model, (j,).

        Raises:
            ApiError: 404, none does.
        """
        found = self._candidates.get(model)
        if found is None:
            specs = self.dispatcher.view.instances
            names = ((AUTO, spec.model, spec.name, served) for spec, served in zip(specs, self._served, strict=True))
            found = tuple(model in each for each in names)
            if True not in found:
                known = ", ".join(self._model_names())
                raise ApiError(404, f"The model `{model[:100]}` does not exist; must be one of {known}", "model")
            self._candidates[model] = found
        return found

    def decide(self, request: Request, allowed: tuple[bool, ...]) -> LiveDecision:
        """Look at all instances and choose one.

        Raises:
            NoInstanceError: none may be asked.
        """
        before = perf_counter()
        if self.dispatcher.looks:
            self.sight.look(self.clock.now_ps())
            self._follow_restarts()
        made = self.dispatcher.decide(request, self.clock.now_ps(), allowed)
        self.metrics.decided(made, perf_counter() - before)
        self._setup.on_decision(made)
        return made

    def _follow_restarts(self) -> None:
        """Go on with the options that publishers really have, once for each that is met."""
        for j, known in enumerate(self._generations):
            generation = self.sight.generation(j)
            if generation != known:
                self._generations[j] = generation
                options = self.sight.options(j)
                if options is not None:
                    self.dispatcher.reconfigure(j, options)
                    self.sight.look(self.clock.now_ps())

    def rewrite(self, body: bytes, asked: Asked, request: Request, instance: int) -> bytes:
        """Return the body that an instance gets: the client's, unless the model has another name there."""
        if asked.model != self._served[instance]:
            content = json.loads(body)
            content["model"] = self._served[instance]
            body = json.dumps(content, separators=(",", ":")).encode()
        return body if self._setup.rewrite is None else self._setup.rewrite(body, request, instance)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if self._stops or self.num_open >= self.live.max_streams:
            self._count(-1, REJECTED)
            reason = "the router stops" if self._stops else f"{self.num_open} requests are open, no more are taken"
            raise ApiError(503, reason, headers={"Retry-After": "1"})
        self.num_open += 1
        try:
            try:
                exchange = await self._understand(http)
            except (ApiError, web.HTTPException):
                self._count(-1, REJECTED)
                raise
            except BaseException:
                self._count(-1, CANCELLED)
                raise
            self.exchanges.add(exchange)
            try:
                return await exchange.run()
            except ApiError as error:
                outcome = exchange.outcome
                outcome.status, outcome.reason = REJECTED, outcome.reason or f"status_{error.status}"
                raise
            except asyncio.CancelledError:
                exchange.outcome.status = CANCELLED
                exchange.outcome.reason = "shutdown" if self._stops else "client_left"
                raise
            finally:
                self.exchanges.discard(exchange)
                self._numbers.discard(exchange.number)
                self._finish(exchange)
        finally:
            self.num_open -= 1

    async def _understand(self, http: web.Request) -> Exchange:
        """Read a request.

        Raises:
            ApiError: it makes no sense.
        """
        try:
            async with asyncio.timeout(self.live.stall_timeout_s):
                body = await http.read()
        except TimeoutError:
            raise ApiError(408, "the body did not come") from None
        asked = parse_request(http.path, body)
        self.candidates(asked.model)
        tpot_ms = header_ms(http.headers, TPOT_HEADER)
        request_id = http.headers.get("X-Request-Id", "")[:_LONGEST_ID] or uuid.uuid4().hex
        number = request_key(request_id)
        while number in self._numbers:  # a client may use one id for several open requests
            request_id = f"{request_id[:_LONGEST_ID]}-{uuid.uuid4().hex[:8]}"
            number = request_key(request_id)
        self._numbers.add(number)
        return Exchange(self, http, body, asked, request_id, number, None if tpot_ms is None else tpot_ms / 1e3)

    def _finish(self, exchange: Exchange) -> None:
        """Account for a request."""
        outcome = exchange.outcome
        outcome.end_ps = self.clock.now_ps()
        made = outcome.made
        instance = -1 if made is None else made.instance
        self._count(instance, outcome.status)
        if outcome.status == "finished" and made is not None:
            e2e_s = (outcome.end_ps - outcome.arrival_ps) / PS_PER_S
            ttft_s = itl_s = None
            if outcome.first_token_ps >= 0:
                ttft_s = (outcome.first_token_ps - outcome.arrival_ps) / PS_PER_S
                if outcome.output_tokens > 1:
                    itl_s = (e2e_s - ttft_s) / (outcome.output_tokens - 1)
            self.metrics.timed(instance, ttft_s, made.predicted_ttft_s, itl_s, e2e_s)
            target_ps = made.request.slo_ttft_ps
            if ttft_s is not None and 0 <= target_ps < ttft_s * PS_PER_S:
                self.metrics.violated("ttft")
            if itl_s is not None and exchange.tpot_s is not None and itl_s > exchange.tpot_s:
                self.metrics.violated("tpot")
        self._setup.on_end(outcome)

    def _count(self, instance: int, status: str) -> None:
        self.ended[status] = self.ended.get(status, 0) + 1
        self.metrics.ended(instance, status)

    # -- the other pages

    def _model_names(self) -> list[str]:
        return [AUTO, *dict.fromkeys(spec.model for spec in self.dispatcher.view.instances)]

    async def _models(self, _: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "simcluster"} for name in self._model_names()]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        now = self.clock.now_ps()
        well = sum(each.may_be_asked(now) for each in self.dispatcher.health)
        status = 503 if self._stops or not well else 200
        return web.json_response({"healthy": well, "instances": len(self._urls), "stops": self._stops}, status=status)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self.metrics.text(self.dispatcher, self.clock.now_ps())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _mean_tokens(world: World) -> list[tuple[int, int]]:
    """Return prompt and answer lengths that stand for requests nobody knows, (j,)."""
    known, group = world.known, world.known.group_of_instance
    prompt = np.rint(known.prompt_tokens.mean(axis=0))[group].astype(int).tolist()
    output = np.rint(known.predicted_output_tokens.mean(axis=0))[group].astype(int).tolist()
    return list(zip(prompt, output, strict=True))
