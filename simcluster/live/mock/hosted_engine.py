"""A simulated engine in wall-clock time: it wakes at every step end, and streams get their tokens."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simcluster import _native
from simcluster.backends.vllm_publisher import request_key
from simcluster.instance import InstanceSpec, TrueModel
from simcluster.live.alarm import Alarm
from simcluster.live.clock import LiveClock
from simcluster.live.mock.tally import Tally
from simcluster.units import PS_PER_S

__all__ = ["HostedEngine", "Stream"]

_FIRST_TOKEN = int(_native.EventKind.first_token)
_TOKEN = int(_native.EventKind.token)
_SCHEDULED = int(_native.EventKind.scheduled)
_FINISHED = int(_native.EventKind.finished)
_FAILED = int(_native.EventKind.failed)
_SEEN = (_FIRST_TOKEN, _TOKEN, _FINISHED, _FAILED)
_STOP = int(_native.EndReason.stop)


@dataclass(slots=True, eq=False)
class Stream:
    """The tokens of one request, as the client of the server sees them come.

    Attributes:
        sent_ps: when the server got it [ps].
        prompt_tokens: its length [tokens].
        tokens: so many have come.
        finish: why it ended: `stop`, `length`, `failed`, or `abort` when its client has left; None before.
        scheduled_ps: when it was first scheduled [ps].
        first_token_ps: when the first token was out [ps].
        end_ps: when the last one was [ps].
    """

    sent_ps: int
    prompt_tokens: int
    tokens: int = 0
    finish: str | None = None
    scheduled_ps: int | None = None
    first_token_ps: int | None = None
    end_ps: int | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Wait until more tokens or the end have come since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def changed(self) -> None:
        """Wake up who waits."""
        self._changed.set()


class HostedEngine:
    """One engine and its open requests.

    Attributes:
        spec: the instance.
        engine: the native engine.
        num_steps: steps that have ended.
        on_end: who is told of every request that has ended.
        num_tokens: tokens that clients were sent.
        lateness_ps: how late steps were told of [simulated ps].
    """

    def __init__(
        self,
        spec: InstanceSpec,
        true_model: TrueModel,
        clock: LiveClock,
        on_end: Callable[[Stream], None],
        on_change: Callable[[_native.Engine], None] = lambda _: None,
    ) -> None:
        """Host an engine.

        Args:
            spec: what it is.
            true_model: how fast it is.
            clock: the time of all engines of a cluster.
            on_end: is told of every request that has ended.
            on_change: is given the engine after its state has changed, for publishing.
        """
        self.spec = spec
        self.engine = _native.Engine(
            spec.engine, true_model.step_time, true_model.noise, record_tokens=True, record_steps=True
        )
        self.num_steps = self.num_tokens = 0
        self.lateness_ps = Tally()
        self._clock = clock
        self.on_end = [on_end]
        self._on_change = on_change
        self._streams: dict[int, Stream] = {}
        self._inside: set[int] = set()  # keys that the engine has, those of clients who have just left among them
        self._outbox: deque[tuple[int, int, int, int, int]] = deque()  # (seen [ps], id, value, kind, reason)
        self._alarm = Alarm(self._ring)
        self._due_s = math.inf

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
        *,
        ends_by_length: bool,
        priority: int = 0,
        prompt: Sequence[tuple[int, int]] = (),
        reach_ps: int = 0,
    ) -> tuple[int, Stream] | None:
        """Send a request to the engine.

        Args:
            request_id: the client's; snapshots have its `request_key`, as those of vLLM do.
            prompt_tokens: 1 or more.
            output_tokens: tokens after which it ends by itself.
            max_tokens: its limit, -1 for the context's.
            ends_by_length: it ends by its limit alone.
            priority: smaller is served earlier.
            prompt: runs of token ids (first, count); empty: it shares nothing with others.
            reach_ps: when it is there [ps], before the front end; now if that has passed.

        Returns:
            A key for `cancel`, and the stream; None if the engine rejects it.
        """
        now = max(self._clock.now_ps(), self.engine.now)
        self._turn(now)  # what has ended by now is told before, so that time only goes forward
        key = self._free_key(request_id)
        at = self.spec.engine_arrival_ps(max(now, reach_ps), prompt_tokens)
        if not self.engine.submit(
            key, prompt_tokens, output_tokens, at, max_tokens, ends_by_length, priority, now, prompt
        ):
            self.engine.take_events()
            return None
        self._inside.add(key)
        stream = self._streams[key] = Stream(sent_ps=now, prompt_tokens=prompt_tokens)
        self._on_change(self.engine)
        self._arm()
        return key, stream

    def _free_key(self, request_id: str) -> int:
        """Return the key of an id; one that the engine has already, as after a retry, gets another."""
        names = itertools.chain([request_id], (f"{request_id}#{number}" for number in itertools.count(2)))
        return next(key for key in map(request_key, names) if key not in self._inside)

    def cancel(self, key: int) -> None:
        """Note that the client has left; nothing happens if the request has ended."""
        stream = self._streams.pop(key, None)
        if stream is not None:
            now = max(self._clock.now_ps(), self.engine.now)
            self.engine.cancel(key, now)
            stream.finish, stream.end_ps = "abort", now
            self._ended(stream)
            self._on_change(self.engine)
            self._arm()

    def close(self) -> None:
        """Stop; open streams get no more tokens."""
        self._alarm.close()

    def wake(self) -> None:
        """Bring the engine up to this instant."""
        self._turn(max(self._clock.now_ps(), self.engine.now))
        self._arm()

    def _turn(self, now: int) -> None:
        before = self.engine.num_steps
        changes = self.engine.next_change <= now
        self.engine.advance_to(now)
        hop = self.spec.output_hop_ps
        for key, at, value, kind, reason in self.engine.take_events().tolist():
            if kind == _SCHEDULED and key in self._streams:
                self._streams[key].scheduled_ps = at
            elif kind in _SEEN:
                self._outbox.append((at + hop, key, value, kind, reason))
        if self.engine.num_steps != before:
            self._account(now)
        if changes:
            self._on_change(self.engine)
        while self._outbox and self._outbox[0][0] <= now:
            self._tell(*self._outbox.popleft())

    def _account(self, now: int) -> None:
        for end in self.engine.take_steps()[:, 2].tolist():
            self.num_steps += 1
            self.lateness_ps.add(now - end)

    def _arm(self) -> None:
        """Wake up at the next step end, or when a client is to see something."""
        due_ps = self.engine.next_change
        if self._outbox:
            due_ps = min(due_ps, self._outbox[0][0])
        due_s = self._clock.loop_time(due_ps)
        if due_s != self._due_s:
            self._due_s = due_s
            self._alarm.set(None if due_s == math.inf else due_s)

    def _ring(self) -> None:
        self._due_s = math.inf
        self.wake()

    def _tell(self, at: int, key: int, value: int, kind: int, reason: int) -> None:
        if kind in (_FINISHED, _FAILED):  # nothing more of it comes
            self._inside.discard(key)
        stream = self._streams.get(key)
        if stream is None:  # its client has left
            return
        if kind in (_FINISHED, _FAILED):
            del self._streams[key]
            stream.end_ps = at
            stream.finish = "failed" if kind == _FAILED else "stop" if reason == _STOP else "length"
            self._ended(stream)
        else:
            stream.first_token_ps = at if stream.first_token_ps is None else stream.first_token_ps
            self.num_tokens += value - stream.tokens
            stream.tokens = value
        stream.changed()

    def _ended(self, stream: Stream) -> None:
        for told in self.on_end:
            told(stream)

    def share_late(self, tolerance_s: float) -> float | None:
        """Return the share of steps that were told of more than so many simulated seconds late; None before any."""
        return self.lateness_ps.share_above(tolerance_s * PS_PER_S)
