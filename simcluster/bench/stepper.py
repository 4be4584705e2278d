"""One instance stepped in plain Python, request by request: what the engine is compared with.

It follows the engine's default rules (first come, first served; chunked prefill; admission only if the whole prompt
fits; the asynchronous loop) for requests that end by themselves, and steps exactly as the engine does. It knows no
preemption, so it is for workloads that never run out of KV blocks.
"""

from collections import deque
from dataclasses import dataclass, field

from simcluster import _native
from simcluster.errors import SimulationError

__all__ = ["PlainStepper", "Step"]

Step = tuple[int, int, int, int, int, int, int]
"""Start, end [ps], tokens, decodes, decode context, prefill attention, prefills."""


@dataclass(slots=True)
class _Request:
    """A request; its known tokens are the prompt and what was sampled, delivered or not."""

    number: int
    prompt: int
    output: int
    at: int
    known: int
    computed: int = 0
    delivered: int = 0
    blocks: int = 0


@dataclass(slots=True)
class _Flight:
    """A batch, who gets a token from it, and when it ends [ps]."""

    tokens: int = 0
    prefill_tokens: int = 0
    context: int = 0
    attention: int = 0
    prefills: int = 0
    end: int = 0
    sampling: list[_Request] = field(default_factory=list)


class PlainStepper:
    """An instance under default rules.

    Attributes:
        steps: what was executed, if recorded.
        first_tokens: (request, instant [ps]) of each first output token.
        ends: (request, instant [ps]) of each end.
        num_steps: batches executed.
    """

    def __init__(
        self, config: _native.SchedulerConfig, model: _native.StepTimeModel, *, record_steps: bool = False
    ) -> None:
        self.steps: list[Step] = []
        self.first_tokens: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []
        self.num_steps = 0
        self._record = record_steps
        self._budget, self._seats = config.max_num_batched_tokens, config.max_num_seqs
        self._block, self._free = config.block_size, config.num_gpu_blocks - 1
        self._terms = (model.b0, model.b1, model.b1x, model.b2, model.b3, model.b4, model.b5)
        self._hinge, self._host = model.hinge_tokens, model.host
        self._inbox: deque[_Request] = deque()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._flights: deque[_Flight] = deque()
        self._clock = self._device_free = 0
        self._waits_for_batch = self._unflushed_ends = False

    def submit(self, number: int, prompt_tokens: int, output_tokens: int, at: int) -> None:
        """Hand over a request that reaches the engine at an instant [ps], in order of time."""
        self._inbox.append(_Request(number, prompt_tokens, output_tokens, at, known=prompt_tokens))

    def advance_to(self, t: int) -> None:
        """Process every step that ends at or before t [ps].

        Raises:
            SimulationError: the KV blocks have run out.
        """
        while True:
            if self._waits_for_batch:
                if self._flights[0].end > t:
                    return
                self._process_results()
                continue
            at = self._clock
            if not (self._flights or self._has_requests()):
                if not self._inbox:
                    return
                at = max(at, self._inbox[0].at)
            if at >= t:
                return
            self._clock = at
            self._iterate()

    def _has_requests(self) -> bool:
        return bool(self._running or self._waiting or self._unflushed_ends)

    def _iterate(self) -> None:
        """Take arrivals and make one pass; then wait for the oldest batch unless there is room for another."""
        while self._inbox and self._inbox[0].at <= self._clock:
            self._waiting.append(self._inbox.popleft())
        if self._has_requests():
            self._schedule()
            if len(self._flights) < 2 and self._has_requests():
                return
        self._waits_for_batch = bool(self._flights)

    def _schedule(self) -> None:
        """Make one pass: running requests catch up in order, then waiting ones are admitted."""
        batch = _Flight()
        put, budget, block, sampling = self._put, self._budget, self._block, batch.sampling
        for request in self._running:
            if batch.tokens == budget:
                break
            position = request.computed
            if position < request.prompt:
                put(request, batch)
                continue
            batch.context += position  # a decode; what _put does, without a call
            batch.tokens += 1
            request.computed = end = position + 1
            if end > request.blocks * block:
                request.blocks += 1
                self._free -= 1
            request.known = end + 1
            sampling.append(request)
        if self._free < 0:
            raise SimulationError("the plain stepper has run out of KV blocks; give it more, or less load")
        while self._waiting and batch.tokens < self._budget and len(self._running) < self._seats:
            request = self._waiting[0]
            if -(-request.prompt // self._block) > self._free:
                break
            self._running.append(self._waiting.popleft())
            self._put(request, batch)
        self._unflushed_ends = False
        self._launch(batch)

    def _put(self, request: _Request, batch: _Flight) -> None:
        """Give a request that is not through its prompt the tokens and blocks that it has to catch up on."""
        position = request.computed
        tokens = min(request.known - position, self._budget - batch.tokens)
        batch.prefills += 1
        batch.prefill_tokens += tokens
        batch.attention += tokens * position + tokens * (tokens + 1) // 2
        end = request.computed = position + tokens
        if end > request.blocks * self._block:
            needed = -(-end // self._block)
            self._free -= needed - request.blocks
            request.blocks = needed
        batch.tokens += tokens
        if end == request.known:
            request.known = end + 1
            batch.sampling.append(request)

    def _launch(self, batch: _Flight) -> None:
        """Put a batch on the accelerator behind the one that runs; an empty one takes no time."""
        start = end = max(self._clock, self._device_free)
        tokens, context = batch.tokens, batch.context
        if tokens:
            b0, b1, b1x, b2, b3, b4, b5 = self._terms
            time = b0 + b1 * tokens + b1x * max(tokens - self._hinge, 0) + b2 * context
            if batch.prefills:
                time += b3 * batch.attention + b4 * context + b5 * batch.prefills
            end += max(time, self._host)
            self.num_steps += 1
            if self._record:
                decodes = tokens - batch.prefill_tokens
                self.steps.append((start, end, tokens, decodes, context, batch.attention, batch.prefills))
        self._device_free = batch.end = end
        self._flights.append(batch)

    def _process_results(self) -> None:
        done = self._flights.popleft()
        now = self._clock = max(self._clock, done.end)
        self._waits_for_batch = False
        for request in done.sampling:
            delivered = request.delivered = request.delivered + 1
            if delivered == 1:
                self.first_tokens.append((request.number, now))
            if delivered == request.output:  # beyond it: a wasted decode of one that has ended
                self._running.remove(request)
                self._free += request.blocks
                self._unflushed_ends = True
                self.ends.append((request.number, now))
