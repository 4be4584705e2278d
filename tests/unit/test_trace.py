from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_data import shared_data
from simcluster.errors import TraceError
from simcluster.workload import Trace, read_trace, write_trace
from simcluster.workload.trace_schema import COLUMNS
from trace_files import maps, write_file

TEN_YEARS_NS = 3650 * 86_400 * 10**9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.parquet"


# ---- what is normal ------------------------------------------------------------------------------


def test_three_columns_are_enough_and_the_others_take_their_defaults(file: Path) -> None:
    trace = read_trace(write_file(file))
    assert trace.request_id.tolist() == ["0", "1", "2"]
    assert trace.arrival_ns.tolist() == [0, 10, 20]
    assert trace.prompt_tokens.tolist() == [5, 6, 7]
    assert trace.output_tokens.tolist() == [1, 2, 3]
    assert trace.max_tokens.tolist() == trace.cancel_ns.tolist() == [-1, -1, -1]
    assert trace.slo_ttft_ns.tolist() == [-1, -1, -1]
    assert trace.priority.tolist() == [0, 0, 0]
    assert not trace.ends_by_length.any()
    assert trace.task is None
    assert trace.task_names == ()
    assert trace.session_id is None
    assert trace.prompt is None
    assert trace.output_tokens_by_model == trace.quality_by_model == {}
    assert trace.prefix_offsets is None
    assert trace.notes == ()
    assert len(trace) == 3


def test_every_optional_column_is_read(file: Path) -> None:
    trace = read_trace(
        write_file(
            file,
            metadata={
                "simcluster.schema_version": "1",
                "simcluster.prefix_block_size": "4",
                "simcluster.source": "here",
                "unrelated": "x",
            },
            request_id=["a", "b", "c"],
            task=["long", "chat", "long"],
            session_id=["s", None, "s"],
            max_tokens=[9, None, 7],
            finish=["eos", "length", "eos"],
            priority=[-1, 0, 5],
            cancel_s=[0.0, None, 1.5],
            slo_ttft_s=[0.15, None, 1.12],
            prompt=["one", "two", "three"],
            prefix_hashes=[[1, 2], [], [1, 3]],
            prompt_tokens_by_model=maps([{"x": 5}, {"x": 6}, {"x": 7}], pa.int32()),
            output_tokens_by_model=maps([{"x": 1, "y": 2}, {"y": 4, "x": 3}, {"x": 5, "y": 6}], pa.int64()),
            quality_by_model=maps([{"x": 0.0}, {"x": 0.5}, {"x": 1.0}], pa.float64()),
        )
    )
    assert trace.request_id.tolist() == ["a", "b", "c"]
    assert trace.task is not None
    assert trace.task_names == ("chat", "long")
    assert trace.task.tolist() == [1, 0, 1]
    assert trace.session_id is not None
    assert trace.session_id.tolist() == ["s", None, "s"]
    assert trace.max_tokens.tolist() == [9, -1, 7]
    assert trace.ends_by_length.tolist() == [False, True, False]
    assert trace.priority.tolist() == [-1, 0, 5]
    assert trace.cancel_ns.tolist() == [0, -1, 1_500_000_000]
    assert trace.slo_ttft_ns.tolist() == [150_000_000, -1, 1_120_000_000]
    assert trace.prompt is not None
    assert trace.prompt.tolist() == ["one", "two", "three"]
    assert trace.prefix_offsets is not None
    assert trace.prefix_values is not None
    assert trace.prefix_offsets.tolist() == [0, 2, 2, 4]
    assert trace.prefix_values.tolist() == [1, 2, 1, 3]
    assert trace.prefix_block_size == 4
    assert trace.prompt_tokens_by_model["x"].tolist() == [5, 6, 7]
    assert trace.output_tokens_by_model["x"].tolist() == [1, 3, 5]
    assert trace.output_tokens_by_model["y"].tolist() == [2, 4, 6]
    assert trace.quality_by_model["x"].tolist() == [0.0, 0.5, 1.0]
    assert trace.metadata == {"source": "here"}


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint64()])
def test_integers_of_any_width_are_read(file: Path, kind: Any) -> None:
    trace = read_trace(write_file(file, prompt_tokens=pa.array([5, 6, 7], kind)))
    assert trace.prompt_tokens.dtype == np.int64
    assert trace.prompt_tokens.tolist() == [5, 6, 7]


def test_an_optional_column_of_nothing_but_nulls_says_as_much_as_none(file: Path) -> None:
    plain = read_trace(write_file(file))
    nulls = pa.nulls(3)
    optional = set(COLUMNS) - {"arrival_ns", "arrival_s", "prompt_tokens", "output_tokens"}
    trace = read_trace(write_file(file, **dict.fromkeys(optional, nulls)))
    for field in fields(Trace):
        if field.name != "sha256":
            np.testing.assert_array_equal(getattr(trace, field.name), getattr(plain, field.name))


def test_arrivals_in_seconds_are_rounded_to_whole_nanoseconds(file: Path) -> None:
    seconds = [0.0, 0.052, 0.0981990004]
    trace = read_trace(write_file(file, arrival_s=seconds))
    assert trace.arrival_ns.tolist() == [0, 52_000_000, 98_199_000]


def test_equal_timestamps_keep_the_order_of_the_file(file: Path) -> None:
    trace = read_trace(write_file(file, arrival_ns=[5, 5, 5], request_id=["c", "a", "b"]))
    assert trace.request_id.tolist() == ["c", "a", "b"]
    assert trace.notes == ()


def test_unsorted_rows_are_sorted_stably_with_a_note_and_keep_their_ids(file: Path) -> None:
    trace = read_trace(write_file(file, arrival_ns=[7, 3, 7], task=["p", "q", "r"]))
    assert trace.arrival_ns.tolist() == [3, 7, 7]
    assert trace.request_id.tolist() == ["1", "0", "2"]
    assert trace.prompt_tokens.tolist() == [6, 5, 7]
    assert trace.task is not None
    assert [trace.task_names[code] for code in trace.task] == ["q", "p", "r"]
    assert trace.notes == ("sorted: 1 row arrived before the row above",)


def test_negative_offsets_are_rebased_to_zero_with_a_note(file: Path) -> None:
    trace = read_trace(write_file(file, arrival_s=[-5.0, 0.0, 10.0]))
    assert trace.arrival_ns.tolist() == [0, 5 * 10**9, 15 * 10**9]
    assert trace.notes == ("rebased: the first arrival was at -5 s and is now at 0 s",)


def test_a_positive_first_arrival_stays_where_it_is(file: Path) -> None:
    assert read_trace(write_file(file, arrival_ns=[100, 101, 102])).arrival_ns.tolist() == [
        100,
        101,
        102,
    ]


def test_rows_without_output_or_prompt_are_skipped_and_counted(file: Path) -> None:
    trace = read_trace(
        write_file(
            file,
            arrival_ns=[0, 1, 2, 3, 4, 5],
            prompt_tokens=[10, 12, 8, 0, 9, 0],
            output_tokens=[5, 0, 3, 0, 1, 4],
            request_id=["a", "same", "b", "same", "c", "same"],
        )
    )
    assert trace.request_id.tolist() == ["a", "b", "c"]
    assert trace.skipped == {"zero_output": 2, "zero_prompt": 1}
    assert trace.notes == ("skipped 2 rows (zero_output)", "skipped 1 row (zero_prompt)")


def test_default_ids_are_row_numbers_of_the_file_even_after_skipping(file: Path) -> None:
    assert read_trace(write_file(file, output_tokens=[0, 2, 3])).request_id.tolist() == ["1", "2"]


def test_unknown_columns_are_ignored_with_a_note(file: Path) -> None:
    trace = read_trace(write_file(file, None, hash_ids=[[1], [2], [3]], **{"odd\nname": [1, 2, 3]}))
    assert trace.notes == ("ignored columns: hash_ids, 'odd\\nname'",)


def test_text_columns_may_be_categories_or_integers(file: Path) -> None:
    trace = read_trace(write_file(file, request_id=[30, 10, 20], task=pa.array(["b", "a", "b"]).dictionary_encode()))
    assert trace.request_id.tolist() == ["30", "10", "20"]
    assert trace.task_names == ("a", "b")


def test_a_file_in_a_folder_named_like_a_partition_has_no_extra_columns(tmp_path: Path) -> None:
    folder = tmp_path / "task=chat"
    folder.mkdir()
    assert read_trace(write_file(folder / "t.parquet")).task is None


def test_a_file_of_many_row_groups_reads_like_one(file: Path, tmp_path: Path) -> None:
    trace = read_trace(
        write_file(
            file,
            task=["b", "a", "c"],
            quality_by_model=maps([{"m": 0.1}, {"m": 0.2}, {"m": 0.3}], pa.float64()),
        )
    )
    split = tmp_path / "split.parquet"
    pq.write_table(pq.read_table(file), split, row_group_size=1)
    assert read_trace(split).equals(trace)


def test_the_trace_carries_the_hash_of_its_file(file: Path) -> None:
    write_file(file)
    first = read_trace(file).sha256
    write_file(file, prompt_tokens=[5, 6, 8])
    assert first is not None
    assert len(first) == 64
    assert read_trace(file).sha256 != first


def test_the_azure_conversation_trace_just_reads() -> None:
    data = shared_data()
    if data is None:
        pytest.skip("the shared data is not here")
    trace = read_trace(data / "traces" / "azure2023_conv.parquet")
    assert len(trace) == 19_366
    assert trace.notes == ()
    assert trace.arrival_ns[0] == 0
    assert int(trace.arrival_ns[-1]) == 3_501_721_937_000
    assert float(np.median(trace.prompt_tokens)) == 1020


def test_a_mooncake_trace_reads_without_its_foreign_hashes() -> None:
    data = shared_data()
    if data is None:
        pytest.skip("the shared data is not here")
    trace = read_trace(data / "traces" / "mooncake_conversation.parquet")
    assert len(trace) == 12_031
    assert trace.notes == ("ignored columns: hash_ids",)


# ---- writing and slicing -------------------------------------------------------------------------


def small_trace() -> Trace:
    return Trace.from_columns(
        np.array([0, 0, 7], dtype=np.int64),
        np.array([9, 4, 5], dtype=np.int64),
        np.array([1, 2, 3], dtype=np.int64),
        task=np.array([1, 0, 1], dtype=np.int32),
        task_names=("a", "b"),
        quality_by_model={"m": np.array([0.1, 0.2, 0.3])},
        prefix_offsets=np.array([0, 3, 3, 5], dtype=np.int64),
        prefix_values=np.array([10, 11, 12, 10, 14], dtype=np.int64),
        prefix_block_size=4,
        metadata={"source": "test", "seed": "1"},
    )


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    write_trace(small_trace(), tmp_path / "a")
    write_trace(small_trace(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    write_trace(read_trace(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_file_says_its_schema_version_units_and_origin(file: Path) -> None:
    write_trace(small_trace(), file)
    metadata = pq.ParquetFile(file).metadata.metadata
    assert metadata[b"simcluster.schema_version"] == b"1"
    assert b"nanoseconds" in metadata[b"simcluster.units"]
    assert metadata[b"simcluster.source"] == b"test"
    assert metadata[b"simcluster.seed"] == b"1"


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot write the trace"):
        write_trace(small_trace(), tmp_path / "none" / "t.parquet")
    (tmp_path / "taken").mkdir()
    with pytest.raises(TraceError, match="cannot write the trace"):
        write_trace(small_trace(), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_metadata_of_the_format_itself_cannot_be_set(file: Path) -> None:
    trace = small_trace()
    trace.metadata["units"] = "furlongs"
    with pytest.raises(ValueError, match="'units' is set by the file format"):
        write_trace(trace, file)


def test_head_and_take_cut_every_column(file: Path) -> None:
    trace = small_trace()
    write_trace(trace.head(2), file)
    assert read_trace(file).equals(trace.head(2))
    assert len(trace.head(99)) == 3
    cut = trace.take([2, 0])
    assert cut.request_id.tolist() == ["2", "0"]
    assert cut.quality_by_model["m"].tolist() == [0.3, 0.1]
    assert cut.prefix_offsets is not None
    assert cut.prefix_values is not None
    assert cut.prefix_offsets.tolist() == [0, 2, 5]
    assert cut.prefix_values.tolist() == [10, 14, 10, 11, 12]
    assert trace.take(trace.prompt_tokens > 4).prompt_tokens.tolist() == [9, 5]
    assert len(trace.head(0)) == 0
    with pytest.raises(ValueError, match="must be 0 or more"):
        trace.head(-1)


def test_columns_of_different_lengths_are_refused() -> None:
    two, three = np.array([1, 2]), np.array([1, 2, 3])
    with pytest.raises(ValueError, match="prompt_tokens has 2 rows, arrival_ns has 3"):
        Trace.from_columns(three, two, three)
    with pytest.raises(ValueError, match=r"quality_by_model\[m\] has 2 rows"):
        Trace.from_columns(three, three, three, quality_by_model={"m": two})


def test_traces_that_differ_in_one_value_are_not_equal() -> None:
    trace = small_trace()
    other = small_trace()
    assert trace.equals(other)
    other.quality_by_model["m"][1] = 0.25
    assert not trace.equals(other)
    assert not trace.equals(trace.head(2))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 12))

    def column(low: int, high: int) -> np.ndarray[Any, Any]:
        return np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), np.int64)

    def texts(unique: bool) -> np.ndarray[Any, Any]:
        text = st.text(max_size=6)
        values = draw(st.lists(text, min_size=n, max_size=n, unique=unique))
        return np.array(values, dtype=object)

    optional: dict[str, Any] = {}
    if draw(st.booleans()):
        optional["request_id"] = texts(unique=True)
        optional["session_id"] = texts(unique=False)
        optional["prompt"] = texts(unique=False)
    if draw(st.booleans()):
        tokens = column(0, 2**31)
        optional["max_tokens"] = np.where(tokens == 0, -1, tokens)
        optional["ends_by_length"] = column(0, 1).astype(bool)
        optional["priority"] = column(-(2**31), 2**31 - 1)
        optional["cancel_ns"] = column(-1, 10**15)
        targets = column(-1, 10**15)
        optional["slo_ttft_ns"] = np.where(targets == 0, -1, targets)
    if draw(st.booleans()):
        names = sorted(draw(st.sets(st.text(max_size=4), min_size=1, max_size=3)))
        optional["task_names"] = tuple(names)
        optional["task"] = column(0, len(names) - 1).astype(np.int32)
        optional["prompt_tokens_by_model"] = {name: column(1, 2**31) for name in names}
        optional["output_tokens_by_model"] = {name: column(1, 2**31) for name in names}
        optional["quality_by_model"] = {name: column(0, 10**6) / 10**6 for name in names}
    prompts = column(1, 100)
    if draw(st.booleans()):
        block = draw(st.integers(1, 60))
        counts = np.where(column(0, 1) == 0, 0, -(-prompts // block))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        optional["prefix_offsets"] = offsets
        optional["prefix_values"] = np.arange(offsets[-1]) * 7 - 2**62
        optional["prefix_block_size"] = block
    if draw(st.booleans()):
        optional["after"] = np.array([draw(st.integers(-1, row - 1)) for row in range(n)])
        optional["think_ns"] = column(0, 10**15)
    metadata = draw(st.dictionaries(st.sampled_from(["source", "seed", "recipe"]), st.text()))
    arrivals = np.sort(column(0, TEN_YEARS_NS))
    return Trace.from_columns(arrivals, prompts, column(1, 2**31), metadata=metadata, **optional)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
def test_what_is_written_is_what_is_read(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "round.parquet"
    write_trace(trace, path)
    again = read_trace(path)
    assert again.equals(trace)
    assert again.notes == ()
    assert again.skipped == {}
