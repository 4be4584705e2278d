"""A simulated cluster gives the same results, whether the native engine or the installed vLLM schedules in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import MS, submit
from law_helpers import law
from simcluster import _native
from simcluster.backends.vllm_engine import VllmEngine, vllm_engine_factory
from simcluster.backends.vllm_setup import vllm_version
from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.experiment.run import EngineName, run_policy
from simcluster.instance import lognormal_factors
from simcluster.records import write_run
from simcluster.request import PrefixHashes
from simcluster.scenario import Scenario, load_scenario
from simcluster.world import World as ClusterWorld
from strategies import World, worlds

ALL = ("round_robin", "random", "shortest_queue", "latency_agnostic", "sfs", "oracle")
TIGHT = {"max_model_len": 4096, "num_gpu_blocks_override": 300}
HASH_BLOCK = 16

# name: engine options, whether prompts share prefixes, policies
VARIANTS: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "shared prefixes": ({}, True, ALL),
    "no caching": ({"enable_prefix_caching": False}, False, ("latency_agnostic", "sfs")),
    "preemptions": (TIGHT, False, ("latency_agnostic", "oracle")),
    "preemptions and shared prefixes, synchronous": (TIGHT | {"async_scheduling": False}, True, ("sfs",)),
}


def _installed() -> str:
    return ".".join(vllm_version().split(".")[:2])


def _quickstart(options: dict[str, Any], shared: bool) -> tuple[Scenario, ClusterWorld]:
    """Return the shipped quickstart with its first 300 requests and these options in every instance."""
    scenario, path = load_scenario("quickstart")
    data = scenario.model_dump()
    data["workload"]["limit"] = 300
    for instance in data["cluster"]["instances"]:
        instance["engine"] |= {"vllm_version": _installed()} | options
    scenario = Scenario.model_validate(data)
    world = build_world(scenario, path)
    if shared:
        world = replace(world, known=replace(world.known, prefix=_shared_prefixes(world)))
        for spec in world.instances:
            spec.engine.shared_prefixes = True
    return scenario, world


def _shared_prefixes(world: ClusterWorld) -> PrefixHashes:
    """Let 12 groups of prompts begin alike: a common first half, and all of it with every fourth member."""
    lists = []
    fresh = 1_000_000
    for index, tokens in enumerate(world.known.prompt_tokens[:, 0].tolist()):
        group, member = index % 12, index // 12
        blocks = -(-tokens // HASH_BLOCK)
        common = blocks // 2 if member % 4 else blocks
        lists.append([group * 1000 + k for k in range(common)] + [fresh + k for k in range(blocks - common)])
        fresh += blocks
    offsets = np.cumsum([0, *(len(one) for one in lists)], dtype=np.int64)
    return PrefixHashes(offsets, np.concatenate(lists).astype(np.int64), HASH_BLOCK)


@pytest.mark.parametrize(
    ("variant", "policy"),
    [(variant, policy) for variant, (_, _, policies) in VARIANTS.items() for policy in policies],
)
def test_a_run_of_the_quickstart_has_the_same_bytes(tmp_path: Path, variant: str, policy: str) -> None:
    options, shared, _ = VARIANTS[variant]
    requests = _compare(tmp_path, *_quickstart(options, shared), policy)
    assert requests.num_rows == 300
    assert not shared or sum(requests["cached_tokens"].to_pylist()) > 10_000
    assert "preemptions" not in variant or sum(requests["num_preemptions"].to_pylist()) > 50


def _compare(folder: Path, scenario: Scenario, world: ClusterWorld, policy: str) -> pa.Table:
    """Run a policy under both engines, compare what they write byte for byte, and return the requests."""
    engines: tuple[EngineName, ...] = ("native", "vllm")
    for engine in engines:
        run = run_policy(scenario, world, policy, engine=engine)
        assert run.manifest["engine"] == engine
        write_run(folder / engine, run.manifest, run.tables, run.summary)
    for table in ("requests", "decisions", "instances"):
        native, vllm = (folder / engine / f"{table}.parquet" for engine in engines)
        assert native.read_bytes() == vllm.read_bytes(), table
    return run.tables["requests"]


def test_users_who_wait_for_answers_see_the_same(tmp_path: Path) -> None:
    """A closed loop of 40 users who think for 50 ms."""
    scenario, world = _quickstart(TIGHT, True)
    number = np.arange(300, dtype=np.int64)
    loop = replace(world, after=np.where(number >= 40, number - 40, -1), think_ps=np.where(number >= 40, 50 * MS, 0))
    requests = _compare(tmp_path, scenario, loop, "shortest_queue")
    assert requests.num_rows == 300


def _that_vllm_would_start(world: World) -> World:
    """Return a world of the installed version: pools hold the longest request, batches every seat."""
    options = world.options
    needed = -(-options["max_model_len"] // options["block_size"])
    seats = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    return world.with_options(
        usable_blocks=max(world.usable_blocks, needed),
        max_num_seqs=seats,
        max_num_active_seqs=min(options["max_num_active_seqs"], seats),
        vllm_version=_native.VllmVersion["v" + _installed().replace(".", "_")],
    )


def _fates(engine: Any, world: World, looks: list[int]) -> list[object]:
    """Drive an engine and return everything that can be seen of it at some instants and at the end."""
    seen: list[object] = []
    accepted = [submit(engine, number, ask) for number, ask in enumerate(world.asks)]
    try:
        for look in sorted(looks):
            engine.advance_to(look * MS)
            seen.append(_view(engine, world))
        engine.drain()
    except _native.LivelockError as error:
        seen.append(str(error))
    return [*seen, accepted, _view(engine, world), engine.take_events().tolist()]


def _view(engine: Any, world: World) -> list[object]:
    """Return an engine's counters and its snapshot, with what becomes of that."""
    snapshot = engine.snapshot()
    counting = world.with_options(enable_prefix_caching=False, track_blocks=False).config
    ends = [(5 + number % 3, number % 2 == 0) for number in range(snapshot.num_running + snapshot.num_waiting)]
    future = snapshot.restore(counting, world.model, ends)
    future.advance_to(engine.now + 3000 * MS)
    return [
        *(getattr(engine, name) for name in ("now", "num_steps", "busy_time", "num_running", "num_waiting")),
        *(engine.num_free_blocks, engine.num_preemptions, engine.prefix_stats),
        *(snapshot.taken_at, snapshot.boundary, snapshot.intake, snapshot.num_free_blocks),
        snapshot.requests.tolist(),
        future.take_events().tolist(),
        future.take_steps().tolist(),
    ]


@law(150)
@given(world=worlds(), looks=st.lists(st.integers(0, 600), max_size=4), noisy=st.booleans())
def test_random_requests_meet_the_same_fate(world: World, looks: list[int], noisy: bool, loop: bool) -> None:
    world = _that_vllm_would_start(world).with_options(async_scheduling=loop)
    noise = _native.StepNoise(lognormal_factors(0.1), 7, 1) if noisy else None
    native = _native.Engine(world.config, world.model, noise)
    vllm = VllmEngine(world.config, world.model, noise)
    assert _fates(vllm, world, looks) == _fates(native, world, looks)


def _one_instance(**options: Any) -> ClusterWorld:
    scenario, path = load_scenario("quickstart")
    data = scenario.model_dump()
    del data["cluster"]["instances"][1:]
    data["cluster"]["instances"][0]["engine"] |= options
    data["workload"]["limit"] = 1
    return build_world(Scenario.model_validate(data), path)


def test_another_version_than_the_installed_one_is_refused() -> None:
    other = "0.33" if _installed() == "0.32" else "0.32"
    world = _one_instance(vllm_version=other)
    with pytest.raises(ConfigError) as caught:
        vllm_engine_factory(world)
    message = str(caught.value)
    assert message.startswith(f"instance qwen3-0.6b: engine.vllm_version = {other}, but vLLM {vllm_version()} is")
    assert "\n" not in message


def test_a_pool_too_small_for_the_longest_request_is_refused() -> None:
    world = _one_instance(vllm_version=_installed(), num_gpu_blocks_override=300)
    with pytest.raises(ConfigError, match=r"max_model_len = 40960 tokens needs 2560 KV blocks, the pool has 299"):
        vllm_engine_factory(world)


def test_what_vllm_refuses_is_said_with_the_instance() -> None:
    world = _one_instance(vllm_version=_installed(), max_num_seqs=8)
    world.instances[0].engine.max_num_active_seqs = 16  # a scenario file that says so is refused before
    with pytest.raises(ConfigError, match=r"instance qwen3-0.6b: engine: vLLM .* refuses these options \("):
        vllm_engine_factory(world)
