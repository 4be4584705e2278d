"""TTFT targets."""

import math

import numpy as np
import numpy.typing as npt

from simcluster.errors import ConfigError
from simcluster.rng import Stream, generator

__all__ = ["MS_PER_TOKEN", "ttft_targets_s"]

_FLOOR_MS = 150.0
_CEILING_MS = 1120.0
_BASE_MS = 155.0
MS_PER_TOKEN = 3.5e-3
_OFFSET_MS = (1.0, 5.0)
_FACTOR = (0.98, 1.02)


def ttft_targets_s(
    prompt_tokens: npt.NDArray[np.int64],
    seed: int,
    replication: int = 0,
    scale: float = 1.0,
    ms_per_token: float = MS_PER_TOKEN,
) -> npt.NDArray[np.float64]:
    """Draw one TTFT target per request.

    tau = min(1120 ms, max(150 ms, u + (155 + 3.5e-3 * p) * v)) with p prompt tokens,
    u ~ U(1, 5) ms and v ~ U(0.98, 1.02). A longer trace with the same seed begins with the same
    u and v.

    Args:
        prompt_tokens: prompt lengths p [tokens], shape (n,).
        seed: seed of the targets' own random stream.
        replication: replication of that seed.
        scale: factor on the finished targets, above 0; the paper's rule is 1.
        ms_per_token: slope over the prompt [ms/token]; the paper prints 3.5e-3.

    Returns:
        Targets tau [s], float64, shape (n,).

    Raises:
        ConfigError: the scale is not a finite number above 0, or a prompt length is negative.

    Source: paper B.2.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale of the TTFT targets = {scale!r}; must be finite and above 0")
    prompts = np.asarray(prompt_tokens, dtype=np.float64)
    if prompts.size and prompts.min() < 0:
        raise ConfigError(f"prompt_tokens = {prompts.min():g}; must be 0 or more")
    # One row of draws per request, so that the targets of a prefix do not depend on its end.
    draws = generator(seed, Stream.TARGETS, replication).random((prompts.size, 2))
    offset_ms = _OFFSET_MS[0] + (_OFFSET_MS[1] - _OFFSET_MS[0]) * draws[:, 0]
    factor = _FACTOR[0] + (_FACTOR[1] - _FACTOR[0]) * draws[:, 1]
    target_ms = offset_ms + (_BASE_MS + ms_per_token * prompts) * factor
    return np.clip(target_ms, _FLOOR_MS, _CEILING_MS) * (scale / 1e3)
