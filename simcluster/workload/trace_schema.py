"""Names and limits of the trace file format, schema v1; `traces/README.md` describes them."""

__all__ = ["COLUMNS", "KEY", "MAX_SPAN_NS", "MAX_TOKENS", "OWN_KEYS", "SCHEMA_VERSION", "UNITS"]

SCHEMA_VERSION = "1"
KEY = "simcluster."  # prefix of our keys in the file's metadata, which other writers share
OWN_KEYS = ("schema_version", "units", "prefix_block_size")
UNITS = "*_ns nanoseconds, *_s seconds, *_tokens tokens, quality 0 to 1"
MAX_SPAN_NS = 3653 * 86_400 * 10**9  # 10 years
MAX_TOKENS = 2**31
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
    "prompt_tokens_by_model",
    "output_tokens_by_model",
    "quality_by_model",
    "prefix_hashes",
    "prompt",
)
