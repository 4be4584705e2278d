"""Service rates of a card: exact where the engine's steps can be counted by hand, and as committed."""

from pathlib import Path

import pytest

from simcluster.calibrate.service_rates import UTILISATION, main, service_rates
from simcluster.card import load_card
from simcluster.errors import CalibrationError
from simcluster.shipped import find_file
from simcluster.workload import Trace, read_trace
from small_cluster import make_card
from trace_files import write_file

CARDS = Path(__file__).resolve().parents[2] / "calibration"
NAMES = ("qwen3-0.6b-h100", "qwen3-8b-h100", "qwen3-32b-tp2-h100", "llama-3.1-8b-h100")


def equal_requests(folder: Path, count: int) -> Trace:
    """Return requests of 100 prompt and 10 output tokens, one a second."""
    write_file(
        folder / "t.parquet",
        arrival_s=[float(k) for k in range(count)],
        prompt_tokens=[100] * count,
        output_tokens=[10] * count,
    )
    return read_trace(folder / "t.parquet")


def test_an_engine_with_room_for_one_request_has_the_rates_that_its_steps_give(tmp_path: Path) -> None:
    # 10 ms and 1 ms per token: a prefill of 110 ms, which gives the first token, and nine steps of 11 ms.
    card = load_card(make_card(tmp_path, kv_cache={"num_gpu_blocks": 8, "block_size": 16}))
    rates = service_rates(card, equal_requests(tmp_path, 100), "t")
    assert rates.prefill_throughput_tps == pytest.approx(100 / 0.110, rel=1e-4)
    assert rates.mean_decode_step_s == pytest.approx(0.011, rel=1e-4)
    assert rates.service_rate_rps == pytest.approx(1 / (0.110 + 9 * 0.011), rel=1e-2)
    assert rates.parallelism == pytest.approx(1)
    assert rates.utilisation == UTILISATION
    assert rates.method == "simulated from the eq9 fit under the requests of t"


def test_more_room_means_more_parallelism_and_a_higher_service_rate(tmp_path: Path) -> None:
    trace = equal_requests(tmp_path, 200)
    found = [
        service_rates(
            load_card(make_card(tmp_path, kv_cache={"num_gpu_blocks": 7 * seats + 1, "block_size": 16})), trace, "t"
        )
        for seats in (1, 4)
    ]
    assert found[1].parallelism == pytest.approx(4, rel=0.05)
    assert found[1].service_rate_rps > 1.2 * found[0].service_rate_rps  # four share the 10 ms of a decode step


def test_a_trace_that_never_fills_the_engine_says_so(tmp_path: Path) -> None:
    card = load_card(make_card(tmp_path))
    with pytest.raises(CalibrationError, match="3 requests do not keep the instance saturated; give a trace of more"):
        service_rates(card, equal_requests(tmp_path, 3), "t")


@pytest.mark.parametrize("name", NAMES)
def test_committed_service_rates_are_what_the_command_finds(name: str) -> None:
    source = find_file("quickstart", "traces", ".parquet")
    card = load_card(CARDS / f"{name}.json")
    found = service_rates(card, read_trace(source), source.name)
    assert card.service_rates is not None
    assert found.method == card.service_rates.method
    for key in ("prefill_throughput_tps", "mean_decode_step_s", "service_rate_rps", "parallelism"):
        assert getattr(found, key) == pytest.approx(getattr(card.service_rates, key), rel=1e-4), key


def test_the_command_adds_rates_to_a_card_that_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_card(tmp_path, service_rates=None, kv_cache={"num_gpu_blocks": 8, "block_size": 16})
    before = load_card(path)
    assert before.service_rates is None
    equal_requests(tmp_path, 100)
    assert main([str(path), "--trace", str(tmp_path / "t.parquet")]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ")
    after = load_card(path)
    assert after.service_rates is not None
    assert after.model_copy(update={"service_rates": None}) == before


def test_a_missing_card_or_trace_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert main([str(make_card(tmp_path)), "--trace", "nowhere"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "none.json: no such file" in lines[0]
    assert "nowhere" in lines[1]
