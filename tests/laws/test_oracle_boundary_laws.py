"""What routers see in a run: never more than they may (the oracle boundary), and stale views as published."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from cluster_cases import MS, Case, cases, traces
from simcluster import _native
from simcluster.backends import replicas
from simcluster.backends.simulated import SimulatedCluster
from simcluster.experiment.run import run_policy
from simcluster.request import Request
from simcluster.routers import POLICIES, build_router
from simcluster.routers.base import ClusterView, Decision, Router
from simcluster.scenario import Scenario
from simcluster.world import World
from small_cluster import INSTANCE, frame, make_world, scenario_data

PS = 10**9  # picoseconds of a millisecond
KNOWN_POLICIES = sorted(set(POLICIES) - {"oracle"})


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
