"""A model folder with a real shape and no weights, made on the spot: for tests, and for people without a model.

vLLM fills it with random weights (`--load-format dummy`). Step times depend on the shape alone, so such a recording is
as good as one of a trained model; texts are not, so requests carry token ids and run to their given lengths.
"""

import json
from pathlib import Path

from simcluster.errors import ConfigError

__all__ = ["write_model"]

_HEAD = 64  # sizes of heads that vLLM's attention kernels take: multiples of 32
_WIDE_HEAD = 128


def write_model(folder: Path, *, layers: int = 4, hidden: int = 512, vocabulary: int = 8192, limit: int = 8192) -> Path:
    """Write the configuration of a Qwen3 model.

    With hidden = 1024 a layer has the shape of Qwen3-0.6B's: 16 query heads and 8 key-value heads of 128.

    Args:
        folder: where to; made if missing.
        layers: number of layers.
        hidden: hidden size; a multiple of 128.
        vocabulary: number of token ids.
        limit: context limit [tokens].

    Returns:
        The folder.

    Raises:
        ConfigError: a size is out of range, or the folder holds another model.
    """
    if hidden < 128 or hidden % 128:
        raise ConfigError(f"hidden = {hidden}; must be a multiple of 128, at least 128, as the heads are 64 or 128 wide")
    for name, value, least in (("layers", layers, 1), ("vocabulary", vocabulary, 64), ("limit", limit, 64)):
        if value < least:
            raise ConfigError(f"{name} = {value}; must be at least {least}")
    wide = hidden >= 1024
    heads = max(hidden * 2 // _WIDE_HEAD if wide else hidden // _HEAD, 2)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": _WIDE_HEAD if wide else _HEAD,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": limit,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads // 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }
    file = folder / "config.json"
    text = json.dumps(config, indent=1) + "\n"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{folder}: there is another model already; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return folder
