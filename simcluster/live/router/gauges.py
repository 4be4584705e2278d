"""What a server says of itself on `/metrics`, as vLLM names it in any version."""

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Gauges", "read_gauges"]

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the newer name first
_INFO = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Gauges:
    """Some gauges of one server. What it does not tell is None, which is not 0: an unknown server is not an idle one.

    Attributes:
        running: running requests, of all its engines.
        waiting: waiting requests, likewise.
        kv_usage: share of KV blocks in use, 0 to 1, the mean of its engines.
        num_blocks: KV blocks of one engine.
        block_size: tokens per block.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None


def read_gauges(text: str) -> Gauges:
    """Read the answer of `/metrics`; lines of no interest may be anything.

    Raises:
        ValueError: a line of interest is not in Prometheus' text format.
    """
    wanted = (_RUNNING, _WAITING, *_USAGE, _INFO)
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    values: dict[str, list[float]] = {}
    labels: dict[str, str] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == _INFO:
                labels = sample.labels
    usage = next((values[name] for name in _USAGE if name in values), None)
    return Gauges(
        running=_total(values.get(_RUNNING)),
        waiting=_total(values.get(_WAITING)),
        kv_usage=None if not _are_numbers(usage) or usage is None else min(max(sum(usage) / len(usage), 0.0), 1.0),
        num_blocks=_count(labels.get("num_gpu_blocks")),
        block_size=_count(labels.get("block_size")),
    )


def _are_numbers(values: list[float] | None) -> bool:
    return bool(values) and all(map(math.isfinite, values or []))


def _total(values: list[float] | None) -> int | None:
    return max(0, round(sum(values))) if values is not None and _are_numbers(values) else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and int(text) > 0 else None
