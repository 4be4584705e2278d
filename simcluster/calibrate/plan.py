"""What a recording runs: which requests, in which order, for how long.

A plan is made of phases, each with a share of the time. A phase runs batches of requests one after another, or keeps
a number of requests in flight, or lets requests arrive at random at a share of the rate that the saturation phase has
measured. Everything is drawn from a seed; how far a phase gets in its time depends on the machine.

    warmup        every batch size and prompt length once, since first times are slower: kernels, graphs, caches
    lone_prefill  one prompt after another: the time of prefill tokens by prompt length and context
    decode        batches of equal context: the time of decodes by batch and context
    mixed         prompts among decodes, with few to many requests in flight
    saturation    more requests than run at once: prefill throughput, mean decode step, service rate, parallelism
    served        the four tasks arriving at random, at several loads: what a simulation is compared with

Only the standard library and numpy are needed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from simcluster.errors import ConfigError
from simcluster.rng import seeded

__all__ = ["PHASES", "TASKS", "Limits", "Phase", "Plan", "Shape", "Task", "build_plan"]

Shape = tuple[int, int]
"""Prompt tokens and output tokens of a request."""

PHASES = ("warmup", "lone_prefill", "decode", "mixed", "saturation", "served")
_SHARES = {"warmup": 0.1, "lone_prefill": 0.12, "decode": 0.28, "mixed": 0.15, "saturation": 0.15, "served": 0.2}
_LOADS = (0.5, 0.7, 0.9)  # of the served mix, as shares of the service rate
_LENGTHS = sorted({2**power for power in range(16)} | {96 * 2**power for power in range(9)})
_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384)
_DECODE_STEPS = 16  # of a full batch at one point of the grid
_MOST_CHUNKS = 32  # steps that may be spent to bring one point of the grid to its context
_MIX_TOKENS = 8_000  # the longest common request of the four tasks


@dataclass(frozen=True, slots=True)
class Task:
    """Log-normal lengths of a kind of request [tokens]."""

    prompt: float
    prompt_sigma: float
    answer: float
    answer_sigma: float


# Medians and spreads of traces/recipes/quickstart.yaml.
TASKS = {
    "alpaca": Task(45, 0.55, 160, 0.6),
    "hotpotqa": Task(1380, 0.27, 80, 0.5),
    "govreport": Task(7000, 0.45, 500, 0.25),
    "writingprompts": Task(55, 0.45, 750, 0.3),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step.
        max_model_len: prompt and output of a request [tokens].
        num_gpu_blocks: blocks of the KV cache, the null block included; None: not known before the engine is up.
        block_size: tokens of a block.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_gpu_blocks: int | None = None
    block_size: int = 16

    def fits(self, shapes: list[Shape]) -> bool:
        """Whether requests can be resident together without a preemption."""
        if len(shapes) > self.max_num_seqs or any(sum(shape) > self.max_model_len for shape in shapes):
            return False
        if self.num_gpu_blocks is None:
            return True
        return sum(math.ceil(sum(shape) / self.block_size) for shape in shapes) <= self.num_gpu_blocks - 1

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request that can run alone [tokens]."""
        held = self.max_model_len
        if self.num_gpu_blocks is not None:
            held = min(held, (self.num_gpu_blocks - 1) * self.block_size)
        return held


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the plan.

    Attributes:
        name: one of `PHASES`.
        seconds: how long it may take; requests in flight at the end are waited for.
        batches: what is submitted together, each batch once the one before has ended; a round of the grid each.
        levels: how many requests to keep in flight, one after another, each for an equal part of the time.
        loads: arrival rates, as shares of the measured service rate, each for an equal part of the time.
        summary: what it does, for people.
    """

    name: str
    seconds: float
    batches: tuple[tuple[Shape, ...], ...] = ()
    levels: tuple[int, ...] = ()
    loads: tuple[float, ...] = ()
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Phases in order, and what was left out, in words."""

    phases: tuple[Phase, ...]
    skipped: tuple[str, ...]
    limits: Limits
    seed: int

    @property
    def seconds(self) -> float:
        """Time that all phases may take [s]."""
        return sum(phase.seconds for phase in self.phases)

    def rounds(self, phase: Phase) -> Iterator[tuple[Shape, ...]]:
        """Yield the batches of a phase again and again, shuffled anew each time."""
        rng = seeded(self.seed, PHASES.index(phase.name), 0)
        while True:
            for place in rng.permutation(len(phase.batches)).tolist():
                yield phase.batches[place]

    def mixed(self) -> Iterator[Shape]:
        """Yield requests of very different lengths."""
        rng = seeded(self.seed, PHASES.index("mixed"), 1)
        longest = max(self.limits.longest * 3 // 4, 2)
        while True:
            prompt = round(math.exp(rng.uniform(math.log(4), math.log(max(min(longest, 8192), 5)))))
            yield self._clipped(prompt, round(math.exp(rng.uniform(math.log(2), math.log(64)))))

    def served(self, phase: Phase) -> Iterator[Shape]:
        """Yield requests of the four tasks, equally often.

        Where the longest do not fit, all lengths are raised to a power below 1: short tasks stay short, long ones long.
        """
        rng = seeded(self.seed, PHASES.index(phase.name), 2)
        power = min(1.0, math.log(self.limits.longest / 2) / math.log(_MIX_TOKENS))
        tasks = list(TASKS.values())
        while True:
            task = tasks[int(rng.integers(len(tasks)))]
            prompt = task.prompt * math.exp(task.prompt_sigma * rng.standard_normal())
            answer = task.answer * math.exp(task.answer_sigma * rng.standard_normal())
            yield self._clipped(round(prompt**power), round(answer**power))

    def gaps(self, phase: Phase) -> Iterator[float]:
        """Yield times between arrivals in units of their mean."""
        rng = seeded(self.seed, PHASES.index(phase.name), 3)
        while True:
            yield float(rng.exponential())

    def _clipped(self, prompt: int, answer: int) -> Shape:
        prompt = min(max(prompt, 4), self.limits.longest - 2)
        return prompt, min(max(answer, 2), self.limits.longest - prompt)


def build_plan(
    limits: Limits,
    *,
    seed: int = 0,
    minutes: float = 10.0,
    phases: tuple[str, ...] = PHASES,
    loads: tuple[float, ...] = _LOADS,
) -> Plan:
    """Plan a recording.

    Args:
        limits: what the engine can hold.
        seed: of all draws.
        minutes: how long all phases may take together [min].
        phases: those wanted; the others' time goes to them.
        loads: of the served phase, as shares of the service rate.

    Raises:
        ConfigError: no such phase, a time or load is not above 0, or the engine can hold next to nothing.
    """
    unknown = [name for name in phases if name not in PHASES]
    if unknown or not phases:
        found = unknown[0] if unknown else "none"
        raise ConfigError(f"phase {found}: no such phase; take some of {', '.join(PHASES)}")
    if "served" in phases and "saturation" not in phases:
        raise ConfigError("phase served without saturation: the arrival rates are shares of the rate measured there")
    if not (math.isfinite(minutes) and minutes > 0):
        raise ConfigError(f"minutes = {minutes:g}; must be above 0")
    if not loads or not all(math.isfinite(load) and load > 0 for load in loads):
        raise ConfigError(f"loads = {', '.join(f'{load:g}' for load in loads) or 'none'}; each must be above 0")
    if limits.longest < 32:
        raise ConfigError(
            f"the engine holds requests of {limits.longest} tokens only; a recording needs 32; raise max_model_len or "
            "the KV cache"
        )
    share = sum(_SHARES[name] for name in phases)
    made, skipped = [], []
    for name in PHASES:
        if name in phases:
            phase, left_out = _phase(name, 60 * minutes * _SHARES[name] / share, limits, loads)
            made.append(phase)
            skipped += left_out
    return Plan(tuple(made), tuple(skipped), limits, seed)


def _phase(name: str, seconds: float, limits: Limits, loads: tuple[float, ...]) -> tuple[Phase, list[str]]:
    if name == "warmup":
        batches = _warm_up(limits)
        return Phase(name, seconds, batches, summary=f"{len(batches)} batches, each shape once"), []
    if name == "lone_prefill":
        lengths, skipped = _lengths(limits)
        text = f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]:,} tokens, alone, again and again"
        return Phase(name, seconds, tuple(((length, 2),) for length in lengths), summary=text), skipped
    if name == "decode":
        grid, skipped = _decode_grid(limits)
        text = f"{len(grid)} batches of 1 to {max(map(len, grid))} requests with equal contexts, again and again"
        return Phase(name, seconds, grid, summary=text), skipped
    if name == "mixed":
        levels = tuple(level for level in _BATCHES[1:] if level <= limits.max_num_seqs) or (1,)
        text = f"random requests, {levels[0]} to {levels[-1]} in flight"
        return Phase(name, seconds, levels=levels, summary=text), []
    if name == "saturation":
        level = limits.max_num_seqs + max(limits.max_num_seqs // 4, 4)
        text = f"the four tasks, {level} requests in flight of which {limits.max_num_seqs} run"
        return Phase(name, seconds, levels=(level,), summary=text), []
    text = f"the four tasks, Poisson arrivals at {', '.join(f'{load:.0%}' for load in loads)} of the service rate"
    return Phase(name, seconds, loads=loads, summary=text), []


def _warm_up(limits: Limits) -> tuple[tuple[Shape, ...], ...]:
    """Every decode batch from all requests down to one, and prompts of every length of the grid.

    Requests of a staircase end one step after another, so one batch meets every batch size.
    """
    count = limits.max_num_seqs
    while count > 1 and not limits.fits(_staircase(count)):
        count -= 1
    lengths, _ = _lengths(limits)
    return (tuple(_staircase(count)), *(((length, 2),) for length in lengths))


def _staircase(count: int) -> list[Shape]:
    return [(4, 2 + place) for place in range(count)]


def _lengths(limits: Limits) -> tuple[list[int], list[str]]:
    """Return the prompt lengths of the grid, the longest possible one last, and what does not fit."""
    longest = limits.longest - 2
    lengths = [length for length in _LENGTHS if length < longest]
    skipped = []
    beyond = [length for length in _LENGTHS if longest < length <= limits.max_model_len - 2]
    if beyond:
        skipped.append(f"lone prompts beyond {longest:,} tokens: the KV cache holds no more")
    if longest <= 2 * lengths[-1]:
        lengths.append(longest)
    return lengths, skipped


def _decode_grid(limits: Limits) -> tuple[tuple[tuple[Shape, ...], ...], list[str]]:
    """Return batches that decode together for some steps, and what does not fit.

    Prompts enter chunk by chunk, so the first request must go on until the last one has begun.
    """
    grid, too_big, too_long = [], [], []
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if batch > limits.max_num_seqs or context > limits.max_model_len:
                continue
            chunks = math.ceil(batch * context / limits.max_num_batched_tokens)
            shapes = [(context, _DECODE_STEPS + chunks)] * batch
            if context + _DECODE_STEPS + chunks > limits.max_model_len:
                continue
            if not limits.fits(shapes):
                too_big.append((batch, context))
            elif chunks > _MOST_CHUNKS:
                too_long.append((batch, context))
            else:
                grid.append(tuple(shapes))
    skipped = []
    for points, why in (
        (too_big, "the KV cache does not hold it"),
        (too_long, f"it takes over {_MOST_CHUNKS} steps to build up"),
    ):
        if points:
            batch, context = min(points, key=lambda point: point[0] * point[1])
            skipped.append(
                f"{len(points)} points of the decode grid, from {batch} requests x {context:,} tokens on: {why}"
            )
    return tuple(grid), skipped
