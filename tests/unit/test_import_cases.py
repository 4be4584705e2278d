"""The cases C009 and C044 to C058: quirks of recorded traces, each with its right values."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_line import run_command
from simcluster.errors import ConfigError, TraceError
from simcluster.workload import Trace, read_trace
from simcluster.workload.doctor import inspect_trace
from simcluster.workload.importing import ImportOptions, ImportReport, TimeUnit, import_trace
from trace_files import FILES, imported, write_file

MAP = {"arrival": "t", "prompt_tokens": "p", "output_tokens": "o"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def csv_of(path: Path, rows: list[tuple[Any, ...]], header: str = "t,p,o") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def jsonl_of(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arrivals_of(path: Path, out: Path, times: list[Any], unit: str = "s", **options: Any) -> tuple[list[float], Any]:
    """Import requests at these times; return the arrivals [s] and the report."""
    csv_of(path, [(time, 2, 1) for time in times])
    trace, report = imported(path, out, columns=MAP, time_unit=TimeUnit.parse(unit), **options)
    return (trace.arrival_ns / 1e9).tolist(), report


def error_of(path: Path, out: Path, **options: Any) -> str:
    with pytest.raises((TraceError, ConfigError)) as caught:
        import_trace(path, out, ImportOptions(**options))
    assert not out.exists()
    return str(caught.value)


# ---- C009 ----------------------------------------------------------------------------------------

LONG = [(6700, 500), (8000, 192), (8000, 193), (8192, 1), (23000, 450)]


def long_rows(path: Path) -> Path:
    rows = [{"t": row, "p": prompt, "o": output} for row, (prompt, output) in enumerate(LONG)]
    return jsonl_of(path, rows)


def test_the_filter_keeps_what_fits_the_context_and_names_the_rows_it_drops(tmp_path: Path, out: Path) -> None:
    # C009
    path = long_rows(tmp_path / "t.jsonl")
    options = {"columns": MAP, "time_unit": TimeUnit.parse("s"), "overflow": "drop", "max_model_len": 8192}
    trace, report = imported(path, out, **options)
    assert len(trace) == 2
    assert report.skipped.as_data() == {"exceeds_context": {"rows": 3, "first_lines": [3, 4, 5]}}
    assert trace.prompt_tokens.sum() == 14700
    assert trace.output_tokens.sum() == 692


def test_without_the_filter_every_row_is_kept_for_the_engine_to_judge(tmp_path: Path, out: Path) -> None:
    # C009
    path = long_rows(tmp_path / "t.jsonl")
    trace, report = imported(path, out, columns=MAP, time_unit=TimeUnit.parse("s"), max_model_len=8192)
    assert len(trace) == 5
    assert report.changed.first == {
        "prompt fills the context: the engine will reject it": [4, 5],
        "answer runs into the context: the engine will cut it": [3],
    }


# ---- C044 to C050: times -------------------------------------------------------------------------


def test_dates_with_seven_digits_and_a_last_line_without_an_end_are_read(out: Path) -> None:
    # C044
    assert not (FILES / "azure2023.csv").read_bytes().endswith(b"\n")
    trace, _ = imported(FILES / "azure2023.csv", out, format="azure")
    assert trace.arrival_ns.tolist() == [0, 52_000_000, 98_189_000]
    assert len(trace) == 3


IDLE = [0, 1, 2, 219, 220]


def test_a_higher_speed_shortens_every_interval(tmp_path: Path, out: Path) -> None:
    # C045
    assert arrivals_of(tmp_path / "t", out, IDLE, speed=10)[0] == [0, 0.1, 0.2, 21.9, 22.0]


def test_long_gaps_can_be_cut_and_are_counted(tmp_path: Path, out: Path) -> None:
    # C045
    arrivals, report = arrivals_of(tmp_path / "t", out, IDLE, max_gap_s=5)
    assert arrivals == [0, 1, 2, 7, 8]
    assert "1 row (gap before it cut to 5 s): line 5" in report.lines()


def test_statistics_of_a_trace_with_a_long_gap(tmp_path: Path, out: Path) -> None:
    # C045
    arrivals_of(tmp_path / "t", out, IDLE)
    found = inspect_trace(read_trace(out))["arrivals"]
    assert found["span_s"] == 220
    assert found["rate_rps"] == pytest.approx(0.01818, abs=5e-6)
    assert found["longest_gap"]["gap_s"] == 217


def test_speed_scales_intervals_from_the_first_row(tmp_path: Path, out: Path) -> None:
    # C046
    assert arrivals_of(tmp_path / "t", out, [100, 102, 106], speed=2)[0] == [0, 1, 3]
    for speed in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--speed"):
            ImportOptions(speed=speed).check()


def test_times_since_1970_are_rebased_and_durations_are_not(tmp_path: Path, out: Path) -> None:
    # C047
    header = "send_time_us,p,o,deadline_us"
    path = csv_of(tmp_path / "t", [(1787000000000000, 1, 1, 1000000), (1787000000250000, 1, 1, 1000000)], header)
    columns = {**MAP, "arrival": "send_time_us", "cancel": "deadline_us"}
    trace, _ = imported(path, out, columns=columns)
    assert trace.arrival_ns.tolist() == [0, 250_000_000]
    assert trace.cancel_ns.tolist() == [10**9, 10**9]


def test_times_since_1970_beside_relative_ones_are_an_error_of_the_unit(tmp_path: Path, out: Path) -> None:
    # C047
    path = csv_of(tmp_path / "t", [(1787000000000000, 1, 1), (250000, 1, 1)])
    message = error_of(path, out, columns=MAP, time_unit=TimeUnit.parse("us"))
    assert "found arrivals 1.787e+09 s apart, read in us; allowed is 10 years" in message
    assert "do not mix times since 1970 with relative ones" in message
    path = csv_of(tmp_path / "t", [(0, 1, 1, 1787000000000000)], "t,p,o,deadline_us")
    columns = {**MAP, "cancel": "deadline_us"}
    assert "found 1787000000.0; allowed is 0 to 1e+06 s after the arrival" in error_of(
        path, out, columns=columns, time_unit=TimeUnit.parse("us")
    )


def test_negative_offsets_are_rebased_with_a_note(tmp_path: Path, out: Path) -> None:
    # C048
    arrivals, report = arrivals_of(tmp_path / "t", out, [-5, 0, 10], unit="1")
    assert arrivals == [0, 5, 15]
    assert report.notes == ("rebased: the first arrival was at -5 s and is now at 0 s",)


@pytest.mark.parametrize("unit", ["inf", "nan", "0", "-1", "-inf", "fortnight", ""])
def test_a_multiplier_must_be_a_finite_number_above_0(unit: str) -> None:
    # C048
    with pytest.raises(ConfigError, match="time unit = "):
        TimeUnit.parse(unit)


FAILED = [(0, 10, 5), (1, 12, 0), (2, 8, 3), (3, 0, 0), (4, 9, 1)]
BURST = "Timestamp,Request tokens,Response tokens"


def test_rows_without_an_answer_are_skipped_and_counted(tmp_path: Path, out: Path) -> None:
    # C049
    path = csv_of(tmp_path / "t", FAILED, BURST)
    trace, report = imported(path, out, format="burstgpt")
    assert len(trace) == 3
    assert report.skipped.counts == {"zero_output": 2}


def test_rows_without_an_answer_can_be_kept_as_prefill_only(tmp_path: Path, out: Path) -> None:
    # C049
    path = csv_of(tmp_path / "t", FAILED, BURST)
    trace, report = imported(path, out, format="burstgpt", zero_output="prefill")
    assert trace.prompt_tokens.tolist() == [10, 12, 8, 9]
    # The prefill makes the first token, so a prefill-only request is one of one token, and its client asks for no more.
    assert trace.output_tokens.tolist() == [5, 1, 3, 1]
    assert trace.max_tokens.tolist() == [-1, 1, -1, -1]
    assert trace.ends_by_length.tolist() == [False, True, False, False]
    assert report.skipped.counts == {"zero_prompt": 1}
    assert report.changed.first == {"zero_output, kept as prefill with one token": [3]}


def test_prefill_only_rows_in_one_block_of_many_leave_the_others_as_they_are(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C049
    monkeypatch.setattr("simcluster.workload.importing.text.text_blocks.__defaults__", (16,))
    path = csv_of(tmp_path / "t", [(row, 5, 0 if row == 20 else 3) for row in range(40)], BURST)
    trace, report = imported(path, out, format="burstgpt", zero_output="prefill", end_s=30)
    assert np.flatnonzero(trace.ends_by_length).tolist() == np.flatnonzero(trace.max_tokens == 1).tolist() == [20]
    assert report.changed.counts == {"zero_output, kept as prefill with one token": 1}
    _, report = imported(path, out, format="burstgpt", zero_output="prefill", end_s=10)
    assert report.changed.counts == {}


RAMP = [0, 1000, 2000, 3000, 3001, 3002, 3003]


def test_a_window_can_be_cut_out_of_a_trace(tmp_path: Path, out: Path) -> None:
    # C050
    arrivals, report = arrivals_of(tmp_path / "t", out, RAMP, start_s=3000, end_s=3004)
    assert arrivals == [0, 1, 2, 3]
    assert report.window_rate_rps == 1.0
    assert "the window has 1 requests/s" in report.lines()
    assert report.skipped.counts == {"before_start": 3}
    assert arrivals_of(tmp_path / "t", out, RAMP, end_s=3000)[0] == [0, 1000, 2000]


def test_a_slow_start_is_warned_of(tmp_path: Path, out: Path) -> None:
    # C050
    arrivals_of(tmp_path / "t", out, RAMP)
    (warning,) = inspect_trace(read_trace(out))["warnings"]
    assert warning.startswith("slow start: the first half of the span has 0.00133 requests/s, less than 5 %")
    arrivals_of(tmp_path / "t", out, list(range(100)))
    assert inspect_trace(read_trace(out))["warnings"] == []
    arrivals_of(tmp_path / "t", out, [0, 1, 2])
    assert inspect_trace(read_trace(out))["warnings"] == []


# ---- C051 to C056: values ------------------------------------------------------------------------

HASHED = [(20, [0, 1]), (600, [0, 1]), (512, [3]), (513, [3])]


def hashed(path: Path, rows: list[tuple[int, list[int]]]) -> Path:
    return jsonl_of(path, [{"timestamp": 0, "input_length": p, "output_length": 1, "hash_ids": ids} for p, ids in rows])


def test_a_prompt_has_one_hash_per_block_begun(tmp_path: Path, out: Path) -> None:
    # C051
    path = hashed(tmp_path / "t.jsonl", HASHED)
    message = error_of(path, out, format="mooncake")
    assert "hash_ids, line 1: found 2 hashes for 20 prompt tokens (and 1 more such rows)" in message
    assert "one per 512 tokens begun, here 1, or none at all" in message
    trace, _ = imported(hashed(path, HASHED[1:3]), out, format="mooncake")
    assert trace.prompt_tokens.tolist() == [600, 512]
    out.unlink()
    assert "line 1: found 1 hashes for 513 prompt tokens" in error_of(hashed(path, HASHED[3:]), out, format="mooncake")


def test_another_block_of_the_hashes_can_be_given(tmp_path: Path, out: Path) -> None:
    # C051
    trace, _ = imported(hashed(tmp_path / "t.jsonl", HASHED[:1]), out, format="mooncake", hash_block=10)
    assert trace.prefix_block_size == 10


def test_mooncake_counts_milliseconds(tmp_path: Path, out: Path) -> None:
    # C052
    rows = [{"timestamp": t, "input_length": 9, "output_length": 1, "hash_ids": [1]} for t in (0, 3000, 9000)]
    trace, report = imported(jsonl_of(tmp_path / "t", rows), out, format="mooncake")
    assert trace.arrival_ns.tolist() == [0, 3 * 10**9, 9 * 10**9]
    assert report.rate_rps == pytest.approx(0.222, abs=3e-4)


def test_the_unit_of_an_unknown_column_is_never_guessed(tmp_path: Path, out: Path) -> None:
    # C052
    path = csv_of(tmp_path / "t", [(0, 9, 1), (3000, 9, 1)])
    message = error_of(path, out, format="generic", columns=MAP)
    assert "t: the unit of the times is not known" in message
    assert "--time-unit ms" in message


TWICE = [("a", 0), ("a", 1), ("b", 2)]


def twice(path: Path, rows: list[tuple[str, int]]) -> Path:
    return csv_of(path, [(time, 2, 1, name) for name, time in rows], "t,p,o,request_id")


def test_a_repeated_id_is_refused_with_both_lines(tmp_path: Path, out: Path) -> None:
    # C053
    message = error_of(twice(tmp_path / "t", TWICE), out, columns=MAP, time_unit=TimeUnit.parse("s"))
    assert "request_id: found 'a' in line 2 and again in line 3; ids must be unique" in message


def test_repeated_ids_can_be_numbered(tmp_path: Path, out: Path) -> None:
    # C053
    options = {"columns": MAP, "time_unit": TimeUnit.parse("s"), "on_duplicate": "suffix"}
    trace, report = imported(twice(tmp_path / "t", TWICE), out, **options)
    assert trace.request_id.tolist() == ["a", "a#2", "b"]
    assert report.kept == 3
    rows = [("a", 0), ("a#2", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]
    trace, _ = imported(twice(tmp_path / "t", rows), out, **options)
    assert trace.request_id.tolist() == ["a", "a#2", "a#3", "a#4", "b", "b#2"]


def test_ids_of_rows_that_are_left_out_may_repeat(tmp_path: Path, out: Path) -> None:
    # C053
    path = csv_of(tmp_path / "t", [(0, 2, 0, "a"), (1, 2, 1, "a"), (9, 2, 1, "a")], "t,p,o,request_id")
    trace, _ = imported(path, out, columns=MAP, time_unit=TimeUnit.parse("s"), end_s=9.0)
    assert trace.request_id.tolist() == ["a"]


def test_a_key_that_first_shows_up_in_line_101_is_not_lost(tmp_path: Path, out: Path) -> None:
    # C054
    rows = [{"t": row, "p": 1, "o": 1} | ({"session_id": f"s{row}"} if row >= 100 else {}) for row in range(150)]
    trace, _ = imported(jsonl_of(tmp_path / "t", rows), out, columns=MAP, time_unit=TimeUnit.parse("s"))
    assert trace.session_id is not None
    given = [name for name in trace.session_id.tolist() if name is not None]
    assert given == [f"s{row}" for row in range(100, 150)]


def test_a_fraction_after_200_whole_numbers_is_exact(tmp_path: Path, out: Path) -> None:
    # C055
    arrivals, report = arrivals_of(tmp_path / "t", out, [*range(200), "199.5"])
    assert len(arrivals) == report.read == 201
    assert arrivals[-1] == 199.5


def test_a_type_that_changes_in_another_block_loses_nothing(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C054, C055
    monkeypatch.setattr("simcluster.workload.importing.text.BLOCK_BYTES", 64)
    monkeypatch.setattr("simcluster.workload.importing.text.text_blocks.__defaults__", (64,))
    rows: list[dict[str, Any]] = [{"t": row, "p": 1, "o": 1} for row in range(50)]
    rows += [{"t": 50.5, "p": 2.0, "o": "3", "session_id": 7, "x": [1]}, {"t": 51, "p": 1, "o": 1, "session_id": "7"}]
    trace, _ = imported(jsonl_of(tmp_path / "t", rows), out, columns=MAP, time_unit=TimeUnit.parse("s"))
    assert len(trace) == 52
    assert trace.arrival_ns[50:].tolist() == [50_500_000_000, 51_000_000_000]
    assert trace.output_tokens[50] == 3
    assert trace.session_id is not None
    assert trace.session_id[49:].tolist() == [None, "7", "7"]


def test_a_missing_answer_length_is_an_error_that_names_its_row(tmp_path: Path, out: Path) -> None:
    # C056
    path = write_file(tmp_path / "t", output_tokens=pa.array([5, None, 7], pa.int64()))
    message = error_of(path, out)
    assert "output_tokens, row 2: found null; fill it in, or leave such rows out with --missing-output drop" in message


@pytest.mark.parametrize(
    "missing", [pa.array([5, None, 7], pa.int64()), pa.array([5.0, float("nan"), 7.0]), pa.array(["5", "", "7"])]
)
def test_rows_without_an_answer_length_can_be_dropped(tmp_path: Path, out: Path, missing: Any) -> None:
    # C056
    trace, report = imported(write_file(tmp_path / "t", output_tokens=missing), out, missing_output="drop")
    assert len(trace) == 2
    assert trace.output_tokens.sum() == 12
    assert report.skipped.counts == {"missing_output": 1}


# ---- C057, C058: nothing and a lot ---------------------------------------------------------------


def test_an_empty_trace_says_how_many_rows_were_read_and_why_they_went(tmp_path: Path, out: Path) -> None:
    # C057
    options = {"columns": MAP, "time_unit": TimeUnit.parse("s")}
    assert "0 requests after filters (0 read); a trace needs" in error_of(csv_of(tmp_path / "t", []), out, **options)
    path = csv_of(tmp_path / "t", [(row, 9, 9) for row in range(5)])
    message = error_of(path, out, **options, overflow="drop", max_model_len=8)
    assert "0 requests after filters (5 read, 5 dropped: exceeds_context 5)" in message
    message = error_of(path, out, **options, start_s=100.0)
    assert "0 requests after filters (5 read, 5 dropped: before_start 5)" in message


def test_an_empty_trace_is_exit_code_2_and_one_line(tmp_path: Path) -> None:
    # C057
    path = csv_of(tmp_path / "t", [], "arrival_s,prompt_tokens,output_tokens")
    code, text, errors = run_command("trace", "import", path, "--out", tmp_path / "x.parquet")
    assert (code, text) == (2, "")
    assert errors.count("\n") == 1
    assert "0 requests after filters (0 read)" in errors


MEASURE = """
import resource, sys
from pathlib import Path
from simcluster.workload.importing import ImportOptions, import_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = import_trace(Path(sys.argv[1]), Path(sys.argv[2]), ImportOptions())
print(report.kept, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
"""


def test_a_million_rows_are_imported_in_bounded_memory(tmp_path: Path) -> None:
    # C058, the part before the run: 30 bytes per request and a few blocks, where whole texts would take 100.
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{row / 100},1,1\n" for row in range(10**6)))
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "x.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, megabytes = done.stdout.split()
    assert int(kept) == 10**6
    assert float(megabytes) < 250


# ---- both ways of parsing ------------------------------------------------------------------------

VALUES = st.one_of(
    st.integers(0, 99),
    st.floats(0, 99).map(lambda x: round(x, 3)),
    st.sampled_from(["", "7", "x", " 3", "1e2", "nan", "-1", "0x1", "007", "5.0", None, True, 2**70]),
)
ROWS = st.lists(st.tuples(st.integers(0, 50), VALUES, VALUES), min_size=1, max_size=8)


def outcome(path: Path, out: Path, **options: Any) -> tuple[Trace, ImportReport] | str:
    try:
        return imported(path, out, **options)
    except TraceError as error:
        return str(error)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, is_json=st.booleans(), data=st.data())
def test_the_quick_and_the_careful_parser_agree(
    rows: list[tuple[Any, ...]], is_json: bool, data: st.DataObject, tmp_path: Path
) -> None:
    path, out = tmp_path / "t", tmp_path / "o"
    if is_json:
        text = "".join(json.dumps(dict(zip("tpo", row, strict=True))) + "\n" for row in rows)
        path.write_text(text + "\n" * data.draw(st.integers(0, 1)))
    else:
        csv_of(path, [tuple("" if value is None else value for value in row) for row in rows])
    options: dict[str, Any] = {"columns": MAP, "time_unit": TimeUnit.parse("s"), "missing_output": "drop"}
    quick = outcome(path, out, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simcluster.workload.importing.text._quick_csv", lambda *_: None)
        patch.setattr("simcluster.workload.importing.text._quick_json", lambda *_: None)
        careful = outcome(path, out, **options)
    if isinstance(quick, str) or isinstance(careful, str):
        assert quick == careful
    else:
        assert quick[0].equals(careful[0])
        assert quick[1].lines() == careful[1].lines()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    times=st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=12),
    speed=st.sampled_from([1.0, 2.0, 0.25]),
    max_gap_s=st.sampled_from([None, 1.0, 1000.0]),
)
def test_an_imported_trace_is_sorted_starts_at_0_and_loses_no_row(
    times: list[int], speed: float, max_gap_s: float | None, tmp_path: Path
) -> None:
    path, out = tmp_path / "t", tmp_path / "o"
    csv_of(path, [(time, row + 1, 1) for row, time in enumerate(times)])
    options: dict[str, Any] = {"columns": MAP, "time_unit": TimeUnit.parse("ms")}
    trace, report = imported(path, out, **options, speed=speed, max_gap_s=max_gap_s)
    assert report.read == len(trace) == len(times)
    assert trace.notes == ()
    assert trace.arrival_ns[0] == 0
    assert (np.diff(trace.arrival_ns) >= 0).all()
    order = np.argsort(np.array(times), kind="stable")
    assert trace.prompt_tokens.tolist() == (order + 1).tolist()
    if max_gap_s is None:
        offsets = (np.array(times)[order] - min(times)) * 1e6
        assert np.abs(trace.arrival_ns - offsets / speed).max() <= 0.5
    else:
        assert np.diff(trace.arrival_ns).max(initial=0) <= max_gap_s * 1e9 / speed + 1
