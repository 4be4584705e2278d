"""Random small runs: a trace, a scenario and a policy each, for laws of runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from simcluster.experiment.run import PolicyRun, run_policy
from simcluster.routers import POLICIES
from small_cluster import make_world, scenario_data

__all__ = ["MS", "Case", "cases", "runs", "traces"]

MS = 10**6  # nanoseconds


@dataclass(frozen=True, slots=True)
class Case:
    """One trace, one scenario and one policy."""

    columns: dict[str, Any]
    data: dict[str, Any]
    policy: str

    def run(self, folder: Path) -> PolicyRun:
        return run_policy(*make_world(folder, self.columns, self.data), self.policy)


@st.composite
def traces(draw: st.DrawFn, grid_ms: int = 10) -> dict[str, Any]:
    n = draw(st.integers(1, 14))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    return {
        "arrival_ns": sorted(
            column(st.one_of(st.just(0), st.integers(0, 30), st.integers(0, 3000)).map(grid_ms.__mul__))
        ),
        "prompt_tokens": column(st.integers(1, 50)),
        "output_tokens": column(st.integers(1, 12)),
        "max_tokens": pa.array(column(st.sampled_from([None, None, None, 1, 6, 200])), pa.int64()),
        "finish": column(st.sampled_from(["eos", "eos", "length"])),
        "cancel_s": pa.array(column(st.sampled_from([None, None, None, 0.0, 0.015, 0.05])), pa.float64()),
        "priority": column(st.integers(0, 1)),
    }


@st.composite
def instances(draw: st.DrawFn) -> dict[str, Any]:
    engine = {
        "max_model_len": 48,  # some prompts are longer: rejected
        "block_size": 4,
        "num_gpu_blocks_override": draw(st.integers(6, 20)),  # some never fit, some evict others
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.sampled_from([8, 24, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
    }
    noise = draw(st.sampled_from([None, {"sigma": 0.2}]))
    card = draw(st.sampled_from(["u.json", "u.json", "far.json"]))
    return {
        "card": card,
        "price": {"input_usd_per_mtok": 2.0, "output_usd_per_mtok": 5.0},
        "engine": engine,
        "true_model": {"noise": noise},
        "quality": draw(st.sampled_from([0.5, 0.9])),
    }


def routings() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "refresh_interval_s": st.sampled_from([0.0, 0.0, 0.02, 0.07]),
            "publish_delay_s": st.sampled_from([0.0, 0.0, 0.013]),
            "replicas": st.integers(1, 3),
            "overlay": st.booleans(),
            "router_delay_s": st.sampled_from([0.0, 0.004]),
            "tie": st.sampled_from(["index", "rotate", "random"]),
            "objective": st.sampled_from(["slo", "weighted"]),
        }
    )


def measures() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"horizon_s": st.sampled_from([None, None, 0.03, 0.3, 2.0]), "drain": st.sampled_from([True, True, False])}
    )


@st.composite
def cases(draw: st.DrawFn, routing: st.SearchStrategy[dict[str, Any]] | None = None) -> Case:
    data = scenario_data(
        draw(st.lists(instances(), min_size=1, max_size=3)),
        routing=draw(routings() if routing is None else routing),
        measure=draw(measures()),
        slo={"ttft": draw(st.sampled_from(["none", 0.03, 0.2]))},
        output={"decisions": "full", "sample_interval_s": draw(st.sampled_from([0.01, 1.0]))},
    )
    columns = draw(traces()) | {}
    columns["arrival_ns"] = [ms * MS for ms in columns["arrival_ns"]]
    policy = draw(st.sampled_from(sorted(POLICIES)))
    if policy == "sfs_plus":  # it weighs delay by targets
        data["routing"] = data["routing"] | {"objective": "slo"}
    return Case(columns, data, policy)


runs = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
