"""The noise of true step times: recorded where the card has residuals, assumed and called so elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simcluster.errors import ConfigError
from simcluster.units import PS_PER_S
from simcluster.world import World
from small_cluster import make_card, make_world, run_once, scenario_data

STEP = {"b0_s": 0.010, "b1_s": 0.001, "b2_s": 0.0, "b3_s": 0.0}
COLUMNS = {"arrival_s": [0.0], "prompt_tokens": [10], "output_tokens": [400]}
RESIDUALS = (0.8, 0.95, 1.0, 1.35)


def world(folder: Path, true_model: dict[str, Any], residuals: tuple[float, ...] | None = RESIDUALS) -> World:
    make_card(folder, fits={"eq9": STEP | ({} if residuals is None else {"residuals": residuals})})
    return make_world(folder, COLUMNS, scenario_data([{"true_model": true_model}]))[1]


@pytest.mark.parametrize("true_model", [{}, {"noise": {}}, {"noise": {"kind": "recorded"}}])
def test_noise_is_drawn_from_the_recorded_residuals_where_there_are_any(
    tmp_path: Path, true_model: dict[str, Any]
) -> None:
    model = world(tmp_path, true_model).true_models[0]
    assert model.noise is not None
    factors = np.array([model.noise.apply(PS_PER_S, step) for step in range(4000)]) / PS_PER_S
    values, counts = np.unique(factors.round(6), return_counts=True)
    assert values.tolist() == list(RESIDUALS)
    assert counts.min() > 850  # equally likely
    assert "4 quantiles of its recorded residuals" in model.description


def test_a_sigma_asks_for_log_normal_noise_whatever_was_recorded(tmp_path: Path) -> None:
    model = world(tmp_path, {"noise": {"sigma": 0.1}}).true_models[0]
    assert "10% log-normal noise per step (assumed)" in model.description


def test_without_residuals_three_percent_are_assumed(tmp_path: Path) -> None:
    found = world(tmp_path, {}, residuals=None)
    assert "3% log-normal noise per step (assumed)" in found.true_models[0].description
    assert any("3% log-normal noise per step (assumed)" in note for note in found.assumptions)


def test_recorded_noise_that_was_not_recorded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"noise\.kind = 'recorded'; the fit eq9 of the card u has no recorded"):
        world(tmp_path, {"noise": {"kind": "recorded"}}, residuals=None)


def test_recorded_noise_has_no_sigma(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recorded noise has none"):
        world(tmp_path, {"noise": {"kind": "recorded", "sigma": 0.1}})


def test_a_run_takes_as_long_as_the_residuals_say(tmp_path: Path) -> None:
    """400 steps of 11 ms whose factors are 1.025 on average: what was recorded need not have the mean 1."""
    make_card(tmp_path, fits={"eq9": STEP | {"residuals": RESIDUALS}})
    _, requests = run_once(tmp_path, COLUMNS, scenario_data([{"true_model": {}}]))
    took_s = requests["e2e_s"][0] - 0.02
    assert took_s == pytest.approx(399 * 0.011 * 1.025, rel=0.03)
