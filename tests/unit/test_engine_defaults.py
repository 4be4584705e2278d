"""Engine options that are not given take vLLM's defaults for the device and obey vLLM's rules."""

from pathlib import Path
from typing import Any

import pytest

from simcluster import _native
from simcluster.card import Card, load_card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.errors import ConfigError
from simcluster.shipped import find_file, shipped_names
from small_cluster import make_card

# device: (max_num_batched_tokens, max_num_seqs, async_scheduling) of vLLM's API server
BY_DEVICE = {
    "H100": (8192, 1024, True),
    "H200": (8192, 1024, True),
    "B200": (16384, 1024, True),
    "B300": (16384, 1024, True),
    "A100": (2048, 256, True),
    "L4": (2048, 256, True),
    "CPU": (2048, 128, False),
}


def card(folder: Path, **changes: Any) -> Card:
    return load_card(make_card(folder, **({"max_model_len": 40_960} | changes)))


def resolved(card: Card, **options: Any) -> tuple[_native.SchedulerConfig, list[str]]:
    return resolve_engine_options(EngineOptions(**options), card, "s.yaml: here")


@pytest.mark.parametrize(
    ("device", "kind"),
    [("EPYC 9B45 (CPU)", "CPU"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA L40S", "")],
)
def test_a_device_as_recordings_name_it_is_of_its_kind(device: str, kind: str, tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path, device=device))
    expected = BY_DEVICE.get(kind, (2048, 256, True))
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.async_scheduling) == expected


@pytest.mark.parametrize("device", BY_DEVICE)
def test_batch_limits_follow_the_device_as_in_the_api_server(device: str, tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path, device=device))
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.async_scheduling) == BY_DEVICE[device]


def test_the_other_defaults_are_those_of_vllm(tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path))
    assert engine.block_size == 16
    assert engine.num_gpu_blocks == 1001
    assert engine.max_model_len == 40_960
    assert engine.max_num_active_seqs == 0
    assert engine.enable_prefix_caching
    assert engine.enable_chunked_prefill
    assert engine.policy == _native.Policy.fcfs
    assert engine.vllm_version == _native.VllmVersion.v0_33
    assert engine.long_prefill_token_threshold == 0
    assert not engine.long_prefill_token_threshold_adaptive
    assert engine.scheduler_reserve_full_isl
    assert engine.watermark == 0.0
    assert engine.prefill_schedule_interval == 1
    assert engine.validate() == ""


def test_the_default_token_budget_is_lowered_to_what_all_sequences_can_use(tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path, device="H100"), max_num_seqs=4, max_model_len=100)
    assert engine.max_num_batched_tokens == 400
    engine, _ = resolved(card(tmp_path, device="H100"), max_num_seqs=4, max_model_len=40_000)
    assert engine.max_num_batched_tokens == 8192


def test_the_default_token_budget_is_raised_to_the_context_limit_without_chunked_prefill(tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path, device="H100"), enable_chunked_prefill=False)
    assert engine.max_num_batched_tokens == 40_960
    engine, _ = resolved(card(tmp_path, device="H100"), enable_chunked_prefill=False, max_model_len=4_000)
    assert engine.max_num_batched_tokens == 8192


def test_the_number_of_sequences_is_lowered_to_the_token_budget(tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path, device="H100"), max_num_batched_tokens=64)
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (64, 64)
    engine, _ = resolved(card(tmp_path, device="H100"), max_num_batched_tokens=64, max_num_seqs=100)
    assert engine.max_num_seqs == 64


def test_what_is_given_is_taken_as_it_is(tmp_path: Path) -> None:
    engine, _ = resolved(
        card(tmp_path, device="CPU"), max_num_batched_tokens=777, max_num_seqs=9, async_scheduling=True
    )
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.async_scheduling) == (777, 9, True)
    engine, _ = resolved(card(tmp_path, device="H100"), async_scheduling=False)
    assert not engine.async_scheduling


def test_another_block_size_holds_the_same_tokens(tmp_path: Path) -> None:
    engine, _ = resolved(card(tmp_path), block_size=32)
    assert (engine.block_size, engine.num_gpu_blocks) == (32, 501)
    engine, _ = resolved(card(tmp_path), block_size=32, num_gpu_blocks_override=11)
    assert (engine.block_size, engine.num_gpu_blocks) == (32, 11)


def test_a_pool_smaller_than_the_context_limit_is_a_warning_with_both_numbers(tmp_path: Path) -> None:
    _, warnings = resolved(card(tmp_path))
    assert len(warnings) == 1
    assert warnings[0].startswith("s.yaml: here: ")
    for part in ("max_model_len = 40960", "2560 KV blocks", "the pool has 1000", "refuse to start", "rejected"):
        assert part in warnings[0]
    assert resolved(card(tmp_path), max_model_len=16_000)[1] == []
    assert len(resolved(card(tmp_path), max_model_len=16_001)[1]) == 1


def test_a_small_token_budget_without_chunked_prefill_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    allowed = {"enable_chunked_prefill": False, "max_model_len": 1000}
    with pytest.raises(ConfigError, match=r"here\.max_num_batched_tokens = 999; .*max_model_len = 1000; raise it"):
        resolved(card(tmp_path), max_num_batched_tokens=999, **allowed)
    assert resolved(card(tmp_path), max_num_batched_tokens=1000, **allowed)[0].validate() == ""


def test_the_asynchronous_loop_on_a_cpu_is_a_warning(tmp_path: Path) -> None:
    small = {"max_model_len": 1000, "async_scheduling": True}
    assert "CPU backend always runs the synchronous loop" in resolved(card(tmp_path), **small)[1][0]
    assert resolved(card(tmp_path, device="H100"), **small)[1] == []


def test_the_shipped_cards_resolve_without_a_warning() -> None:
    for name in shipped_names("calibration", ".json"):
        shipped = load_card(find_file(name, "calibration", ".json"))
        engine, warnings = resolved(shipped)
        assert warnings == []
        assert engine.validate() == ""
