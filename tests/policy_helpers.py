"""Hand-built clusters for tests of policies: views of engines under a chosen load, requests, and a long game.

Engines take 10 ms per step and 1 ms per token, as in the cases.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_helpers import MS, config, u_step
from simcluster import _native
from simcluster.card import FrontEnd, ServiceRates
from simcluster.instance import InstanceSpec
from simcluster.request import Request
from simcluster.routers import SHED, ClusterView, Router, RouterSettings, TieBreaker, build_router
from simcluster.units import PS_PER_S

Load = Sequence[tuple[int, int]]  # (prompt, output) of each request, all sent at time 0

OBSERVERS = ("observe_dispatch", "observe_first_token", "observe_end")


def make_rates(*, theta: float = 1000.0, decode_s: float = 0.011, mu: float = 5.0, k: float = 2.0) -> ServiceRates:
    """Return mean rates of an instance whose steps take 10 ms and 1 ms per token."""
    return ServiceRates(
        prefill_throughput_tps=theta,
        mean_decode_step_s=decode_s,
        service_rate_rps=mu,
        parallelism=k,
        utilisation=0.5,
        method="made up",
    )


def make_spec(index: int, *, b0: float = 10, b1: float = 1, **changes: Any) -> InstanceSpec:
    """Return an instance; `usable_blocks` and other engine options go to its scheduler."""
    engine = {key: changes.pop(key) for key in list(changes) if key not in InstanceSpec.__dataclass_fields__}
    values: dict[str, Any] = {
        "index": index,
        "name": "abcdefgh"[index],
        "model": "M",
        "card": "none",
        "price_in": 0.0,
        "price_out": 0.0,
        "engine": config(**engine),
        "believed": u_step(b0, b1),
        "front_end": FrontEnd(request_s=0.0, per_prompt_token_s=0.0, output_s=0.0),
        "service_rates": make_rates(),
    }
    return InstanceSpec(**(values | changes))


def make_specs(count: int, **changes: Any) -> tuple[InstanceSpec, ...]:
    return tuple(make_spec(j, **changes) for j in range(count))


def make_settings(
    specs: Sequence[InstanceSpec], *, tie: Any = "index", seed: int = 1, **changes: Any
) -> RouterSettings:
    values: dict[str, Any] = {
        "num_instances": len(specs),
        "objective": "slo",
        "latency_weight": 1.0,
        "ties": TieBreaker(tie, np.random.default_rng([seed, 1])),
        "rng": np.random.default_rng([seed, 2]),
        "instances": tuple(specs),
    }
    return RouterSettings(**(values | changes))


def make_router(policy: str, specs: Sequence[InstanceSpec], **changes: Any) -> Router:
    return build_router(policy, make_settings(specs, **changes))


def make_view(
    specs: Sequence[InstanceSpec],
    loads: Sequence[Load] | None = None,
    *,
    at_ms: float = 0,
    healthy: Sequence[bool] = (),
    mean_output: int = 10,
) -> ClusterView:
    """Return what a router sees of engines that got these requests at time 0, so many ms later."""
    views = []
    for spec, load in zip(specs, loads or [()] * len(specs), strict=True):
        engine = _native.Engine(spec.engine, spec.believed)
        for number, (prompt, output) in enumerate(load):
            engine.submit(10_000 + number, prompt, output, 0)
        engine.advance_to(round(at_ms * MS))
        view = _native.InstanceView(spec.engine, spec.believed, mean_output, True)
        view.refresh(_native.Snapshot.capture(engine))
        views.append(view)
    return ClusterView(round(at_ms * MS), 0, tuple(specs), views, tuple(healthy))


def make_request(
    index: int = 0,
    *,
    count: int = 3,
    prompt: int = 100,
    output: int = 10,
    utility: Sequence[float] | None = None,
    quality: Sequence[float] | None = None,
    target_ms: float | None = None,
    blocks: Sequence[int] | None = None,
    block: int = 16,
    session: str | None = None,
    arrival: int = 0,
) -> Request:
    """Return a request; `blocks` are its prefix hashes, one for every `block` tokens begun; no quality: as utility."""
    quality = quality or utility
    return Request(
        index=index,
        arrival_ps=arrival,
        prompt_tokens=np.full(count, prompt, dtype=np.int64),
        max_tokens=-1,
        priority=0,
        slo_ttft_ps=-1 if target_ms is None else round(target_ms * MS),
        predicted_output_tokens=np.full(count, output, dtype=np.int64),
        predicted_utility=np.zeros(count) if utility is None else np.array(utility, dtype=np.float64),
        predicted_quality=np.zeros(count) if quality is None else np.array(quality, dtype=np.float64),
        prefix_hashes=None if blocks is None else np.array(blocks, dtype=np.int64),
        session_id=session,
        prefix_block_size=0 if blocks is None else block,
    )


def tell(router: Router, name: str, *arguments: object) -> None:
    """Let a router observe something, if it wants to."""
    method = getattr(router, name, None)
    if method is not None:
        method(*arguments)


def play(policy: str, *, seed: int = 3, decisions: int = 300, count: int = 3) -> list[int]:
    """Return the choices of a fresh router in a long random game: loads, failures, prefixes, sessions, answers.

    Requests stay open for a while; the first token comes after a time that depends on the instance.
    """
    rng = np.random.default_rng(seed)
    specs = tuple(make_spec(j, b0=10 * (j + 1), usable_blocks=600, max_num_seqs=20) for j in range(count))
    router = make_router(policy, specs, tie="random", seed=seed)
    chosen: list[int] = []
    waiting: list[tuple[int, int]] = []  # (request, instance) without a first token
    running: list[tuple[int, int]] = []
    for index in range(decisions):
        if index % 10 == 0:
            loads = [[(int(rng.integers(9, 400)), 300) for _ in range(rng.integers(40))] for _ in range(count)]
            views = make_view(specs, loads, at_ms=1000).views
        healthy = tuple(bool(ok) for ok in rng.random(count) < 0.9)
        view = ClusterView(PS_PER_S, 0, specs, views, healthy)
        group, length = int(rng.integers(6)), int(rng.integers(1, 40))
        own = [10_000 * (index + 1) + k for k in range(length // 2)]
        blocks = [100 * group + k for k in range(length)] + own
        request = make_request(
            index,
            count=count,
            prompt=16 * len(blocks),
            utility=rng.random(count).tolist(),
            target_ms=float(rng.uniform(1000, 3000)),
            blocks=blocks,
            session=f"s{group}",
            arrival=PS_PER_S,
        )
        decision = router.route(request, view)
        chosen.append(decision.instance)
        if decision.instance != SHED:
            tell(router, "observe_dispatch", request, decision.instance)
            waiting.append((index, decision.instance))
        while len(waiting) > 4:
            number, instance = waiting.pop(int(rng.integers(len(waiting))))
            tell(router, "observe_first_token", number, instance, float(rng.uniform(0.1, 0.3) * (instance + 1)))
            running.append((number, instance))
        while len(running) > 8:
            tell(router, "observe_end", *running.pop(int(rng.integers(len(running)))))
    return chosen
