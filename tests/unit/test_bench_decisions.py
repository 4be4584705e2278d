"""The figures of `simcluster bench` about SFS over many instances: what is timed decides and routes as SFS does."""

import numpy as np
import pytest

from simcluster import _native
from simcluster.bench.decision_figures import routed_cluster
from simcluster.bench.snapshot_figures import published_cluster
from simcluster.bench.workload import engine_parts


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("refresh_after", [0, 5, 1000])
def test_the_routed_loop_chooses_as_views_shown_everything_at_every_arrival_do(models: int, refresh_after: int) -> None:
    cluster = routed_cluster(6, models, 900)
    chosen = cluster.route(500, refresh_after=refresh_after)
    chosen += cluster.route(400, refresh_after=refresh_after)
    fresh = routed_cluster(6, models, 900)
    asked = fresh.asked
    rows = zip(asked.prompt_tokens.tolist(), asked.output_tokens.tolist(), asked.at_ps.tolist(), strict=True)
    for number, (prompt, output, at) in enumerate(rows):
        for engine, view in zip(fresh.engines, fresh.views, strict=True):
            engine.advance_to(at)
            view.refresh(engine.snapshot())
        utility = [fresh.utilities[(j % models + number) % models] for j in range(6)]
        lengths = [np.full(6, value, dtype=np.int64) for value in (prompt, output, at, 0)]
        _, _, best, _, _ = fresh.fleet.decide(
            number, np.array(utility), *lengths, arrival_time=at, target_s=0.5, explain=_native.Explain.all
        )
        assert chosen[number] == best[0]
        fresh.engines[best[0]].submit(number, prompt, output, at)
        fresh.views[best[0]].record_dispatch(number, prompt, output, at)
    assert np.bincount(chosen, minlength=6).min() > 50


def test_a_repeated_decision_is_the_one_that_estimates_everybody_makes() -> None:
    cluster = routed_cluster(40, 3, 4000)
    cluster.route(4000)
    everybody = cluster.decide(_native.Explain.all, 1)
    assert cluster.fleet.num_estimated == 40
    assert cluster.decide(_native.Explain.runner_up, 5) == everybody
    assert 0 < cluster.fleet.num_estimated < 20
    at = int(cluster.asked.at_ps[-1])
    prompt, output, now = (np.full(40, value, dtype=np.int64) for value in (512, 256, at))
    estimates = _native.estimate_first_token(cluster.views, 1 << 60, prompt, output, now)
    dearest = [j for j in range(40) if cluster.utilities[j % 3] == 0.9]
    assert everybody == min(dearest, key=estimates.__getitem__)


def test_the_routed_loop_refuses_what_does_not_belong_together() -> None:
    cluster = routed_cluster(3, 1, 10)
    with pytest.raises(ValueError, match="not all there"):
        cluster.route(11)
    cluster = routed_cluster(3, 1, 10)
    cluster.views.pop()
    with pytest.raises(ValueError, match="one engine and one view"):
        cluster.route(10)


def test_every_decision_from_shared_memory_sees_what_every_instance_published_last() -> None:
    config, model = engine_parts()
    left = []
    with published_cluster(6, 32) as cluster:
        for _ in range(4):
            cluster.step()
            cluster.copy()
            for engine, view in zip(cluster.engines, cluster.views, strict=True):
                own = _native.InstanceView(config, model, 256, True)
                own.refresh(engine.snapshot())
                assert (view.num_running, view.num_waiting) == (own.num_running, own.num_waiting) == (32, 0)
                assert view.decode_tokens_left == own.decode_tokens_left
            left.append(cluster.views[0].decode_tokens_left)
            assert cluster.decide() % 3 == 2  # the dearest model meets the target
        assert cluster.readers.num_writers == 6
    assert left == sorted(set(left), reverse=True)
