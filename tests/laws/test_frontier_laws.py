"""A router's estimate from a frontier against whole simulations, stepping and jumping: the same picosecond.

SIMCLUSTER_ESTIMATES says how many estimates are compared (default 4,000; 200,000 take about a minute).
"""

import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine_helpers import MS
from simcluster import _native

ESTIMATES = int(os.environ.get("SIMCLUSTER_ESTIMATES", "4000"))
PARTS = 4


@dataclass(slots=True)
class Candidate:
    """A request as a router knows it."""

    number: int
    prompt: int
    predicted: int
    at: int
    limit: int
    by_length: bool
    priority: int
    arrival: int

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        return self.number, self.prompt, self.predicted, self.at

    @property
    def rest(self) -> tuple[int, bool, int, int]:
        return self.limit, self.by_length, self.priority, self.arrival


@dataclass
class World:
    """One instance and one view of it; other routers send there too. Everything follows from the seed."""

    seed: int
    config: _native.SchedulerConfig = field(default_factory=_native.SchedulerConfig)
    model: _native.StepTimeModel = field(default_factory=_native.StepTimeModel)
    now: int = 0
    sent: int = 0
    held: _native.Snapshot | None = None

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self._draw_config()
        self._draw_model(self.model)
        true = self.model
        if draw.random() < 0.25:
            self._draw_model(true := _native.StepTimeModel())
        self.engine = _native.Engine(self.config, true)
        self.view = _native.InstanceView(self.config, self.model, draw.randint(1, 40), draw.random() < 0.9)
        self.grid, self.foresight = draw.random() < 0.5, draw.random() < 0.5
        self.longest, self.delay = draw.choice([2, 20, 200]), draw.choice([0, 0, MS, 30 * MS])

    def _draw_config(self) -> None:
        draw, c = self.draw, self.config
        c.async_scheduling, c.enable_prefix_caching = draw.random() < 0.5, draw.random() < 0.5
        c.shared_prefixes = False
        c.block_size = draw.choice([1, 4, 16])
        c.max_model_len = draw.choice([64, 256, 4096])
        c.max_num_batched_tokens = draw.choice([4, 8, 32, 128, 2048])
        c.max_num_seqs = draw.choice([1, 2, 4, 16, 256])
        c.max_num_active_seqs = draw.choice([0, 0, 0, 1, 3, 8])
        needed = -(-c.max_model_len // c.block_size)
        c.num_gpu_blocks = draw.choice([needed + 1, needed // 2 + 2, needed // 4 + 2, 20 * needed])
        c.watermark = draw.choice([0, 0, 0.1])
        c.scheduler_reserve_full_isl = draw.random() < 0.7
        c.policy = _native.Policy.priority if draw.random() < 0.05 else _native.Policy.fcfs
        c.long_prefill_token_threshold = 4 if draw.random() < 0.05 else 0
        c.long_prefill_token_threshold_adaptive = draw.random() < 0.5
        c.prefill_schedule_interval = 3 if draw.random() < 0.05 else 1
        if draw.random() < 0.05:
            c.enable_chunked_prefill = False
            c.max_num_batched_tokens = max(c.max_num_batched_tokens, c.max_model_len)

    def _draw_model(self, m: _native.StepTimeModel) -> None:
        draw = self.draw
        m.b0, m.b1 = draw.choice([10 * MS, 5 * MS, 1]), draw.choice([MS, 25_000_000])
        m.b2, m.b3 = draw.choice([0, 45_000, 10_000_000]), draw.choice([0, 1_200])
        m.b1x, m.hinge_tokens = draw.choice([0, 10_000_000]), draw.choice([0, 8, 64])
        m.b4, m.b5 = draw.choice([0, 1_000]), draw.choice([0, 100_000_000])
        m.host = draw.choice([0, MS, 20 * MS])

    def request(self) -> Candidate:
        draw = self.draw
        self.sent += 1
        at = self.now + self.delay
        if draw.random() < 0.2:
            at += draw.choice([0, 10 * MS, 20 * MS]) if self.grid else draw.randrange(30 * MS)
        return Candidate(
            self.sent,
            draw.randint(1, min(self.config.max_model_len + 2, draw.choice([4, 40, 600]))),
            draw.randint(1, self.longest),
            at,
            draw.choice([-1, -1, draw.randint(1, self.longest)]),
            draw.random() < 0.25,
            draw.randint(0, 2),
            self.now,
        )

    def send(self, request: Candidate, known: bool) -> None:
        """Hand a request to the engine; the router knows of it or not, and may be wrong about its end."""
        foreseen = known and self.foresight
        output = request.predicted if foreseen else self.draw.randint(1, self.longest)
        self.engine.submit(request.number, request.prompt, output, request.at, *request.rest)
        if known:
            self.view.record_dispatch(*request.lengths, *request.rest)

    def move(self) -> None:
        """Let time pass; then perhaps a snapshot reaches the router, or a request the engine."""
        draw = self.draw
        scale = draw.choice([0, 0, 1, 10, 100, 1000]) * MS
        self.now += scale // (10 * MS) * 10 * MS * draw.randint(0, 3) if self.grid else int(scale * 2 * draw.random())
        self.engine.advance_to(self.now)
        act = draw.randrange(5)
        if act == 0:
            self.send(self.request(), True)
        elif act == 1 and not self.foresight:
            self.send(self.request(), False)
        elif act == 2:
            if draw.random() < 0.5:
                self.held = self.engine.snapshot()
            if self.held is not None:
                self.view.refresh(self.held)
        elif act == 3 and self.sent and draw.random() < 0.5:  # one that has ended, as far as the router knows
            self.view.forget_dispatch(draw.randint(max(1, self.sent - 5), self.sent))

    def ask(self) -> tuple[int, ...]:
        """Estimate a request in four ways, and perhaps send it."""
        request = self.request()
        if self.draw.random() < 0.1:
            request.at += self.draw.randrange(500) * MS
        columns = [np.array([value]) for value in request.lengths[1:]]
        frontier = [
            int(_native.estimate_first_token([self.view], request.number, *columns, *request.rest)[0]) for _ in range(2)
        ]
        whole = [self.view.simulate_first_token(*request.lengths, *request.rest, fast=fast) for fast in (True, False)]
        if self.draw.random() < 0.5:
            self.send(request, True)
        return (*frontier, *whole)


@pytest.mark.parametrize("part", range(PARTS))
def test_an_estimate_from_a_frontier_is_that_of_a_whole_simulation(part: int) -> None:
    compared, seed, later = 0, part, 0
    while compared < ESTIMATES / PARTS:
        world = World(seed)
        try:
            for _ in range(world.draw.randint(1, 40)):
                world.move()
                found = world.ask()
                assert len(set(found)) == 1, f"world {seed}, request {world.sent}: {found}"
                compared += 1
                later += found[0] < _native.NEVER
        except _native.LivelockError:  # two requests evict each other, as in the real scheduler
            pass
        seed += PARTS
    assert later > compared / 2
