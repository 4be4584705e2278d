"""Scheduler classes for vLLM that publish the engine's state in shared memory after everything that changes it.

    SIMCLUSTER_SNAPSHOT=NAME vllm serve M --scheduler-cls simcluster.backends.vllm_publisher.PublishingAsyncScheduler

`PublishingAsyncScheduler` is for vLLM's asynchronous scheduling, its default on GPUs, `PublishingScheduler` for
`--no-async-scheduling` and CPUs. simcluster must be installed beside vLLM 0.32 or 0.33; no file of vLLM is touched.
`simcluster.calibrate.recorder` has classes that publish and record at once.

Environment:
    SIMCLUSTER_SNAPSHOT: where to publish, as `shm:NAME` in a scenario; with data parallelism, rank r takes NAME-dpR.
    SIMCLUSTER_SNAPSHOT_CAPACITY: room for so many requests (default 1024); what finds none is counted.

Publishing never stops the engine: if it fails, readers are told that the source is closed, and the log says why.
"""

import functools
import hashlib
import importlib
import logging
import os
import re
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from simcluster import _native
from simcluster.errors import ConfigError

__all__ = ["EnginePublisher", "engine_request_key", "publishing_class", "request_key", "snapshot_config"]

_BASES = {  # name: (module, class) of vLLM
    "PublishingScheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "PublishingAsyncScheduler": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
}
_DEFAULT_CAPACITY = 1024
_MOST_CAPACITY = 65536
_LARGEST_NS = 2**62
# Ids of vLLM's OpenAI server around the id that its client gave: of chats, and of the first prompt of a completion.
_RANDOM = r"-[0-9a-f]{8}"
_CLIENT_ID = re.compile(rf"(?:chatcmpl-(?P<chat>.+?)|cmpl-(?P<text>.+)-0)(?:{_RANDOM})", re.DOTALL)
_CLIENT_ID_ALONE = re.compile(r"(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<text>.+)-0)", re.DOTALL)
_logger = logging.getLogger(__name__)


def request_key(request_id: str) -> int:
    """Return what stands for a request id in a snapshot: 63 bits of its hash, so that ids of any length fit.

    A router sends the id as the header X-Request-Id; two of a thousand ids agree by chance once in 10^13 times.
    """
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1


def engine_request_key(engine_id: str, *, randomized: bool = True) -> int:
    """Return `request_key` of the id that the client gave, by the id that vLLM's engine has for the request.

    The OpenAI server makes `cmpl-ID-0-xxxxxxxx` and `chatcmpl-ID-xxxxxxxx` of the header X-Request-Id. Further prompts
    of one call, further samples of one prompt and requests of another origin keep their whole id.

    Args:
        engine_id: as the engine knows it.
        randomized: with the eight random digits, which VLLM_DISABLE_REQUEST_ID_RANDOMIZATION leaves out.
    """
    found = (_CLIENT_ID if randomized else _CLIENT_ID_ALONE).fullmatch(engine_id)
    return request_key(engine_id if found is None else found["chat"] or found["text"])


def snapshot_config(scheduler: Any) -> _native.SchedulerConfig:
    """Return the options of a scheduler of vLLM as the native engine names them.

    Raises:
        ConfigError: the engine works in a way that a snapshot does not describe.
    """
    whole = scheduler.vllm_config
    options, parallel = whole.scheduler_config, whole.parallel_config
    if parallel.pipeline_parallel_size > 1 or whole.speculative_config is not None:
        raise ConfigError(
            "snapshots describe neither pipeline parallelism nor speculative decoding; run vLLM without them, or "
            "without this scheduler class and with `snapshot: metrics` in the scenario"
        )
    version = str(importlib.import_module("vllm").__version__)
    names = {"0.32": _native.VllmVersion.v0_32, "0.33": _native.VllmVersion.v0_33}
    if (release := ".".join(version.split(".")[:2])) not in names:
        raise ConfigError(f"vLLM {version} publishes no snapshots; this version of simcluster knows 0.32 and 0.33")
    config = _native.SchedulerConfig()
    config.vllm_version = names[release]
    config.policy = _native.Policy[getattr(options.policy, "value", options.policy)]
    config.max_num_batched_tokens = scheduler.max_num_scheduled_tokens
    config.max_num_seqs = options.max_num_seqs
    config.max_num_active_seqs = getattr(options, "max_num_active_seqs", None) or 0
    config.max_model_len = scheduler.max_model_len
    config.block_size = scheduler.block_size
    config.num_gpu_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    config.enable_chunked_prefill = options.enable_chunked_prefill
    config.enable_prefix_caching = whole.cache_config.enable_prefix_caching
    config.long_prefill_token_threshold = options.long_prefill_token_threshold
    config.long_prefill_token_threshold_adaptive = getattr(options, "long_prefill_token_threshold_adaptive", False)
    config.scheduler_reserve_full_isl = options.scheduler_reserve_full_isl
    config.watermark = getattr(options, "watermark", 0.0)
    config.prefill_schedule_interval = getattr(options, "prefill_schedule_interval", 1)
    config.async_scheduling = bool(options.async_scheduling)
    return config


class EnginePublisher:
    """Publishes what one scheduler of vLLM holds, told after everything that the engine's loop does with it.

    Args:
        scheduler: of vLLM, whose options do not change any more.
        name: where to publish.
        capacity: room for so many requests.
        clock_ns: CLOCK_MONOTONIC [ns].
        wall_offset_ns: what the clock of vLLM's arrival times is ahead of it [ns]; None: as it is now.
        key: the id of a request in snapshots, by the engine's id; None: of the id that the client gave.

    Raises:
        ConfigError: the name is taken or impossible, or a snapshot cannot describe this engine.
    """

    def __init__(
        self,
        scheduler: Any,
        name: str,
        capacity: int,
        *,
        clock_ns: Callable[[], int] = _native.monotonic_ns,
        wall_offset_ns: int | None = None,
        key: Callable[[str], int] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._clock_ns = clock_ns
        self._pool = scheduler.kv_cache_manager.block_pool
        config = snapshot_config(scheduler)
        try:
            self._writer = _native.SnapshotWriter(name, capacity, config)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"SIMCLUSTER_SNAPSHOT: {error}") from error
        self._watch = _native.SchedulerWatch(self._writer, config)
        self._depth = 2 if config.async_scheduling else 1
        self._waiting_for_batch = False
        randomized = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") in {"", "0"}
        self._key = key or functools.partial(engine_request_key, randomized=randomized)
        self._wall_offset_ns = time.time_ns() - _native.monotonic_ns() if wall_offset_ns is None else wall_offset_ns
        self._publish(clock_ns())

    def scheduled(self, output: Any) -> None:
        """A pass was made; `output` is what it returned."""
        if self._writer.is_closed:
            return
        try:
            now = self._clock_ns()
            self._watch.begin(output.num_scheduled_tokens, output.preempted_req_ids or (), now)
            full = self._watch.num_in_flight >= self._depth
            self._waiting_for_batch = full or not (output.num_scheduled_tokens or self._scheduler.has_requests())
            self._publish(now)
        except Exception:
            self._give_up()

    def updated(self, arrived_ns: int) -> None:
        """The results of the oldest batch, which came at `arrived_ns`, have been processed."""
        if self._writer.is_closed:
            return
        try:
            self._watch.end(arrived_ns)
            self._waiting_for_batch = False
            self._publish(self._clock_ns())
        except Exception:
            self._give_up()

    def added(self, request: Any) -> None:
        """A request has come."""
        if self._writer.is_closed:
            return
        try:
            arrival_ns = int(request.arrival_time * 1e9) - self._wall_offset_ns
            arrival_ns = max(-_LARGEST_NS, min(arrival_ns, _LARGEST_NS))
            self._watch.add(request, self._key(request.request_id), arrival_ns)
            self._publish(self._clock_ns())
        except Exception:
            self._give_up()

    def finished(self) -> None:
        """Requests may have left on somebody's wish."""
        if self._writer.is_closed:
            return
        try:
            self._publish(self._clock_ns())
        except Exception:
            self._give_up()

    def now_ns(self) -> int:
        """Return the clock [ns]."""
        return self._clock_ns()

    def close(self) -> None:
        """Tell readers that nothing more comes."""
        self._writer.close()

    def _give_up(self) -> None:
        _logger.exception("snapshots of this engine are no longer published; it goes on without")
        self._writer.close()

    def _publish(self, now_ns: int) -> None:
        scheduler, watch = self._scheduler, self._watch
        ended, requests = scheduler.finished_req_ids, scheduler.requests
        if ended:
            watch.drop(ended)
        if watch.num_known != len(requests):
            watch.keep_only(requests)
        waiting, holding = scheduler.waiting, getattr(scheduler, "kv_holding_waiting", ())
        watch.publish(
            scheduler.running,
            chain(holding, waiting) if holding else waiting,
            len(waiting) + len(holding),
            self._pool.get_num_free_blocks(),
            self._waiting_for_batch,
            bool(ended),
            bool(getattr(scheduler, "prefill_capacity_bound", False)),
            getattr(scheduler, "num_executed_steps", 0),
            getattr(scheduler, "last_prefill_step", 0),
            now_ns,
        )


def _from_environment(scheduler: Any) -> EnginePublisher:
    """Build the publisher that the environment asks for.

    Raises:
        ConfigError: it asks for none, or for something impossible.
    """
    name = os.environ.get("SIMCLUSTER_SNAPSHOT", "").removeprefix("shm:")
    if not name:
        raise ConfigError(
            "SIMCLUSTER_SNAPSHOT is not set: it must name the shared memory to publish in, as `shm:NAME` in the "
            "router's scenario; or leave --scheduler-cls out"
        )
    text = os.environ.get("SIMCLUSTER_SNAPSHOT_CAPACITY", str(_DEFAULT_CAPACITY))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST_CAPACITY:
        raise ConfigError(f"SIMCLUSTER_SNAPSHOT_CAPACITY = {text!r}; must be a whole number from 1 to {_MOST_CAPACITY}")
    parallel = scheduler.vllm_config.parallel_config
    if getattr(parallel, "data_parallel_size", 1) > 1:
        name = f"{name}-dp{parallel.data_parallel_rank}"
    return EnginePublisher(scheduler, name, int(text))


def publishing_class(base: Any, build: Callable[[Any], EnginePublisher] = _from_environment) -> Any:
    """Return a scheduler class of vLLM that publishes.

    Args:
        base: vLLM's Scheduler or AsyncScheduler.
        build: builds the publisher of a new scheduler.
    """

    class Publishing(base):  # type: ignore[misc]  # known only where vLLM is installed
        """What `base` does, published."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.publisher = build(self)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            output = super().schedule(*args, **kwargs)
            self.publisher.scheduled(output)
            return output

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            arrived_ns = self.publisher.now_ns()
            outputs = super().update_from_output(*args, **kwargs)
            self.publisher.updated(arrived_ns)
            return outputs

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            self.publisher.added(request)

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            left = super().finish_requests(*args, **kwargs)
            self.publisher.finished()
            return left

        def shutdown(self) -> None:
            self.publisher.close()
            super().shutdown()

    return Publishing


@functools.cache
def _named(name: str) -> Any:
    module, base = _BASES[name]
    made = publishing_class(getattr(importlib.import_module(module), base))
    made.__name__ = made.__qualname__ = name
    made.__module__ = __name__
    return made


def __getattr__(name: str) -> Any:
    """Return one of the scheduler classes; they derive from vLLM's, which is imported only now."""
    if name in _BASES:
        return _named(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
