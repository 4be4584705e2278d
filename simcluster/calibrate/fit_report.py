"""The report card of a fit as plain data: what a table on the terminal shows, and `--json` prints."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcluster.calibrate import measured
from simcluster.calibrate.coverage import coverage_of
from simcluster.calibrate.fit import predict
from simcluster.calibrate.fit_sources import FittedSteps
from simcluster.calibrate.step_errors import error_by_kind, error_summary, step_kinds
from simcluster.calibrate.step_tables import CLEAN_RULES
from simcluster.card import Card

__all__ = ["fit_report"]

Array = NDArray[np.float64]

_WORST, _PERIODS = 5, 8
_PLAIN = ("b0_s", "b1_s", "b2_s", "b3_s")
_SHARES = (1, 10, 25, 50, 75, 90, 99)  # percent
_UNITS = {
    "b0_s": "s",
    "b1_s": "s/token",
    "b2_s": "s/token",
    "b3_s": "s/token^2",
    "b1x_s": "s/token",
    "b4_s": "s/token",
    "b5_s": "s",
}


def fit_report(fitted: FittedSteps, card: Card | None) -> dict[str, Any]:
    """Return everything that is worth showing about a fit; errors as fractions, times in seconds.

    Args:
        fitted: the fit.
        card: the card made from it, or None.
    """
    predicted = predict(fitted.fit, fitted.steps) if fitted.held_out is None else fitted.held_out
    return {
        "sources": [
            {
                "name": table.name,
                "steps": len(table.steps) + sum(table.left_out.values()),
                "fitted": len(table.steps),
                "left_out": table.left_out,
            }
            for table in fitted.tables
        ],
        "rules": {name: CLEAN_RULES[name] for table in fitted.tables for name in table.left_out},
        "target": fitted.options.target if any(table.recording for table in fitted.tables) else None,
        "weights": fitted.weights_text,
        "blocks": None if fitted.blocks is None else fitted.blocks.describe(),
        "chosen": fitted.chosen,
        "choice": _choice(fitted),
        "coefficients": _coefficients(fitted),
        "errors": _errors(fitted),
        "residuals": _residuals(fitted, predicted),
        "padding": None if fitted.padding is None else dict(zip(("plain", "padded"), fitted.padding, strict=True)),
        "contention": _contention(fitted),
        "coverage": coverage_of(fitted.steps).model_dump(mode="json"),
        "card": None if card is None else card.model_dump(mode="json", exclude_none=True, exclude={"fits", "coverage"}),
        "notes": fitted.notes,
        "warnings": fitted.warnings,
    }


def _choice(fitted: FittedSteps) -> dict[str, Any] | None:
    if fitted.choice is None:
        return None
    return {
        "reason": fitted.choice.reason,
        "candidates": [
            {
                "name": each.name,
                "coefficients": len(each.terms),
                "held_out": each.held_out or None,
                "other_runs": each.other_runs,
                "behind": each.behind if each.held_out else None,
                "noise": each.noise if each.held_out else None,
                "chosen": number == fitted.choice.chosen,
                "note": each.note,
            }
            for number, each in enumerate(fitted.choice.candidates)
        ],
    }


def _coefficients(fitted: FittedSteps) -> list[dict[str, Any]]:
    """Return one row per coefficient of the chosen fit, those of plain eq. 9 beside them."""
    fit, plain = fitted.fit, fitted.fits["eq9"]
    intervals = {str(term): ends for term, ends in (fit.intervals or {}).items()}
    terms = [term for term in _UNITS if getattr(fit, term) or intervals.get(term) or term in _PLAIN]
    rows: list[dict[str, Any]] = [
        {
            "term": term,
            "unit": _UNITS[term],
            "value": getattr(fit, term),
            "interval": intervals.get(term),
            "eq9": getattr(plain, term) if term in _PLAIN else None,
            "identified": term not in fit.not_identified,
        }
        for term in terms
    ]
    if fit.hinge_tokens:
        rows.append(
            {
                "term": "hinge_tokens",
                "unit": "tokens",
                "value": fit.hinge_tokens,
                "interval": None,
                "eq9": None,
                "identified": True,
            }
        )
    return rows


def _errors(fitted: FittedSteps) -> list[dict[str, Any]]:
    """Return the errors by kind of step: held out and in sample, of the chosen fit and of plain eq. 9."""
    fit, plain = fitted.fit, fitted.fits["eq9"]
    inside = fit.in_sample_mape or error_by_kind(fitted.steps, predict(fit, fitted.steps), fitted.weights)
    kinds = step_kinds(fitted.steps)
    others = None if fitted.choice is None else fitted.choice.candidates[fitted.choice.chosen].other_runs
    unweighted = None
    if fitted.held_out is not None:
        unweighted = error_by_kind(fitted.steps, fitted.held_out)
    return [
        {
            "kind": kind,
            "steps": len(kinds) if kind == "all" else int((kinds == kind).sum()),
            "held_out": (fit.held_out_mape or {}).get(kind),
            "held_out_every_step_alike": (unweighted or {}).get(kind),
            "other_runs": (others or {}).get(kind),
            "in_sample": inside.get(kind),
            "eq9_held_out": (plain.held_out_mape or {}).get(kind),
        }
        for kind in ("all", "decode", "prefill", "mixed")
        if kind in inside
    ]


def _residuals(fitted: FittedSteps, predicted: Array) -> dict[str, Any]:
    """Return recorded over predicted: its distribution, the worst rows and how it goes over time."""
    steps = fitted.steps
    actual = steps["step_s"].to_numpy()
    ratio = actual / predicted
    order = np.argsort(-np.abs(np.log(ratio)))[:_WORST]
    summary = error_summary(actual, predicted)
    worst = [
        {
            "source": fitted.tables[row["source"]].name,
            "row": row["row"],
            "n_tokens": row["n_tokens"],
            "n_decode": row["n_decode"],
            "sum_decode_context": row["sum_decode_context"],
            "num_prefill_requests": row["num_prefill_requests"],
            "step_s": row["step_s"],
            "predicted_s": float(predicted[number]),
            "ratio": float(ratio[number]),
        }
        for number, row in ((int(number), steps.row(int(number), named=True)) for number in order)
    ]
    parts = np.array_split(np.arange(len(steps)), min(_PERIODS, len(steps)))
    return {
        "held_out": fitted.held_out is not None,
        "quantiles": {f"p{share}": float(value) for share, value in zip(_SHARES, _quantiles(ratio), strict=True)},
        "mean_absolute_error_s": summary.mean_absolute,
        "skipped_zeros": summary.skipped,
        "worst": worst,
        "over_time": [
            {
                "from": int(part[0]),
                "to": int(part[-1]) + 1,
                "median_ratio": float(np.median(ratio[part])),
                "mape": error_summary(actual[part], predicted[part]).mape,
            }
            for part in parts
        ],
    }


def _quantiles(ratio: Array) -> list[float]:
    values: list[float] = np.percentile(ratio, _SHARES).tolist()
    return values


def _contention(fitted: FittedSteps) -> dict[str, Any] | None:
    found = measured.contention(fitted.tables, excluded=fitted.options.exclude_disturbed)
    return None if found is None else found.model_dump(mode="json")
