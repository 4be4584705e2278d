"""Which optional terms the steps ask for: the simplest model whose held-out error is within noise of the best."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from simcluster.calibrate.fit import PLAIN_TERMS, fit_terms
from simcluster.calibrate.held_out import Blocks, held_out_prediction, other_runs_prediction
from simcluster.calibrate.step_errors import error_by_kind
from simcluster.card import StepKind, Term
from simcluster.errors import CalibrationError

__all__ = ["OPTIONAL_TERMS", "Candidate", "Choice", "capture_sizes", "choose", "padded"]

Array = NDArray[np.float64]
OPTIONAL_TERMS: tuple[Term, ...] = ("b1x_s", "b5_s", "b4_s")
_WORDS: dict[Term, str] = {"b1x_s": "the hinge (b1x)", "b4_s": "b4", "b5_s": "b5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One set of terms and its errors.

    Attributes:
        terms: what is fitted.
        predicted: held-out prediction of each step (n,) [s]; empty if the terms cannot be told.
        held_out: its MAPE by kind of step [fraction].
        other_runs: MAPE by kind on runs that the fit has not seen [fraction]; None with one run.
        behind: how much worse than the best, on average over blocks [fraction].
        noise: standard error of `behind`.
        note: why it is no candidate, or "".
    """

    terms: tuple[Term, ...]
    predicted: Array
    held_out: dict[StepKind, float]
    other_runs: dict[StepKind, float] | None
    behind: float = 0.0
    noise: float = 0.0
    note: str = ""

    @property
    def name(self) -> str:
        """Eq. 9, and the terms beyond it."""
        extra = [_WORDS[term] for term in OPTIONAL_TERMS if term in self.terms]
        return " + ".join(["eq. 9", *extra])


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates, the chosen one's place among them, and why."""

    candidates: list[Candidate]
    chosen: int
    reason: str


def choose(
    steps: pl.DataFrame,
    weights: Array,
    blocks: Blocks,
    run: NDArray[np.intp],
    on_candidate: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Compare plain eq. 9 with every set of optional terms.

    A candidate is within noise of the best if it is behind by at most one standard error of the difference, over
    blocks of steps; with several runs also over the runs that each fit has not seen. Where the rest of the steps cannot
    tell a term, its fold is predicted without the term.

    Args:
        steps: n steps with `STEP_COLUMNS`.
        weights: (n,), mean 1.
        blocks: how they are cut.
        run: number of the run of each step (n,).
        on_candidate: called with the name of each candidate before its turn.

    Raises:
        CalibrationError: the steps do not determine plain eq. 9, or are too few.
    """
    sets = [terms for size in range(len(OPTIONAL_TERMS) + 1) for terms in itertools.combinations(OPTIONAL_TERMS, size)]
    candidates = [_candidate((*PLAIN_TERMS, *terms), steps, weights, blocks, run, on_candidate) for terms in sets]
    usable = [number for number, each in enumerate(candidates) if not each.note]
    actual = steps["step_s"].cast(pl.Float64).to_numpy()
    best = min(usable, key=lambda number: candidates[number].held_out["all"])
    groups = np.repeat(np.arange(len(cut := blocks.cut(len(steps)))), [len(block) for block in cut])
    for number in usable:
        behind, noise = _difference(candidates[number], candidates[best], actual, weights, groups)
        candidates[number] = _with(candidates[number], behind, noise)
    within = [number for number in usable if candidates[number].behind <= candidates[number].noise]
    within = _good_on_other_runs(candidates, within) or within
    chosen = within[0]  # candidates are in order of simplicity
    return Choice(candidates, chosen, _reason(candidates, chosen, best, blocks))


def _candidate(
    terms: tuple[Term, ...],
    steps: pl.DataFrame,
    weights: Array,
    blocks: Blocks,
    run: NDArray[np.intp],
    on_candidate: Callable[[str], None],
) -> Candidate:
    empty = Candidate(terms=terms, predicted=np.empty(0), held_out={}, other_runs=None)
    on_candidate(empty.name)
    if terms != PLAIN_TERMS:
        try:
            fit_terms(steps, terms, weights)
        except CalibrationError as error:
            return Candidate(terms=terms, predicted=np.empty(0), held_out={}, other_runs=None, note=str(error))
    predicted = held_out_prediction(steps, terms, weights, blocks, allow_partial=True)
    others = None
    if np.unique(run).size > 1:
        foreign = other_runs_prediction(steps, terms, run, weights, allow_partial=True)
        others = error_by_kind(steps, foreign, weights)
    return Candidate(
        terms=terms, predicted=predicted, held_out=error_by_kind(steps, predicted, weights), other_runs=others
    )


def _difference(
    one: Candidate, best: Candidate, actual: Array, weights: Array, groups: NDArray[np.intp]
) -> tuple[float, float]:
    """Return by how much one is worse than the best [fraction], and the standard error over blocks."""
    worse = weights * (np.abs(one.predicted / actual - 1) - np.abs(best.predicted / actual - 1))
    sums = np.bincount(groups, weights=worse)
    number = len(sums)
    return float(worse.mean()), float(np.std(sums, ddof=1) * np.sqrt(number) / len(actual))


def _with(candidate: Candidate, behind: float, noise: float) -> Candidate:
    return Candidate(
        terms=candidate.terms,
        predicted=candidate.predicted,
        held_out=candidate.held_out,
        other_runs=candidate.other_runs,
        behind=behind,
        noise=noise,
    )


def _good_on_other_runs(candidates: list[Candidate], within: list[int]) -> list[int]:
    """Keep those whose error on other runs is above the least by no more than their noise on blocks."""
    errors = {number: others["all"] for number in within if (others := candidates[number].other_runs) is not None}
    if not errors:
        return []
    best = min(errors.values())
    return [number for number in errors if errors[number] <= best + candidates[number].noise]


def _reason(candidates: list[Candidate], chosen: int, best: int, blocks: Blocks) -> str:
    one, top = candidates[chosen], candidates[best]
    text = f"chosen is {one.name}: held-out error {one.held_out['all']:.2%} over {blocks.describe()}"
    if chosen == best:
        text += ", the least of all candidates"
    else:
        text += (
            f"; {top.name} has the least, {top.held_out['all']:.2%}, but the difference is within its noise "
            f"(one standard error, {one.noise:.2%})"
        )
    plain = candidates[0]
    if chosen != 0:
        text += f"; plain eq. 9 has {plain.held_out['all']:.2%}, which is worse by more than noise"
        if plain.behind <= plain.noise:
            text += " on runs that the fit has not seen"
    if one.other_runs is not None:
        text += f"; on runs that the fit has not seen {one.other_runs['all']:.2%}"
    return text


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that vLLM captures as CUDA graphs by default, up to 512."""
    largest = min(max(2 * max_num_seqs, 1), 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return [size for size in sizes if size <= largest]


def padded(steps: pl.DataFrame, sizes: list[int]) -> pl.DataFrame:
    """Round the tokens of steps that only decode up to the next captured size; larger ones run as they are."""
    tokens = steps["n_tokens"].to_numpy()
    grid = np.array(sorted(sizes))
    place = np.searchsorted(grid, tokens)
    up = np.where(place < len(grid), grid[np.minimum(place, len(grid) - 1)], tokens)
    return steps.with_columns(
        n_tokens=pl.when(pl.col("has_prefill")).then(pl.col("n_tokens")).otherwise(pl.Series(up, dtype=pl.Int64))
    )
