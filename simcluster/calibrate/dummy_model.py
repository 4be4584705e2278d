"""A model folder with a real shape and no weights, made on the spot: for tests, and for people without a model.

vLLM fills it with random weights (`--load-format dummy`). Step times depend on the shape alone, so such a recording is
as good as one of a trained model; texts are not, so requests carry token ids and run to their given lengths.

Only the standard library is needed. As a program it writes a shape by its name:

    python -m simcluster.calibrate.dummy_model qwen3-0.6b FOLDER
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from simcluster.errors import ConfigError

__all__ = ["SHAPES", "Shape", "own_shape", "write_model"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides how fast a dense Qwen3 model is."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936
    limit: int = 40_960
    tied: bool = False


SHAPES = {
    "tiny": Shape(2, 256, 768, 4, 2, 64, 8192, 8192, tied=True),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-8b": Shape(36, 4096, 12_288, 32, 8),
    "qwen3-32b": Shape(64, 5120, 25_600, 64, 8),
}
"""The dimensions of published models, and one that a CPU runs in a moment."""


def own_shape(*, layers: int = 4, hidden: int = 512, vocabulary: int = 8192, limit: int = 8192) -> Shape:
    """Return a shape after Qwen3-0.6B's proportions; with hidden = 1024 its layers are that model's.

    Args:
        layers: number of layers.
        hidden: hidden size; a multiple of 128.
        vocabulary: number of token ids.
        limit: context limit [tokens].

    Raises:
        ConfigError: a size is out of range.
    """
    if hidden < 128 or hidden % 128:
        raise ConfigError(f"hidden = {hidden}; must be a multiple of 128, at least 128, since heads are 64 or 128 wide")
    for name, value, least in (("layers", layers, 1), ("vocabulary", vocabulary, 64), ("limit", limit, 64)):
        if value < least:
            raise ConfigError(f"{name} = {value}; must be at least {least}")
    heads, width = (hidden // 64, 128) if hidden >= 1024 else (hidden // 64, 64)
    return Shape(layers, hidden, 3 * hidden, heads, heads // 2, width, vocabulary, limit, tied=True)


def write_model(folder: Path, shape: Shape) -> Path:
    """Write the configuration of a Qwen3 model.

    Args:
        folder: where to; made if missing.
        shape: its dimensions.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder holds another model.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.limit,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }
    file = folder / "config.json"
    text = json.dumps(config, indent=1) + "\n"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{folder}: exists and is not this model; choose a new folder")
        return folder
    folder.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    return folder


if __name__ == "__main__":
    write_model(Path(sys.argv[2]), SHAPES[sys.argv[1]])
