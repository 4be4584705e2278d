"""Numbered random streams.

A stream is addressed by (seed, replication, stream number), so that a new user of randomness never shifts the
draws of another. Everything that belongs to a request is drawn before a run, so all policies meet the same world.
"""

from enum import IntEnum

import numpy as np

__all__ = ["Stream", "generator", "seeded"]


class Stream(IntEnum):
    """Every user of randomness; append only, never renumber."""

    ARRIVALS = 0
    TASKS = 1
    LENGTHS = 2
    QUALITY = 3
    TARGETS = 4
    STEP_NOISE = 5
    ROUTER = 6
    TIES = 7
    STATES = 8
    SESSIONS = 9
    PREDICTIONS = 10
    PROMPT_TEXTS = 20
    PREDICTION_ERRORS = 21


def generator(seed: int, stream: Stream, replication: int = 0) -> np.random.Generator:
    """Return the generator of one stream of one replication of a seed."""
    return seeded(seed, replication, int(stream))


def seeded(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of a key of a seed, for draws outside of runs: fits, recordings, checks."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
