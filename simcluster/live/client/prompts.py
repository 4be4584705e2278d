"""Prompts as token ids: as long as the trace has them, and shared where the trace says that beginnings are shared."""

import numpy as np
import numpy.typing as npt

from simcluster.request import IntArray
from simcluster.world import World

__all__ = ["prompt_ids"]

_FIRST_ID, _NUM_IDS = 100, 256  # ids that even small vocabularies have, and none of which is special in the usual ones


def prompt_ids(world: World, index: int, length: int) -> list[int]:
    """Return a prompt of so many tokens for a request.

    Blocks with equal prefix hashes are equal; all others are the request's own, so that no server finds them cached.

    Args:
        world: the requests.
        index: number of the request.
        length: 1 or more [tokens].
    """
    ids = _mixed(np.arange(length, dtype=np.uint64), 2 * index)
    prefix = world.known.prefix
    if prefix is not None:
        hashes: IntArray = np.repeat(prefix.of(index), prefix.block_size)[:length]
        place = np.arange(len(hashes), dtype=np.uint64)
        ids[: len(hashes)] = _mixed(place, 2 * hashes + 1)
    return [_FIRST_ID + number for number in (ids % np.uint64(_NUM_IDS)).tolist()]


def _mixed(place: npt.NDArray[np.uint64], key: int | IntArray) -> npt.NDArray[np.uint64]:
    """Hash places (k,) under a key, or a key for each. Source: splitmix64."""
    mixed: npt.NDArray[np.uint64] = place + np.asarray(key, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
