"""Makes small recordings, sound and broken, for tests of what reads them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.calibrate.recording import REQUESTS, STEPS

ENGINE = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks": 17,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
MS = 1_000_000  # ns


def info() -> dict[str, Any]:
    """Return the content of recording.json."""
    return {
        "schema_version": 1,
        "simcluster_version": "0",
        "vllm_version": "0.32.0",
        "model": "tiny",
        "device": "CPU",
        "loop": "sync",
        "engine": dict(ENGINE),
        "plan": None,
        "seed": 1,
        "started_at": "2026-12-01T00:00:00Z",
        "complete": True,
    }


def step(number: int, begin: int, entries: list[tuple[str, int, int, bool, bool, int]], length: int = 10 * MS) -> Any:
    """Return a row of steps.parquet that begins at an instant [ns] and runs for `length` [ns]."""
    names = ("request_id", "num_tokens", "context", "is_decode", "produces_token", "prompt_tokens")
    comp: list[dict[str, Any]] = [dict(zip(names, entry, strict=True)) for entry in entries]
    decodes = [row for row in comp if row["is_decode"]]
    prefills = [row for row in comp if not row["is_decode"]]
    times = {
        "t_sched0": begin,
        "t_sched1": begin + MS,
        "t_upd0": begin + MS + length,
        "t_upd1": begin + 2 * MS + length,
    }
    return {
        "step": number,
        **times,
        "n_running": len(comp),
        "n_waiting": 0,
        "free_blocks": 8,
        "n_preempted": 0,
        "n_prefill_reqs": len(prefills),
        "prefill_tokens": sum(row["num_tokens"] for row in prefills),
        "decode_reqs": len(decodes),
        "tokens": sum(row["num_tokens"] for row in comp),
        "decode_ctx": sum(row["context"] for row in decodes),
        "max_decode_ctx": max((row["context"] for row in decodes), default=0),
        "prefill_attn": sum(
            r["num_tokens"] * r["context"] + r["num_tokens"] * (r["num_tokens"] + 1) / 2 for r in prefills
        ),
        "n_samples": sum(row["produces_token"] for row in comp),
        "comp": comp,
        "exec_ms": length / MS,
        "step_ms": 2 + length / MS,
        "sched_ms": 1.0,
        "upd_ms": 1.0,
        "phase": "served",
        "preempted": [],
    }


def steps() -> list[dict[str, Any]]:
    """Return three steps: a prompt of 12 tokens in chunks of 8 and 4, then a decode."""
    return [
        step(1, 100 * MS, [("a", 8, 0, False, False, 12)]),
        step(2, 113 * MS, [("a", 4, 8, False, True, 12)]),
        step(3, 126 * MS, [("a", 1, 12, True, True, 12)]),
    ]


def requests() -> list[dict[str, Any]]:
    """Return the one request of these steps."""
    return [
        {
            "request_id": "a",
            "t_add_ns": 99 * MS,
            "prompt_tokens": 12,
            "max_tokens": 2,
            "output_tokens": 2,
            "phase": "served",
        }
    ]


def write_recording(
    folder: Path,
    info_: dict[str, Any] | None = None,
    steps_: list[dict[str, Any]] | None = None,
    requests_: list[dict[str, Any]] | None = None,
) -> Path:
    """Write a recording; what is not given is the sound one above."""
    folder.mkdir(exist_ok=True)
    (folder / "recording.json").write_text(json.dumps(info_ or info()))
    pq.write_table(pa.Table.from_pylist(steps_ or steps(), STEPS), folder / "steps.parquet")
    pq.write_table(pa.Table.from_pylist(requests_ or requests(), REQUESTS), folder / "requests.parquet")
    return folder
