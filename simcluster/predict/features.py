"""Features of a prompt: hashed tokens after a PCA, counts, wording.

All of it is whole-number arithmetic and single divisions: a prompt has the same features alone or among others, in
every process and on every machine.

Source: paper B.4.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simcluster.predict.tokens import Tokens
from simcluster.predict.wording import WORDING_FEATURES, wording
from simcluster.request import FloatArray, IntArray

__all__ = ["BUCKETS", "COMPONENTS", "PROMPT_FEATURES", "UNIT", "Projection", "fit_projection", "prompt_features"]

BUCKETS = 512
COMPONENTS = 16
UNIT = 10**6  # components are whole numbers of millionths
PROMPT_FEATURES = (
    *(f"pca_{k:02d}" for k in range(COMPONENTS)),
    "tokens",
    "characters",
    "sentences",
    "characters_per_token",
    *WORDING_FEATURES,
)

_MOST_FITTED = 20_000  # prompts that the components are computed from
_SENTENCE = re.compile(r"[.!?]+(?=\s|$)")


def signed_slots(ids: IntArray) -> IntArray:
    """Hash token ids to slots 0 to 1023: the bucket, plus 512 where the sign is negative; fixed for ever.

    Two multiplications of 64-bit words with a fold between them; the top ten bits are the slot.

    Args:
        ids: token ids, (n,).
    """
    words = ids.astype(np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words >>= np.uint64(54)
    return words.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Principal components of hashed token shares.

    Attributes:
        components: (512, 16) whole numbers of millionths.
        offset: (16,) projection of the mean of the fitted prompts, in millionths.
        signed: (1024, 16) the components, then their negatives: one row per slot.
    """

    components: IntArray
    offset: IntArray
    signed: IntArray

    @classmethod
    def of(cls, components: IntArray, offset: IntArray) -> "Projection":
        """Return the projection of these components."""
        return cls(components, offset, np.ascontiguousarray(np.concatenate([components, -components])))

    def of_ids(self, ids: IntArray) -> list[float]:
        """Return the 16 projected features of a prompt's token ids; zeros for an empty prompt."""
        n = len(ids)
        if n == 0:
            return [0.0] * COMPONENTS
        total = self.signed.take(signed_slots(ids), axis=0).sum(axis=0) - n * self.offset
        values: list[float] = (total / (n * UNIT)).tolist()
        return values


def bucket_shares(ids: IntArray) -> FloatArray:
    """Return the signed count of each bucket divided by the number of tokens, (512,).

    Args:
        ids: token ids, (n,).
    """
    if len(ids) == 0:
        return np.zeros(BUCKETS)
    counts = np.bincount(signed_slots(ids), minlength=2 * BUCKETS)
    return (counts[:BUCKETS] - counts[BUCKETS:]) / len(ids)


def fit_projection(prompts: Sequence[IntArray], rng: np.random.Generator) -> Projection:
    """Compute the principal components of the hashed token shares.

    The sign of a component is such that its largest entry is positive. With more than 20,000 prompts a sample of
    them is used; with fewer than 16 dimensions of variation the rest are zeros.

    Args:
        prompts: token ids of each prompt.
        rng: chooses the sample.
    """
    chosen = range(len(prompts))
    if len(prompts) > _MOST_FITTED:
        chosen = np.sort(rng.choice(len(prompts), size=_MOST_FITTED, replace=False)).tolist()
    shares = np.stack([bucket_shares(prompts[k]) for k in chosen])
    mean = shares.mean(axis=0)
    centred = shares - mean
    if len(centred) <= BUCKETS:
        _, sizes, rows = np.linalg.svd(centred, full_matrices=False)
    else:  # many prompts: the same rows from the 512 x 512 products, in a fraction of the time
        _, squares, rows = np.linalg.svd(centred.T @ centred, hermitian=True)
        sizes = np.sqrt(squares)
    rows = rows[:COMPONENTS][sizes[:COMPONENTS] > 1e-6 * max(sizes[0], 1e-300)]
    largest = rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)]
    components = np.zeros((BUCKETS, COMPONENTS), dtype=np.int64)
    components[:, : len(rows)] = np.rint(rows.T * np.where(largest < 0, -1, 1) * UNIT)
    return Projection.of(components, np.rint(mean @ components).astype(np.int64))


def prompt_features(text: str, tokens: Tokens, projection: Projection) -> npt.NDArray[np.float64]:
    """Return the features of a prompt in the order of PROMPT_FEATURES, (k,).

    Args:
        text: the prompt.
        tokens: cuts it into tokens.
        projection: fitted on the training prompts.
    """
    ids = tokens.ids(text)
    n, characters = len(ids), len(text)
    values = projection.of_ids(ids)
    values += (float(n), float(characters), float(max(len(_SENTENCE.findall(text)), 1)), characters / max(n, 1))
    values += wording(text)
    return np.array(values)
