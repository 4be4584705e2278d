import numpy as np
import polars as pl
import pytest

from simcluster.calibrate.fit import STEP_COLUMNS, fit_step_time, outlying_rows, predict
from simcluster.calibrate.held_out import bootstrap_intervals, calibrate, held_out_mape
from simcluster.calibrate.step_errors import error_by_kind, error_summary, step_kinds
from simcluster.card import Term
from simcluster.errors import CalibrationError
from step_tables import DECODES_OF_FOUR, HINGE, PLAIN, SIX, Batch, drawn_steps, table


def test_the_features_of_a_mixed_batch_are_those_of_eq_9() -> None:
    row = table(SIX).row(4, named=True)
    assert (row["n_tokens"], row["sum_decode_context"], row["prefill_attention"]) == (7, 30, 45)


def test_six_exact_batches_give_back_their_coefficients() -> None:
    steps = table(SIX)
    fit = fit_step_time(steps, "eq9")
    found = [1e3 * c for c in (fit.b0_s, fit.b1_s, fit.b2_s, fit.b3_s)]
    assert found == pytest.approx([10, 0.2, 0.01, 0.002], rel=1e-9)
    assert np.abs(predict(fit, steps) - steps["step_s"].to_numpy()).max() < 1e-9
    assert error_by_kind(steps, predict(fit, steps))["all"] == pytest.approx(0, abs=1e-12)


def test_a_cold_first_step_is_named_and_hardly_moves_the_fit() -> None:
    steps = table((Batch(((10, 0),), (), 9000.0), *SIX))
    fit = fit_step_time(steps, "eq9")
    assert outlying_rows(steps, fit) == [0]
    assert 1e3 * fit.b0_s == pytest.approx(10, rel=0.05)
    without = fit_step_time(steps[1:], "eq9")
    assert 1e3 * without.b0_s == pytest.approx(10, rel=1e-9)
    assert outlying_rows(steps[1:], without) == []


def test_one_shape_of_batch_cannot_identify_the_token_and_prefill_terms() -> None:
    with pytest.raises(CalibrationError) as caught:
        fit_step_time(table(DECODES_OF_FOUR), "eq9")
    message = str(caught.value)
    assert "2 of 4" in message
    assert "b1_s: it cannot be told apart from b0_s" in message
    assert "b3_s: its feature is 0 in every step" in message
    assert "b2_s: " not in message
    assert "\n" not in message


def test_a_partial_fit_flags_what_it_cannot_tell() -> None:
    steps = table(DECODES_OF_FOUR)
    fit = fit_step_time(steps, "eq9", allow_partial=True)
    assert fit.not_identified == ("b1_s", "b3_s")
    assert fit.b1_s == fit.b3_s == 0
    assert predict(fit, steps) == pytest.approx(steps["step_s"].to_numpy(), rel=1e-9)


def test_rows_without_weight_do_not_help_to_identify() -> None:
    steps = table((*SIX, *DECODES_OF_FOUR))
    weights = np.array([0.0] * 6 + [1.0] * 4)
    with pytest.raises(CalibrationError, match="2 of 4"):
        fit_step_time(steps, "eq9", weights)


def test_mape_leaves_out_zeros_and_counts_them() -> None:
    summary = error_summary(np.array([0.0, 100.0, 200.0]), np.array([5.0, 110.0, 180.0]))
    assert summary.mape == pytest.approx(0.1)
    assert summary.skipped == 1
    assert summary.mean_absolute == pytest.approx(35 / 3)


def test_mape_of_nothing_but_zeros_is_not_a_number() -> None:
    assert np.isnan(error_summary(np.zeros(2), np.ones(2)).mape)


def test_steps_are_decode_prefill_or_mixed() -> None:
    expected = ["prefill", "prefill", "decode", "decode", "mixed", "mixed"]
    assert step_kinds(table(SIX)).tolist() == expected


def test_kinds_without_a_step_have_no_error() -> None:
    steps = table(DECODES_OF_FOUR)
    assert set(error_by_kind(steps, steps["step_s"].to_numpy())) == {"all", "decode"}


def test_noisy_steps_give_back_the_coefficients_within_their_intervals() -> None:
    fit = calibrate(drawn_steps(PLAIN), "eq9")
    assert fit.intervals is not None
    assert set(fit.intervals) == {"b0_s", "b1_s", "b2_s", "b3_s"}
    for term, (low, high) in fit.intervals.items():
        # Three times the interval: all four hold at once, and the draw is fixed.
        margin = high - low
        assert low - margin <= getattr(PLAIN, term) <= high + margin, term
        assert low <= getattr(fit, term) <= high, term
    assert fit.held_out_mape is not None
    # The mean of |N(0, 2 %)| is 1.6 %.
    assert fit.held_out_mape["all"] == pytest.approx(0.016, abs=0.003)


def test_the_hinge_is_found_and_plain_eq_9_is_worse() -> None:
    steps = drawn_steps(HINGE)
    fit = fit_step_time(steps, "hinge")
    assert fit.hinge_tokens in (320, 384, 448)
    assert fit.b1_s + fit.b1x_s == pytest.approx(HINGE.b1_s + HINGE.b1x_s, rel=0.03)
    assert held_out_mape(steps, "eq9")["all"] > 1.5 * held_out_mape(steps, "hinge")["all"]


def test_extra_terms_are_fitted_when_asked_for() -> None:
    truth = HINGE.model_copy(update={"b4_s": 3e-8, "b5_s": 2e-4})
    fit = fit_step_time(drawn_steps(truth, noise=0), "hinge", extra_terms=("b4_s", "b5_s"))
    assert fit.hinge_tokens == 384
    assert fit.b4_s == pytest.approx(3e-8, rel=1e-6)
    assert fit.b5_s == pytest.approx(2e-4, rel=1e-6)


def test_a_coefficient_is_never_negative() -> None:
    falling = tuple(Batch((), (c,) * n, 20 - 0.01 * c + n) for c in (10, 100, 500) for n in (1, 8))
    fit = fit_step_time(table(falling), "eq9", allow_partial=True)
    assert fit.b2_s == 0


def test_a_weight_of_two_is_a_row_twice() -> None:
    steps = drawn_steps(PLAIN, rows=60)
    weights = np.where(np.arange(60) < 20, 2.0, 1.0)
    doubled = pl.concat([steps, steps[:20]])
    weighted = fit_step_time(steps, "eq9", weights)
    repeated = fit_step_time(doubled, "eq9")
    for term in ("b0_s", "b1_s", "b2_s", "b3_s"):
        assert getattr(weighted, term) == pytest.approx(getattr(repeated, term), rel=1e-5)


def test_held_out_rows_do_not_reach_the_fit_that_predicts_them() -> None:
    steps = drawn_steps(PLAIN, noise=0)
    # A block that no other block explains: held out it is wrong, fitted it would weigh in.
    spoiled = steps.with_columns(
        step_s=pl.when(pl.int_range(pl.len()) < 10).then(2 * pl.col("step_s")).otherwise("step_s")
    )
    errors = held_out_mape(spoiled, "eq9")
    assert errors["all"] == pytest.approx(0.5 * 10 / 400, rel=0.1)


def test_intervals_are_the_same_on_every_call() -> None:
    steps = drawn_steps(PLAIN)
    fit = fit_step_time(steps, "eq9")
    terms: tuple[Term, ...] = ("b0_s", "b1_s")
    assert bootstrap_intervals(steps, fit, terms) == bootstrap_intervals(steps, fit, terms)


def test_too_few_steps_for_a_held_out_error_are_refused() -> None:
    with pytest.raises(CalibrationError, match="6 are too few"):
        held_out_mape(table(SIX), "eq9")


@pytest.mark.parametrize("name", STEP_COLUMNS)
def test_a_missing_column_is_named(name: str) -> None:
    with pytest.raises(CalibrationError, match=f"no column {name};"):
        fit_step_time(table(SIX).drop(name), "eq9")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None])
def test_a_step_without_a_positive_time_is_named(value: float | None) -> None:
    times = [0.01, value, *[0.01] * 4]
    steps = table(SIX).with_columns(step_s=pl.Series(times, dtype=pl.Float64))
    with pytest.raises(CalibrationError, match=r"row 1: step_s = .*; must be finite and > 0"):
        fit_step_time(steps, "eq9")


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(CalibrationError, match="empty"):
        fit_step_time(table(SIX)[:0], "eq9")


@pytest.mark.parametrize("weights", [np.ones(5), np.zeros(6), -np.ones(6), np.full(6, np.nan)], ids=str)
def test_weights_must_be_finite_and_not_all_zero(
    weights: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    with pytest.raises(CalibrationError, match="weights: must be 6"):
        fit_step_time(table(SIX), "eq9", weights)


def test_the_plain_form_takes_no_extra_terms() -> None:
    with pytest.raises(ValueError, match="hinge"):
        fit_step_time(table(SIX), "eq9", extra_terms=("b5_s",))
