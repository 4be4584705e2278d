import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simcluster.errors import TraceError
from simcluster.workload import read_trace
from trace_files import maps, write_file

NAN = math.nan
INF = math.inf
X = {"x": 1}
XY = {"x": 1, "y": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.parquet"


def error_of(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "none.parquet")
    assert "directory" in error_of(tmp_path)


def test_a_file_that_is_not_parquet_is_refused(file: Path) -> None:
    for content in (b"", b"PAR1", b"arrival_s,prompt_tokens\n0,1\n" * 9):
        file.write_bytes(content)
        assert "not a complete Parquet file" in error_of(file)


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    content = write_file(file, task=["a", "b", "c"]).read_bytes()
    for size in range(0, len(content), 7):
        file.write_bytes(content[:size])
        assert "not a complete Parquet file" in error_of(file)


def test_a_column_name_that_is_not_text_is_refused(file: Path) -> None:
    content = write_file(file).read_bytes()
    file.write_bytes(content.replace(b"prompt_tokens", b"prompt\xfftokens"))
    assert "not a complete Parquet file" in error_of(file)


def test_an_empty_trace_says_how_many_rows_were_read(file: Path) -> None:
    none = pa.array([], pa.int64())
    write_file(file, arrival_ns=none, prompt_tokens=none, output_tokens=none)
    assert error_of(file).startswith("0 requests after filters (0 read)")
    write_file(file, output_tokens=[0, 0, 1], prompt_tokens=[1, 0, 0])
    assert error_of(file).startswith("0 requests after filters (3 read, 3 dropped: zero_output 2, zero_prompt 1)")


def test_a_missing_column_is_named_beside_those_that_are_there(file: Path) -> None:
    assert error_of(write_file(file, output_tokens=None)) == (
        "found no column output_tokens, only arrival_ns, prompt_tokens; rename or add the column"
    )
    assert "no column arrival_ns or arrival_s" in error_of(write_file(file, arrival_ns=None))


def test_two_arrival_columns_are_refused(file: Path) -> None:
    write_file(file, arrival_ns=[0, 1, 2], arrival_s=[0.0, 1.0, 2.0])
    assert "found both arrival_ns and arrival_s; allowed is one of them" in error_of(file)


def test_a_column_that_is_there_twice_is_refused(file: Path) -> None:
    column = pa.array([1, 2, 3])
    names = ["arrival_ns", "prompt_tokens", "output_tokens", "priority", "priority"]
    pq.write_table(pa.Table.from_arrays([column] * 5, names=names), file)
    assert error_of(file) == "priority: found the column twice; allowed is once"


BAD_COLUMNS: list[tuple[str, Any, str]] = [
    ("output_tokens", [5, None, 7], ", row 2: found null;"),
    ("arrival_ns", [0, 1, None], ", row 3: found null;"),
    ("prompt_tokens", [None, 1, None], ", row 1: found null (and 1 more such rows);"),
    ("arrival_s", [0.0, NAN, 1.0], ", row 2: found nan;"),
    ("arrival_s", [0.0, 1.0, INF], ", row 3: found inf;"),
    ("arrival_s", [-INF, 1.0, 2.0], ", row 1: found -inf;"),
    ("prompt_tokens", [1, -1, 1], ", row 2: found -1; allowed is 0 to 2147483648"),
    ("output_tokens", [1, 1, -2], ", row 3: found -2; allowed is 0 to 2147483648"),
    ("prompt_tokens", [1, 2**31 + 1, 1], ", row 2: found 2147483649; allowed is 0 to"),
    ("output_tokens", pa.array([1, 1, 2**64 - 1], pa.uint64()), ", row 3: found 1844674407"),
    ("prompt_tokens", [5.0, 6.0, 7.0], ": found a column of type double; allowed is an integer"),
    ("output_tokens", ["1", "2", "3"], ": found a column of type string;"),
    ("output_tokens", [True, True, True], ": found a column of type bool;"),
    ("arrival_ns", [0.0, 1.0, 2.0], ": found a column of type double;"),
    ("arrival_ns", pa.array([0, 1, 2], pa.timestamp("ns")), ": found a column of type timestamp"),
    ("arrival_s", ["0", "1", "2"], ": found a column of type string;"),
    ("arrival_s", [1.0, 1.7e9, 2.0], ", row 2: found 1700000000.0; allowed is +-3.15619e+08"),
    ("arrival_ns", [0, 1, 17 * 10**17], ", row 3: found 1700000000000000000; allowed is"),
    ("arrival_s", [-2e8, 0.0, 2e8], ": found a trace of 4e+08 s; allowed is 10 years; check"),
    ("request_id", ["a", "b", "a"], ": found 'a' in row 1 and again in row 3;"),
    ("request_id", ["a", None, "b"], ", row 2: found null;"),
    ("request_id", [1.0, 2.0, 3.0], ": found a column of type double; allowed is text"),
    ("finish", ["eos", "stop", "stop"], ", row 2: found 'stop' (and 1 more such rows); allowed"),
    ("finish", ["eos", None, "eos"], ", row 2: found null;"),
    ("max_tokens", [1, 0, 1], ", row 2: found 0; allowed is 1 to"),
    ("max_tokens", [1, None, -1], ", row 3: found -1; allowed is 1 to"),
    ("priority", [0, 2**31, 0], ", row 2: found 2147483648; allowed is -2147483648 to"),
    ("priority", [0, 0, -(2**31) - 1], ", row 3: found -2147483649;"),
    ("cancel_s", [0.0, -1.0, None], ", row 2: found -1.0; allowed is 0 to 1e+06 s"),
    ("cancel_s", [0.0, NAN, None], ", row 2: found nan;"),
    ("cancel_s", ["0", "1", "2"], ": found a column of type string; allowed is a number"),
    ("slo_ttft_s", [0.1, 0.0, 0.1], ", row 2: found 0.0; allowed is 1e-09 to"),
    ("slo_ttft_s", [0.1, 1.5e8, 0.1], ", row 2: found 150000000.0; allowed is"),
    ("task", ["a", "b", None], ", row 3: found null;"),
    ("prompt", ["a", "b", None], ", row 3: found null;"),
    ("quality_by_model", ["a", "b", "c"], ": found a column of type string; allowed is a map"),
    ("quality_by_model", maps([X, None, X], pa.float64()), ", row 2: found null;"),
    ("quality_by_model", maps([X, {"x": 1.1}, X], pa.float64()), "['x'], row 2: found 1.1;"),
    ("quality_by_model", maps([X, X, {"x": -0.1}], pa.float64()), "['x'], row 3: found -0.1;"),
    ("quality_by_model", maps([X, X, {"x": NAN}], pa.float64()), "['x'], row 3: found nan;"),
    ("quality_by_model", maps([X, {"x": None}, X], pa.float64()), "['x'], row 2: found null;"),
    ("quality_by_model", maps([X, [("x", 1), ("x", 1)], X], pa.float64()), "'x' more than once;"),
    ("output_tokens_by_model", maps([XY, X, XY], pa.int64()), ", row 2: found no key 'y', which"),
    ("output_tokens_by_model", maps([X, X, XY], pa.int64()), ", row 3: found key 'y', which"),
    ("output_tokens_by_model", maps([X, X, {"x": 0}], pa.int64()), "['x'], row 3: found 0;"),
    ("prompt_tokens_by_model", maps([X, X, X], pa.float64()), "['x']: found a column of type"),
    ("prefix_hashes", [[1], [2], [3]], ": found no simcluster.prefix_block_size"),
]


@pytest.mark.parametrize(("column", "values", "message"), BAD_COLUMNS)
def test_a_bad_column_is_refused_with_its_first_bad_row(file: Path, column: str, values: Any, message: str) -> None:
    found = error_of(write_file(file, None, **{column: values}))
    assert found.startswith(column)
    assert message in found


def test_row_numbers_in_errors_are_those_of_the_file_after_sorting_and_skipping(file: Path) -> None:
    write_file(
        file,
        arrival_ns=[9, 8, 7],
        output_tokens=[1, 0, 1],
        priority=[2**40, 2**41, 0],
    )
    assert "priority, row 1: found 1099511627776;" in error_of(file)


@pytest.mark.parametrize(
    ("tokens", "hashes", "good"),
    [(20, [0, 1], False), (600, [0, 1], True), (512, [3], True), (513, [3], False), (9, [], True)],
)
def test_a_prompt_has_one_hash_per_block_begun_or_none(file: Path, tokens: int, hashes: list[int], good: bool) -> None:
    write_file(
        file,
        metadata={"simcluster.prefix_block_size": "512"},
        arrival_ns=[0],
        prompt_tokens=[tokens],
        output_tokens=[1],
        prefix_hashes=pa.array([hashes], pa.list_(pa.int64())),
    )
    if good:
        trace = read_trace(file)
        assert trace.prefix_values is not None
        assert trace.prefix_values.tolist() == hashes
    else:
        needed = -(-tokens // 512)
        assert f"row 1: found {len(hashes)} hashes for {tokens} prompt tokens" in error_of(file)
        assert f"here {needed}, or none" in error_of(file)


def test_bad_hash_columns_are_refused(file: Path) -> None:
    metadata = {"simcluster.prefix_block_size": "512"}
    write_file(file, metadata, prefix_hashes=[[1], [None], [3]])
    assert "prefix_hashes, row 2: found null in the list;" in error_of(file)
    write_file(file, metadata, prefix_hashes=[["a"], ["b"], ["c"]])
    assert "allowed is a list of integers" in error_of(file)
    write_file(file, {"simcluster.prefix_block_size": "0"}, prefix_hashes=[[1], [2], [3]])
    assert "prefix_block_size: found '0'" in error_of(file)


def test_an_unknown_schema_version_is_refused(file: Path) -> None:
    message = error_of(write_file(file, {"simcluster.schema_version": "2"}))
    assert "schema_version: found '2'; allowed is '1'" in message
