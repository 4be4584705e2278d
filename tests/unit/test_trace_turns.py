"""The columns `after` and `think_s` of a trace: read, checked, cut and written."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from simcluster.errors import TraceError
from simcluster.workload import Trace, read_trace, write_trace
from trace_files import imported, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.parquet"


def error_of(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def links(trace: Trace) -> tuple[list[int], list[int]]:
    assert trace.after is not None
    assert trace.think_ns is not None
    return trace.after.tolist(), trace.think_ns.tolist()


def test_a_request_names_the_one_that_it_waits_for(file: Path) -> None:
    write_file(file, request_id=["a", "b", "c"], after=[None, "a", "b"], think_s=[None, 1.5, 0.0])
    assert links(read_trace(file)) == ([-1, 0, 1], [0, 1_500_000_000, 0])


def test_think_times_are_0_where_none_are_given(file: Path) -> None:
    assert links(read_trace(write_file(file, request_id=[7, 8, 9], after=[None, 7, 7]))) == ([-1, 0, 0], [0, 0, 0])


def test_without_ids_row_numbers_from_0_are_named(file: Path) -> None:
    assert links(read_trace(write_file(file, after=[None, 0, 1])))[0] == [-1, 0, 1]


def test_names_are_followed_when_rows_are_sorted(file: Path) -> None:
    write_file(file, arrival_ns=[9, 3, 5], request_id=["a", "b", "c"], after=["c", None, "b"])
    trace = read_trace(file)
    assert trace.request_id.tolist() == ["b", "c", "a"]
    assert links(trace)[0] == [-1, 0, 1]


def test_a_column_of_nulls_is_no_column(file: Path) -> None:
    trace = read_trace(write_file(file, request_id=["a", "b", "c"], after=pa.nulls(3, pa.string())))
    assert trace.after is None
    assert trace.think_ns is None


def test_a_request_whose_predecessor_is_skipped_comes_at_its_own_arrival(file: Path) -> None:
    write_file(file, request_id=["a", "b", "c"], output_tokens=[0, 1, 1], after=[None, "a", "b"], think_s=[None, 3, 4])
    trace = read_trace(file)
    assert links(trace) == ([-1, 0], [0, 4_000_000_000])
    assert trace.notes[-1] == "1 row waited for a skipped row: now sent at their own arrival"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"after": [None, "x", "a"]}, "after, row 2: found 'x'; allowed is the request_id of another row, or null"),
    ({"after": ["a", None, None]}, "after, row 1: found 'a', which does not come earlier"),
    ({"after": [None, "c", None]}, "after, row 2: found 'c', which does not come earlier; allowed is a request of an"),
    ({"after": [None, 1.5, None]}, "after: found a column of type double; allowed is text"),
    ({"think_s": [None, 1.0, None]}, "think_s: found think times without a column after"),
    ({"after": [None, "a", None], "think_s": [None, 1.0, 2.0]}, "think_s, row 3: found a think time; allowed only"),
    ({"after": [None, "a", None], "think_s": [None, -1.0, None]}, "think_s, row 2: found -1.0; allowed is 0 to"),
]


@pytest.mark.parametrize(("columns", "message"), BAD)
def test_a_bad_link_is_refused(file: Path, columns: dict[str, Any], message: str) -> None:
    assert error_of(write_file(file, request_id=["a", "b", "c"], **columns)).startswith(message)


def chain() -> Trace:
    return Trace.from_columns(
        np.array([0, 1, 2, 3]),
        np.array([5, 6, 7, 8]),
        np.array([1, 1, 1, 1]),
        after=np.array([-1, 0, 0, 2]),
        think_ns=np.array([0, 10, 20, 30]),
    )


def test_cutting_a_trace_renumbers_the_links(file: Path) -> None:
    assert links(chain().head(3)) == ([-1, 0, 0], [0, 10, 20])
    assert links(chain().take([0, 2, 3])) == ([-1, 0, 1], [0, 20, 30])
    assert links(chain().take([1, 2, 3])) == ([-1, -1, 1], [0, 0, 30])  # the others come at their nominal arrival
    assert chain().take([0]).after is None
    with pytest.raises(ValueError, match="can only wait for one of an earlier row"):
        chain().take([1, 0])
    write_trace(chain(), file)
    assert read_trace(file).equals(chain())


def test_columns_that_do_not_fit_are_refused() -> None:
    three = np.array([1, 2, 3])
    with pytest.raises(ValueError, match="can only wait for one of an earlier row"):
        Trace.from_columns(three, three, three, after=np.array([0, 0, 0]))
    with pytest.raises(ValueError, match="after has 2 rows"):
        Trace.from_columns(three, three, three, after=np.array([-1, 0]), think_ns=np.array([0, 0]))


def test_an_import_keeps_links_and_cuts_those_to_rows_that_are_left_out(file: Path, tmp_path: Path) -> None:
    write_file(
        file,
        arrival_ns=[0, 10**9, 2 * 10**9, 3 * 10**9],
        prompt_tokens=[5, 6, 7, 8],
        output_tokens=[1, 1, 1, 1],
        request_id=["a", "b", "c", "d"],
        after=[None, "a", "b", "c"],
        think_s=[None, 0.5, 0.5, 0.5],
    )
    trace, _ = imported(file, tmp_path / "out.parquet")
    assert links(trace)[0] == [-1, 0, 1, 2]
    trace, report = imported(file, tmp_path / "out.parquet", start_s=1.0)
    assert links(trace) == ([-1, 0, 1], [0, 500_000_000, 500_000_000])
    assert report.changed.first == {"waited for a request that is left out: comes at its own arrival": [2]}
