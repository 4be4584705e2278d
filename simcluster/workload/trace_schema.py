"""Names and limits of the trace file format, schema v1; `traces/README.md` describes them."""

from typing import Literal

__all__ = ["COLUMNS", "KEY", "MAPS", "MAX_SPAN_NS", "MAX_TOKENS", "OWN_KEYS", "SCHEMA_VERSION", "UNITS"]

SCHEMA_VERSION = "1"
KEY = "simcluster."  # prefix of our keys in the file's metadata, which other writers share
OWN_KEYS = ("schema_version", "units", "prefix_block_size")
UNITS = "*_ns nanoseconds, *_s seconds, *_tokens tokens, quality 0 to 1"
MAX_SPAN_NS = 3653 * 86_400 * 10**9  # 10 years
MAX_TOKENS = 2**31
MAPS: dict[str, Literal["tokens", "quality"]] = {
    "prompt_tokens_by_model": "tokens",
    "output_tokens_by_model": "tokens",
    "quality_by_model": "quality",
    "predicted_output_tokens_by_model": "tokens",
    "predicted_quality_by_model": "quality",
}
"""Columns that map a model's name to tokens, 1 to `MAX_TOKENS`, or to a quality, 0 to 1."""

COLUMNS = (
    "request_id",
    "arrival_ns",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "finish",
    "priority",
    "cancel_s",
    "task",
    "session_id",
    "after",
    "think_s",
    "slo_ttft_s",
    *MAPS,
    "prefix_hashes",
    "prompt",
)
