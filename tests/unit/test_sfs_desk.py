"""SFS about requests that lie in columns: decided in native code by row, and equal to deciding about their arrays."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simcluster import _native
from simcluster.experiment.run import run_policy
from simcluster.request import Request, RequestColumns, untouched_columns
from simcluster.world import World
from small_cluster import frame, make_card, make_world, scenario_data

SFS = import_module("simcluster.routers.sfs")  # its package has a policy of that name
PRICE = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
FAR = {"request_s": 0.02, "per_prompt_token_s": 0.0, "output_s": 0.03}
BY_LENGTH = {"request_s": 0.002, "per_prompt_token_s": 0.0001, "output_s": 0.003}


def _columns(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        "arrival_ns": np.cumsum(rng.integers(0, 30_000_000, count)).tolist(),
        "prompt_tokens": rng.integers(1, 200, count).tolist(),
        "output_tokens": rng.integers(1, 60, count).tolist(),
        "priority": rng.integers(0, 3, count).tolist(),
    }


def _world(folder: Path, *, far: dict[str, float] = FAR, count: int = 120, **sections: Any) -> Any:
    """Two models, one of them at two prices and at two distances: kinds of views that are not alike."""
    make_card(folder)
    make_card(folder, "far", front_end=far)
    make_card(folder, "v", model="N")
    entries = [
        {"name": "a", "replicas": 3},
        {"name": "b", "card": "v.json", "quality": 0.6, "replicas": 2},
        {"name": "c", "price": PRICE},
        {"name": "d", "card": "far.json"},
    ]
    return make_world(folder, _columns(count), scenario_data(entries, slo={"ttft": 0.2}, **sections))


@pytest.mark.parametrize("routing", [{}, {"objective": "weighted", "latency_weight": 0.3}])
@pytest.mark.parametrize("decisions", ["winner", "full"])
def test_sfs_decides_by_row_as_it_decides_by_the_arrays_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routing: dict[str, Any], decisions: str
) -> None:
    scenario, world = _world(tmp_path, routing=routing, output={"decisions": decisions})
    asked: list[RequestColumns | None] = []

    def by_row(request: Request) -> RequestColumns | None:
        asked.append(untouched_columns(request))
        return asked[-1]

    monkeypatch.setattr(SFS, "untouched_columns", by_row)
    rows = run_policy(scenario, world, "sfs")
    assert len(asked) == 120
    assert None not in asked
    monkeypatch.setattr(SFS, "untouched_columns", lambda _: None)
    arrays = run_policy(scenario, world, "sfs")
    for name in ("requests", "decisions"):
        assert frame(rows, name).equals(frame(arrays, name), null_equal=True)
    assert frame(rows, "requests")["instance"].n_unique() > 2


def test_an_array_that_a_policy_changes_counts_in_what_sfs_decides(tmp_path: Path) -> None:
    known = _world(tmp_path)[1].known
    request = known.request(0, 0)
    assert untouched_columns(request) is known
    request.predicted_utility[:] = 0
    assert untouched_columns(request) is None
    assert request.max_tokens == -1


def test_a_front_end_that_takes_time_by_the_token_is_decided_by_arrays(tmp_path: Path) -> None:
    scenario, world = _world(tmp_path, far=BY_LENGTH)
    assert frame(run_policy(scenario, world, "sfs"), "requests").height == 120


def _desk(world: World, **changes: Any) -> _native.Desk:
    """Return a desk for one view of each instance."""
    known = world.known
    views = [_native.InstanceView(spec.engine, spec.believed, 10, True) for spec in world.instances]
    none = np.zeros(len(views), dtype=np.int64)
    columns = {
        "group_of_view": known.group_of_instance,
        "delay": none,
        "hop": none,
        "utility": known.predicted_utility,
        "prompt_tokens": known.prompt_tokens,
        "predicted_output": known.predicted_output_tokens,
        "max_tokens": known.max_tokens,
        "priority": known.priority,
        "target_s": np.full(len(known), np.inf),
    }
    return _native.Desk(_native.Fleet(views, [0] * len(views)), **(columns | changes))


def test_a_desk_takes_columns_that_fit_each_other_alone(tmp_path: Path) -> None:
    world = _world(tmp_path, count=3)[1]
    desk = _desk(world)
    assert desk.decide(2, 0, 0)[0] == "feasible"
    with pytest.raises(ValueError, match="no such request"):
        desk.decide(3, 0, 0)
    with pytest.raises(ValueError, match="no such group"):
        _desk(world, group_of_view=world.known.group_of_instance + 3)
    with pytest.raises(ValueError, match="differ in length"):
        _desk(world, priority=world.known.priority[1:])
