"""Small trace files for tests."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from simcluster.experiment.build import build_world
from simcluster.experiment.run import run_policy
from simcluster.scenario import Scenario, load_scenario
from simcluster.workload import Trace, read_trace
from simcluster.workload.importing import ImportOptions, ImportReport, import_trace

__all__ = ["FILES", "imported", "maps", "replayed", "write_file"]

FILES = Path(__file__).resolve().parent / "data" / "traces"
"""One small file per foreign format; all numbers are invented."""


def imported(path: Path, out: Path, **options: Any) -> tuple[Trace, ImportReport]:
    """Import a file; return the trace as it is read back, and the report."""
    report = import_trace(path, out, ImportOptions(**options))
    return read_trace(out), report


def replayed(trace: Path, limit: int | None = None) -> dict[str, Any]:
    """Run the requests of a trace on the shipped cluster and return the summary, whose totals add up."""
    scenario, path = load_scenario("quickstart")
    data = scenario.model_dump() | {"workload": {"trace": str(trace), "limit": limit}}
    scenario = Scenario.model_validate(data)
    summary = run_policy(scenario, build_world(scenario, path), "shortest_queue").summary
    ends = [summary["requests"][name] for name in ("finished", "rejected", "failed", "unfinished")]
    assert sum(ends) == summary["requests"]["submitted"]
    assert summary["not_submitted"] == 0
    return dict(summary["requests"])


def write_file(path: Path, metadata: dict[str, str] | None = None, **columns: Any) -> Path:
    """Write a Parquet file: three good rows, with these columns added, replaced or dropped (None).

    The column arrival_s takes the place of arrival_ns unless both are given.
    """
    base: dict[str, Any] = {
        "arrival_ns": [0, 10, 20],
        "prompt_tokens": [5, 6, 7],
        "output_tokens": [1, 2, 3],
    }
    if "arrival_s" in columns and "arrival_ns" not in columns:
        del base["arrival_ns"]
    base.update(columns)
    table = pa.table({name: value for name, value in base.items() if value is not None})
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def maps(rows: list[Any], kind: Any) -> Any:
    """Return a map column of these dicts (or lists of pairs, or None)."""
    pairs = [list(row.items()) if isinstance(row, dict) else row for row in rows]
    return pa.array(pairs, pa.map_(pa.string(), kind))
