"""The native decision over many views against brute force: the same winners, runner-up, margin and draws.

SIMCLUSTER_DECISIONS says how many random decisions are compared (default 1,500).
"""

import os
import random
from dataclasses import replace

import numpy as np
import pytest

from engine_helpers import MS, u_step
from policy_helpers import make_request, make_settings, make_spec
from simcluster import _native
from simcluster.card import FrontEnd
from simcluster.instance import InstanceSpec
from simcluster.request import Request
from simcluster.routers import ClusterView, Decision
from simcluster.routers.base import estimate_ttft
from simcluster.routers.objective import TieBreaker, choose_slo, choose_weighted
from simcluster.routers.sfs import Sfs

DECISIONS = int(os.environ.get("SIMCLUSTER_DECISIONS", "1500"))


def runner_up(decision: Decision) -> tuple[int, float] | None:
    """Return the second best and the margin, as the records have them."""
    assert decision.score is not None
    others = decision.score.copy()
    others[decision.instance] = -np.inf
    second = int(np.argmax(others))
    if not np.isfinite(others[second]):
        return None
    return second, float(decision.score[decision.instance] - others[second])


class Cluster:
    """A random cluster whose routers, one native and one by brute force, meet the same requests."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.weighted = draw.random() < 0.5
        self.weight = draw.choice([0.0, 0.3, 1.0, 20.0])
        self.uneven = draw.random() < 0.2  # offers differ within a model
        self.specs = tuple(self._spec(j) for j in range(draw.choice([1, 2, 3, 10, 50])))
        rule = draw.choice(["index", "rotate", "random"])
        self.ties = [TieBreaker(rule, np.random.default_rng(seed)) for _ in range(2)]
        self.all = draw.random() < 0.2
        # Brute force asks views of its own, since a view that was asked knows more than one that was skipped.
        self.views, self.true_views = (
            [_native.InstanceView(s.engine, s.believed, 10, True) for s in self.specs] for _ in range(2)
        )
        self.engines = [_native.Engine(s.engine, s.believed) for s in self.specs]
        self.router = Sfs(
            make_settings(
                self.specs,
                ties=self.ties[0],
                objective="weighted" if self.weighted else "slo",
                latency_weight=self.weight,
                all_candidates=self.all,
            )
        )
        self.now, self.sent, self.skipped = 0, 0, 0

    def _spec(self, j: int) -> InstanceSpec:
        draw = self.draw
        model = draw.randrange(3)
        front = FrontEnd(
            request_s=0.002 * model, per_prompt_token_s=1e-4 if self.uneven else 0.0, output_s=0.001 * model
        )
        spec = make_spec(
            0,
            model=f"M{model}",
            front_end=front,
            max_num_batched_tokens=draw.choice([16, 64]),
            max_num_seqs=draw.choice([2, 8]),
            usable_blocks=draw.choice([8, 100]),
            max_model_len=400,
            async_scheduling=model == 1,
            policy=_native.Policy.priority if draw.random() < 0.05 else _native.Policy.fcfs,
        )
        hinge = {"b1x": MS // 10, "hinge_tokens": 32} if model == 2 else {}
        return replace(spec, index=j, name=f"i{j}", believed=u_step(5 * (model + 1), 0.1, **hinge))

    def request(self) -> Request:
        draw, count = self.draw, len(self.specs)
        by_model = [draw.choice([0.1, 0.5, 0.5, 0.9]) for _ in range(3)]
        utility = np.array([by_model[int(spec.model[1])] for spec in self.specs])
        if self.uneven:
            utility += np.array([draw.choice([0, 0, 0.25]) for _ in range(count)])
        self.sent += 1
        request = make_request(
            self.sent, count=count, prompt=draw.choice([5, 40, 200, 500]), output=draw.randint(1, 60), arrival=self.now
        )
        target = draw.choice([-1, 1, 20, 60, 300])
        return replace(request, predicted_utility=utility, slo_ttft_ps=target * MS if target > 0 else -1)

    def healthy(self) -> tuple[bool, ...]:
        chance = self.draw.choice([1.0, 1.0, 0.7, 0.0])
        return tuple(self.draw.random() < chance for _ in self.specs)

    def by_brute_force(self, request: Request, view: ClusterView) -> Decision:
        ttft_s = estimate_ttft(request, view)
        if self.weighted:
            return choose_weighted(request.predicted_utility, ttft_s, self.weight, self.ties[1], view.healthy)
        target_s = request.slo_ttft_ps / 1e12 if request.slo_ttft_ps >= 0 else np.inf
        return choose_slo(request.predicted_utility, ttft_s, target_s, self.ties[1], view.healthy)

    def compare(self) -> None:
        draw = self.draw
        self.now += draw.choice([0, 0, 1, 10, 100]) * MS
        if draw.random() < 0.3:  # what holds for a later arrival must not be taken for the next one's truth
            self._ask(self.request(), draw.choice([5, 20, 60]) * MS)
        request = self.request()
        found, view = self._ask(request, draw.choice([0, 0, 5 * MS]))
        self._send(request, found.instance, view)

    def _ask(self, request: Request, delay_ps: int) -> tuple[Decision, ClusterView]:
        view = ClusterView(self.now, delay_ps, self.specs, self.views, self.healthy())
        found = self.router.route(request, view)
        true = self.by_brute_force(request, replace(view, views=self.true_views))
        assert (found.instance, found.reason, found.num_tied) == (true.instance, true.reason, true.num_tied)
        assert runner_up(found) == runner_up(true)
        assert found.predicted_ttft_s is not None
        assert true.predicted_ttft_s is not None
        seen = ~np.isnan(found.predicted_ttft_s)
        np.testing.assert_array_equal(found.predicted_ttft_s[seen], true.predicted_ttft_s[seen])
        assert seen[found.instance]
        if self.all:
            assert seen.all()
            np.testing.assert_array_equal(found.score, true.score)
        self.skipped += int(np.count_nonzero(~seen))
        return found, view

    def _send(self, request: Request, j: int, view: ClusterView) -> None:
        draw, prompt = self.draw, int(request.prompt_tokens[j])
        at = self.specs[j].engine_arrival_ps(self.now + view.router_delay_ps, prompt)
        self.engines[j].submit(request.index, prompt, draw.randint(1, 60), at)
        for views in (self.views, self.true_views):
            views[j].record_dispatch(request.index, prompt, int(request.predicted_output_tokens[j]), at)
        if draw.random() < 0.2:
            k = draw.randrange(len(self.specs))
            self.engines[k].advance_to(self.now)
            for views in (self.views, self.true_views):
                views[k].refresh(self.engines[k].snapshot())


@pytest.mark.parametrize("part", range(2))
def test_the_native_decision_is_that_of_brute_force(part: int) -> None:
    compared, skipped, seed = 0, 0, part
    while compared < DECISIONS / 2:
        cluster = Cluster(seed)
        for _ in range(cluster.draw.randint(1, 80)):
            cluster.compare()
            compared += 1
        skipped += cluster.skipped
        seed += 2
    assert skipped > compared  # it would be brute force otherwise


def test_what_bounds_a_view_for_later_arrivals_is_not_held_against_an_earlier_one() -> None:
    spec = make_spec(0, max_num_batched_tokens=64, max_num_seqs=8, usable_blocks=100, async_scheduling=False)
    believed = u_step(10, 0.1)
    idle, later, busy = views = [_native.InstanceView(spec.engine, believed, 10, True) for _ in range(3)]
    busy.record_dispatch(0, 5, 50, 0)
    later.record_dispatch(1, 5, 50, 5 * MS)
    fleet = _native.Fleet(views, [0, 0, 0])

    def best(at_ps: int, explain: _native.Explain, healthy: tuple[bool, ...] = ()) -> list[int]:
        ones, at = np.ones(3, dtype=np.int64), np.full(3, at_ps, dtype=np.int64)
        decided = fleet.decide(9, np.ones(3), 5 * ones, 5 * ones, at, 0 * ones, explain=explain, healthy=healthy)
        return [int(j) for j in decided[2]]

    assert best(6 * MS, _native.Explain.all) == [views.index(idle)]
    assert best(14 * MS, _native.Explain.choice) == [views.index(idle)]  # the busy one would need another batch
    assert best(6 * MS, _native.Explain.choice, (False, True, True)) == [views.index(busy)]
