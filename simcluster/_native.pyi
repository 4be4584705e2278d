"""Engine model of one serving instance and the SFS estimator (C++)."""

from collections.abc import Sequence
import enum
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray


class Policy(enum.Enum):
    fcfs = 0

    priority = 1

class VllmVersion(enum.Enum):
    v0_32 = 0

    v0_33 = 1

class SchedulerConfig:
    """Options of one scheduler under vLLM's own names."""

    def __init__(self) -> None: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, arg: int, /) -> None: ...

    @property
    def max_num_seqs(self) -> int: ...

    @max_num_seqs.setter
    def max_num_seqs(self, arg: int, /) -> None: ...

    @property
    def max_num_active_seqs(self) -> int: ...

    @max_num_active_seqs.setter
    def max_num_active_seqs(self, arg: int, /) -> None: ...

    @property
    def max_model_len(self) -> int: ...

    @max_model_len.setter
    def max_model_len(self, arg: int, /) -> None: ...

    @property
    def block_size(self) -> int: ...

    @block_size.setter
    def block_size(self, arg: int, /) -> None: ...

    @property
    def num_gpu_blocks(self) -> int: ...

    @num_gpu_blocks.setter
    def num_gpu_blocks(self, arg: int, /) -> None: ...

    @property
    def long_prefill_token_threshold(self) -> int: ...

    @long_prefill_token_threshold.setter
    def long_prefill_token_threshold(self, arg: int, /) -> None: ...

    @property
    def long_prefill_token_threshold_adaptive(self) -> bool: ...

    @long_prefill_token_threshold_adaptive.setter
    def long_prefill_token_threshold_adaptive(self, arg: bool, /) -> None: ...

    @property
    def prefill_schedule_interval(self) -> int: ...

    @prefill_schedule_interval.setter
    def prefill_schedule_interval(self, arg: int, /) -> None: ...

    @property
    def watermark(self) -> float: ...

    @watermark.setter
    def watermark(self, arg: float, /) -> None: ...

    @property
    def policy(self) -> Policy: ...

    @policy.setter
    def policy(self, arg: Policy, /) -> None: ...

    @property
    def vllm_version(self) -> VllmVersion: ...

    @vllm_version.setter
    def vllm_version(self, arg: VllmVersion, /) -> None: ...

    @property
    def enable_chunked_prefill(self) -> bool: ...

    @enable_chunked_prefill.setter
    def enable_chunked_prefill(self, arg: bool, /) -> None: ...

    @property
    def enable_prefix_caching(self) -> bool: ...

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, arg: bool, /) -> None: ...

    @property
    def scheduler_reserve_full_isl(self) -> bool: ...

    @scheduler_reserve_full_isl.setter
    def scheduler_reserve_full_isl(self, arg: bool, /) -> None: ...

    @property
    def async_scheduling(self) -> bool: ...

    @async_scheduling.setter
    def async_scheduling(self, arg: bool, /) -> None: ...

    @property
    def track_blocks(self) -> bool: ...

    @track_blocks.setter
    def track_blocks(self, arg: bool, /) -> None: ...

    @property
    def shared_prefixes(self) -> bool: ...

    @shared_prefixes.setter
    def shared_prefixes(self, arg: bool, /) -> None: ...

    def validate(self) -> str:
        """Empty if every option is in range, else what is wrong."""

class EndReason(enum.IntEnum):
    none = 0

    stop = 1

    length = 2

    abort = 3

    kv_capacity = 4

    exceeds_context = 5

class Batch:
    """The requests of one step."""

    @property
    def entries(self) -> list[tuple[int, int, int]]:
        """
        (request id, tokens computed before, tokens in this batch), in batch order.
        """

class Scheduler:
    """vLLM's V1 scheduler for a text model, without a clock."""

    def __init__(self, arg: SchedulerConfig, /) -> None: ...

    def add(self, id: int, prompt_tokens: int, max_tokens: int, eos_at: int = 0, priority: int = 0, arrival_time: int = 0, prompt: Sequence[tuple[int, int]] = [], first_output: int = 0) -> None: ...

    def abort(self, id: int) -> bool: ...

    def has_requests(self) -> bool: ...

    def schedule(self) -> tuple[Batch, list[int], list[int]]:
        """One pass: (batch, ids preempted, ids that can never fit)."""

    def update(self, batch: Batch) -> list[tuple[int, EndReason]]:
        """
        Results of a batch: (id, end reason) of every request that got a token, in order.
        """

    @property
    def running(self) -> list[int]: ...

    @property
    def waiting(self) -> list[int]: ...

    @property
    def num_free_blocks(self) -> int: ...

    def cached_tokens(self, id: int) -> int:
        """Prefix hit [tokens] of a running request at its first admission."""

    def block_table(self, id: int) -> list[int]:
        """Block ids of a running request."""

NEVER: int = 2305843009213693951

class LivelockError(Exception):
    pass

class StepTimeModel:
    """Coefficients of the step time in whole picoseconds."""

    def __init__(self) -> None: ...

    @property
    def b0(self) -> int: ...

    @b0.setter
    def b0(self, arg: int, /) -> None: ...

    @property
    def b1(self) -> int: ...

    @b1.setter
    def b1(self, arg: int, /) -> None: ...

    @property
    def b1x(self) -> int: ...

    @b1x.setter
    def b1x(self, arg: int, /) -> None: ...

    @property
    def b2(self) -> int: ...

    @b2.setter
    def b2(self, arg: int, /) -> None: ...

    @property
    def b3(self) -> int: ...

    @b3.setter
    def b3(self, arg: int, /) -> None: ...

    @property
    def b4(self) -> int: ...

    @b4.setter
    def b4(self, arg: int, /) -> None: ...

    @property
    def b5(self) -> int: ...

    @b5.setter
    def b5(self, arg: int, /) -> None: ...

    @property
    def hinge_tokens(self) -> int: ...

    @hinge_tokens.setter
    def hinge_tokens(self, arg: int, /) -> None: ...

    @property
    def host(self) -> int: ...

    @host.setter
    def host(self, arg: int, /) -> None: ...

    def device_time(self, prefills: Sequence[tuple[int, int]], decodes: Sequence[int]) -> int:
        """
        Time [ps] of a batch of prefills (tokens, context before) and decodes (context before).
        """

    def period(self, device: int, asynchronous: bool) -> int:
        """
        One turn of the loop [ps] for a batch that takes the accelerator `device` [ps].
        """

class StepNoise:
    """Multiplicative noise per step, a pure hash of seed, instance and step."""

    def __init__(self, factors: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], seed: int, instance: int) -> None:
        """factors: (n,) int64, in units of 2**-32."""

    @staticmethod
    def recorded(durations: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)]) -> StepNoise:
        """
        Steps that take what was recorded, (n,) int64 [ps] by number of the step; later ones take the model's time.
        """

    def apply(self, device: int, step: int) -> int:
        """The time [ps] that a step of `device` [ps] really takes."""

class EventKind(enum.IntEnum):
    scheduled = 0

    first_token = 1

    token = 2

    preempted = 3

    finished = 4

    rejected = 5

    failed = 6

class Engine:
    """One serving instance on the simulated clock."""

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel, noise: StepNoise | None = None, record_tokens: bool = False, record_steps: bool = False, fast: bool = True) -> None: ...

    def submit(self, id: int, prompt_tokens: int, output_tokens: int, at: int, max_tokens: int = -1, ends_by_length: bool = False, priority: int = 0, arrival_time: int = 0, prompt: Sequence[tuple[int, int]] = []) -> bool:
        """
        Hand over a request that reaches the engine at `at` [ps]; False if it is rejected.
        """

    def cancel(self, id: int, at: int) -> None: ...

    def advance_to(self, t: int) -> None:
        """Process every step that ends at or before t [ps]."""

    def drain(self) -> None:
        """Run until nothing is left to do."""

    def run_to_first_token(self, id: int) -> int:
        """
        Run until this request's first output token and return when it comes [ps]; NEVER if it never does.
        """

    def next_event(self) -> int:
        """Earliest event [ps] if nothing else arrives; NEVER if none."""

    @property
    def next_change(self) -> int:
        """
        Advancing to an earlier instant [ps] changes nothing; NEVER while nothing is to come.
        """

    def next_end(self) -> int:
        """
        When to advance to [ps] to be told of the next end of a request if nothing else arrives; NEVER if none.
        """

    def fork(self) -> Engine:
        """An independent copy."""

    def snapshot(self) -> Snapshot:
        """The state at the newest step boundary."""

    def take_events(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """Rows (id, at [ps], value, kind, reason) since the last call, (n, 5)."""

    def take_steps(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """
        Rows (index, start, end [ps], tokens, decodes, decode context, prefill attention, prefills, running, waiting, free blocks) since the last call, (n, 11).
        """

    @property
    def now(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def busy_time(self) -> int: ...

    @property
    def num_pending(self) -> int:
        """Requests handed over but not yet taken by the loop."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def running_ids(self) -> list[int]: ...

    @property
    def waiting_ids(self) -> list[int]: ...

    @property
    def prefix_stats(self) -> list[int]:
        """[queries, hits, preempted queries, preempted hits] in tokens."""

class Snapshot:
    """What an instance publishes about itself."""

    @staticmethod
    def capture(engine: Engine) -> Snapshot: ...

    @staticmethod
    def from_state(*, taken_at: int, boundary: int, intake: int, waiting_for_batch: bool, unflushed_ends: bool, capacity_bound: bool, num_executed: int, last_prefill: int, num_free_blocks: int, num_running: int, requests: Sequence[Sequence[int]], in_flight: Sequence[tuple[int, Sequence[tuple[int, int]], Sequence[int], Sequence[tuple[int, int, int]]]]) -> Snapshot:
        """
        The snapshot of an engine that is not the native one.

        requests: running, then waiting: (id, prompt, output, max_tokens, computed, placeholders, in flight, stale, sampled, blocks, cached, preemptions, priority, arrival_time, status, unfinished prefill), status 0 waiting, 1 running, 2 preempted. in_flight: batches (start [ps], prefills (tokens, context before), decodes (context before), entries (index into requests or -1, tokens, sample index)).
        """

    def to_bytes(self) -> bytes:
        """
        Return the snapshot as bytes that from_bytes() of any machine takes.

        Raises ValueError for more than two batches in flight.
        """

    @staticmethod
    def from_bytes(bytes: bytes) -> Snapshot:
        """
        Return the snapshot that to_bytes() was called of; it restores and is estimated from alike.

        Raises ValueError for bytes that are damaged, of another layout or no snapshot at all.
        """

    def restore(self, config: SchedulerConfig, step_time: StepTimeModel, ends: Sequence[tuple[int, bool]]) -> Engine:
        """
        Continue on a new engine; ends: (expected output tokens, ends by length) of each resident request.
        """

    @property
    def taken_at(self) -> int: ...

    @property
    def boundary(self) -> int: ...

    @property
    def intake(self) -> int: ...

    @property
    def left_out(self) -> tuple[int, int, int]:
        """
        Residents that found no room in a published snapshot: (running, waiting, tokens to prefill).
        """

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def request_ids(self) -> list[int]:
        """Running in order, then waiting in order."""

    @property
    def requests(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """
        Rows (id, prompt, output, computed, placeholders, blocks, max_tokens, status), (n, 8).
        """

class InstanceView:
    """One router's knowledge of one instance, with the SFS estimate."""

    def __init__(self, config: SchedulerConfig, believed: StepTimeModel, mean_output: int, overlay: bool) -> None: ...

    def refresh(self, snapshot: Snapshot) -> None: ...

    def record_dispatch(self, id: int, prompt_tokens: int, predicted_output: int, at: int, max_tokens: int = -1, ends_by_length: bool = False, priority: int = 0, arrival_time: int = 0) -> None: ...

    def forget_dispatch(self, id: int) -> None:
        """
        Forget a request of this router that has ended or never arrived; only needed with published snapshots.
        """

    def simulate_first_token(self, id: int, prompt_tokens: int, predicted_output: int, at: int, max_tokens: int = -1, ends_by_length: bool = False, priority: int = 0, arrival_time: int = 0, fast: bool = True) -> int:
        """
        What estimate_first_token() finds, by simulating from the snapshot; with fast off step by step.
        """

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_resident(self) -> int: ...

    @property
    def num_dispatched_since(self) -> int: ...

    @property
    def prefill_tokens_left(self) -> int:
        """
        Tokens to compute before every resident request decodes; prefix hits of waiting ones unknown.
        """

    @property
    def decode_tokens_left(self) -> int:
        """
        Output tokens expected of every resident request, by own predictions, else by mean_output.
        """

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use at the snapshot."""

    @property
    def boundary(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

def num_waiting(views: list[InstanceView], out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Write this number of every view (j,) into an array (j,)."""

def num_running(views: list[InstanceView], out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Write this number of every view (j,) into an array (j,)."""

def num_resident(views: list[InstanceView], out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Write this number of every view (j,) into an array (j,)."""

def tokens_left(views: list[InstanceView], out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Write this number of every view (j,) into an array (j,)."""

def kv_usage(views: list[InstanceView], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Write the share of KV blocks in use of every view (j,) into an array (j,).
    """

def estimate_first_token(views: Sequence[InstanceView], id: int, prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], predicted_output: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], max_tokens: int = -1, ends_by_length: bool = False, priority: int = 0, arrival_time: int = 0) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    SFS: when the request's first token would be processed [ps], per view, (n,); NEVER if it cannot be served.

    Source: paper eqs. 7, 8.
    """

class SfsPlus:
    """The decisions of one router whose delays have a price."""

    def __init__(self, views: Sequence[InstanceView], kind_of_view: Sequence[int], *, price: float, slack_price: float, horizon_s: float, routers: int = 1) -> None:
        """kind_of_view (n,): numbers from 0."""

    def decide(self, id: int, utility: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)], prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], predicted_output: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], hop: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], *, now: int, target_s: float, max_tokens: int = -1, priority: int = 0, arrival_time: int = 0, healthy: Sequence[bool] = []) -> tuple[list[int], Annotated[NDArray[numpy.float64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))]]:
        """
        Decide about one request, all columns (n,), times [ps].

        Returns (views of the largest score, ascending; TTFT (n,) [s], inf where it cannot be served; score (n,), -inf where not a choice; chance to be on time (n,)).
        """

    def sent(self, id: int, instance: int) -> None:
        """The request of the last decision was sent."""

    def first_token(self, id: int, instance: int, ttft_s: float) -> None: ...

    def forget(self, id: int) -> None: ...

class Objective(enum.Enum):
    slo = 0

    weighted = 1

class Explain(enum.Enum):
    """Who is estimated beside the winners."""

    choice = 0

    runner_up = 1

    all = 2

class Fleet:
    """All views of one router, ready for decisions."""

    def __init__(self, views: Sequence[InstanceView], kind_of_view: Sequence[int]) -> None:
        """
        kind_of_view (n,): numbers from 0; requests are usually the same to all views of one kind.
        """

    def decide(self, id: int, utility: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)], prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], predicted_output: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], hop: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], *, max_tokens: int = -1, ends_by_length: bool = False, priority: int = 0, arrival_time: int = 0, objective: Objective = Objective.slo, target_s: float = float('inf'), latency_weight: float = 0.0, explain: Explain = Explain.runner_up, healthy: Sequence[bool] = [], sent: int = 0) -> tuple[str, bool, Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))]]:
        """
        Decide about one request, which reaches the engines at `sent` + `at`; all columns (n,), times [ps].

        Returns (feasible, infeasible or score; whether none is healthy; the equally good views, ascending; TTFT (n,) [s], inf where it cannot be served, nan where not estimated; score (n,), -inf where not a choice).

        Raises ValueError for a utility that is not a number or a negative weight. Source: paper eqs. 3, 5, 7, 8.
        """

    @property
    def num_kinds(self) -> int: ...

    @property
    def num_estimated(self) -> int:
        """Views estimated in the last decision."""

class Desk:
    """Decides about the requests of a run, which lie in columns."""

    def __init__(self, fleet: Fleet, group_of_view: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], delay: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], hop: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], utility: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', writable=False)], prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)], predicted_output: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', writable=False)], max_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], priority: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], target_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', writable=False)]) -> None:
        """
        n views, k requests, whose values are equal within a group of views: group_of_view, and delay and hop to
        and from the engines [ps] (n,); utility, prompt_tokens, predicted_output (k, groups); max_tokens,
        priority, target_s (k,). Raises ValueError for columns that do not fit each other.
        """

    def decide(self, row: int, arrival_time: int, sent: int, *, objective: Objective = Objective.slo, latency_weight: float = 0.0, explain: Explain = Explain.runner_up, healthy: Sequence[bool] = []) -> tuple[str, bool, Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))]]:
        """
        Decide about the request in a row, which leaves the router at `sent`; times [ps].

        Returns (feasible, infeasible or score; whether none is healthy; the equally good views, ascending; TTFT (n,) [s], inf where it cannot be served, nan where not estimated; score (n,), -inf where not a choice).

        Raises ValueError for a utility that is not a number or a negative weight. Source: paper eqs. 3, 5, 7, 8.
        """

def compiler() -> str:
    """The compiler that built this module."""

def bench_round_robin(engines: Sequence[Engine], prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], output_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], first: int, count: int) -> int:
    """
    Hand requests first to first + count - 1 to the engines in turn, each engine advanced to the arrival.

    prompt_tokens, output_tokens, at [ps]: (n,). Returns the number of events, which are dropped.
    """

def bench_estimates(view: InstanceView, snapshot: Snapshot | None, prompt_tokens: int, output_tokens: int, at: int, repeats: int) -> int:
    """
    Estimate a request `repeats` times, each time from the snapshot anew unless it is None; the first token [ps].
    """

def bench_decisions(fleet: Fleet, utility: Sequence[float], prompt_tokens: int, output_tokens: int, at: int, target_s: float, explain: Explain, repeats: int) -> int:
    """
    Decide by eq. 3 about a request `repeats` times; the instance chosen. utility (kinds,).
    """

def bench_route(engines: Sequence[Engine], views: Sequence[InstanceView], fleet: Fleet, utility: Sequence[float], prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], output_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)], first: int, count: int, target_s: float, refresh_after: int) -> list[int]:
    """
    Decide by eq. 3 about requests first to first + count - 1 and hand each to the engine chosen.

    utility (kinds,) goes round by one kind from request to request. prompt_tokens, output_tokens (what views
    expect, too), at [ps]: (n,). A view is refreshed at the dispatch that follows `refresh_after` others to it;
    0: at every one. Returns the instances chosen, (count,).
    """

class Watch(enum.Enum):
    nothing = 0

    ends = 1

    first_tokens_and_ends = 2

class Captured:
    """Snapshots of every instance at one instant."""

class Cluster:
    """
    The engines of one run behind one interface, and what happened to the requests.

    It holds the truth: never hand it to a router.
    """

    def __init__(self, prompt_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], output_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], predicted_output: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], max_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], priority: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], cancel_after: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ends_by_length: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], prefix: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], int] | None, routers_know_ends: bool, in_order: bool, watch: Watch) -> None:
        """
        n requests; the first three columns are (n, groups) [tokens], output_tokens is the truth; cancel_after [ps].

        prefix: offsets (n + 1,), dense hashes, and prompt tokens that one covers. in_order: requests are sent by
        ascending number.
        """

    def add_instance(self, engine: object, group: int, request_s: float, per_prompt_token_s: float, output_hop: int, shares_prefixes: bool, asynchronous: bool) -> None:
        """
        The next instance; times [s], output_hop [ps]. The engine is driven by the cluster alone from now on.
        """

    def add_router(self, views: list[InstanceView]) -> int:
        """A router with these views (j,); returns its number."""

    def advance(self, t: int) -> None:
        """Every instance processes what ends at or before t [ps]."""

    def refresh(self, router: int, t: int) -> None:
        """
        Show a router the newest step boundary of every instance at t [ps]; costs only where there is a new one.
        """

    def capture(self, t: int) -> Captured:
        """
        The newest step boundary of every instance at t [ps], to be shown later.
        """

    def show(self, router: int, snapshots: Captured) -> None: ...

    def shown(self, router: int) -> list[Snapshot]:
        """
        Copies of what a router has been shown last, None where nothing; for tests.
        """

    def dispatch(self, request: int, instance: int, now: int, sent: int, router: int) -> None:
        """
        A request arrives at `now` and leaves for an instance at `sent` [ps]; `router`'s view notes it, or NOBODY's.
        """

    def turn_away(self, request: int, now: int) -> None:
        """A request arrives at `now` [ps] and is sent nowhere."""

    def next_end(self, horizon: int) -> int:
        """
        When to call take_ends() [ps] to be told of the next end of a request if nothing happens up to the horizon;
        beyond the horizon, an instant before which there is none. NEVER if there is none.
        """

    def take_ends(self, t: int) -> list[tuple[int, int, int]]:
        """Take notices, those of all ends up to t [ps] among them."""

    def take_notices(self) -> list[tuple[int, int, int]]:
        """
        What clients were told since the last call, as watched: (request, kind, seen at [ps]).
        """

    def loads(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """
        Per instance (running, waiting, free blocks, preemptions, steps, busy [ps], prefix queries, prefix hits, and both of preempted requests), (j, 10).
        """

    @property
    def num_open(self) -> int:
        """Requests sent and not ended."""

    @property
    def num_sent(self) -> int:
        """Requests that have arrived."""

    def num_ready(self, least: int) -> int:
        """
        How many of the oldest rows are final, `least` or a few more; 0 if fewer.
        """

    def take_rows(self, count: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """
        The oldest rows in order of sending: (request, arrival, instance, scheduled, first token, end, output tokens, cached tokens, preemptions, status, reason), (k, 11); instants [ps], -1 for those that did not come.
        """

    def finish(self, clock: int, cut: bool) -> None:
        """
        Fix the end of the run [ps]; with `cut`, what has not reached its client by then did not happen.
        """

NOBODY: int = 18446744073709551615

def monotonic_ns() -> int:
    """CLOCK_MONOTONIC [ns], the clock of published snapshots."""

class SourceState(enum.Enum):
    """What is known of the writer of snapshots."""

    missing = 0
    """There was none yet."""

    live = 1
    """It holds the segment."""

    closed = 2
    """It ended in good order."""

    dead = 3
    """It is gone without a word."""

class SnapshotWriter:
    """
    Publishes the snapshots of one instance in POSIX shared memory, for readers on this machine.

    The segment is /dev/shm/simcluster.NAME; whoever finds one that a dead process left replaces it. Requests beyond `capacity` are left out and counted.
    Raises ValueError for a bad name or capacity, RuntimeError if another process writes under this name or the memory cannot be had.

    Source: paper appendix F.
    """

    def __init__(self, name: str, capacity: int, config: SchedulerConfig, num_slots: int = 4) -> None: ...

    @overload
    def publish(self, engine: Engine, origin_ns: int = 0, speed: float = 1.0, now_ns: int | None = None) -> None:
        """
        Publish an engine's state; origin_ns: CLOCK_MONOTONIC at the engine's 0, speed: its seconds per second.
        """

    @overload
    def publish(self, snapshot: Snapshot, origin_ns: int = 0, speed: float = 1.0, now_ns: int | None = None) -> None: ...

    def close(self) -> None:
        """Tell readers that this was all, and take the name back."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def capacity(self) -> int: ...

    @property
    def num_published(self) -> int: ...

class SnapshotReader:
    """
    Reads what a SnapshotWriter of any process publishes under a name; it need not exist yet.

    Never waits: while the writer is too fast, or gone, the last good snapshot stays. A writer that comes after another is met at the next read, at most 10 ms late. Instants become picoseconds of a clock that is 0 at `epoch_ns` of CLOCK_MONOTONIC and runs `speed` times as fast, which 64 bits hold for 106 days; earlier ones become 0. Raises ValueError for a bad name or speed.
    """

    def __init__(self, name: str, epoch_ns: int = 0, speed: float = 1.0) -> None: ...

    def read(self, now_ns: int | None = None) -> tuple[Snapshot, int | None, SourceState]:
        """
        Return (the newest snapshot or None, how long ago it was published [ns] or None, state of the writer).

        While the writer lives, an old snapshot is one since which nothing has happened.
        """

    def refresh(self, view: InstanceView, now_ns: int | None = None) -> None:
        """
        Read, and show a view the newest snapshot unless it would learn nothing from it.
        """

    @property
    def state(self) -> SourceState:
        """The writer at the last read."""

    @property
    def age_ns(self) -> int:
        """How old the snapshot was at the last read [ns]."""

    @property
    def epoch_ns(self) -> int: ...

    @property
    def speed(self) -> float: ...

    @property
    def generation(self) -> int:
        """How many writers were met; a new one may have other options."""

    @property
    def num_changes(self) -> int:
        """Number of the snapshot, over all writers."""

    @property
    def num_published(self) -> int:
        """Number of the snapshot, as this writer counts."""

    @property
    def num_misses(self) -> int:
        """Reads that kept an older snapshot because the writer was too fast."""

    @property
    def writer_pid(self) -> int:
        """
        Process of the writer, as its own namespace numbers it; 0: none met yet.
        """

    @property
    def config(self) -> SchedulerConfig:
        """Options of the instance. Raises RuntimeError before a writer was met."""

class SnapshotReaders:
    """
    The readers of views (j,), for reading all of them in one call.

    Raises ValueError for another number of views than of readers.
    """

    def __init__(self, readers: list[SnapshotReader], views: list[InstanceView]) -> None: ...

    def refresh(self, now_ns: int, fresh_ns: int) -> list[int]:
        """
        SnapshotReader.refresh for every view; the numbers of those whose snapshot was published over `fresh_ns` ago.

        An idle engine is none of them while its writer lives, since it has nothing to tell. Whether silent writers live is not asked here.
        """

    def ask(self, now_ns: int) -> None:
        """
        Ask the kernel whether silent writers live, and meet new ones; half a microsecond for each.
        """

    @property
    def num_writers(self) -> int:
        """How many writers were met, by all readers together."""

class SchedulerWatch:
    """
    Publishes the state of a Python scheduler whose requests have the attributes of vLLM's.
    """

    def __init__(self, writer: SnapshotWriter, config: SchedulerConfig) -> None: ...

    def add(self, request: object, id: int, arrival_ns: int) -> None: ...

    def begin(self, num_scheduled_tokens: dict[str, int], preempted_ids: object, now_ns: int) -> None: ...

    def end(self, now_ns: int) -> None: ...

    def drop(self, ended_ids: object) -> None: ...

    def keep_only(self, requests: dict[str, Any]) -> None: ...

    def publish(self, running: list[Any], waiting: object, num_waiting: int, num_free_blocks: int, waiting_for_batch: bool, unflushed_ends: bool, capacity_bound: bool, num_executed: int, last_prefill: int, now_ns: int) -> None: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def num_known(self) -> int: ...

class EventCounter:
    """
    Counts the events of a stream while its bytes pass by, and keeps the last 2,048 bytes.
    """

    def __init__(self) -> None: ...

    def feed(self, piece: bytes) -> None:
        """Count the ends of events, two line feeds each, in bytes that pass by."""

    def keep(self, piece: bytes) -> None:
        """Note bytes whose events are counted elsewhere."""

    @property
    def events(self) -> int:
        """So many so far; whoever knows better may set it."""

    @events.setter
    def events(self, arg: int, /) -> None: ...

    @property
    def tail(self) -> bytes: ...

class FlowEnd(enum.Enum):
    """Why a stream flows no more."""

    whole = 0
    """Its body has ended; the last piece is left to the caller."""

    server_left = 1
    """Before the end."""

    bad_framing = 2
    """What the server sends is not in chunks."""

    client_left = 3

class StreamRelay:
    """
    Passes answers in chunks on from sockets of servers to those of clients, without a thread: call `pump` whenever `file` can be read.

    Source: RFC 9112, section 7.1 (chunks).
    """

    def __init__(self) -> None: ...

    @property
    def file(self) -> int:
        """A descriptor that can be read when there is something to do."""

    def add(self, server: int, client: int, counter: EventCounter, in_chunks: bool) -> int:
        """
        Take over a stream between two descriptors that do not block, and return its number.

        The server's body stands between two chunks, and the client was given all before. Nobody else may read the one or write to the other until `remove`. `in_chunks`: the client gets chunks, too.
        Raises RuntimeError if there are too many open files.
        """

    def remove(self, id: int) -> None:
        """Let go of a stream; its sockets stay open."""

    def waits_for_client(self, id: int) -> bool: ...

    @property
    def num_streams(self) -> int: ...

    def pump(self) -> tuple[list[int], list[tuple[int, FlowEnd, bytes, bool]]]:
        """
        Pass on what has come, and return which streams moved, and which ended, why, with what content that the client was not given, and whether nothing came behind the body. Never waits.
        """
