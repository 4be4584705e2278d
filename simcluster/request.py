"""Requests as columns: what a router may know, and what only the engine knows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PrefixHashes", "Request", "RequestColumns", "RequestTruth"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Request:
    """What a router may know about a request when it arrives; arrays have one value per instance.

    Attributes:
        index: number of the request in its run, by arrival.
        arrival_ps: arrival at the router [ps].
        prompt_tokens: (j,) prompt length by each instance's tokenizer [tokens].
        max_tokens: the client's limit on the answer [tokens]; -1 where not given.
        priority: smaller is served earlier.
        slo_ttft_ps: TTFT target [ps]; -1 without one.
        predicted_output_tokens: (j,) expected answer length [tokens], 1 or more.
        predicted_utility: (j,) expected quality - cost_weight * expected cost. Source: paper eq. 2.
        prefix_hashes: hashes of the prompt's leading blocks, or None.
        session_id: conversation, or None.
        prefix_block_size: prompt tokens that one hash covers; 0 without hashes.
    """

    index: int
    arrival_ps: int
    prompt_tokens: IntArray
    max_tokens: int
    priority: int
    slo_ttft_ps: int
    predicted_output_tokens: IntArray
    predicted_utility: FloatArray
    prefix_hashes: IntArray | None = None
    session_id: str | None = None
    prefix_block_size: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Hashes of the leading blocks of n prompts; equal numbers mean an equal prefix up to there.

    Attributes:
        offsets: (n + 1,) request i has values[offsets[i]:offsets[i + 1]].
        values: dense numbers from 0.
        block_size: prompt tokens that one hash covers; the last one of a prompt may cover fewer.
    """

    offsets: IntArray
    values: IntArray
    block_size: int

    def of(self, index: int) -> IntArray:
        """Return the hashes of one request."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumns:
    """The requests of a run as a router may know them; n requests, j instances.

    Attributes:
        arrival_ps: (n,) arrival at the router [ps], ascending; nominal for one that waits for another.
        prompt_tokens: (n, j) [tokens].
        max_tokens: (n,) [tokens]; -1 where not given.
        priority: (n,).
        slo_ttft_ps: (n,) [ps]; -1 without a target.
        predicted_output_tokens: (n, j) [tokens].
        predicted_quality: (n, j) 0 to 1.
        predicted_utility: (n, j). Source: paper eq. 2.
        prefix: hashes of the prompts' leading blocks, or None.
        session_id: (n,) conversations, Python strings or None; or None.
    """

    arrival_ps: IntArray
    prompt_tokens: IntArray
    max_tokens: IntArray
    priority: IntArray
    slo_ttft_ps: IntArray
    predicted_output_tokens: IntArray
    predicted_quality: FloatArray
    predicted_utility: FloatArray
    prefix: PrefixHashes | None = None
    session_id: npt.NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.arrival_ps)

    def request(self, index: int, arrival_ps: int) -> Request:
        """Return one request as it arrives; numbers are plain Python integers, as SimPy's clock needs them."""
        return Request(
            index,
            arrival_ps,
            self.prompt_tokens[index],
            int(self.max_tokens[index]),
            int(self.priority[index]),
            int(self.slo_ttft_ps[index]),
            self.predicted_output_tokens[index],
            self.predicted_utility[index],
            None if self.prefix is None else self.prefix.of(index),
            None if self.session_id is None else self.session_id[index],
            0 if self.prefix is None else self.prefix.block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTruth:
    """What only the engine knows; n requests, j instances. Never handed to a router but the oracle.

    Attributes:
        output_tokens: (n, j) true answer length [tokens].
        quality: (n, j) true quality of the answer, 0 to 1.
        ends_by_length: (n,) EOS is ignored, the request ends at its limit.
        cancel_after_ps: (n,) when the client gives up, after its own arrival [ps]; -1 for never.
    """

    output_tokens: IntArray
    quality: FloatArray
    ends_by_length: npt.NDArray[np.bool_]
    cancel_after_ps: IntArray
