"""Laws of a run: totals, causality, determinism, and that no router sees more than it may (the oracle boundary)."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from simcluster import _native
from simcluster.backends import replicas
from simcluster.backends.simulated import SimulatedCluster
from simcluster.experiment.run import PolicyRun, run_policies, run_policy
from simcluster.request import Request
from simcluster.routers import POLICIES, build_router
from simcluster.routers.base import ClusterView, Decision, Router
from simcluster.scenario import Scenario
from simcluster.world import World
from small_cluster import INSTANCE, frame, make_card, make_world, scenario_data
from trace_files import write_file

MS = 10**6  # nanoseconds
PS = 10**9  # picoseconds of a millisecond
KNOWN_POLICIES = sorted(set(POLICIES) - {"oracle"})


# ---- random small runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One trace, one scenario and one policy."""

    columns: dict[str, Any]
    data: dict[str, Any]
    policy: str

    def run(self, folder: Path) -> PolicyRun:
        return run_policy(*make_world(folder, self.columns, self.data), self.policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cards: one whose requests reach the engine at once, and one with front-end times."""
    place = tmp_path_factory.mktemp("laws")
    make_card(place)
    make_card(place, "far", front_end={"request_s": 0.003, "per_prompt_token_s": 0.0001, "output_s": 0.007})
    return place


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


@runs
@given(case=cases())
def test_every_request_is_counted_once(folder: Path, case: Case) -> None:
    run = case.run(folder)
    counts, requests = run.summary["requests"], frame(run, "requests")
    parts = counts["finished"] + counts["rejected"] + counts["failed"] + counts["unfinished"]
    assert counts["submitted"] == parts == requests.height
    assert counts["submitted"] + run.summary["not_submitted"] == len(case.columns["arrival_ns"])
    assert sum(sum(group.values()) for group in run.summary["reasons"].values()) == counts["submitted"]
    assert set(run.summary["reasons"]) == {
        name for name in ("finished", "rejected", "failed", "unfinished") if counts[name]
    }
    if case.data["measure"]["horizon_s"] is None:
        assert run.summary["not_submitted"] == 0
        if case.data["measure"]["drain"]:
            assert counts["unfinished"] == 0
    if case.data["output"]["decisions"] != "off":
        assert frame(run, "decisions")["request_id"].to_list() == requests["request_id"].to_list()


@runs
@given(case=cases())
def test_causes_come_before_effects_in_the_records(folder: Path, case: Case) -> None:
    run = case.run(folder)
    requests = frame(run, "requests")
    order = requests.select("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns").rows()
    for instants in order:
        known = [instant for instant in instants if instant is not None]
        assert known == sorted(known)
    assert requests["arrival_ns"].is_sorted()
    for row in requests.to_dicts():
        started, first, ended = row["scheduled_ns"], row["first_token_ns"], row["end_ns"]
        assert (ended is None) == (row["status"] == "unfinished")
        assert started is not None or first is None
        if row["status"] == "finished":
            assert first is not None
        if row["status"] == "rejected":
            assert started is first is None
        assert (row["output_tokens"] > 0) == (first is not None)
    horizon = case.data["measure"]["horizon_s"]
    samples = frame(run, "instances")
    if horizon is not None:
        assert requests["arrival_s"].max() is None or requests["arrival_s"].max() <= horizon
        ends = requests["end_ns"].drop_nulls().to_list() + requests["first_token_ns"].drop_nulls().to_list()
        assert max(ends, default=0) <= round(horizon * 1e9)
        assert samples["at_s"].max() <= horizon


@runs
@given(case=cases())
def test_metrics_are_consistent_with_each_other_and_with_the_instants(folder: Path, case: Case) -> None:
    run = case.run(folder)
    for row in frame(run, "requests").to_dicts():
        for metric, instant in (("queue_s", "scheduled_ns"), ("ttft_s", "first_token_ns"), ("e2e_s", "end_ns")):
            if row[metric] is not None:
                assert row[metric] == pytest.approx((row[instant] - row["arrival_ns"]) / 1e9, abs=2e-9)
        n = row["output_tokens"]
        prompt = row["prompt_tokens"] if row["scheduled_ns"] is not None else 0
        assert row["cost_micro_usd"] == 2.0 * prompt + 5.0 * n
        if row["status"] != "finished":
            assert row["tpot_s"] is row["e2e_s"] is row["utility"] is None
            assert not row["on_time"]
        elif n == 1:
            assert row["tpot_s"] is None
            assert row["e2e_s"] == row["ttft_s"]
        else:
            assert row["e2e_s"] == pytest.approx(row["ttft_s"] + row["tpot_s"] * (n - 1), abs=1e-9)
        if row["status"] == "finished":
            assert row["on_time"] == (row["slo_ttft_s"] is None or row["ttft_s"] <= row["slo_ttft_s"])
            assert row["utility"] == pytest.approx(row["quality"] - 1e-4 * row["cost_micro_usd"])


@runs
@given(case=cases())
def test_the_time_series_never_goes_back_and_ends_with_the_totals(folder: Path, case: Case) -> None:
    run = case.run(folder)
    requests = frame(run, "requests")
    for (name,), rows in frame(run, "instances").group_by("instance", maintain_order=True):
        for growing in ("at_ns", "num_steps", "busy_s", "num_preemptions", "prefix_queries", "prefix_hits"):
            assert rows[growing].is_sorted(), growing
        assert rows["kv_cache_usage"].is_between(0, 1).all()
        here = requests.filter(pl.col("instance") == name)
        for at_ns, running, waiting in rows.select("at_ns", "num_running", "num_waiting").iter_rows():
            inside = here.filter(
                (pl.col("arrival_ns") <= at_ns)
                & (pl.col("end_ns").is_null() | (pl.col("end_ns") >= at_ns) | (pl.col("status") == "failed"))
            )  # an engine notices that a client has left when its step ends
            assert running + waiting <= inside.height


def far_run(
    folder: Path, measure: dict[str, Any] | None = None, **columns: Any
) -> tuple[PolicyRun, list[dict[str, Any]]]:
    """Run requests of 4 + 3 tokens that need 3.4 ms to the engine and 7 ms back; steps take 10 ms + 1 ms per token."""
    base = {"arrival_ns": [0], "prompt_tokens": [4], "output_tokens": [3]} | columns
    data = scenario_data([{"card": "far.json"}], measure=measure or {})
    run = run_policy(*make_world(folder, base, data), "round_robin")
    return run, frame(run, "requests").to_dicts()


def test_records_are_what_a_client_sees_front_end_times_included(folder: Path) -> None:
    _, (row,) = far_run(folder)
    assert row["queue_s"] == pytest.approx(0.0034)
    assert row["ttft_s"] == pytest.approx(0.0034 + 0.014 + 0.007)
    assert row["tpot_s"] == pytest.approx(0.011)
    assert row["e2e_s"] == pytest.approx(0.0034 + 0.014 + 2 * 0.011 + 0.007)


def test_the_answer_no_to_a_request_travels_as_far_as_any_other(folder: Path) -> None:
    _, (row,) = far_run(folder, prompt_tokens=[5000])
    assert (row["status"], row["reason"]) == ("rejected", "exceeds_context")
    assert row["end_ns"] == round((0.003 + 0.5 + 0.007) * 1e9)


def test_a_token_on_its_way_when_the_client_leaves_was_not_delivered(folder: Path) -> None:
    """The first token leaves the engine at 17.4 ms and would arrive at 24.4 ms."""
    _, (row,) = far_run(folder, cancel_s=[0.020])
    assert (row["status"], row["reason"], row["end_ns"]) == ("failed", "cancelled", 20 * MS)
    assert (row["first_token_ns"], row["output_tokens"]) == (None, 0)
    _, (row,) = far_run(folder, cancel_s=[0.025])
    assert (row["first_token_ns"], row["output_tokens"], row["end_ns"]) == (24_400_000, 1, 25 * MS)


def test_a_step_planned_ahead_does_not_start_for_a_client_that_has_left_before(folder: Path) -> None:
    columns = {"arrival_ns": [0, 5 * MS], "prompt_tokens": [20, 4], "output_tokens": [5, 3], "cancel_s": [None, 0.028]}
    data = scenario_data([{"engine": {"async_scheduling": True}}])  # the second step is planned for 41 ms
    row = frame(run_policy(*make_world(folder, columns, data), "round_robin"), "requests").to_dicts()[1]
    assert (row["status"], row["scheduled_ns"], row["end_ns"]) == ("failed", None, 33 * MS)


def test_what_is_on_its_way_to_the_client_at_the_horizon_has_not_happened(folder: Path) -> None:
    run, (row,) = far_run(folder, {"horizon_s": 0.045})  # the last token leaves the engine at 39.4 ms
    assert (row["status"], row["reason"], row["end_ns"]) == ("unfinished", "in_transit", None)
    assert row["first_token_ns"] == 24_400_000
    assert run.summary["requests"]["unfinished"] == 1
    _, (row,) = far_run(folder, {"horizon_s": 0.020})
    assert (row["status"], row["first_token_ns"], row["output_tokens"]) == ("unfinished", None, 0)


# ---- determinism and common worlds -----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path, folder: Path) -> None:
    columns: dict[str, Any] = {
        "arrival_ns": [7 * MS * k for k in range(40)],
        "prompt_tokens": [3 + k % 17 for k in range(40)],
        "output_tokens": [1 + k % 9 for k in range(40)],
        "task": ["ab"[k % 2] for k in range(40)],
        "session_id": [f"s{k % 5}" for k in range(40)],
    }
    write_file(folder / "t.parquet", **columns)
    policies = ["random", "shortest_queue", "sfs"]
    routing = {"policies": policies, "tie": "random", "replicas": 2, "refresh_interval_s": 0.02}
    data = scenario_data([{"true_model": {}}, {"quality": 0.5}, {}], routing=routing, slo={"ttft": "paper"})
    (folder / "s.yaml").write_text(yaml.safe_dump(data))
    for number in (1, 2):
        command = [sys.executable, "-P", "-m", "simcluster", "run", str(folder / "s.yaml"), "--quiet", "--json"]
        environment = os.environ | {"PYTHONHASHSEED": str(number)}
        subprocess.run(
            [*command, "--out", str(tmp_path / str(number))], env=environment, check=True, capture_output=True
        )
    for policy in policies:
        for table in ("requests", "decisions", "instances"):
            first, second = (tmp_path / str(number) / policy / f"{table}.parquet" for number in (1, 2))
            assert first.read_bytes() == second.read_bytes()


def world_state(world: World) -> dict[str, bytes]:
    """Return everything that is fixed before a run, as bytes."""
    columns = {**{f"known.{k}": getattr(world.known, k) for k in ("arrival_ps", "prompt_tokens", "slo_ttft_ps")}}
    columns["known.group_of_instance"] = world.known.group_of_instance
    columns |= {f"known.{k}": getattr(world.known, k) for k in ("predicted_output_tokens", "predicted_utility")}
    columns |= {f"truth.{k}": getattr(world.truth, k) for k in ("output_tokens", "quality", "cancel_after_ps")}
    return {name: values.tobytes() for name, values in columns.items()}


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_no_policy_changes_the_world_that_the_next_one_meets(folder: Path, case: Case) -> None:
    data = case.data | {"measure": {}}
    scenario, world = make_world(folder, case.columns, data)
    before = world_state(world)
    together = run_policies(scenario, world, ["random", "shortest_queue", "sfs"])
    assert world_state(world) == before
    fixed = ["request_id", "arrival_ns", "slo_ttft_s"]
    first = frame(together[0], "requests").select(fixed)
    for run in together:
        assert frame(run, "requests").select(fixed).equals(first)
        alone = run_policy(*make_world(folder, case.columns, data), run.policy)
        for name in run.tables:
            assert frame(alone, name).equals(frame(run, name)), (run.policy, name)


def test_c043_arrivals_lengths_and_targets_do_not_depend_on_policy_or_cluster(folder: Path) -> None:
    columns = {
        "arrival_ns": [5 * MS * k for k in range(30)],
        "prompt_tokens": [4 + k for k in range(30)],
        "output_tokens": [1 + k % 7 for k in range(30)],
    }
    seen = []
    for count in (2, 3):
        data = scenario_data(count, seed=7, slo={"ttft": "paper"})
        scenario, world = make_world(folder, columns, data)
        for policy in ("round_robin", "random"):
            requests = frame(run_policy(scenario, world, policy), "requests")
            seen.append(requests.select("arrival_ns", "prompt_tokens", "output_tokens", "slo_ttft_s").rows())
    assert seen[0] == seen[1] == seen[2] == seen[3]
    _, other = make_world(folder, columns, scenario_data(2, seed=8, slo={"ttft": "paper"}))
    assert (other.known.slo_ttft_ps != world.known.slo_ttft_ps).any()


# ---- what routers see ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Log:
    """What was shown and told to routers and decided in one run, in order.

    `published` has, per decision of a router that looks, the newest snapshots that it had been shown. `seen` has, per
    decision, the request, the view, how much had been published and told, and the choice.
    """

    told: list[Any] = field(default_factory=list)
    published: list[Any] = field(default_factory=list)
    seen: list[tuple[Request, list[Any], tuple[int, int], Decision]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    newest: Callable[[], list[_native.Snapshot]] = list  # what the router that decides has been shown

    def publish(self) -> None:
        """Note the newest snapshots."""
        shots = [shot for shot in self.newest() if shot is not None]
        self.published.append([{name: plain(value) for name, value in public(shot).items()} for shot in shots])
        self.objects += shots[: max(200 - len(self.objects), 0)]


def public(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that do not start with an underscore, methods excepted."""
    if isinstance(value, BaseModel):
        return dict(value)
    names = [name for name in dir(value) if not name.startswith("_")]
    return {name: found for name in names if not callable(found := getattr(value, name))}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@dataclass
class Watched:
    """A router that notes what it is shown and what it decides."""

    inner: Router
    log: Log

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.__dict__["inner"], name)
        if not name.startswith("observe_"):
            return method

        def observe(request: Request | int, *rest: Any) -> None:
            self.log.told.append((name, request.index if isinstance(request, Request) else request, *rest))
            method(request, *rest)

        return observe

    def route(self, request: Request, view: ClusterView) -> Decision:
        if self.inner.needs_view:
            self.log.publish()
        state = [{name: plain(value) for name, value in public(each).items()} for each in view.views]
        if len(self.log.objects) < 200:
            self.log.objects += [request, view]
        decision = self.inner.route(request, view)
        known = (len(self.log.published), len(self.log.told))
        self.log.seen.append((request, [view.now_ps, state], known, decision))
        return decision


def watched_run(scenario: Scenario, world: World, policy: str) -> Log:
    """Run a policy and return what it saw and chose."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "build_router", lambda *a, **k: Watched(build_router(*a, **k), log))
        cluster = SimulatedCluster(world, scenario, policy)
    count = scenario.routing.replicas
    log.newest = lambda: cluster._cluster.shown(cluster._replicas[(cluster.num_sent - 1) % count].native)
    cluster.run()
    log.newest = list
    return log


BURST = 12
CROWD: dict[str, Any] = {  # a burst within the first step (11 ms and more), then more requests
    "arrival_ns": [k * MS // 2 for k in range(BURST)] + [(20 + 9 * k) * MS for k in range(30)],
    "prompt_tokens": [3 + (5 * k) % 11 for k in range(BURST + 30)],
    "output_tokens": [4 + (3 * k) % 8 for k in range(BURST + 30)],
    "session_id": [f"s{k % 4}" for k in range(BURST + 30)],
    "task": ["ab"[k % 2] for k in range(BURST + 30)],
}
TIGHT: list[dict[str, Any]] = [  # few seats: the wait depends on when others end
    {"engine": {"max_num_seqs": 2, "async_scheduling": True}, "quality": 0.9},
    {"engine": {"max_num_seqs": 2}, "quality": 0.8},
    {"engine": {"max_num_seqs": 1}, "quality": 0.7},
]


def other_ends(world: World) -> World:
    """Return the world with other true answers; nobody but the engines may notice."""
    n, j = world.truth.output_tokens.shape
    rng = np.random.Generator(np.random.PCG64(1))
    truth = replace(
        world.truth,
        output_tokens=world.truth.output_tokens + rng.integers(3, 60, (n, j)),
        quality=rng.random((n, j)),
        ends_by_length=~world.truth.ends_by_length,
    )
    return replace(world, truth=truth)


def other_speed(world: World) -> World:
    """Return the world with slower true steps."""
    slower = _native.StepTimeModel()
    slower.b0, slower.b1 = 23 * PS, 2 * PS
    return replace(world, true_models=tuple(replace(each, step_time=slower) for each in world.true_models))


@pytest.mark.parametrize("staleness", [{}, {"refresh_interval_s": 0.02}, {"publish_delay_s": 0.015}], ids=str)
@pytest.mark.parametrize("hidden", [other_ends, other_speed])
@pytest.mark.parametrize("policy", KNOWN_POLICIES)
def test_given_an_equal_request_and_view_the_decision_is_equal_whatever_the_truth(
    policy: str, hidden: Callable[[World], World], staleness: dict[str, Any], folder: Path
) -> None:
    data = scenario_data(TIGHT, routing=staleness | {"tie": "random"}, slo={"ttft": 0.06})
    scenario, world = make_world(folder, CROWD, data)
    one, two = watched_run(scenario, world, policy), watched_run(scenario, hidden(world), policy)
    equal = 0
    for (request, view, known, decision), (other, other_view, also_known, other_decision) in zip(
        one.seen, two.seen, strict=True
    ):
        published, told = known
        shown = known == also_known and one.published[:published] == two.published[:published]
        if not shown or view != other_view or one.told[:told] != two.told[:told]:
            break  # from here on the truth has shown
        assert request.index == other.index
        assert decision.instance == other_decision.instance
        for name in ("predicted_ttft_s", "score"):
            pair = [getattr(each, name) for each in (decision, other_decision)]
            assert [each is None for each in pair] in ([True, True], [False, False]), name
            assert pair[0] is None or np.array_equal(*pair, equal_nan=True), name  # nan: not estimated
        equal += 1
    assert equal >= BURST
    if one.published:
        assert one.published != two.published  # the worlds do differ


def test_the_oracle_does_decide_by_the_truth(folder: Path) -> None:
    scenario, world = make_world(folder, CROWD, scenario_data(TIGHT, slo={"ttft": 0.06}))
    one, two = watched_run(scenario, world, "oracle"), watched_run(scenario, other_ends(world), "oracle")
    first, second = ([decision.instance for *_, decision in log.seen[:BURST]] for log in (one, two))
    assert first != second


def numbers(value: Any, seen: set[int]) -> Iterator[float]:
    """Yield every number that can be reached from an object by its public attributes."""
    if isinstance(value, int | float | np.number):
        yield float(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield from value.astype(np.float64).ravel().tolist()
    elif isinstance(value, str | None) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        if isinstance(value, dict):
            value = [*value, *value.values()]
        inner = list(value) if isinstance(value, list | tuple | set | np.ndarray) else public(value).values()
        for each in inner:
            yield from numbers(each, seen)


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("policy", ["shortest_queue", "sfs"])
def test_no_number_of_the_truth_can_be_reached_from_what_a_router_gets(
    policy: str, by_length: bool, folder: Path
) -> None:
    data = scenario_data(TIGHT, measure={"horizon_s": 0.4}, slo={"ttft": 0.06})
    scenario, world = make_world(folder, CROWD, data)
    n, j = world.truth.output_tokens.shape
    lengths = 1009 + 2 * np.arange(n * j).reshape(n, j)
    quality = 0.12345 + 0.00001 * np.arange(n * j).reshape(n, j)
    truth = replace(world.truth, output_tokens=lengths, quality=quality, ends_by_length=np.full(n, by_length))
    model = _native.StepTimeModel()
    model.b0, model.b1 = 10_123_456_789, 1_098_765_432
    hidden = replace(
        world, truth=truth, true_models=tuple(replace(each, step_time=model) for each in world.true_models)
    )
    secrets = {*lengths.ravel().tolist(), *quality.ravel().tolist(), model.b0, model.b1}
    log = watched_run(scenario, hidden, policy)
    found = set(numbers(log.objects, set()))
    assert {4096.0, 0.9} & found  # the search does reach options and predictions
    assert not {float(each) for each in secrets} & found
    assert {float(each) for each in secrets} <= set(numbers([hidden.truth, hidden.true_models], set()))


@settings(max_examples=60, deadline=None)
@given(
    case=cases(
        st.fixed_dictionaries(
            {
                "refresh_interval_s": st.sampled_from([0.02, 0.05]),
                "publish_delay_s": st.sampled_from([0.0, 0.013]),
                "replicas": st.integers(1, 2),
            }
        )
    )
)
def test_a_stale_view_with_overlay_shows_at_least_a_routers_own_unseen_dispatches(folder: Path, case: Case) -> None:
    scenario, world = make_world(folder, case.columns, case.data)
    log = watched_run(scenario, world, "shortest_queue")
    routing = scenario.routing
    interval, delay = (round(value * 1e12) for value in (routing.refresh_interval_s, routing.publish_delay_s))
    for number, (_, (now, views), _, _) in enumerate(log.seen):
        state_of = (now // interval) * interval - delay  # the view shows this instant, or nothing if it is before 0
        own = [
            decision.instance
            for request, (sent, _), _, decision in log.seen[number % routing.replicas : number : routing.replicas]
            if sent >= state_of
        ]
        for j, view in enumerate(views):
            assert view["num_resident"] >= own.count(j)
            if state_of < 0:
                assert view["num_resident"] == own.count(j)


@pytest.mark.parametrize(
    "staleness",
    [{"refresh_interval_s": 0.02}, {"refresh_interval_s": 0.02, "publish_delay_s": 0.013}, {"publish_delay_s": 0.013}],
)
def test_a_view_shows_what_was_published_at_the_last_refresh_minus_the_delay(
    staleness: dict[str, Any], folder: Path
) -> None:
    scenario, world = make_world(folder, CROWD, scenario_data(TIGHT, routing=staleness))
    log = watched_run(scenario, world, "shortest_queue")
    interval, delay = (round(staleness.get(name, 0.0) * 1e12) for name in ("refresh_interval_s", "publish_delay_s"))
    shown = 0
    for (_, (now, views), _, _), shots in zip(log.seen, log.published, strict=True):
        state_of = (now // interval * interval if interval else now) - delay
        if state_of < 0:
            assert shots == [] or interval == 0
            continue
        for view, shot in zip(views, shots, strict=True):
            shown += 1
            assert shot["taken_at"] == state_of
            for name in ("boundary", "num_running", "num_free_blocks"):
                assert view[name] == shot[name], name
    assert shown > 60


@settings(max_examples=60, deadline=None)
@given(case=cases(st.fixed_dictionaries({"tie": st.sampled_from(["index", "rotate"])})), columns=traces(grid_ms=20))
def test_on_the_grid_of_refreshes_a_stale_view_decides_as_a_fresh_one(
    folder: Path, case: Case, columns: dict[str, Any]
) -> None:
    columns["arrival_ns"] = sorted({ms * MS for ms in columns["arrival_ns"]})
    n = len(columns["arrival_ns"])
    columns = {name: values[:n] for name, values in columns.items()}
    for policy in ("shortest_queue", "sfs"):
        tables = []
        for interval in (0.0, 0.02):
            routing = case.data["routing"] | {"refresh_interval_s": interval}
            run = run_policy(*make_world(folder, columns, case.data | {"routing": routing}), policy)
            tables.append(frame(run, "decisions"))
        assert tables[0].equals(tables[1])


def test_the_default_instance_of_these_laws_is_noiseless_so_differences_come_from_the_truth() -> None:
    assert INSTANCE["true_model"] == {"noise": None}
