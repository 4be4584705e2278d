"""Dimensions of dense transformer models, which composing a step from kernels needs."""

import json
from dataclasses import dataclass
from pathlib import Path

from simcluster.errors import CalibrationError

__all__ = ["KNOWN_MODELS", "ModelShape", "model_shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with gated MLP.

    Attributes:
        name: short name.
        layers: number of decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocab: rows of the output projection.
        normed_heads: whether queries and keys are normed (Qwen3).
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    normed_heads: bool = False


def _shape(name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocab=vocab,
        normed_heads=name.startswith("Qwen3"),
    )


# From the models' config.json.
KNOWN_MODELS = {
    shape.name: shape
    for shape in (
        _shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 151_936),
        _shape("Qwen3-8B", 36, 4096, 12_288, 32, 8, 151_936),
        _shape("Qwen3-14B", 40, 5120, 17_408, 40, 8, 151_936),
        _shape("Qwen3-32B", 64, 5120, 25_600, 64, 8, 151_936),
        _shape("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128_256),
    )
}


def model_shape(name: str | None, config: Path | None) -> ModelShape:
    """Return a model's dimensions, by its name or from its config.json.

    Raises:
        CalibrationError: the name is not known and no config is given, or the config is unreadable or incomplete.
    """
    if config is None:
        short = (name or "").rsplit("/", maxsplit=1)[-1]
        if short not in KNOWN_MODELS:
            known = ", ".join(KNOWN_MODELS)
            found = "no --model" if name is None else f"--model {name}: its dimensions are not known"
            raise CalibrationError(f"{found}; give one of {known}, or --config with the model's config.json")
        return KNOWN_MODELS[short]
    try:
        values = json.loads(config.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{config}: cannot be read ({error.strerror}); give the model's config.json") from None
    except ValueError as error:
        raise CalibrationError(f"{config}: not valid JSON ({error}); give the model's config.json") from None
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [key for key in keys if not isinstance(values, dict) or not isinstance(values.get(key), int)]
    if missing:
        raise CalibrationError(f"{config}: no {', '.join(missing)}; only dense decoders can be composed")
    if values.get("num_experts") or values.get("num_local_experts"):
        raise CalibrationError(f"{config}: a mixture of experts; only dense decoders can be composed")
    heads = values["num_attention_heads"]
    return ModelShape(
        name=(name or config.resolve().parent.name).rsplit("/", maxsplit=1)[-1],
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        intermediate=values["intermediate_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab=values["vocab_size"],
        normed_heads=str(values.get("model_type", "")).startswith("qwen3"),
    )
