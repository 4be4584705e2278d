"""Requests as columns: one column per group of equal instances, and requests that look their values up."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simcluster.request import PrefixHashes
from simcluster.world import World
from small_cluster import make_card, make_world, scenario_data

COLUMNS = {
    "arrival_ns": [0, 5, 9],
    "prompt_tokens": [4, 5, 6],
    "output_tokens": [2, 3, 4],
    "session_id": ["x", None, "y"],
    "priority": [3, 1, 2],
}
PRICE = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two models at two prices: groups of 50, 1 and 3 instances."""
    make_card(tmp_path)
    make_card(tmp_path, "v", model="N")
    entries = [
        {"name": "a", "replicas": 50},
        {"name": "b", "card": "v.json"},
        {"name": "c", "replicas": 3, "price": PRICE},
    ]
    return make_world(tmp_path, COLUMNS, scenario_data(entries))[1]


def test_a_thousand_replicas_would_not_make_a_thousand_columns(world: World) -> None:
    assert world.known.group_of_instance.tolist() == [0] * 50 + [1] + [2] * 3
    for column in (world.known.prompt_tokens, world.known.predicted_utility, world.truth.output_tokens):
        assert column.shape == (3, 3)


def test_a_request_has_one_value_per_instance_and_looks_it_up_once(world: World) -> None:
    known = world.known
    request = known.request(1, 7)
    assert (request.index, request.arrival_ps, request.max_tokens, request.priority) == (1, 7, -1, 1)
    for name in ("prompt_tokens", "predicted_output_tokens", "predicted_utility"):
        value = getattr(request, name)
        assert value.shape == (54,)
        np.testing.assert_array_equal(value, getattr(known, name)[1][known.group_of_instance])
        assert getattr(request, name) is value
    assert request.predicted_utility[53] < request.predicted_utility[0]  # it costs more there
    assert (request.session_id, request.prefix_hashes, request.prefix_block_size) == (None, None, 0)
    assert known.request(0, 0).session_id == "x"


def test_what_a_policy_does_to_the_arrays_of_a_request_stays_there(world: World) -> None:
    before = world.known.prompt_tokens.copy()
    world.known.request(0, 0).prompt_tokens[:] = 0
    np.testing.assert_array_equal(world.known.prompt_tokens, before)


def test_a_request_can_be_copied_pickled_and_changed(world: World) -> None:
    hashes = PrefixHashes(np.array([0, 2, 2, 3]), np.array([8, 9, 8]), 4)
    request = replace(world.known, prefix=hashes).request(0, 0)
    for other in (copy.copy(request), pickle.loads(pickle.dumps(request)), replace(request, max_tokens=3)):
        assert other.priority == 3
        assert other.prefix_hashes is not None
        assert other.prefix_hashes.tolist() == [8, 9]
        assert other.prefix_block_size == 4
    assert replace(request, max_tokens=3).max_tokens == 3


def test_a_name_that_no_request_has_is_an_error_like_any_other(world: World) -> None:
    with pytest.raises(AttributeError, match="no 'prompt'"):
        _ = world.known.request(0, 0).prompt
    with pytest.raises(AttributeError):
        world.known.request(0, 0).priority = 5
