"""Short ways to build a native engine, drive it and read what happened to each request.

Times in these helpers are milliseconds; the engine itself counts whole picoseconds.
"""

from dataclasses import dataclass, field

from simcluster import _native
from simcluster._native import EndReason, EventKind

MS = 10**9  # picoseconds

_LAST = (EventKind.finished, EventKind.rejected, EventKind.failed)


def u_step(b0: float = 10, b1: float = 1, **others: int) -> _native.StepTimeModel:
    """Return the model of the cases: 10 ms per batch and 1 ms per token; others in picoseconds."""
    model = _native.StepTimeModel()
    model.b0 = round(b0 * MS)
    model.b1 = round(b1 * MS)
    for name, value in others.items():
        setattr(model, name, value)
    return model


def config(**options: object) -> _native.SchedulerConfig:
    """Return the options that the cases assume, with these changed.

    The defaults: synchronous loop, no prefix caching, and more blocks, tokens and seats than a case
    can use. `usable_blocks` is the size of the pool without its null block.
    """
    native = _native.SchedulerConfig()
    native.async_scheduling = False
    native.enable_prefix_caching = False
    native.num_gpu_blocks = 100_001
    usable = options.pop("usable_blocks", None)
    if isinstance(usable, int):
        native.num_gpu_blocks = usable + 1
    for name, value in options.items():
        getattr(native, name)  # a misspelt option is an error
        setattr(native, name, value)
    return native


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a test."""

    at: float
    prompt: int
    output: int
    cancel: float | None = None
    max_tokens: int = -1
    by_length: bool = False
    priority: int = 0
    arrival_time: int = 0
    runs: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Story:
    """What became of one request."""

    at: float = 0
    scheduled: float | None = None
    hit_tokens: int | None = None
    tokens: list[float] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    end: float | None = None
    kind: EventKind | None = None  # finished, rejected or failed; None while resident
    reason: EndReason = EndReason.none

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.at

    @property
    def e2e(self) -> float:
        assert self.end is not None
        return self.end - self.at

    @property
    def wait(self) -> float:
        assert self.scheduled is not None
        return self.scheduled - self.at


def submit(engine: _native.Engine, number: int, ask: Ask) -> bool:
    """Hand over the request under this number, and its cancellation."""
    accepted = engine.submit(
        number,
        ask.prompt,
        ask.output,
        round(ask.at * MS),
        max_tokens=ask.max_tokens,
        ends_by_length=ask.by_length,
        priority=ask.priority,
        arrival_time=ask.arrival_time,
        prompt=list(ask.runs),
    )
    if ask.cancel is not None:
        engine.cancel(number, round(ask.cancel * MS))
    return accepted


def start(
    options: _native.SchedulerConfig,
    *asks: Ask,
    model: _native.StepTimeModel | None = None,
    noise: _native.StepNoise | None = None,
) -> _native.Engine:
    """Return an engine with these requests handed over, numbered from 0; nothing has run yet."""
    engine = _native.Engine(options, model or u_step(), noise, record_tokens=True, record_steps=True)
    for number, ask in enumerate(asks):
        submit(engine, number, ask)
    return engine


def stories(engine: _native.Engine, asks: tuple[Ask, ...]) -> list[Story]:
    """Return what became of each request by the events since the last call."""
    found = [Story(at=ask.at) for ask in asks]
    for number, at, value, kind, reason in engine.take_events().tolist():
        story = found[number]
        if kind == EventKind.scheduled:
            story.scheduled, story.hit_tokens = at / MS, value
        elif kind == EventKind.token:
            story.tokens.append(at / MS)
        elif kind == EventKind.preempted:
            story.preempted.append(at / MS)
        elif kind in _LAST:
            assert story.kind is None, "a request ends once"
            story.end, story.kind, story.reason = at / MS, EventKind(kind), EndReason(reason)
    return found


def simulate(options: _native.SchedulerConfig, *asks: Ask, model: _native.StepTimeModel | None = None) -> list[Story]:
    """Run the requests to the end and return what became of each."""
    engine = start(options, *asks, model=model)
    engine.drain()
    return stories(engine, asks)


def steps(engine: _native.Engine) -> list[tuple[float, float, int]]:
    """Return (start, end, tokens) of every step since the last call."""
    return [(row[1] / MS, row[2] / MS, row[3]) for row in engine.take_steps().tolist()]
