"""The card of a fit: the step-time model with what a recording says beside it, and what had to be assumed."""

from dataclasses import dataclass

from simcluster.calibrate import measured
from simcluster.calibrate.coverage import coverage_of
from simcluster.calibrate.fit_sources import FittedSteps
from simcluster.calibrate.recording import Recording
from simcluster.card import Assumption, Card, FrontEnd, KvCache, StepTimeFit
from simcluster.errors import CalibrationError

__all__ = ["CardNames", "make_card"]

_DIGITS, _ERROR_DIGITS = 5, 3
_TERMS = ("b0_s", "b1_s", "b2_s", "b3_s", "b1x_s", "b4_s", "b5_s")
_COMPOSED = "composed from measured kernels, not a serving run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardNames:
    """What people call the instance, and what its steps do not say.

    Attributes:
        name: of the card.
        date: YYYY-MM-DD.
        model: served model; None: as recorded.
        device: kind of device; None: as recorded.
        base: card to take KV cache, context limit, host time and front end from where no recording says them, or None.
    """

    name: str
    date: str
    model: str | None = None
    device: str | None = None
    base: Card | None = None


def make_card(fitted: FittedSteps, names: CardNames) -> Card:
    """Put the card together.

    Raises:
        CalibrationError: neither a recording nor a base card says how large the KV cache is, or what the model is.
    """
    recordings = [table.recording for table in fitted.tables if table.recording is not None]
    first = recordings[0] if recordings else None
    num_gpus = _num_gpus(fitted, names.base)
    assumptions: list[Assumption] = []
    notes: list[str] = []
    if fitted.served:
        notes.append(f"fits: weights of the steps: {fitted.weights_text}")
    else:
        assumptions.append(Assumption(field="fits", note=f"weights of the steps: {fitted.weights_text}"))
    host_s = _host_time(fitted, names.base, assumptions, notes)
    if fitted.options.target == "worker-cpu" and first is not None:
        notes.append("fits: step times are CPU times of the worker: what the machine takes alone")
    rates, reason = measured.service_rates(fitted.tables, host_s)
    if rates is None:
        assumptions.append(Assumption(field="service_rates", note=f"not measured: {reason}"))
    return Card(
        schema_version=1,
        name=names.name,
        model=_known("model", names.model, first.info.model if first else None, names.base),
        device=_known("device", names.device, first.info.device if first else None, names.base),
        num_gpus=num_gpus,
        engine="vllm",
        engine_version=_known("engine_version", None, first.info.vllm_version if first else None, names.base),
        max_model_len=first.info.engine.max_model_len if first else _base(names.base).max_model_len,
        kv_cache=_kv_cache(first, names.base, num_gpus, assumptions),
        host_time_s=_rounded(host_s, _DIGITS),
        front_end=_front_end(recordings, names.base, assumptions, notes),
        fits={name: _tidy(fit) for name, fit in fitted.fits.items()},
        chosen_fit=fitted.chosen,
        coverage=coverage_of(fitted.steps),
        service_rates=rates,
        target=fitted.options.target if recordings else None,
        contention=measured.contention(fitted.tables, excluded=fitted.options.exclude_disturbed),
        provenance=_provenance(fitted, recordings),
        measured=bool(recordings) and len(recordings) == len(fitted.tables),
        assumptions=assumptions,
        adjustments=[],
        notes=notes or None,
        date=names.date,
        source=", ".join(table.name for table in fitted.tables),
        source_sha256=fitted.tables[0].sha256,
    )


def _base(base: Card | None) -> Card:
    if base is None:
        raise CalibrationError(
            "steps: a table of steps does not say the KV cache, the context limit and the engine; give --base CARD to "
            "take them from, or fit a recording"
        )
    return base


def _known(field: str, given: str | None, recorded: str | None, base: Card | None) -> str:
    found = given or recorded
    return found or str(getattr(_base(base), field))


def _num_gpus(fitted: FittedSteps, base: Card | None) -> int:
    told = sorted({table.num_gpus for table in fitted.tables if table.num_gpus is not None})
    if len(told) > 1:
        raise CalibrationError(f"steps: of instances of {', '.join(map(str, told))} GPUs; fit them apart")
    return told[0] if told else _base(base).num_gpus


def _kv_cache(first: Recording | None, base: Card | None, num_gpus: int, assumptions: list[Assumption]) -> KvCache:
    if first is not None:
        return KvCache(num_gpu_blocks=first.info.engine.num_gpu_blocks, block_size=first.info.engine.block_size)
    card = _base(base)
    other = f", whose {card.num_gpus} GPUs hold another number" if card.num_gpus != num_gpus else ""
    assumptions.append(Assumption(field="kv_cache.num_gpu_blocks", note=f"taken over from the card {card.name}{other}"))
    return card.kv_cache


def _host_time(fitted: FittedSteps, base: Card | None, assumptions: list[Assumption], notes: list[str]) -> float:
    """Return the host time of the loop [s], and say where it is from."""
    found = measured.host_time_s(fitted.tables, fitted.options.target)
    if found is not None:
        notes.append(f"host_time_s: {found[1]}")
        return found[0]
    if base is None:
        note = "not measured: no step of the synchronous loop; 0 means unknown, not free"
        assumptions.append(Assumption(field="host_time_s", note=note))
        return 0.0
    assumptions.append(Assumption(field="host_time_s", note=f"taken over from the card {base.name}"))
    return base.host_time_s


def _front_end(
    recordings: list[Recording], base: Card | None, assumptions: list[Assumption], notes: list[str]
) -> FrontEnd:
    found = measured.front_end(recordings)
    if found is not None:
        notes.append(f"front_end: {found[1]}")
        return found[0]
    if base is not None:
        assumptions.append(Assumption(field="front_end", note=f"taken over from the card {base.name}"))
        return base.front_end
    note = "not measured, since no client times are in the recording; 0 means unknown, not free"
    assumptions.append(Assumption(field="front_end", note=note))
    return FrontEnd(request_s=0.0, per_prompt_token_s=0.0, output_s=0.0)


def _provenance(fitted: FittedSteps, recordings: list[Recording]) -> str:
    if recordings and len(recordings) == len(fitted.tables):
        info = recordings[0].info
        return f"recorded from vLLM {info.vllm_version} on {info.device}, {info.loop} loop"
    if any(table.composed for table in fitted.tables):
        return _COMPOSED
    return "a table of step times"


def _tidy(fit: StepTimeFit) -> StepTimeFit:
    """Round a fit, so that the last bits of a platform's arithmetic do not show."""
    values: dict[str, object] = {term: _rounded(getattr(fit, term), _DIGITS) for term in _TERMS}
    if fit.intervals is not None:
        values["intervals"] = {
            term: (_rounded(low, _ERROR_DIGITS), _rounded(high, _ERROR_DIGITS))
            for term, (low, high) in fit.intervals.items()
        }
    for name in ("held_out_mape", "in_sample_mape"):
        errors = getattr(fit, name)
        if errors is not None:
            values[name] = {kind: _rounded(error, _ERROR_DIGITS) for kind, error in errors.items()}
    if fit.residuals is not None:
        values["residuals"] = tuple(_rounded(value, _DIGITS) for value in fit.residuals)
    return fit.model_copy(update=values)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
