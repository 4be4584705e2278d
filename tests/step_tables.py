"""Small tables of steps: exact ones, and ones drawn from a known model."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from simcluster.calibrate.fit import predict
from simcluster.card import StepTimeFit


@dataclass(frozen=True)
class Batch:
    """A step: prefills as (tokens, context before them), decode contexts, duration [ms]."""

    prefills: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    ms: float


# 10@0, 10@10, |50, |50,150, 6@4|30 and 20@0|10,10 under (10, 0.2, 0.01, 0.002) ms.
SIX = (
    Batch(((10, 0),), (), 12.11),
    Batch(((10, 10),), (), 12.31),
    Batch((), (50,), 10.7),
    Batch((), (50, 150), 12.4),
    Batch(((6, 4),), (30,), 11.79),
    Batch(((20, 0),), (10, 10), 15.02),
)
DECODES_OF_FOUR = tuple(Batch((), (c,) * 4, 10 + 0.04 * c) for c in (10, 20, 30, 40))


def table(batches: tuple[Batch, ...]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "n_tokens": [sum(p for p, _ in b.prefills) + len(b.decodes) for b in batches],
            "sum_decode_context": [sum(b.decodes) for b in batches],
            "prefill_attention": [sum((p * c + p * (p + 1) / 2 for p, c in b.prefills), 0.0) for b in batches],
            "has_prefill": [bool(b.prefills) for b in batches],
            "num_prefill_requests": [len(b.prefills) for b in batches],
            "step_s": [b.ms / 1e3 for b in batches],
        }
    )


def drawn_steps(truth: StepTimeFit, rows: int = 400, noise: float = 0.02) -> pl.DataFrame:
    """Draw steps of all kinds, a third of them decode-only, with log-normal noise."""
    random = np.random.default_rng(1)
    decoding = random.integers(0, 65, rows)
    context = decoding * random.integers(64, 4096, rows)
    prefills = np.where((np.arange(rows) % 3 == 0) | (decoding == 0), 0, 1)
    prefills = np.where(decoding == 0, 1, prefills * random.integers(1, 4, rows))
    chunk = np.where(prefills > 0, random.integers(16, 4096, rows), 0)
    steps = pl.DataFrame(
        {
            "n_tokens": decoding + chunk,
            "sum_decode_context": context,
            "prefill_attention": chunk * (chunk + 1) / 2 + chunk * random.integers(0, 512, rows),
            "has_prefill": prefills > 0,
            "num_prefill_requests": prefills,
        }
    )
    times = predict(truth, steps) * np.exp(noise * random.standard_normal(rows))
    return steps.with_columns(step_s=times)


PLAIN = StepTimeFit(b0_s=6e-3, b1_s=1.5e-5, b2_s=4e-8, b3_s=7e-10)
HINGE = StepTimeFit(b0_s=6e-3, b1_s=8e-6, b2_s=5e-8, b3_s=7e-10, b1x_s=1.2e-5, hinge_tokens=384)
