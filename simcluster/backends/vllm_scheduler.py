"""vLLM's own scheduler on a CPU, with token ids fixed beforehand in place of a model.

Every decision is made by the installed vLLM's `Scheduler` or, with asynchronous scheduling, `AsyncScheduler`; what is
here hands requests over, plays the model and reads the results. The interface is that of `_native.Scheduler`, so that
the two can take each other's place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcluster import _native
from simcluster.backends.vllm_setup import build_scheduler, vllm_names

__all__ = ["VllmBatch", "VllmEntry", "VllmScheduler"]

_EOS = 2
_ID_WIDTH = 19  # vLLM breaks ties by the id as text; with leading zeros that is the order of the numbers
_OWN_TOKENS_BIT = 36  # as in the simulated cluster: token ids of one request's own tokens have bits from here on
_OWN_OUTPUTS = 1 << 35  # and its outputs start here above its prompt
_STATUS = {"WAITING": 0, "RUNNING": 1, "PREEMPTED": 2}  # as _native.Snapshot.from_state counts them
_REASONS = {"stop": _native.EndReason.stop, "length": _native.EndReason.length}


@dataclass(frozen=True, slots=True)
class VllmEntry:
    """One request of a batch.

    Attributes:
        id: the request.
        start: tokens computed before.
        num_tokens: tokens in this batch.
        decode: one token beyond the prompt.
        first: the request's first batch.
        sample_index: which output token it samples, counted from 0; -1: none.
        token: id of that token.
    """

    id: int
    start: int
    num_tokens: int
    decode: bool
    first: bool
    sample_index: int
    token: int


@dataclass(frozen=True, slots=True)
class VllmBatch:
    """One batch, with what vLLM says about it."""

    rows: tuple[VllmEntry, ...]
    output: Any

    @property
    def entries(self) -> list[tuple[int, int, int]]:
        """(request id, tokens computed before, tokens in this batch), in batch order."""
        return [(row.id, row.start, row.num_tokens) for row in self.rows]


@dataclass(slots=True)
class _Resident:
    """A request in the scheduler and what its model will say."""

    request: Any
    eos_at: int
    first_output: int
    num_sampled: int = 0
    num_cached: int = -1  # prefix hit of the first admission; -1 before it


class VllmScheduler:
    """One scheduler of vLLM.

    Args:
        options: every option of a recorded scenario's `config`, by vLLM's names.
        derive: returns the class to take in place of vLLM's own.

    Raises:
        ConfigError: vLLM is missing, has no such option, or refuses its value.
    """

    def __init__(self, options: Mapping[str, Any], derive: Callable[[Any], Any] | None = None) -> None:
        self._vllm = vllm_names()
        self._scheduler = build_scheduler(options, derive)
        self._residents: dict[int, _Resident] = {}
        self._preempted: list[int] = []
        self._hasher = None
        if options["enable_prefix_caching"]:
            self._hasher = self._vllm.get_request_block_hasher(options["block_size"], self._vllm.hash_function)
        preempt = self._scheduler._preempt_request

        def note(request: Any, *args: Any, **kwargs: Any) -> None:
            self._preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        self._scheduler._preempt_request = note
        self.class_name = type(self._scheduler).__name__
        self.num_preemptions = 0
        self.prefix_stats = [0, 0, 0, 0]  # tokens: queries, hits, and both after a preemption

    def add(
        self,
        id: int,  # noqa: A002  (as in the native scheduler)
        prompt_tokens: int,
        max_tokens: int,
        eos_at: int = 0,
        priority: int = 0,
        arrival_time: int = 0,
        prompt: Sequence[tuple[int, int]] = (),
        first_output: int = 0,
    ) -> None:
        """Add a request; prompt: runs (first token id, count); eos_at counts from 1, 0: none."""
        own = (id + 1) << _OWN_TOKENS_BIT
        tokens: list[int] = []
        for first, count in prompt or [(own, prompt_tokens)]:
            tokens.extend(range(first, first + count))
        sampling = self._vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sampling.update_from_generation_config({}, _EOS)
        request = self._vllm.Request(
            request_id=str(id).zfill(_ID_WIDTH),
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=arrival_time,
            priority=priority,
            block_hasher=self._hasher,
        )
        self._residents[id] = _Resident(request, eos_at, first_output or own + _OWN_OUTPUTS)
        self._scheduler.add_request(request)

    def abort(self, id: int) -> bool:  # noqa: A002
        """Drop a request whose client has left; False if it is not here."""
        aborted = self._vllm.RequestStatus.FINISHED_ABORTED
        found = bool(self._scheduler.finish_requests(str(id).zfill(_ID_WIDTH), aborted))
        if found:
            del self._residents[id]
        return found

    def has_requests(self) -> bool:
        """Whether anything is waiting, running, or ended but not yet flushed to the workers."""
        return bool(self._scheduler.has_requests())

    def schedule(self) -> tuple[VllmBatch, list[int], list[int]]:
        """Run one pass: (batch, ids preempted, nothing)."""
        self._preempted = []
        batch = self.read_batch(self._scheduler.schedule())
        self.num_preemptions += len(self._preempted)
        stats = self._scheduler.kv_cache_manager.make_prefix_cache_stats()
        new = (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits)
        self.prefix_stats = [total + more for total, more in zip(self.prefix_stats, new, strict=True)]
        return batch, self._preempted, []

    def read_batch(self, output: Any) -> VllmBatch:
        """Read what a pass of vLLM says; to be called once per pass, since it draws the tokens."""
        rows = tuple(self._entry(int(key), tokens) for key, tokens in output.num_scheduled_tokens.items())
        return VllmBatch(rows, output)

    def _entry(self, number: int, tokens: int) -> VllmEntry:
        resident = self._residents[number]
        request = resident.request
        start = request.num_computed_tokens - tokens  # the pass has counted them already
        first = resident.num_cached < 0
        if first:
            resident.num_cached = start
        index, token = -1, 0
        if not request.is_prefill_chunk:
            index = resident.num_sampled
            resident.num_sampled += 1
            token = _EOS if resident.eos_at == index + 1 else resident.first_output + index
        decode = tokens == 1 and start >= request.num_prompt_tokens
        return VllmEntry(number, start, tokens, decode, first, index, token)

    def update(self, batch: VllmBatch) -> list[tuple[int, _native.EndReason]]:
        """Process the results of a batch: (id, end reason) of every request that got a token, in order."""
        results = []
        for outputs in self._scheduler.update_from_output(batch.output, self.model_output(batch)).values():
            for item in outputs.outputs:
                reason = _native.EndReason.none
                if item.finish_reason is not None:
                    reason = _REASONS[str(item.finish_reason)]
                    del self._residents[int(item.request_id)]
                results.append((int(item.request_id), reason))
        return results

    def model_output(self, batch: VllmBatch) -> Any:
        """Return what a model runner would answer to a batch, as vLLM's own type."""
        keys = list(batch.output.num_scheduled_tokens)
        return self._vllm.ModelRunnerOutput(
            req_ids=keys,
            req_id_to_index={key: place for place, key in enumerate(keys)},
            sampled_token_ids=[[row.token] if row.sample_index >= 0 else [] for row in batch.rows],
        )

    @property
    def vllm(self) -> Any:
        """The object of vLLM."""
        return self._scheduler

    @property
    def running(self) -> list[int]:
        """Ids of the running, in their order."""
        return [int(request.request_id) for request in self._scheduler.running]

    @property
    def waiting(self) -> list[int]:
        """Ids of the waiting, in their order."""
        return [int(request.request_id) for request in self._scheduler.waiting]

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._scheduler.waiting)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def cached_tokens(self, id: int) -> int:  # noqa: A002
        """Prefix hit [tokens] of a resident request at its first admission."""
        return self._residents[id].num_cached

    def block_table(self, id: int) -> list[int]:  # noqa: A002
        """Block ids of a resident request."""
        return list(self._scheduler.kv_cache_manager.get_block_ids(str(id).zfill(_ID_WIDTH))[0])

    def request_rows(self, visible_max_tokens: Mapping[int, int]) -> list[tuple[int, ...]]:
        """Return the state of the running, then of the waiting, as `_native.Snapshot.from_state` wants it.

        Args:
            visible_max_tokens: by id, what a snapshot may tell of where each request ends.
        """
        return [
            self._row(request, visible_max_tokens[int(request.request_id)])
            for queue in (self._scheduler.running, self._scheduler.waiting)
            for request in queue
        ]

    def _row(self, request: Any, max_tokens: int) -> tuple[int, ...]:
        number = int(request.request_id)
        resident = self._residents[number]
        return (
            number,
            request.num_prompt_tokens,
            request.num_output_tokens,
            max_tokens,
            request.num_computed_tokens,
            request.num_output_placeholders,
            request.num_in_flight_tokens,
            request.num_stale_output_tokens,
            resident.num_sampled,
            len(self.block_table(number)),
            resident.num_cached,
            request.num_preemptions,
            request.priority,
            request.arrival_time,
            _STATUS[request.status.name],
            int(request.is_prefill_chunk),
        )

    def pass_state(self) -> dict[str, Any]:
        """Return what the next pass depends on beside the requests, as `_native.Snapshot.from_state` names it."""
        scheduler = self._scheduler
        return {
            "unflushed_ends": bool(scheduler.finished_req_ids),
            "capacity_bound": bool(scheduler.prefill_capacity_bound),
            "num_executed": getattr(scheduler, "num_executed_steps", 0),  # 0.33 on
            "last_prefill": getattr(scheduler, "last_prefill_step", 0),
            "num_free_blocks": self.num_free_blocks,
            "num_running": self.num_running,
        }
