"""Each known format on a small file of invented numbers, and what is recognised and asked."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simcluster.errors import ConfigError, TraceError
from simcluster.workload import read_trace, write_trace
from simcluster.workload.doctor import inspect_trace
from simcluster.workload.importing import AmbiguousTraceError, ImportOptions, TimeUnit, import_trace
from simcluster.workload.recipe import Recipe
from simcluster.workload.synth import make_trace
from trace_files import FILES, imported, maps, replayed, write_file

TIMED = '{"timestamp": %s, "input_length": 5, "output_length": 3}\n'


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def refused(path: Path, out: Path, **options: Any) -> str:
    """Return the one line that an import of this file fails with."""
    with pytest.raises((TraceError, ConfigError)) as caught:
        import_trace(path, out, ImportOptions(**options))
    assert "\n" not in str(caught.value)
    assert list(out.parent.glob("*.parquet")) == []
    assert list(out.parent.glob(".*")) == []
    return str(caught.value)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ---- one file per format -------------------------------------------------------------------------


def test_azure_2023_and_2024_are_recognised_with_their_dates(out: Path) -> None:
    trace, report = imported(FILES / "azure2023.csv", out)
    assert report.format == "azure"
    assert trace.arrival_ns.tolist() == [0, 52_000_000, 98_189_000]
    assert trace.prompt_tokens.tolist() == [10, 20, 30]
    assert trace.output_tokens.tolist() == [2, 2, 1]
    trace, report = imported(FILES / "azure2024.csv", out)
    assert report.format == "azure"
    assert trace.arrival_ns.tolist() == [0, 250_000_000, 1_750_000_000, 1_875_000_000]
    assert "time unit date: TIMESTAMP holds dates" in report.reasons


def test_burstgpt_is_recognised_with_its_sessions_and_kinds_of_requests(out: Path) -> None:
    trace, report = imported(FILES / "burstgpt.csv", out)
    assert report.format == "burstgpt"
    assert trace.arrival_ns.tolist() == [0, 3 * 10**9, 10_500_000_000]
    assert trace.prompt_tokens.tolist() == [10, 8, 30]
    assert trace.session_id is not None
    assert trace.session_id.tolist() == ["s-1", "s-2", "s-1"]
    assert trace.task_names == ("API log", "Conversation log")
    assert report.skipped.counts == {"zero_output": 1}
    assert report.ignored == ("Elapsed time", "Model", "Total tokens")


def test_mooncake_keeps_its_hashes_and_their_block_size(out: Path) -> None:
    trace, report = imported(FILES / "mooncake.jsonl", out)
    assert report.format == "mooncake"
    assert trace.arrival_ns.tolist() == [0, 3 * 10**9, 9 * 10**9]
    assert trace.prefix_block_size == 512
    assert trace.prefix_offsets is not None
    assert trace.prefix_values is not None
    assert trace.prefix_offsets.tolist() == [0, 2, 4, 5]
    assert trace.prefix_values.tolist() == [0, 1, 0, 2, 3]


def test_a_timed_trace_of_vllm_is_told_from_mooncake_by_its_blocks_and_fractions(out: Path) -> None:
    trace, report = imported(FILES / "vllm_timed.jsonl", out)
    assert report.format == "vllm-timed"
    assert trace.arrival_ns.tolist() == [0, 1_250_000_000, 1_250_000_000]
    assert trace.prefix_block_size == 16
    assert trace.prefix_values is not None
    assert trace.prefix_values.tolist() == [11, 12, 13, 11, 14, 11, 14, -1]  # an unsigned hash keeps its bits
    assert any("counts seconds by default" in reason for reason in report.reasons)


def test_a_detailed_result_of_vllm_bench_gives_its_requests_without_the_failed_ones(out: Path) -> None:
    trace, report = imported(FILES / "vllm_bench.json", out)
    assert report.format == "vllm-bench"
    assert trace.arrival_ns.tolist() == [0, 750_000_000, 2_500_000_000]
    assert trace.prompt_tokens.tolist() == [100, 300, 50]
    assert trace.output_tokens.tolist() == [10, 30, 5]
    assert report.skipped.counts == {"zero_output": 1}


def test_a_result_of_vllm_bench_may_be_one_line(tmp_path: Path, out: Path) -> None:
    data = json.loads((FILES / "vllm_bench.json").read_text())
    trace, _ = imported(written(tmp_path / "b.json", json.dumps(data)), out)
    assert len(trace) == 3


def test_a_result_of_vllm_bench_without_start_times_or_of_unequal_arrays_is_refused(tmp_path: Path, out: Path) -> None:
    data = json.loads((FILES / "vllm_bench.json").read_text())
    del data["start_times"]
    path = written(tmp_path / "b.json", json.dumps(data))
    assert "found lengths but no arrivals" in refused(path, out)
    assert "--save-detailed" in refused(path, out)
    path.write_text(json.dumps(data | {"start_times": [1.0]}))
    assert "arrays of different lengths: start_times 1, input_lens 4, output_lens 4" in refused(path, out)


GENERIC = {
    "arrival": "sent_us",
    "prompt_tokens": "in",
    "output_tokens": "out",
    "request_id": "id",
    "cancel": "deadline_ms",
}


def test_any_table_is_read_by_mapping_its_columns(out: Path) -> None:
    trace, report = imported(FILES / "generic.csv", out, columns=GENERIC)
    assert report.format == "generic"
    assert "time unit us: the column is called sent_us" in report.reasons
    assert trace.request_id.tolist() == ["r1", "r2", "r3"]
    assert trace.arrival_ns.tolist() == [0, 250_000_000, 1_000_000_000]
    assert trace.cancel_ns.tolist() == [1_000_000_000, -1, 250_000_000]
    assert report.ignored == ("note",)


def test_a_trace_of_this_project_can_be_imported_again_with_every_column(tmp_path: Path, out: Path) -> None:
    path = write_file(
        tmp_path / "t",
        metadata={"simcluster.prefix_block_size": "4", "simcluster.source": "here", "simcluster.seed": "3"},
        request_id=["a", "b", "c"],
        task=["x", "y", "x"],
        session_id=["s", None, "s"],
        max_tokens=[9, None, 7],
        finish=["eos", "length", "eos"],
        priority=[-1, 0, 5],
        cancel_s=[0.5, None, 1.5],
        slo_ttft_s=[0.15, None, 1.12],
        after=[None, None, "a"],
        think_s=[None, None, 2.0],
        prompt=["one", "two", "three"],
        prefix_hashes=[[1, 2], None, [1, 3]],
        output_tokens_by_model=maps([{"m": 1}, {"m": 2}, {"m": 3}], pa.int64()),
        quality_by_model=maps([{"m": 0.5}, {"m": 0.25}, {"m": 1.0}], pa.float64()),
    )
    trace, report = imported(path, out)
    original = read_trace(path)
    again = read_trace(out)
    assert report.format == "simcluster"
    assert trace.metadata["seed"] == "3"
    assert trace.metadata["source"] == "imported from t, format simcluster; it says: here"
    again.metadata.clear()
    original.metadata.clear()
    assert again.equals(original)
    write_trace(original, tmp_path / "w")
    types = [{field.name: field.type for field in pq.read_schema(file)} for file in (out, tmp_path / "w")]
    assert types[0] == types[1]


HAND_MADE: dict[str, dict[str, Any]] = {
    "azure2023.csv": {},
    "azure2024.csv": {},
    "burstgpt.csv": {},
    "mooncake.jsonl": {},
    "vllm_timed.jsonl": {},
    "vllm_bench.json": {},
    "generic.csv": {"columns": GENERIC},
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_each_format_is_imported_inspected_and_replayed(name: str, out: Path) -> None:
    trace, report = imported(FILES / name, out, **HAND_MADE[name])
    assert len(trace) == report.kept > 0
    assert inspect_trace(trace, 40960)["arrivals"] is not None
    assert replayed(out)["submitted"] == len(trace)


@pytest.mark.parametrize(
    "parts",
    [
        {"requests": 50, "rate_rps": 5.0, "lengths": {"kind": "file", "file": str(FILES / "lengths.csv")}},
        {
            "arrivals": {"kind": "servegen", "rates": str(FILES / "servegen_rates.csv"), "window_s": [0, 600]},
            "lengths": {"kind": "servegen", "lengths": str(FILES / "servegen_lengths.csv")},
        },
    ],
    ids=["lengths", "servegen"],
)
def test_lengths_and_rates_become_traces_that_are_replayed(parts: dict[str, Any], out: Path) -> None:
    trace = make_trace(Recipe.model_validate({"name": "hand-made", "seed": 1} | parts))
    write_trace(trace, out)
    assert replayed(out)["submitted"] == len(trace) > 0


def test_every_hand_made_file_is_tried() -> None:
    rest = {"README.md", "servegen", "lengths.csv", "servegen_rates.csv", "servegen_lengths.csv"}
    assert {path.name for path in FILES.iterdir()} == {*HAND_MADE, *rest}


def test_gzip_is_unpacked(tmp_path: Path, out: Path) -> None:
    with (FILES / "azure2024.csv").open("rb") as plain, gzip.open(tmp_path / "a.csv.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    trace, _ = imported(tmp_path / "a.csv.gz", out)
    assert len(trace) == 4


def test_a_byte_order_mark_tabs_and_windows_line_ends_are_harmless(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival_s\tprompt_tokens\toutput_tokens\r\n0\t1\t2\r\n\r\n1.5\t3\t4\r\n")
    trace, _ = imported(path, out)
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000]
    assert trace.output_tokens.tolist() == [2, 4]


@pytest.mark.parametrize("name", ["servegen_rates.csv", "servegen_lengths.csv"])
def test_rates_and_histograms_are_no_trace_and_the_error_says_what_to_do(name: str, out: Path) -> None:
    assert "holds ServeGen rates or lengths, no requests; make a trace of them" in refused(FILES / name, out)


def test_lengths_alone_are_no_trace_and_the_error_says_what_to_do(out: Path) -> None:
    assert "found lengths but no arrivals" in refused(FILES / "lengths.csv", out)


# ---- what is asked -------------------------------------------------------------------------------


def test_timestamps_without_hashes_have_two_readings_and_both_are_named(tmp_path: Path, out: Path) -> None:
    path = written(tmp_path / "t.jsonl", TIMED % 0 + TIMED % 3000)
    message = refused(path, out)
    assert "mooncake, timestamps in ms (--format mooncake)" in message
    assert "vllm-timed, timestamps in s (--time-unit s)" in message
    assert imported(path, out, format="mooncake")[0].arrival_ns.tolist() == [0, 3 * 10**9]
    assert imported(path, out, time_unit=TimeUnit.parse("s"))[0].arrival_ns.tolist() == [0, 3000 * 10**9]


def test_every_choice_of_a_question_makes_it_go_away(tmp_path: Path, out: Path) -> None:
    path = written(tmp_path / "t.jsonl", TIMED % 0 + TIMED % 3000)
    with pytest.raises(AmbiguousTraceError) as caught:
        import_trace(path, out, ImportOptions())
    assert len(caught.value.choices) == 2
    for choice in caught.value.choices:
        assert len(imported(path, out, **choice.changes)[0]) == 2


def test_fractions_make_the_unit_of_a_trace_with_mooncakes_blocks_unclear(tmp_path: Path, out: Path) -> None:
    line = '{"timestamp": 0.5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
    assert "seconds (--time-unit s); milliseconds (--time-unit ms)" in refused(written(tmp_path / "t", line), out)


def test_whole_timestamps_with_vllms_blocks_may_be_seconds_or_milliseconds(tmp_path: Path, out: Path) -> None:
    line = '{"timestamp": 5, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}\n'
    assert "seconds (--time-unit s); milliseconds (--time-unit ms)" in refused(written(tmp_path / "t", line), out)


def test_the_block_of_a_hash_is_the_one_that_fits_all_prompts(tmp_path: Path, out: Path) -> None:
    path = write_file(tmp_path / "t", prompt_tokens=[64, 65, 10], hash_ids=[[1], [1, 2], [3]])
    trace, report = imported(path, out)
    assert trace.prefix_block_size == 64
    assert "64 tokens per hash: of 16, 64 and 512, the only one that fits the first 3 prompts with hashes" in (
        report.reasons
    )


def test_a_block_that_cannot_be_told_is_asked_for(tmp_path: Path, out: Path) -> None:
    path = write_file(tmp_path / "t", prompt_tokens=[4, 5, 6], hash_ids=[[1], [2], [3]])
    assert "64 tokens per hash (--hash-block 64)" in refused(path, out)
    path = write_file(tmp_path / "t", prompt_tokens=[4, 5, 6], hash_ids=[[1, 2], [2], [3]])
    assert "none of 16, 64 and 512 tokens per hash fits every prompt; say it with --hash-block N" in refused(path, out)


def test_hashes_that_first_show_up_late_are_not_lost(tmp_path: Path, out: Path) -> None:
    plain = '{"arrival_s": %d, "prompt_tokens": 20, "output_tokens": 1}\n'
    late = '{"arrival_s": 2000, "prompt_tokens": 20, "output_tokens": 1, "prefix_hashes": [1, 2]}\n'
    path = written(tmp_path / "t.jsonl", "".join(plain % row for row in range(1500)) + late)
    assert "line 1501: found hashes; say how many tokens one covers: --hash-block N" in refused(path, out)
    trace, _ = imported(path, out, hash_block=16)
    assert trace.prefix_values is not None
    assert trace.prefix_values.tolist() == [1, 2]


# ---- what is refused -----------------------------------------------------------------------------

GOOD = "arrival_s,prompt_tokens,output_tokens\n0,1,2\n"
REFUSED: list[tuple[str, str]] = [
    ("", "0 requests after filters (0 read); the file is empty"),
    ("[1, 2]", "found one JSON list; allowed is one JSON object per line"),
    ('{"a":\n1}', "found one JSON object over several lines"),
    ("0,1.5,2\n1,2,3\n", "line 1: found '0,1.5,2'; allowed is a header with column names"),
    ("a,a,b\n1,2,3\n", "line 1: found the column a twice"),
    ("\n\n", "0 requests after filters (0 read); the file is empty"),
    (",,\n1,2,3\n", "line 1: found no column names"),
    ("a,b,c\r1,2,3\r4,5,6\n", "line 1: found a line that ends in a bare carriage return"),
    ("a,b,c\n1,2,3\n", "no known format has the columns a, b, c; say which is which: --map arrival=NAME"),
    (GOOD + "1,2\n", "line 3: found 2 values; allowed is 3, as in the header"),
    (GOOD + '1,"2,3\n', "line 3: not CSV"),
    (GOOD + "1,two,3\n", "prompt_tokens, line 3: found 'two'; allowed is a whole number"),
    (GOOD + "1,2.5,3\n", "prompt_tokens, line 3: found '2.5'; allowed is a whole number"),
    (GOOD + "1,-2,3\n", "prompt_tokens, line 3: found -2; allowed is 0 to"),
    (GOOD + "1,0x10,3\n", "prompt_tokens, line 3: found '0x10'; allowed is a whole number"),
    (GOOD + "1,,3\n", "prompt_tokens, line 3: found null; fill it in or drop the row"),
    (GOOD + "1,99999999999,3\n", "prompt_tokens, line 3: found 99999999999; allowed is 0 to"),
    (GOOD + "soon,2,3\n", "arrival_s, line 3: found 'soon'; allowed is a number"),
    (GOOD + ",2,3\n", "arrival_s, line 3: found no arrival"),
    (GOOD + "nan,2,3\n", "arrival_s, line 3: found nan; allowed is an instant in s; check the unit"),
    (GOOD + "1e300,2,3\n", "arrival_s, line 3: found 1e+300; allowed is an instant in s"),
    (GOOD + "99999999999,2,3\n", "arrival_s, line 3: found 99999999999; is beyond the clock"),
    ("arrival_s,prompt_tokens,output_tokens,task\n0,1,2,a\n1,1,2,\n", "task, line 3: found null"),
    ("arrival_s,prompt_tokens,output_tokens,finish\n0,1,2,stop\n", "finish, line 2: found 'stop'"),
    ("arrival_s,prompt_tokens,output_tokens,max_tokens\n0,1,2,0\n", "max_tokens, line 2: found 0"),
    ("arrival_s,prompt_tokens,output_tokens,cancel_s\n0,1,2,-1\n", "cancel_s, line 2: found -1.0"),
    ("arrival_s,prompt_tokens,output_tokens,after\n0,1,2,x\n", "after: names requests, but there is no column"),
    ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 2}\n{"arrival_s": 1,\n', "line 2: not JSON"),
    ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 2}\n[1]\n', "line 2: found list; allowed is one JSON"),
    ('{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 2}\n', "prompt_tokens, line 1: found True"),
    ('{"arrival_s": 0, "prompt_tokens": "7", "output_tokens": 2.5}\n', "output_tokens, line 1: found 2.5"),
    ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "session_id": 1.5}\n', "session_id, line 1: found 1.5"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_bad_file_is_refused_in_one_line_that_says_where(tmp_path: Path, out: Path, text: str, message: str) -> None:
    assert message in refused(written(tmp_path / "bad", text), out)


def test_bytes_that_are_not_text_are_refused_with_their_line(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(GOOD.encode() + b"1,2,3,\xff\n")
    assert "line 3: found bytes that are not UTF-8 text" in refused(path, out)
    path.write_bytes(b"\xff\xfea\x00")
    assert "line 1: found bytes that are not UTF-8 text" in refused(path, out)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, out: Path) -> None:
    packed = gzip.compress((FILES / "azure2024.csv").read_bytes() * 100)
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    assert "cannot be read" in refused(tmp_path / "cut.gz", out)
    whole = write_file(tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    assert "not a complete Parquet file" in refused(tmp_path / "cut", out)


def test_missing_files_folders_and_places_to_write_are_named(tmp_path: Path, out: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.csv", out)
    assert "is a folder; give one file" in refused(tmp_path, out)
    message = refused(FILES / "azure2023.csv", tmp_path / "none" / "out.parquet")
    assert "cannot write the trace (no such folder)" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"arival": "sent_us"}}, "'arival' is no column of a trace; did you mean arrival?"),
        ({"columns": {"in": "prompt_tokens"}}, "the trace's name comes first: --map prompt_tokens=in"),
        ({"columns": {"arrival": "sent"}}, "has no column 'sent'; did you mean 'sent_us'?"),
        ({"columns": {"cancel": "note"}}, "the unit of this duration is not known; add it: --map cancel=note:ms"),
        ({"format": "azure"}, "format azure: found no column TIMESTAMP, ContextTokens, GeneratedTokens, only id, "),
        ({"format": "generic"}, "found no column --map arrival=NAME, --map prompt_tokens=NAME"),
        ({"overflow": "drop"}, "--overflow drop; needs the context limit; add --max-model-len N"),
        ({"max_model_len": 0}, "--max-model-len 0; must be a number of tokens"),
        ({"hash_block": -1}, "--hash-block -1; must be a number of tokens"),
        ({"start_s": -1.0}, "--start -1; must be seconds after the first arrival"),
        ({"start_s": 5.0, "end_s": 5.0}, "--end 5; must be later than --start 5"),
        ({"end_s": float("nan")}, "--end nan; must be"),
        ({"max_gap_s": 0.0}, "--max-gap 0; must be a finite number above 0"),
    ],
)
def test_bad_options_are_refused_with_the_fix(out: Path, options: dict[str, Any], message: str) -> None:
    if "cancel" in options.get("columns", {}):
        options["columns"] |= {"arrival": "sent_us", "prompt_tokens": "in", "output_tokens": "out"}
    assert message in refused(FILES / "generic.csv", out, **options)


def test_the_report_lists_what_happened_and_where_for_people_and_machines(tmp_path: Path, out: Path) -> None:
    rows = "".join(f"{9 - row},{row % 2},1\n" for row in range(10))
    path = written(tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens\n" + rows + "20,5,0\n")
    _, report = imported(path, out)
    lines = report.lines()
    assert "skipped 5 rows (zero_prompt): lines 2, 4, 6, 8, 10" in lines
    assert "skipped 1 row (zero_output): line 12" in lines
    assert "4 rows (sorted: arrived before the row above): lines 5, 7, 9, 11" in lines
    assert lines[-1] == f"{out}: 5 requests of 11 rows over 8 s, 0.5 requests/s"
    data = json.loads(json.dumps(report.as_data(), allow_nan=False))
    assert data["skipped"]["zero_prompt"] == {"rows": 5, "first_lines": [2, 4, 6, 8, 10]}
    assert data["requests"] == 5


def test_long_lists_of_rows_end_with_how_many_more_there_are(tmp_path: Path, out: Path) -> None:
    path = written(tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1,1\n" + "1,1,0\n" * 9)
    assert "skipped 9 rows (zero_output): lines 3, 4, 5, 6, 7 and 4 more" in imported(path, out)[1].lines()


def test_the_same_import_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        imported(FILES / "mooncake.jsonl", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
