"""What must hold for every policy, checked on hand-built clusters: `simcluster policy test`."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from simcluster import _native
from simcluster.card import FrontEnd, ServiceRates
from simcluster.instance import InstanceSpec
from simcluster.request import IntArray, Request
from simcluster.rng import seeded
from simcluster.routers import RouterSettings, TieBreaker, build_router
from simcluster.routers.base import SHED, ClusterView, Decision, Router
from simcluster.units import PS_PER_S

__all__ = ["Check", "check_router"]

_MS = PS_PER_S // 1000
_FAIRNESS = 1e-4  # below this chance a count of ties is called unfair


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: what was checked.
        passed: whether it holds.
        detail: numbers, for people.
    """

    name: str
    passed: bool
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def check_router(policy: str, *, seed: int = 1, decisions: int = 400, limit_us: float = 1000.0) -> list[Check]:
    """Check what every policy promises.

    Args:
        policy: as users write it.
        seed: of the clusters, the requests and the policy's random stream.
        decisions: how many each check makes.
        limit_us: how long the median decision among three instances may take [us].

    Raises:
        ConfigError: there is no such policy.
        PolicyError: it raised an exception or chose no instance.
    """
    return [
        _check_health(policy, seed, decisions),
        _check_determinism(policy, seed, decisions),
        *(_check_ties(policy, seed, decisions, rule) for rule in ("random", "rotate")),
        _check_time(policy, seed, decisions, limit_us),
    ]


# Hand-built clusters


def _make_settings(
    instances: tuple[InstanceSpec, ...], seed: int, tie: Literal["index", "rotate", "random"] = "random"
) -> RouterSettings:
    """Return settings of a router with its own random streams."""
    return RouterSettings(
        num_instances=len(instances),
        objective="slo",
        latency_weight=1.0,
        ties=TieBreaker(tie, seeded(seed, 1)),
        rng=seeded(seed, 2),
        instances=instances,
    )


def _make_instances(count: int, *, equal: bool) -> tuple[InstanceSpec, ...]:
    """Return instances of one model, or of models of different speed and price."""
    engine = _native.SchedulerConfig()
    engine.num_gpu_blocks = 2001
    engine.enable_prefix_caching = False
    specs = []
    for j in range(count):
        factor = 1 if equal else j + 1
        step_time = _native.StepTimeModel()
        step_time.b0, step_time.b1 = 5 * factor * _MS, _MS // 100 * factor
        specs.append(
            InstanceSpec(
                index=j,
                name=f"instance-{j + 1}",
                model=f"model-{factor}B",
                card="none",
                price_in=0.1 * factor,
                price_out=0.4 * factor,
                engine=engine,
                believed=step_time,
                front_end=FrontEnd(request_s=0.0, per_prompt_token_s=0.0, output_s=0.0),
                service_rates=ServiceRates(
                    prefill_throughput_tps=1e5 / factor,
                    mean_decode_step_s=0.01 * factor,
                    service_rate_rps=20.0 / factor,
                    parallelism=30.0,
                    utilisation=0.5,
                    method="made up",
                ),
            )
        )
    return tuple(specs)


def _make_view(
    instances: tuple[InstanceSpec, ...],
    loads: list[int],
    healthy: tuple[bool, ...] = (),
) -> ClusterView:
    """Return a view of engines that have so many requests, one second after these came."""
    views = []
    for spec, load in zip(instances, loads, strict=True):
        engine = _native.Engine(spec.engine, spec.believed)
        for number in range(load):
            engine.submit(-1 - number, 50 + 7 * (number % 90), 5000, 0)
        engine.advance_to(PS_PER_S)
        view = _native.InstanceView(spec.engine, spec.believed, 200, True)
        view.refresh(_native.Snapshot.capture(engine))
        views.append(view)
    return ClusterView(PS_PER_S, 0, instances, views, healthy)


def _make_request(
    index: int, count: int, rng: np.random.Generator, *, target_s: float | None = None, sharing: float = 0.25
) -> Request:
    """Return a request; such a share of them has its session and prefix in common with others."""
    prompt = int(rng.integers(20, 2000))
    group = int(rng.integers(8)) if rng.random() < sharing else 1000 + index
    hashes: IntArray = np.arange(-(-prompt // 64), dtype=np.int64) + 1000 * group
    quality = np.linspace(0.5, 0.9, count) if target_s is not None else np.full(count, 0.5)
    return Request(
        index=index,
        arrival_ps=PS_PER_S,
        prompt_tokens=np.full(count, prompt, dtype=np.int64),
        max_tokens=-1,
        priority=0,
        slo_ttft_ps=-1 if target_s is None else round(target_s * PS_PER_S),
        predicted_output_tokens=np.full(count, 100, dtype=np.int64),
        predicted_utility=quality,
        predicted_quality=quality,
        prefix_hashes=hashes,
        session_id=f"session-{group}",
        prefix_block_size=64,
    )


def _tell(router: Router, request: Request, instance: int) -> None:
    """Let the router observe a request that is served at once."""
    for name, arguments in (
        ("observe_dispatch", (request, instance)),
        ("observe_first_token", (request.index, instance, 0.1)),
        ("observe_end", (request.index, instance)),
    ):
        method: Callable[..., None] | None = getattr(router, name, None)
        if method is not None:
            method(*arguments)


def _decide(policy: str, seed: int, decisions: int, size: int) -> Iterator[tuple[ClusterView, Decision]]:
    """Yield decisions of a fresh router under changing loads and failures."""
    rng = seeded(seed)
    instances = _make_instances(size, equal=False)
    router = build_router(policy, _make_settings(instances, seed))
    for index in range(decisions):
        if index % 20 == 0:
            view = _make_view(instances, rng.integers(0, 40, size).tolist())
        healthy = rng.random(size) < 0.6
        healthy[rng.integers(size)] = index % 20 > 0  # now and then it may be that none is
        view = ClusterView(view.now_ps, 0, instances, view.views, tuple(healthy.tolist()))
        request = _make_request(index, size, rng, target_s=float(rng.uniform(0.02, 2.0)))
        decision = router.route(request, view)
        if decision.instance != SHED:
            _tell(router, request, decision.instance)
        yield view, decision


# The checks


def _check_health(policy: str, seed: int, decisions: int) -> Check:
    made = wrong = shed = 0
    for size in (1, 2, 3, 5):
        for view, decision in _decide(policy, seed, decisions // 4, size):
            made += 1
            shed += decision.instance == SHED
            wrong += decision.instance != SHED and not (view.none_healthy or view.healthy[decision.instance])
    detail = f"{made} decisions over 1 to 5 instances, {wrong} for an unhealthy one" + f", {shed} shed" * (shed > 0)
    return Check("never an unhealthy instance", wrong == 0, detail)


def _check_determinism(policy: str, seed: int, decisions: int) -> Check:
    runs = []
    state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  (a policy may use the global generator; it should not)
    try:
        for attempt in range(2):
            random.seed(attempt)
            np.random.seed(attempt)  # noqa: NPY002
            runs.append([decision.instance for _, decision in _decide(policy, seed, decisions, 3)])
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
    differ = sum(a != b for a, b in zip(*runs, strict=True))
    return Check("same seed, same decisions", differ == 0, f"{differ} of {decisions} decisions differ")


def _check_ties(policy: str, seed: int, decisions: int, rule: Literal["random", "rotate"]) -> Check:
    rng = seeded(seed)
    instances = _make_instances(4, equal=True)
    router = build_router(policy, _make_settings(instances, seed, rule))
    view = _make_view(instances, [0] * 4)
    counts = np.zeros(4, dtype=np.int64)
    for index in range(decisions):
        request = _make_request(index, 4, rng, sharing=0.0)
        chosen = router.route(request, view).instance
        counts[chosen] += 1
        _tell(router, request, chosen)
    from scipy.stats import chisquare  # noqa: PLC0415  (slow to import, and needed here alone)

    chance = float(chisquare(counts).pvalue)
    detail = f"{'/'.join(map(str, counts))} among 4 equal idle instances, chi-square p = {chance:.2g}"
    return Check(f"fair ties, rule {rule}", chance >= _FAIRNESS, detail)


def _check_time(policy: str, seed: int, decisions: int, limit_us: float) -> Check:
    rng = seeded(seed)
    instances = _make_instances(3, equal=False)
    router = build_router(policy, _make_settings(instances, seed))
    view = _make_view(instances, [10, 20, 30])
    times = []
    for index in range(decisions):
        request = _make_request(index, 3, rng, target_s=1.0)
        before = time.perf_counter_ns()
        decision = router.route(request, view)
        times.append((time.perf_counter_ns() - before) / 1e3)
        if decision.instance != SHED:
            _tell(router, request, decision.instance)
    median, high = float(np.median(times)), float(np.percentile(times, 99))
    detail = f"median {median:.1f} us, p99 {high:.1f} us, 3 instances with 60 requests; limit {limit_us:g} us"
    return Check("time per decision", median <= limit_us, detail)
