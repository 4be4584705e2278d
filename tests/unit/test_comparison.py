"""Verdicts: what is called better, what is not, and who wins."""

from typing import Any

import numpy as np
import pytest

from simcluster.report.comparison import METRICS, area_comparison, load_comparison
from simcluster.report.paired import BlockValues, SeedValues, Values
from simcluster.rng import seeded

UTILITY, TTFT = METRICS["on_time_utility"], METRICS["ttft_p99_s"]
NOISE = [0.004, -0.003, 0.002, -0.001, 0.003, -0.004, 0.001, -0.002, 0.0005, -0.0005]


def by_seed(values: list[float]) -> Values:
    return SeedValues(dict(enumerate(values, start=1)), lambda: seeded(1))


def policies(n: int = 8, metric: str = "on_time_utility", **means: float) -> dict[str, dict[str, Values | None]]:
    """Return policies around their means, each with a ripple of its own."""
    ripples = [[noise * (number + 1) for noise in NOISE[number:] + NOISE[:number]] for number in range(len(means))]
    return {
        name: {metric: by_seed([mean + each for each in ripple[:n]])}
        for (name, mean), ripple in zip(means.items(), ripples, strict=True)
    }


def verdict_of(result: dict[str, Any], policy: str) -> str:
    return next(str(pair["verdict"]) for pair in result["pairs"] if pair["policy"] == policy)


def test_a_clear_gain_is_said_with_its_size_and_interval() -> None:
    result = load_comparison(policies(base=0.40, sfs=0.57), "base", UTILITY)
    text = verdict_of(result, "sfs")
    assert text.startswith("sfs better than base by 0.169")
    assert "(+42.3 %), 95 % interval 0.16" in text
    assert result["winner"]["verdict"] == "winner: sfs"


def test_a_clear_loss_is_said_as_one() -> None:
    text = verdict_of(load_comparison(policies(base=0.57, random=0.40), "base", UTILITY), "random")
    assert text.startswith("random worse than base by 0.17")
    assert "(-3" in text


def test_no_difference_is_never_called_one() -> None:
    result = load_comparison(policies(base=0.57, other=0.5701), "base", UTILITY)
    assert verdict_of(result, "other").startswith("no difference shown between other and base: -0.0008 (-0.136 %)")
    assert result["winner"]["tied"]


def test_too_few_seeds_are_said_to_be_too_few_however_clear_the_numbers() -> None:
    text = verdict_of(load_comparison(policies(5, base=0.40, sfs=0.57), "base", UTILITY), "sfs")
    assert text.startswith("no difference shown")
    assert text.endswith("5 seeds can never show one here, at least 6 are needed")


def test_more_policies_need_more_seeds() -> None:
    two = load_comparison(policies(6, base=0.40, sfs=0.57), "base", UTILITY)
    four = load_comparison(policies(6, base=0.40, sfs=0.57, x=0.2, y=0.3), "base", UTILITY)
    assert two["pairs"][0]["outcome"] == "better"
    assert {pair["outcome"] for pair in four["pairs"]} == {"no difference shown"}
    assert "at least 7 are needed" in verdict_of(four, "sfs")


def test_holm_is_taken_over_the_policies_that_are_compared() -> None:
    pairs = load_comparison(policies(base=0.40, sfs=0.57, x=0.2), "base", UTILITY)["pairs"]
    found = [pair["metrics"]["on_time_utility"] for pair in pairs]
    assert [each["p"] for each in found] == pytest.approx([2 / 2**8] * 2)
    assert [each["p_holm"] for each in found] == pytest.approx([4 / 2**8] * 2)


def test_where_less_is_better_less_wins() -> None:
    values = policies(metric="ttft_p99_s", base=0.40, fast=0.20)
    result = load_comparison(values, "base", TTFT)
    assert verdict_of(result, "fast").startswith("fast better than base by 0.20")
    assert result["winner"]["policy"] == "fast"


def test_a_policy_that_knows_the_truth_is_compared_but_does_not_win() -> None:
    result = load_comparison(policies(base=0.40, sfs=0.57, oracle=0.60), "base", UTILITY, ["oracle"])
    assert verdict_of(result, "oracle").startswith("oracle better")
    assert result["winner"]["policy"] == "sfs"
    assert "oracle" not in {pair["policy"] for pair in result["winner"]["pairs"]}


def test_best_as_reference_is_the_best_of_this_load() -> None:
    result = load_comparison(policies(a=0.4, b=0.6, c=0.5), "best", UTILITY)
    assert {pair["reference"] for pair in result["pairs"]} == {"b"}
    assert {pair["outcome"] for pair in result["pairs"]} == {"worse"}


def test_pairs_are_those_of_equal_seeds() -> None:
    values: dict[str, dict[str, Values | None]] = {
        "a": {"on_time_utility": SeedValues({1: 0.1, 2: 0.2, 3: 0.3}, lambda: seeded(1))},
        "b": {"on_time_utility": SeedValues({3: 0.7, 2: 0.4, 9: 5.0}, lambda: seeded(1))},
    }
    found = load_comparison(values, "a", UTILITY)["pairs"][0]["metrics"]["on_time_utility"]
    assert found["pairs"] == 2
    assert found["difference"] == pytest.approx((0.4 + 0.2) / 2)


def test_a_metric_that_one_lacks_is_not_compared() -> None:
    values: dict[str, dict[str, Values | None]] = {
        "a": {"on_time_utility": None},
        "b": {"on_time_utility": by_seed([1.0])},
    }
    result = load_comparison(values, "a", UTILITY)
    assert result["pairs"][0]["outcome"] == "unknown"
    assert "have no on-time utility to compare" in result["pairs"][0]["verdict"]


def test_the_area_is_that_of_each_seed() -> None:
    low, high = policies(base=0.40, sfs=0.60), policies(base=0.20, sfs=0.50)
    area = area_comparison([low, high], [2.0, 6.0], "base", UTILITY)
    assert area is not None
    expected = 4 * (0.6 + 0.5 - 0.4 - 0.2) / 2
    assert area["pairs"][0]["metrics"]["on_time_utility"]["difference"] == pytest.approx(expected, abs=0.02)
    assert area["pairs"][0]["outcome"] == "better"
    assert area_comparison([low], [2.0], "base", UTILITY) is None


def test_one_trace_is_judged_by_its_resamples() -> None:
    replicates = seeded(1).normal(0.5, 0.01, size=999)
    values: dict[str, dict[str, Values | None]] = {
        "a": {"on_time_utility": BlockValues(0.5, replicates, 20)},
        "same": {"on_time_utility": BlockValues(0.5, replicates + seeded(2).normal(0, 0.001, size=999), 20)},
        "far": {"on_time_utility": BlockValues(0.6, replicates + 0.1, 20)},
    }
    result = load_comparison(values, "a", UTILITY, is_one_trace=True)
    assert [pair["outcome"] for pair in result["pairs"]] == ["no difference shown", "better"]
    assert "seeds" not in "".join(result["verdicts"])
    area = area_comparison([values, values], [1.0, 3.0], "a", UTILITY, is_one_trace=True)
    assert area is not None
    assert area["pairs"][1]["metrics"]["on_time_utility"]["difference"] == pytest.approx(0.2)
    assert np.ptp(area["pairs"][1]["metrics"]["on_time_utility"]["interval"]) == pytest.approx(0, abs=1e-12)
