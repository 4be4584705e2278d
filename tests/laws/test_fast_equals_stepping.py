"""Jumps, lockstep and counted blocks against visiting every request in every step with exact blocks: bit for bit.

SIMCLUSTER_WORKLOADS says how many random workloads are compared (default 400; 20,000 take about ten seconds).
"""

import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from simcluster import _native

WORKLOADS = int(os.environ.get("SIMCLUSTER_WORKLOADS", "400"))
MS = 10**9


@dataclass
class Workload:
    """One random engine with random requests; everything follows from the seed."""

    seed: int
    config: _native.SchedulerConfig = field(default_factory=_native.SchedulerConfig)
    model: _native.StepTimeModel = field(default_factory=_native.StepTimeModel)
    noise: _native.StepNoise | None = None
    requests: list[tuple[int, int, int, int, int, bool, int, int]] = field(default_factory=list)
    cancels: dict[int, int] = field(default_factory=dict)
    looks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self._draw_config(draw)
        self._draw_model(draw)
        self._draw_requests(draw)
        if draw.random() < 0.15:
            self.noise = _native.StepNoise(np.array([2**32, 3 * 2**31, 2**32 + 5]), self.seed, 0)

    def _draw_config(self, draw: random.Random) -> None:
        c = self.config
        c.block_size = draw.choice([1, 4, 16])
        c.max_model_len = draw.choice([64, 256, 4096])
        c.max_num_batched_tokens = draw.choice([4, 8, 32, 128, 2048])
        c.max_num_seqs = draw.choice([1, 2, 4, 16, 256])
        c.max_num_active_seqs = draw.choice([0, 0, 0, 1, 3, 8])
        needed = -(-c.max_model_len // c.block_size)
        c.num_gpu_blocks = draw.choice([needed + 1, needed // 2 + 2, 2 * needed + 1, 20 * needed])
        c.enable_prefix_caching = draw.random() < 0.5
        c.async_scheduling = draw.random() < 0.5
        c.watermark = draw.choice([0, 0, 0.1])
        c.scheduler_reserve_full_isl = draw.random() < 0.7
        c.policy = _native.Policy.priority if draw.random() < 0.1 else _native.Policy.fcfs
        c.long_prefill_token_threshold = 4 if draw.random() < 0.1 else 0
        c.prefill_schedule_interval = 3 if draw.random() < 0.1 else 1
        if draw.random() < 0.15:
            c.enable_chunked_prefill = False
            c.max_num_batched_tokens = max(c.max_num_batched_tokens, c.max_model_len)

    def _draw_model(self, draw: random.Random) -> None:
        m = self.model
        m.b0, m.b1 = draw.choice([10 * MS, 5 * MS, 1]), draw.choice([MS, 25_000_000])
        m.b2, m.b3 = draw.choice([0, 45_000, 10_000_000]), draw.choice([0, 1_200])
        m.b1x, m.hinge_tokens = draw.choice([0, 10_000_000]), draw.choice([0, 8, 64])
        m.b4, m.b5 = draw.choice([0, 1_000]), draw.choice([0, 100_000_000])
        m.host = draw.choice([0, MS, 20 * MS])

    def _draw_requests(self, draw: random.Random) -> None:
        at, grid, longest = 0, draw.random() < 0.4, draw.choice([2, 20, 200])
        for index in range(draw.choice([1, 3, 20, 80])):
            scale = draw.choice([MS, 100 * MS, 1000 * MS])
            at += draw.choice([0, 0, 10 * MS, 100 * MS]) if grid else int(draw.expovariate(1) * scale)
            prompt = draw.randint(1, min(self.config.max_model_len + 2, draw.choice([4, 40, 600])))
            limit = draw.choice([-1, -1, draw.randint(1, longest)])
            by_length, priority = draw.random() < 0.3, draw.randint(0, 2)
            self.requests.append((index, prompt, draw.randint(1, longest), at, limit, by_length, priority, at))
            if draw.random() < 0.1:
                self.cancels[index] = at + int(draw.expovariate(1) * 100 * MS)
        self.looks = sorted(draw.randrange(at + 1000 * MS) for _ in range(5))

    def run(self, *, fast: bool, counted: bool) -> list[object]:
        """Everything that can be seen of one run: events, and the state at every arrival and look."""
        self.config.shared_prefixes = not counted
        engine = _native.Engine(self.config, self.model, self.noise, fast=fast)
        seen: list[object] = []
        left = list(self.requests)
        try:
            for look in [*self.looks, None]:
                while left and (look is None or left[0][3] <= look):
                    request = left.pop(0)
                    engine.advance_to(request[3])
                    seen.append(_counts(engine))
                    engine.submit(*request)
                    if request[0] in self.cancels:
                        engine.cancel(request[0], self.cancels[request[0]])
                if look is not None:
                    engine.advance_to(look)
                    shot = _native.Snapshot.capture(engine)
                    seen += [shot.requests.tolist(), shot.boundary, shot.intake, _counts(engine)]
            engine.drain()
        except _native.LivelockError as error:
            seen.append(str(error))
        return [*seen, engine.take_events().tolist(), _counts(engine)]


def _counts(engine: _native.Engine) -> tuple[object, ...]:
    hits = tuple(engine.prefix_stats)
    blocks, steps = (engine.num_free_blocks, engine.num_preemptions), (engine.num_steps, engine.busy_time)
    return (engine.num_running, engine.num_waiting, *blocks, *steps, hits)


@pytest.mark.parametrize("part", range(4))
def test_the_fast_path_shows_what_stepping_with_exact_blocks_shows(part: int) -> None:
    preemptions = 0
    for seed in range(part, WORKLOADS, 4):
        workload = Workload(seed)
        stepping = workload.run(fast=False, counted=False)
        assert workload.run(fast=True, counted=True) == stepping, f"workload {seed}"
        preemptions += stepping[-1][3]
    assert preemptions > 0 or WORKLOADS < 100


@pytest.mark.parametrize("seed", [1595, 1648, 1795, 5642, 5877])
def test_answers_to_prompts_of_one_token_share_no_block_of_one_token(seed: int) -> None:
    workload = Workload(seed)
    assert (workload.config.block_size, workload.config.enable_prefix_caching) == (1, True)
    assert workload.run(fast=True, counted=True) == workload.run(fast=False, counted=False)


@pytest.mark.parametrize("seed", range(40))
def test_a_prefill_evicted_by_the_decode_before_it_is_shown_as_stepping_shows_it(seed: int) -> None:
    """A long prompt in small chunks runs out of blocks, and then waits through passes that are jumped over."""
    draw = random.Random(seed)
    workload = Workload(seed, noise=None, requests=[], looks=[])
    config, model = _native.SchedulerConfig(), _native.StepTimeModel()
    config.async_scheduling = draw.random() < 0.8
    config.block_size = draw.choice([1, 4])
    config.max_num_batched_tokens = draw.randint(4, 12)
    prompt, output = draw.randint(30, 60), draw.randint(20, 60)
    config.num_gpu_blocks = -(-(prompt + draw.randint(4, 8)) // config.block_size) + 2
    model.b0, model.b1 = 10 * MS, MS
    workload.config, workload.model, workload.noise, workload.cancels = config, model, None, {}
    workload.requests = [(0, 4, output, 0, -1, False, 0, 0), (1, prompt, 5, 0, -1, False, 0, 0)]
    workload.looks = sorted(draw.randrange(1500 * MS) for _ in range(3))
    stepping = workload.run(fast=False, counted=False)
    assert workload.run(fast=True, counted=True) == stepping
    assert stepping[-1][3] > 0 or prompt < 40
