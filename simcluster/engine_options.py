"""vLLM's engine options: names, defaults by device and the rules between them.

Defaults are those of vLLM's API server for the card's device. Source: printed by vLLM 0.33's own configuration
code with faked device names; see docs/scheduler.md.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from simcluster import _native
from simcluster.card import Card
from simcluster.errors import ConfigError

__all__ = ["EngineOptions", "resolve_engine_options", "with_options"]

_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_CountOrOff = Annotated[int, Field(ge=0, le=2**31 - 1)]

# device: (max_num_batched_tokens, max_num_seqs, async_scheduling)
_BY_DEVICE = {
    "H100": (8192, 1024, True),
    "H200": (8192, 1024, True),
    "B200": (16384, 1024, True),
    "B300": (16384, 1024, True),
    "CPU": (2048, 128, False),
}
_OTHER_GPU = (2048, 256, True)
_POLICIES = {"fcfs": _native.Policy.fcfs, "priority": _native.Policy.priority}
_VERSIONS = {"0.32": _native.VllmVersion.v0_32, "0.33": _native.VllmVersion.v0_33}


class EngineOptions(BaseModel):
    """Options of one engine under vLLM's names; what is not given takes vLLM's default for the device."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_num_batched_tokens: _Count | None = None
    max_num_seqs: _Count | None = None
    max_num_active_seqs: _Count | None = None
    max_model_len: _Count | None = None
    block_size: _Count | None = None
    num_gpu_blocks_override: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: _CountOrOff = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    prefill_schedule_interval: _Count = 1
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool | None = None
    vllm_version: Literal["0.32", "0.33"] = "0.33"


def _kind(device: str) -> str:
    """Return the kind of a device; recordings say more, such as `NVIDIA H100 80GB HBM3` or `EPYC 9B45 (CPU)`."""
    words = re.split(r"[^A-Za-z0-9]+", device)
    return next((kind for kind in _BY_DEVICE if kind in words), device)


def resolve_engine_options(options: EngineOptions, card: Card, where: str) -> tuple[_native.SchedulerConfig, list[str]]:
    """Fill in vLLM's defaults and apply its rules.

    Args:
        options: what the scenario says.
        card: device, context limit and KV cache of the instance.
        where: path of the options in the scenario, for messages.

    Returns:
        The native options, and warnings for people.

    Raises:
        ConfigError: two options contradict each other.
    """
    budget, seqs, asynchronous = _BY_DEVICE.get(_kind(card.device), _OTHER_GPU)
    native = _native.SchedulerConfig()
    native.max_model_len = options.max_model_len or card.max_model_len
    native.max_num_seqs = options.max_num_seqs or seqs
    native.max_num_batched_tokens = options.max_num_batched_tokens or _default_budget(
        budget, native.max_num_seqs, native.max_model_len, options.enable_chunked_prefill
    )
    if not options.enable_chunked_prefill and native.max_num_batched_tokens < native.max_model_len:
        raise ConfigError(
            f"{where}.max_num_batched_tokens = {native.max_num_batched_tokens}; without chunked prefill it "
            f"must be at least max_model_len = {native.max_model_len}; raise it or leave it out"
        )
    native.max_num_seqs = min(native.max_num_seqs, native.max_num_batched_tokens)
    native.max_num_active_seqs = options.max_num_active_seqs or 0
    if native.max_num_active_seqs > native.max_num_seqs:
        raise ConfigError(
            f"{where}.max_num_active_seqs = {native.max_num_active_seqs}; must be at most max_num_seqs = "
            f"{native.max_num_seqs}, as vLLM demands; lower it or leave it out"
        )
    native.block_size = options.block_size or card.kv_cache.block_size
    native.num_gpu_blocks = options.num_gpu_blocks_override or _blocks(card, native.block_size)
    for name in (
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "watermark",
        "prefill_schedule_interval",
    ):
        setattr(native, name, getattr(options, name))
    native.policy = _POLICIES[options.scheduling_policy]
    native.vllm_version = _VERSIONS[options.vllm_version]
    native.async_scheduling = asynchronous if options.async_scheduling is None else options.async_scheduling
    return native, _warnings(native, options, card, where)


def _default_budget(budget: int, seqs: int, max_model_len: int, chunked: bool) -> int:
    """Lower vLLM's default to what can be used, and raise it to the context limit without chunking."""
    budget = min(budget, seqs * max_model_len)
    return budget if chunked else max(budget, max_model_len)


def _blocks(card: Card, block_size: int) -> int:
    """Return the card's KV cache in blocks of this size, the null block included."""
    usable_tokens = (card.kv_cache.num_gpu_blocks - 1) * card.kv_cache.block_size
    return max(usable_tokens // block_size, 1) + 1


def _warnings(native: _native.SchedulerConfig, options: EngineOptions, card: Card, where: str) -> list[str]:
    warnings = []
    needed = -(-native.max_model_len // native.block_size)
    if needed > native.num_gpu_blocks - 1:
        warnings.append(
            f"{where}: one request of max_model_len = {native.max_model_len} tokens needs {needed} KV blocks, the "
            f"pool has {native.num_gpu_blocks - 1}; vLLM would refuse to start, here such a request is rejected"
        )
    if _kind(card.device) == "CPU" and options.async_scheduling:
        warnings.append(f"{where}.async_scheduling = true; vLLM's CPU backend always runs the synchronous loop")
    return warnings


def with_options(native: _native.SchedulerConfig, **changes: object) -> _native.SchedulerConfig:
    """Return a copy of resolved options with some of them changed."""
    copy = _native.SchedulerConfig()
    for name, value in vars(_native.SchedulerConfig).items():
        if isinstance(value, property):
            setattr(copy, name, changes.pop(name, getattr(native, name)))
    assert not changes, f"no options: {changes}"
    return copy
