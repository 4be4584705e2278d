"""What the laws of runs share."""

from pathlib import Path

import pytest

from small_cluster import make_card


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cards: one whose requests reach the engine at once, and one with front-end times."""
    place = tmp_path_factory.mktemp("laws")
    make_card(place)
    make_card(place, "far", front_end={"request_s": 0.003, "per_prompt_token_s": 0.0001, "output_s": 0.007})
    return place
