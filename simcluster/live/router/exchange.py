"""One request through the router: decided, sent, passed on, and accounted for however it ends."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from simcluster import _native
from simcluster.live.openai_api import ApiError, Asked, error_body
from simcluster.live.router.core import RouterCore
from simcluster.live.router.dispatcher import LiveDecision, NoInstanceError
from simcluster.live.router.meter import Meter
from simcluster.live.router.outcome import FAILED, FINISHED, REJECTED, Outcome
from simcluster.live.router.own import OwnRequest
from simcluster.live.router.relay import Passage
from simcluster.live.router.upstream import Answer, AttemptError, passed_on
from simcluster.request import Request
from simcluster.routers.base import SHED
from simcluster.units import PS_PER_S

__all__ = ["Exchange"]

_RETRY_AFTER: Final = {"Retry-After": "1"}


class _Passed(web.StreamResponse):
    """An answer whose head leaves together with its first piece, which is there already."""

    _send_headers_immediately = False


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its way through a router.

    Attributes:
        core: the router.
        http: the client's request.
        body: as it came.
        asked: what it asks for.
        request_id: the client's, or one that was made for it.
        number: stands for it in snapshots.
        tpot_s: its target for the time per token [s], or None.
        outcome: how it ends.
        moved: something has, since somebody last looked.
        still_s: when it was last seen that something had [s of `Patience.now_s`]; None: nothing flows yet.
        stalled: "" or who kept the other waiting: `upstream` or `client`.
    """

    core: RouterCore
    http: web.Request
    body: bytes
    asked: Asked
    request_id: str
    number: int
    tpot_s: float | None = None
    outcome: Outcome = field(init=False)
    moved: bool = False
    still_s: float | None = None
    stalled: str = ""
    _writing: bool = False
    _passage: Passage | None = None
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.request_id)

    async def run(self) -> web.StreamResponse:
        """Answer the request.

        Raises:
            ApiError: nobody could.
        """
        core, outcome = self.core, self.outcome
        request = await core.requests.build(
            self.number, self.asked, self.http.headers, self.request_id, core.clock.now_ps
        )
        outcome.arrival_ps = request.arrival_ps
        headers = self._headers()
        allowed = list(core.candidates(self.asked.model))
        failure: AttemptError | None = None
        while outcome.attempts <= core.setup.scenario.live.retries:
            try:
                made = core.decide(request, tuple(allowed))
            except NoInstanceError:
                break
            outcome.made = made
            if made.instance == SHED:
                raise self._turned_away(503, "shed", "no instance is expected to answer in time")
            outcome.attempts += 1
            if failure is not None:
                core.metrics.retried(failure.reason)
            try:
                return await self._attempt(request, made, headers)
            except AttemptError as error:
                failure = error
                allowed[made.instance] = False
        return self._given_up(failure)

    def _headers(self) -> CIMultiDict[str]:
        headers = passed_on(self.http.headers)
        headers["X-Request-Id"] = self.request_id
        headers.popall("Content-Encoding", None)  # the body was unpacked
        headers["Accept-Encoding"] = "identity"  # so that tokens can be counted
        return headers

    def _turned_away(self, status: int, reason: str, text: str) -> ApiError:
        self.outcome.status, self.outcome.reason = REJECTED, reason
        return ApiError(status, text, headers=_RETRY_AFTER)

    def _given_up(self, failure: AttemptError | None) -> web.Response:
        """Answer with what the last server said, or with an error of the router's own."""
        if failure is None:
            raise self._turned_away(503, "no_instance", "no instance may be asked; try again")
        self.outcome.status, self.outcome.reason = FAILED, failure.reason
        if failure.answer is not None:
            return web.Response(
                status=failure.answer.status, headers=self._described(failure.answer.headers), body=failure.answer.first
            )
        status = 504 if failure.reason == "timeout" else 502
        error = ApiError(status, f"{self.outcome.attempts} servers were asked, none answered ({failure.reason})")
        return web.json_response(error_body(error), status=status, headers=self._described(CIMultiDict(_RETRY_AFTER)))

    async def _attempt(self, request: Request, made: LiveDecision, headers: CIMultiDict[str]) -> web.StreamResponse:
        """Ask one server, and pass its answer on.

        Raises:
            AttemptError: it did not begin to answer.
        """
        core, j = self.core, made.instance
        health = core.dispatcher.health[j]
        health.asked(self.number)
        own = core.dispatcher.sent(request, j, core.clock.now_ps())
        try:
            body = core.rewrite(self.body, self.asked, request, j)
            answer = await core.upstreams.ask(j, self.http.path, body, headers, stream=self.asked.stream)
        except BaseException as error:
            if isinstance(error, AttemptError) and error.fault:
                health.failed(self.number, core.clock.now_ps(), core.setup.scenario.live, at_once=error.gone)
            health.gave_up(self.number)
            core.dispatcher.ended(self.number, j, core.clock.now_ps())
            raise
        health.answered(self.number)
        try:
            return await self._pass_on(answer, own, j)
        finally:
            answer.close()
            core.dispatcher.ended(self.number, j, core.clock.now_ps())

    async def _pass_on(self, answer: Answer, own: OwnRequest, instance: int) -> web.StreamResponse:
        """Give the client what comes, byte for byte; if it breaks off, so does the client's answer."""
        outcome, core = self.outcome, self.core
        response = _Passed(status=answer.status, headers=self._described(answer.headers))
        meter = Meter(streams=answer.streams)
        self._task = asyncio.current_task()
        self.moved = True
        try:
            last = await self._pump(answer, response, meter, own, instance)
            meter.finish()
            self._writing = self._writing or bool(last)
            await response.write_eof(last)
            self._judge(answer, meter)
        except AttemptError as error:
            core.dispatcher.health[instance].failed(self.number, core.clock.now_ps(), core.setup.scenario.live)
            self._break_off(response, f"upstream_{error.reason}")
        except asyncio.CancelledError:
            if not self.stalled:
                self._judge_left(answer, meter)
                raise
            assert self._task is not None  # set above
            self._task.uncancel()
            if self.stalled == "upstream":
                core.dispatcher.health[instance].failed(self.number, core.clock.now_ps(), core.setup.scenario.live)
            self._break_off(response, f"{self.stalled}_stalled")
        except (ConnectionError, OSError) as error:  # of the client's side: the server's are AttemptErrors
            self._judge_left(answer, meter)
            raise asyncio.CancelledError from error
        finally:
            self._task = None
            outcome.output_tokens = meter.tokens
            outcome.server_counted = meter.completion_tokens is not None
        return response

    async def _pump(
        self, answer: Answer, response: web.StreamResponse, meter: Meter, own: OwnRequest, instance: int
    ) -> bytes:
        """Pass an answer on but for its last piece, which is to leave together with the end.

        Raises:
            AttemptError: the server broke off.
            ConnectionError: the client has left.
        """
        core = self.core
        await response.prepare(self.http)
        client = self.http.transport
        if client is None:
            raise ConnectionResetError
        in_chunks = response.headers.get("Transfer-Encoding") == "chunked"

        def came() -> None:
            self.moved = True
            if meter.events > own.tokens:
                now = core.clock.now_ps()
                if own.tokens == 0:
                    self.outcome.first_token_ps = now
                    core.dispatcher.first_token(self.number, instance, now)
                own.tokens = meter.events
                core.sight.tokens_came(instance, now)

        piece = answer.first
        while True:
            meter.feed(piece)
            came()  # before a client that does not read may hold it up
            if answer.is_whole:
                break
            self._writing = True
            await response.write(piece)  # the first one together with the head
            self._writing = False
            self.moved = True
            if meter.events and answer.connection is not None:
                self._passage = core.relay.open(answer.connection, client, meter.counter, came, in_chunks=in_chunks)
            if self._passage is not None:
                piece = await self._flow(self._passage)
                break
            piece = await answer.piece()
        self._writing = client.get_write_buffer_size() > 0  # the client has not read all
        return piece

    async def _flow(self, passage: Passage) -> bytes:
        """Let the rest of the answer flow but for its last piece.

        Raises:
            AttemptError: the server broke off.
            ConnectionResetError: the client has left.
        """
        try:
            why, last = await passage.ended
        finally:
            self._writing = passage.waits_for_client
            passage.close()
        if why == _native.FlowEnd.client_left:
            self._writing = True
            raise ConnectionResetError
        if why != _native.FlowEnd.whole:
            raise AttemptError("disconnected")
        return last

    def _judge(self, answer: Answer, meter: Meter) -> None:
        outcome = self.outcome
        if answer.status >= 400:
            outcome.status, outcome.reason = REJECTED, f"status_{answer.status}"
        elif meter.error:
            outcome.status, outcome.reason = FAILED, "engine_error"
        elif not meter.is_done:
            outcome.status, outcome.reason = FAILED, "no_end"
        else:
            outcome.status, outcome.reason = FINISHED, ""

    def _judge_left(self, answer: Answer, meter: Meter) -> None:
        """Judge an answer whose client left: one that has read `[DONE]` need not wait until the connection ends."""
        if answer.streams and not self._writing:
            if not meter.is_done:
                meter.finish()
            if meter.is_done:
                self._judge(answer, meter)

    def _break_off(self, response: web.StreamResponse, reason: str) -> None:
        """End the client's answer so that nobody takes it for a whole one."""
        self.outcome.status, self.outcome.reason = FAILED, reason
        response.force_close()
        if self.http.transport is not None:
            self.http.transport.abort()

    def stall(self) -> None:
        """Give the answer up, since whoever is to move has not for too long."""
        if self._task is not None:
            transport = self.http.transport
            unread = self._writing or (transport is not None and transport.get_write_buffer_size() > 0)
            unread = unread or (self._passage is not None and self._passage.waits_for_client)
            self.stalled = "client" if unread else "upstream"
            self._task.cancel()

    def _described(self, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        """Return an answer's headers, and what was decided."""
        made = self.outcome.made
        if made is not None:
            view = self.core.dispatcher.view
            headers["x-simcluster-policy"] = self.core.setup.policy
            headers["x-simcluster-instance"] = view.instances[made.instance].name
            headers["x-simcluster-model"] = view.instances[made.instance].model
            if made.predicted_ttft_s is not None:
                headers["x-simcluster-predicted-ttft-ms"] = f"{1e3 * made.predicted_ttft_s:.3f}"
            if made.age_ps >= 0:
                headers["x-simcluster-snapshot-age-ms"] = f"{1e3 * made.age_ps / PS_PER_S:.3f}"
            if made.fallback:
                headers["x-simcluster-fallback"] = made.fallback
        return headers
