"""How fast a simulated instance really is: a fit of its card, and noise that was recorded or is assumed."""

from typing import Any

from simcluster import _native
from simcluster.card import Card, StepTimeFit
from simcluster.errors import ConfigError
from simcluster.instance import TrueModel, lognormal_factors, recorded_factors, step_time_model
from simcluster.scenario import TrueModelSpec

__all__ = ["fit_of", "noise_in_words", "true_model"]

_ASSUMED_SIGMA = 0.03


def fit_of(card: Card, name: Any, where: str) -> StepTimeFit:
    """Return a fit of a card.

    Raises:
        ConfigError: the card has no such fit.
    """
    if name not in card.fits:
        raise ConfigError(f"{where} = {name!r}; the card {card.name} has {', '.join(sorted(card.fits))}")
    return card.fits[name]


def true_model(spec: TrueModelSpec, card: Card, seed: int, index: int, where: str) -> TrueModel:
    """Return the truth about an instance.

    Args:
        spec: what the scenario says.
        card: of the instance.
        seed: of the noise.
        index: of the instance.
        where: the scenario's field, for messages.

    Raises:
        ConfigError: the card has no such fit, or no residuals where recorded noise is asked for.
    """
    name = spec.fit or card.chosen_fit
    fit = fit_of(card, name, f"{where}.fit")
    noise = None
    if _is_recorded(spec, fit):
        if fit.residuals is None:
            raise ConfigError(
                f"{where}.noise.kind = 'recorded'; the fit {name} of the card {card.name} has no recorded residuals; "
                "use kind: lognormal, or a card that `calibrate fit` made"
            )
        noise = _native.StepNoise(recorded_factors(fit.residuals), seed, index)
    elif (sigma := _sigma(spec)) > 0:
        noise = _native.StepNoise(lognormal_factors(sigma), seed, index)
    scale = f" times {spec.scale:g}" if spec.scale != 1 else ""
    return TrueModel(
        step_time=step_time_model(fit, card.host_time_s, spec.scale),
        noise=noise,
        description=f"{name} fit{scale}, {noise_in_words(spec, card)}",
    )


def noise_in_words(spec: TrueModelSpec, card: Card) -> str:
    """Return what noise there is and where it comes from."""
    fit = card.fits[spec.fit or card.chosen_fit]
    if _is_recorded(spec, fit) and fit.residuals is not None:
        return f"noise drawn from {len(fit.residuals)} quantiles of its recorded residuals"
    sigma = _sigma(spec)
    return f"{sigma:.0%} log-normal noise per step (assumed)" if sigma > 0 else "no noise"


def _is_recorded(spec: TrueModelSpec, fit: StepTimeFit) -> bool:
    if spec.noise is None:
        return False
    found = spec.noise.kind == "auto" and spec.noise.sigma is None and fit.residuals is not None
    return found or spec.noise.kind == "recorded"


def _sigma(spec: TrueModelSpec) -> float:
    if spec.noise is None:
        return 0.0
    return _ASSUMED_SIGMA if spec.noise.sigma is None else spec.noise.sigma
