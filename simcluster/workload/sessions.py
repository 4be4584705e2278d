"""Conversations and closed loops: which request follows which, and how prompts grow."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from simcluster.errors import ConfigError
from simcluster.rng import Stream, generator
from simcluster.workload.recipe import Closed, Sessions
from simcluster.workload.tasks import clipped_lengths
from simcluster.workload.trace_columns import IntArray
from simcluster.workload.trace_schema import MAX_TOKENS

__all__ = ["Turns", "closed_loop", "conversation_prompts", "conversation_turns", "prefix_columns"]

_MOST_HASHES = 200_000_000


@dataclass(frozen=True, slots=True)
class Turns:
    """Which requests belong together, n of them, a conversation's turns one after the other.

    Attributes:
        session: conversation of each request, from 0, shape (n,).
        turn: its turn, from 0, shape (n,).
        think_ns: time before it [ns], 0 for a first turn, shape (n,).
    """

    session: IntArray
    turn: IntArray
    think_ns: IntArray

    @property
    def previous(self) -> IntArray:
        """Index of the turn before, -1 for a first turn, shape (n,)."""
        return np.where(self.turn > 0, np.arange(len(self.turn)) - 1, -1)

    def nominal_ns(self, starts_ns: IntArray) -> IntArray:
        """Return when each turn comes if answers take no time [ns], shape (n,).

        Args:
            starts_ns: arrivals of the first turns [ns], one per conversation.
        """
        return starts_ns[self.session] + _within(self.think_ns, self.turn)


def _within(values: IntArray, turn: IntArray) -> IntArray:
    """Sum values over the turns of a conversation up to each turn, shape (n,)."""
    sums = np.cumsum(values)
    first = np.arange(len(turn)) - turn
    result: IntArray = sums - (sums - values)[first]
    return result


def conversation_turns(sessions: Sessions, n: int, seed: int, replication: int) -> Turns:
    """Draw how many turns conversations have and how long people think, until n requests are together.

    Args:
        sessions: the recipe's rules.
        n: number of requests; the last conversation may be cut short.
        seed: seed of the stream.
        replication: replication of that seed.
    """
    rng = generator(seed, Stream.SESSIONS, replication)
    # One row per request: there are at most n conversations. Columns: turns of a conversation, time to think.
    draws = rng.standard_normal((n, 2))
    none = np.zeros(n, dtype=np.int32)
    counts = clipped_lengths([sessions.turns], none, draws[:, 0], 1.0)
    ends = np.cumsum(np.minimum(counts, n))
    session = np.searchsorted(ends, np.arange(n), side="right")
    turn = np.arange(n) - (ends - np.minimum(counts, n))[session]
    with np.errstate(over="ignore"):
        think_s = np.minimum(sessions.think_s.median * np.exp(sessions.think_s.sigma * draws[:, 1]), 1e6)
    think_ns = np.where(turn > 0, np.rint(think_s * 1e9).astype(np.int64), 0)
    return Turns(session.astype(np.int64), turn.astype(np.int64), think_ns)


def closed_loop(closed: Closed, n: int) -> Turns:
    """Deal n requests to users in turn; each user's requests follow one another.

    Args:
        closed: number of users and their time to think.
        n: number of requests.
    """
    users = min(closed.concurrency, n)
    counts = np.full(users, n // users)
    counts[: n % users] += 1
    session = np.repeat(np.arange(users), counts)
    turn = np.arange(n) - (np.cumsum(counts) - counts)[session]
    think_ns = np.where(turn > 0, round(closed.think_s * 1e9), 0)
    return Turns(session, turn, think_ns)


def conversation_prompts(prefix_tokens: int, new_tokens: IntArray, answers: IntArray, turn: IntArray) -> IntArray:
    """Return prompt lengths [tokens], shape (n,): the last prompt, its answer and the new tokens.

    The prefix is in the first prompt and so in all later ones; it is never added again.

    Args:
        prefix_tokens: tokens before the first turn's new ones [tokens].
        new_tokens: what a turn adds [tokens], shape (n,).
        answers: answer lengths [tokens], shape (n,).
        turn: turn of each request, from 0, a conversation's turns one after the other, shape (n,).

    Raises:
        ConfigError: a prompt grows beyond 2^31 tokens.
    """
    earlier = np.concatenate([[0], answers[:-1]])
    prompts = prefix_tokens + _within(new_tokens + np.where(turn > 0, earlier, 0), turn)
    if prompts.max() > MAX_TOKENS:
        raise ConfigError(
            f"sessions: a prompt grows to {prompts.max():,} tokens; allowed is {MAX_TOKENS:,}; use fewer turns or "
            "shorter answers"
        )
    return prompts


def prefix_columns(sessions: Sessions, turns: Turns, prompts: IntArray, seed: int, replication: int) -> dict[str, Any]:
    """Return hashes of the prompts' blocks, as arguments of Trace.from_columns, or nothing if nothing is shared.

    A conversation is one run of tokens, and each prompt is the beginning of it: its blocks have consecutive hashes.
    Blocks that lie whole in the shared prefix have the same hashes in all conversations with this prefix.

    Args:
        sessions: the recipe's rules.
        turns: which requests belong together.
        prompts: prompt lengths [tokens], shape (n,).
        seed: seed of the stream that deals prefixes.
        replication: replication of that seed.
    """
    block = sessions.hash_block
    shared = sessions.prefix_tokens // block
    if shared == 0 and not turns.turn.any():
        return {}
    blocks = -(-prompts // block)
    if int(blocks.sum()) > _MOST_HASHES:
        raise ConfigError(
            f"sessions: the prompts have {int(blocks.sum()):,} blocks of {block} tokens; allowed are {_MOST_HASHES:,}; "
            "raise hash_block, or draw fewer or shorter requests"
        )
    most = np.zeros(int(turns.session[-1]) + 1, dtype=np.int64)
    np.maximum.at(most, turns.session, blocks)
    first = sessions.prefixes * shared + np.cumsum(most) - most  # hash of block 0, were it the conversation's own
    deal = generator(seed, Stream.SESSIONS, replication).spawn(1)[0]
    prefix = deal.integers(sessions.prefixes, size=len(most))
    offsets = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
    own = np.repeat(first[turns.session], blocks) + position
    common = np.repeat(prefix[turns.session] * shared, blocks) + position
    return {
        "prefix_offsets": offsets,
        "prefix_values": np.where(position < shared, common, own),
        "prefix_block_size": block,
    }
