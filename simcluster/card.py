"""The calibration card: how fast one model on one kind of GPU is, and how far that is known.

A card is a JSON file of `calibration/`. It holds the coefficients of the step-time model with their
intervals and held-out errors, the KV cache, the host and front-end times, and what is assumed
rather than measured. This file decides what a valid card is; `simcluster.calibrate` makes one.
"""

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simcluster.errors import CardError
from simcluster.validation import explain

__all__ = [
    "Adjustment",
    "Assumption",
    "Card",
    "Contention",
    "Coverage",
    "CoverageMap",
    "FitName",
    "FrontEnd",
    "KvCache",
    "Measure",
    "ServiceRates",
    "StepKind",
    "StepTimeFit",
    "StepTimeForm",
    "Term",
    "Validation",
    "load_card",
    "write_card",
]

StepTimeForm = Literal["eq9", "hinge"]
FitName = Literal["eq9", "hinge", "extended", "eq9_served"]
Term = Literal["b0_s", "b1_s", "b2_s", "b3_s", "b1x_s", "b4_s", "b5_s"]
StepKind = Literal["all", "decode", "prefill", "mixed"]
Measure = Literal["ttft_mape", "tpot_mape", "e2e_mape"]

_NonNegative = Annotated[float, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0)]
_Text = Annotated[str, Field(min_length=1)]
_Errors = dict[StepKind, _NonNegative]
_CountRange = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
_ValueRange = tuple[_NonNegative, _NonNegative]

_PLAIN_FITS: tuple[FitName, ...] = ("eq9", "eq9_served")
_OPTIONAL_TERMS: tuple[Term, ...] = ("b1x_s", "b4_s", "b5_s")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StepTimeFit(_Model):
    """Coefficients of the time of one engine step.

    `T = b0 + b1*n_tokens + b2*S_dec + b3*A_pre + b1x*max(n_tokens - hinge_tokens, 0)
    + b4*S_dec*[the batch contains a prefill] + b5*(number of prefilling requests)`,
    with S_dec the sum of the decode contexts and A_pre the sum of `p*c + p*(p+1)/2` over the
    prefilling requests (p = prefill tokens of this step, c = tokens already in the KV cache).
    All coefficients are at least 0. Host time is not part of T, see `Card.host_time_s`.

    Attributes:
        b0_s: time of any step [s].
        b1_s: time per prefill or decode token [s/token].
        b2_s: time per token of decode context [s/token].
        b3_s: time per pair of the prefill attention [s/token^2].
        b1x_s: further time per token above `hinge_tokens` [s/token].
        hinge_tokens: where the dense layers stop being bound by memory bandwidth [tokens].
        b4_s: further time per token of decode context beside a prefill [s/token].
        b5_s: time per prefilling request [s].
        not_identified: terms that the data cannot tell, held at 0.
        intervals: 95 % block-bootstrap interval of each coefficient, in its unit, or None.
        held_out_mape: error on steps left out of the fit [fraction], by kind of step, or None.
        in_sample_mape: error on the fitted steps [fraction], by kind of step, or None.
        residuals: equally likely quantiles of recorded over predicted time of held-out steps, or None.

    Source: paper eq. 9; the terms b1x, b4 and b5 are this project's.
    """

    b0_s: _NonNegative
    b1_s: _NonNegative
    b2_s: _NonNegative
    b3_s: _NonNegative
    b1x_s: _NonNegative = 0.0
    hinge_tokens: Annotated[int, Field(ge=0)] = 0
    b4_s: _NonNegative = 0.0
    b5_s: _NonNegative = 0.0
    not_identified: tuple[Term, ...] = ()
    intervals: dict[Term, _ValueRange] | None = None
    held_out_mape: _Errors | None = None
    in_sample_mape: _Errors | None = None
    residuals: Annotated[tuple[_Positive, ...], Field(min_length=2)] | None = None


class FrontEnd(_Model):
    """Time outside the engine.

    Attributes:
        request_s: from the router to the engine, per request [s].
        per_prompt_token_s: the same, per prompt token [s/token].
        output_s: from the engine to the client, per output [s].
    """

    request_s: _NonNegative
    per_prompt_token_s: _NonNegative
    output_s: _NonNegative


class KvCache(_Model):
    """The KV cache of one instance.

    Attributes:
        num_gpu_blocks: blocks as vLLM counts them, the null block included; one less is usable.
        block_size: tokens per block.
    """

    num_gpu_blocks: Annotated[int, Field(ge=2)]
    block_size: Annotated[int, Field(ge=1)]


class CoverageMap(_Model):
    """How many fitted steps there are by batch and mean decode context.

    Attributes:
        batch_size: lowest number of decoding requests of each row; 0 is for steps without a decode.
        mean_decode_context: lowest mean context of each column [tokens].
        steps: number of steps, by row and column.
        with_prefill: how many of them contain a prefill.
    """

    batch_size: tuple[Annotated[int, Field(ge=0)], ...]
    mean_decode_context: tuple[Annotated[int, Field(ge=0)], ...]
    steps: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    with_prefill: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]


class Coverage(_Model):
    """The ranges (lowest, highest) of the fitted steps; beyond them a prediction extrapolates.

    Attributes:
        num_steps: number of fitted steps.
        n_tokens: prefill and decode tokens of a step [tokens].
        batch_size: decoding requests of a step.
        mean_decode_context: mean context of the decoding requests of a step [tokens].
        sum_decode_context: sum of these contexts [tokens].
        num_prefill_requests: prefilling requests of a step.
        prefill_attention: sum of `p*c + p*(p+1)/2` of a step [tokens^2].
        map: the steps by batch and context, or None.
    """

    num_steps: Annotated[int, Field(ge=1)]
    n_tokens: _CountRange
    batch_size: _CountRange
    mean_decode_context: _ValueRange
    sum_decode_context: _CountRange
    num_prefill_requests: _CountRange
    prefill_attention: _ValueRange
    map: CoverageMap | None = None


class ServiceRates(_Model):
    """How fast the instance serves a mix of requests: what estimators without a step-time model need.

    Attributes:
        prefill_throughput_tps: theta_pre, prefill tokens per second of the steps that contain a prefill [tokens/s].
        mean_decode_step_s: Tbar_dec, mean time of the steps that only decode [s].
        service_rate_rps: mu, peak output throughput over mean answer length [requests/s].
        parallelism: k, mean number of running requests under saturation [requests].
        utilisation: load of the run that gave the first two, over `service_rate_rps`.
        method: how they were found, and under which requests.

    Source: paper eqs. 6, 10, 11; `simcluster.calibrate.service_rates` finds them.
    """

    prefill_throughput_tps: _Positive
    mean_decode_step_s: _Positive
    service_rate_rps: _Positive
    parallelism: Annotated[float, Field(ge=1)]
    utilisation: _Positive
    method: _Text


class Validation(_Model):
    """One comparison of the card with a real run; `simcluster validate --write` adds it.

    Attributes:
        run: name of the run or of the table of points.
        requests: requests compared, for a run.
        points: closed-loop measurements compared, for a table of points.
        errors: mean absolute relative errors [fraction]: ttft_mape, tpot_mape, e2e_mape.
        tuned: what was changed about the card for it, by name; empty for the card as it is.
        tuned_on: what that was fitted to, in words; None for the card as it is.
    """

    run: _Text
    requests: Annotated[int, Field(ge=1)] | None = None
    points: Annotated[int, Field(ge=1)] | None = None
    errors: Annotated[dict[Measure, _NonNegative], Field(min_length=1)]
    tuned: dict[_Text, float] = Field(default_factory=dict)
    tuned_on: str | None = None

    @property
    def text(self) -> str:
        """What was compared, and how well it fits, in one line."""
        names = {"ttft_mape": "TTFT", "tpot_mape": "TPOT", "e2e_mape": "E2E"}
        errors = ", ".join(f"{names[name]} {100 * value:.1f} %" for name, value in sorted(self.errors.items()))
        size = f"{self.requests} requests" if self.requests else f"{self.points} points"
        tuned = f", tuned on {self.tuned_on}" if self.tuned_on else ""
        return f"validated on {self.run} ({size}{tuned}), error {errors}"


class Contention(_Model):
    """How much other work on the machine disturbed the recorded steps.

    Attributes:
        wall_over_cpu: wall time of all steps over the worker's CPU time.
        disturbed_share: share of steps whose wall time is above 1.15 times the worker's CPU time + 0.5 ms [fraction].
        excluded: whether these steps were left out of the fit.
    """

    wall_over_cpu: _Positive
    disturbed_share: Annotated[float, Field(ge=0, le=1)]
    excluded: bool


class Assumption(_Model):
    """A field of the card that was not measured, and where its value comes from."""

    field: _Text
    note: _Text


class Adjustment(_Model):
    """Fields that were multiplied by a factor after the fit, and why."""

    field: _Text
    factor: Annotated[float, Field(gt=0)]
    reason: _Text


class Card(_Model):
    """A calibration card.

    Attributes:
        schema_version: version of this layout.
        name: the card's name, also its file's.
        model: the served model.
        device: kind of GPU.
        num_gpus: GPUs of one instance (tensor parallel).
        engine: serving engine.
        engine_version: what the card stands for.
        max_model_len: context limit [tokens].
        kv_cache: resolved size of the KV cache.
        host_time_s: host time per step [s]: added to the step time in the synchronous loop, a lower
            bound of the period in the asynchronous one.
        front_end: time outside the engine.
        fits: step-time models by name; "eq9" is the paper's, "hinge" and "extended" have optional terms, "eq9_served"
            is the paper's on the steps of a simulated cluster whose engines follow "hinge".
        chosen_fit: the fit to use where nothing else is asked for.
        coverage: ranges of the fitted steps.
        service_rates: how fast it serves a mix of requests; None where nobody has measured it.
        validations: comparisons with real runs, one per run; None without any.
        target: which of a step's times was fitted; None for steps that have only one.
        contention: what other work on the machine did to the recorded steps; None where it is not known.
        provenance: where the steps come from.
        measured: whether the steps were recorded from a serving engine.
        assumptions: what was not measured.
        adjustments: what was scaled after the fit.
        notes: how measured fields were measured.
        date: when the card was made, YYYY-MM-DD.
        source: name of the file with the steps.
        source_sha256: SHA-256 of that file.
    """

    schema_version: Literal[1]
    name: _Text
    model: _Text
    device: _Text
    num_gpus: Annotated[int, Field(ge=1)]
    engine: Literal["vllm"]
    engine_version: _Text
    max_model_len: Annotated[int, Field(ge=1)]
    kv_cache: KvCache
    host_time_s: _NonNegative
    front_end: FrontEnd
    fits: Annotated[dict[FitName, StepTimeFit], Field(min_length=1)]
    chosen_fit: FitName
    coverage: Coverage
    service_rates: ServiceRates | None = None
    validations: list[Validation] | None = None
    target: Literal["wall", "worker-cpu"] | None = None
    contention: Contention | None = None
    provenance: _Text
    measured: bool
    assumptions: list[Assumption]
    adjustments: list[Adjustment]
    notes: list[_Text] | None = None
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    source: _Text
    source_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def step_time(self) -> StepTimeFit:
        """The chosen step-time model."""
        return self.fits[self.chosen_fit]

    @property
    def badge(self) -> str:
        """How far the card can be trusted, in one line; it stands in every output that uses the card."""
        if self.validations:
            return "; ".join(each.text for each in self.validations)
        return "calibrated, not validated" if self.measured else "uncalibrated preset"

    @model_validator(mode="after")
    def _check_fits(self) -> Self:
        if self.chosen_fit not in self.fits:
            made = ", ".join(sorted(self.fits))
            raise ValueError(f"chosen_fit = {self.chosen_fit!r}; must be one of the fits: {made}")
        for name, term in itertools.product(_PLAIN_FITS, _OPTIONAL_TERMS):
            plain = self.fits.get(name)
            if plain is not None and getattr(plain, term) != 0:
                raise ValueError(
                    f"fits.{name}.{term} = {getattr(plain, term)!r}; "
                    "must be 0, since eq. 9 has no such term; move the fit to fits.hinge"
                )
        return self


def load_card(path: Path) -> Card:
    """Read a calibration card.

    Raises:
        CardError: the file is missing, is not JSON or is not a valid card. The message is one line:
            the file, the field, its value, what is allowed and the fix.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CardError(f"{path}: no such file; give the path of a calibration card (*.json)") from None
    except OSError as error:
        raise CardError(f"{path}: cannot be read ({error.strerror}); give a calibration card") from None
    try:
        return Card.model_validate_json(text)
    except ValidationError as error:
        raise CardError(f"{path}: {explain(error, Card)}") from None


def write_card(card: Card, path: Path) -> None:
    """Write a card as JSON with sorted keys, indent 2 and a newline at the end.

    Equal cards give equal bytes. The file is replaced in one move, so a reader never meets half a
    card.

    Raises:
        CardError: the file cannot be written.
    """
    text = json.dumps(
        card.model_dump(mode="json", exclude_none=True), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text + "\n")
            Path(temporary).chmod(0o644)  # mkstemp makes it private; a card is for everyone
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CardError(f"{path}: cannot be written ({error.strerror}); give a folder that is writable") from None
