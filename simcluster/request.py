"""Requests as columns: what a router may know, and what only the engine knows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PrefixHashes", "Request", "RequestColumns", "RequestTruth", "untouched_columns"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Request:
    """What a router may know about a request when it arrives; arrays have one value per instance.

    One that comes from columns looks a value up when it is first asked for.

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
        predicted_quality: (j,) expected quality of the answer, 0 to 1; None where nobody predicts it.
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
    predicted_quality: FloatArray | None = None
    _columns: "RequestColumns | None" = field(default=None, init=False, repr=False, compare=False)
    _untouched: "RequestColumns | None" = field(default=None, init=False, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        """Look up what has not been set; called for nothing else."""
        columns = None if name in _OWN else self._columns
        if columns is None:
            raise AttributeError(f"a request has no {name!r}")
        value = columns.value(name, self.index)
        if name in _PER_INSTANCE:
            _set(self, "_untouched", None)
        _set(self, name, value)
        return value


_set = object.__setattr__  # a request is frozen for everybody else


def untouched_columns(request: Request) -> "RequestColumns | None":
    """Return the columns whose row `index` a request is, or None if it may differ from them.

    It may once it has given out an array, since a policy can write into that. Meant for decisions in native code,
    which read this row alone.
    """
    return request._untouched


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
    """The requests of a run as a router may know them; n requests, j instances in m groups.

    The instances of a group serve the same model at the same price, so everything about a request is equal there.

    Attributes:
        group_of_instance: (j,) column of each instance.
        arrival_ps: (n,) arrival at the router [ps], ascending; nominal for one that waits for another.
        prompt_tokens: (n, m) [tokens].
        max_tokens: (n,) [tokens]; -1 where not given.
        priority: (n,).
        slo_ttft_ps: (n,) [ps]; -1 without a target.
        predicted_output_tokens: (n, m) [tokens].
        predicted_quality: (n, m) 0 to 1.
        predicted_utility: (n, m). Source: paper eq. 2.
        prefix: hashes of the prompts' leading blocks, or None.
        session_id: (n,) conversations, Python strings or None; or None.
    """

    group_of_instance: IntArray
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
        request = Request.__new__(Request)
        _set(request, "index", index)
        _set(request, "arrival_ps", arrival_ps)
        _set(request, "_columns", self)
        _set(request, "_untouched", self)
        return request

    def value(self, name: str, index: int) -> Any:
        """Return one attribute of a request, (j,) for those that differ between instances."""
        if name in _PER_INSTANCE:
            return getattr(self, name)[index].take(self.group_of_instance)
        if name in _NUMBERS:
            return int(getattr(self, name)[index])
        if name == "session_id":
            return None if self.session_id is None else self.session_id[index]
        if name == "prefix_hashes":
            return None if self.prefix is None else self.prefix.of(index)
        if name == "prefix_block_size":
            return 0 if self.prefix is None else self.prefix.block_size
        raise AttributeError(f"a request has no {name!r}")


_OWN = frozenset({"_columns", "_untouched"})
_PER_INSTANCE = frozenset({"prompt_tokens", "predicted_output_tokens", "predicted_quality", "predicted_utility"})
_NUMBERS = frozenset({"max_tokens", "priority", "slo_ttft_ps"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTruth:
    """What only the engine knows; n requests, m groups of instances. Never handed to a router but the oracle.

    Attributes:
        output_tokens: (n, m) true answer length [tokens].
        quality: (n, m) true quality of the answer, 0 to 1.
        ends_by_length: (n,) EOS is ignored, the request ends at its limit.
        cancel_after_ps: (n,) when the client gives up, after its own arrival [ps]; -1 for never.
    """

    output_tokens: IntArray
    quality: FloatArray
    ends_by_length: npt.NDArray[np.bool_]
    cancel_after_ps: IntArray
