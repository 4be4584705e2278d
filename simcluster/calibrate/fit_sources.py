"""From recorded steps to a fit: choose the model, fit it, and keep what says how far to trust it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate import measured
from simcluster.calibrate.choose import Choice, capture_sizes, choose, padded
from simcluster.calibrate.fit import PLAIN_TERMS, design, fit_terms, outlying_rows, predict
from simcluster.calibrate.held_out import (
    GRID_BLOCKS,
    SERVED_BLOCKS,
    Blocks,
    bootstrap_intervals,
    held_out_prediction,
)
from simcluster.calibrate.solve import not_identified
from simcluster.calibrate.step_errors import error_by_kind
from simcluster.calibrate.step_tables import FitOptions, StepTable, check_alike, joined, load_table
from simcluster.calibrate.weights import served_step_weights
from simcluster.card import FitName, StepTimeFit, Term
from simcluster.errors import CalibrationError

__all__ = ["FittedSteps", "fit_sources"]

Array = NDArray[np.float64]

_RESIDUALS = 200  # quantiles of recorded over predicted that a card keeps
_PADDING_GAIN = 0.8  # error with padding over error without, below which it is worth a warning
_CONTENTION = 0.05  # share of disturbed steps that is worth a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSteps:
    """A fit with everything that the card and the report say about it.

    Attributes:
        tables: the sources, rows left out.
        steps: all steps that were fitted, n.
        weights: (n,), mean 1.
        weights_text: where they come from.
        blocks: how the steps were cut for held-out errors; None if they are too few for any.
        choice: the candidates and the chosen one; None if there was nothing to choose by.
        fits: by name, "eq9" and, if it has optional terms, the chosen one.
        chosen: name of the chosen fit.
        held_out: held-out prediction of each step by the chosen fit (n,) [s], or None.
        outliers: rows far off, numbers in `steps`.
        padding: held-out MAPE of decode steps without and with padding to CUDA-graph sizes; None off a GPU.
        options: what was asked for.
        notes: what differs between the sources, but may.
        warnings: what looks wrong.
    """

    tables: list[StepTable]
    steps: pl.DataFrame
    weights: Array
    weights_text: str
    blocks: Blocks | None
    choice: Choice | None
    fits: dict[FitName, StepTimeFit]
    chosen: FitName
    held_out: Array | None
    outliers: list[int]
    padding: tuple[float, float] | None
    options: FitOptions
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def served(self) -> bool:
        """Whether a served phase decided the weights."""
        return self.weights_text.startswith("as the")

    @property
    def fit(self) -> StepTimeFit:
        """The chosen fit."""
        return self.fits[self.chosen]


def fit_sources(
    paths: Sequence[Path],
    options: FitOptions,
    *,
    allow_partial: bool = False,
    equal_weights: bool = False,
    on_stage: Callable[[str], None] = lambda _: None,
) -> FittedSteps:
    """Fit the step-time model to one or several sources.

    Args:
        paths: recordings or tables of steps.
        options: which steps of them.
        allow_partial: fit what the steps can tell, hold the rest at 0 and name it.
        equal_weights: let every step count alike even if a served phase was recorded.
        on_stage: called with what is done next, for a progress line.

    Raises:
        CalibrationError: a source cannot be read or does not belong to the others, or the steps do not determine the
            plain model.
    """
    on_stage("reading")
    tables = [load_table(path, options) for path in paths]
    notes = check_alike(tables)
    steps = joined(tables)
    weights, text = served_step_weights(steps, equal=equal_weights)
    warnings = [warning for table in tables for warning in table.warnings]
    unknown = not_identified(design(steps, PLAIN_TERMS, 0)[weights > 0], PLAIN_TERMS)
    plain = fit_terms(steps, PLAIN_TERMS, weights, allow_partial=allow_partial)
    blocks = _blocks(tables, len(steps))
    choice = None
    if blocks is not None and not unknown:
        choice = choose(steps, weights, blocks, steps["source"].to_numpy().astype(np.intp), on_stage)
    on_stage("intervals")
    fits, chosen, held_out = _fits(plain, steps, weights, blocks, choice)
    outliers = outlying_rows(steps, fits[chosen])
    padding = None if blocks is None or choice is None else _padding(tables, steps, weights, blocks, choice)
    warnings = [warning for table in tables for warning in table.warnings]
    warnings += _data_warnings(len(steps), unknown, blocks)
    warnings += _outlier_warning(steps, outliers, fits[chosen], tables)
    warnings += _contention_warning(tables, options)
    warnings += _padding_warning(padding)
    return FittedSteps(
        tables=tables,
        steps=steps,
        weights=weights,
        weights_text=text,
        blocks=blocks,
        choice=choice,
        fits=fits,
        chosen=chosen,
        held_out=held_out,
        outliers=outliers,
        padding=padding,
        options=options,
        notes=notes,
        warnings=warnings,
    )


def _fits(
    plain: StepTimeFit, steps: pl.DataFrame, weights: Array, blocks: Blocks | None, choice: Choice | None
) -> tuple[dict[FitName, StepTimeFit], FitName, Array | None]:
    """Return the fits with their errors, the chosen one's name and its held-out prediction."""
    terms: dict[FitName, tuple[Term, ...]] = {"eq9": PLAIN_TERMS}
    fits: dict[FitName, StepTimeFit] = {"eq9": plain}
    chosen: FitName = "eq9"
    if choice is not None and choice.chosen != 0:
        taken = choice.candidates[choice.chosen].terms
        chosen = "hinge" if taken == (*PLAIN_TERMS, "b1x_s") else "extended"
        terms[chosen], fits[chosen] = taken, fit_terms(steps, taken, weights)
    if blocks is None:
        return fits, chosen, None
    held_out: dict[FitName, Array] = {}
    for name, fit in list(fits.items()):
        told = tuple(term for term in terms[name] if term not in fit.not_identified)
        held_out[name] = _held_out(steps, told, weights, blocks, choice)
        fits[name] = _with_errors(fit, steps, told, weights, blocks, held_out[name])
    return fits, chosen, held_out[chosen]


def _data_warnings(rows: int, unknown: dict[Term, str], blocks: Blocks | None) -> list[str]:
    warnings = []
    if unknown:
        reasons = "; ".join(f"{term}: {reason}" for term, reason in unknown.items())
        warnings.append(f"not identified, held at 0: {reasons}; do not use the card where these matter")
    if blocks is None:
        warnings.append(f"{rows} steps are too few for held-out errors, intervals or optional terms: plain eq. 9")
    return warnings


def _padding_warning(padding: tuple[float, float] | None) -> list[str]:
    if padding is None or padding[1] >= _PADDING_GAIN * padding[0]:
        return []
    return [
        f"decode steps are {padding[0]:.2%} off, and {padding[1]:.2%} if their tokens are rounded up to CUDA-graph "
        "sizes; the simulator does not pad"
    ]


def _blocks(tables: Sequence[StepTable], rows: int) -> Blocks | None:
    """Cut recordings into blocks of steps as they followed each other, grids into lines; None for too few rows."""
    wanted = (SERVED_BLOCKS, GRID_BLOCKS) if all(each.recording is not None for each in tables) else (GRID_BLOCKS,)
    for blocks in wanted:
        try:
            blocks.cut(rows)
        except CalibrationError:
            continue
        return blocks
    return None


def _held_out(
    steps: pl.DataFrame, terms: tuple[Term, ...], weights: Array, blocks: Blocks, choice: Choice | None
) -> Array:
    """Return held-out predictions, those of the choice where it has made them."""
    for candidate in () if choice is None else choice.candidates:
        if candidate.terms == terms and not candidate.note:
            return candidate.predicted
    return held_out_prediction(steps, terms, weights, blocks, allow_partial=True)


def _with_errors(
    fit: StepTimeFit, steps: pl.DataFrame, terms: tuple[Term, ...], weights: Array, blocks: Blocks, predicted: Array
) -> StepTimeFit:
    ratio = steps["step_s"].to_numpy() / predicted
    order = np.argsort(ratio)
    shares = np.cumsum(weights[order]) / weights.sum()
    middle = (np.arange(_RESIDUALS) + 0.5) / _RESIDUALS
    quantiles = ratio[order][np.minimum(np.searchsorted(shares, middle), len(ratio) - 1)]
    return fit.model_copy(
        update={
            "held_out_mape": error_by_kind(steps, predicted, weights),
            "in_sample_mape": error_by_kind(steps, predict(fit, steps), weights),
            "intervals": bootstrap_intervals(steps, fit, terms, weights, blocks),
            "residuals": tuple(float(value) for value in quantiles),
        }
    )


def _outlier_warning(steps: pl.DataFrame, rows: list[int], fit: StepTimeFit, tables: Sequence[StepTable]) -> list[str]:
    if not rows:
        return []
    row = steps.row(rows[0], named=True)
    ratio = row["step_s"] / float(predict(fit, steps[rows[0] : rows[0] + 1])[0])
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return [
        f"row {row['row']} of {tables[row['source']].name}{more}: over 100 times the median error, "
        f"{row['step_s']:.4g} s is {ratio:.3g} times the fit; a cold first step? --skip-steps leaves it out"
    ]


def _contention_warning(tables: Sequence[StepTable], options: FitOptions) -> list[str]:
    found = measured.contention(tables, excluded=options.exclude_disturbed)
    if found is None or found.disturbed_share < _CONTENTION or options.exclude_disturbed:
        return []
    text = (
        f"contention: {found.disturbed_share:.0%} of the steps took over 1.15 times the worker's CPU time, "
        f"all together {found.wall_over_cpu:.2f} times"
    )
    if options.target == "worker-cpu":
        return [f"{text}; --exclude-disturbed leaves them out"]
    return [f"{text}; --target worker-cpu fits what the machine takes alone, --exclude-disturbed leaves them out"]


def _padding(
    tables: Sequence[StepTable], steps: pl.DataFrame, weights: Array, blocks: Blocks, choice: Choice
) -> tuple[float, float] | None:
    """Return the held-out error of decode steps without and with padding; None where nothing is captured."""
    recording = tables[0].recording
    if recording is None or "cpu" in recording.info.device.lower():
        return None
    options = recording.info.engine.model_dump()
    if options.get("enforce_eager"):
        return None
    one = choice.candidates[choice.chosen]
    if "decode" not in one.held_out:
        return None
    sizes = options.get("cudagraph_capture_sizes") or capture_sizes(recording.info.engine.max_num_seqs)
    up = padded(steps, [int(size) for size in sizes])
    errors = error_by_kind(up, held_out_prediction(up, one.terms, weights, blocks, allow_partial=True), weights)
    return one.held_out["decode"], errors["decode"]
