"""The state of an instance as the router's own streams tell it, corrected by what the server says on `/metrics`.

It is the same snapshot that an engine would publish, at the newest instant at which a token came: requests with tokens
decode, the others wait or are computed as far as the believed engine would have got with them.
"""

from dataclasses import dataclass

from simcluster import _native
from simcluster.engine_options import with_options
from simcluster.instance import InstanceSpec
from simcluster.live.router.gauges import Gauges
from simcluster.live.router.own import OwnRequest

__all__ = ["Others", "OwnStreams", "others_of"]

_FIRST_FOREIGN = 2**62  # ids of requests that only the server's gauges tell of
_WAITING, _RUNNING, _PREEMPTED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Others:
    """Requests of other clients at an instance.

    Attributes:
        running: so many run.
        waiting: so many wait.
        kv_usage: share of the KV blocks in use, by everybody; None where unknown.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None


def others_of(gauges: Gauges, own_started: int, own_open: int) -> Others:
    """Return what the gauges tell beyond the router's own requests.

    Args:
        gauges: of the server.
        own_started: own requests with tokens when they were read.
        own_open: own requests then.
    """
    running, waiting = gauges.running or 0, gauges.waiting or 0
    surplus = max(0, running + waiting - own_open)
    foreign_waiting = min(surplus, max(0, waiting - (own_open - own_started)))
    return Others(surplus - foreign_waiting, foreign_waiting, gauges.kv_usage)


class OwnStreams:
    """Makes snapshots of one instance.

    Args:
        spec: the instance.
        mean_prompt: stands for the prompt of a request of others [tokens].
        mean_output: stands for its answer [tokens].
    """

    def __init__(self, spec: InstanceSpec, mean_prompt: int, mean_output: int) -> None:
        self._spec = spec
        self._config = with_options(spec.engine, enable_prefix_caching=False)  # identities of blocks are not known
        self._mean = (max(1, mean_prompt), max(1, mean_output))
        self._engine = _native.Engine(self._config, spec.believed)
        self._submitted: set[int] = set()

    def snapshot(self, own: dict[int, OwnRequest], at_ps: int, others: Others) -> _native.Snapshot:
        """Return the state at the newest instant at which something was heard of the instance.

        Args:
            own: the router's open requests there.
            at_ps: that instant [ps].
            others: requests of other clients.
        """
        computed = self._computed(own, at_ps)
        running: list[tuple[int, ...]] = []
        waiting: list[tuple[int, ...]] = []
        for each in own.values():
            if each.at_ps > at_ps and not each.tokens:
                continue  # it came later; the view knows of it
            row = self._row(each, computed.get(each.id, 0))
            (running if row[14] == _RUNNING else waiting).append(row)
        running += [self._foreign(k, started=True) for k in range(others.running)]
        waiting += [self._foreign(others.running + k, started=False) for k in range(others.waiting)]
        running, late = running[: self._config.max_num_seqs], running[self._config.max_num_seqs :]
        waiting = [_put_back(row) for row in late] + waiting
        shot = _native.Snapshot.from_state(
            taken_at=at_ps,
            boundary=at_ps,
            intake=-1,
            waiting_for_batch=False,
            unflushed_ends=False,
            capacity_bound=False,
            num_executed=0,
            last_prefill=-1,
            num_free_blocks=self._free_blocks(running, others.kv_usage),
            num_running=len(running),
            requests=running + waiting,
            in_flight=[],
        )
        self._continue_from(shot, own)
        return shot

    def _computed(self, own: dict[int, OwnRequest], at_ps: int) -> dict[int, int]:
        """Return how far the believed engine has got with the prompts by then."""
        engine = self._engine
        for each in own.values():
            if each.id not in self._submitted and engine.now <= each.at_ps <= at_ps:
                self._submitted.add(each.id)
                engine.submit(
                    each.id,
                    each.prompt_tokens,
                    each.predicted_output,
                    each.at_ps,
                    each.max_tokens,
                    priority=each.priority,
                    arrival_time=each.arrival_ps,
                )
        if at_ps > engine.now:
            engine.advance_to(at_ps)
        return {row[0]: row[3] for row in engine.snapshot().requests.tolist()}

    def _row(self, own: OwnRequest, computed: int) -> tuple[int, ...]:
        """Return a request as a snapshot has it."""
        room = self._config.max_model_len - own.prompt_tokens
        limit = max(own.tokens + 1, min(own.max_tokens, room) if own.max_tokens > 0 else room)
        late = min(computed, own.prompt_tokens - 1)  # a token that should have come comes with the next step
        computed = own.prompt_tokens + own.tokens - 1 if own.tokens else late
        started = own.tokens > 0 or computed > 0
        blocks = -(-computed // self._config.block_size)
        return (
            *(own.id, own.prompt_tokens, own.tokens, limit, computed, 0, 0, 0, own.tokens, blocks),
            *(0 if started else -1, 0, own.priority, own.arrival_ps),
            *((_RUNNING if started else _WAITING), int(started and not own.tokens)),
        )

    def _foreign(self, number: int, *, started: bool) -> tuple[int, ...]:
        """Return a request of somebody else: one that runs is half done."""
        prompt, output = self._mean
        prompt = min(prompt, self._config.max_model_len - 1)
        limit = self._config.max_model_len - prompt
        tokens = min(max(1, output // 2), limit - 1) if started else 0
        computed = prompt + tokens - 1 if tokens else 0
        blocks = -(-computed // self._config.block_size)
        return (
            *(_FIRST_FOREIGN + number, prompt, tokens, limit, computed, 0, 0, 0, tokens, blocks),
            *(0 if tokens else -1, 0, 0, 0, _RUNNING if tokens else _WAITING, 0),
        )

    def _free_blocks(self, running: list[tuple[int, ...]], kv_usage: float | None) -> int:
        usable = self._config.num_gpu_blocks - 1  # one is the null block
        if kv_usage is not None:
            return max(0, usable - round(kv_usage * usable))
        return max(0, usable - sum(row[9] for row in running))

    def _continue_from(self, shot: _native.Snapshot, own: dict[int, OwnRequest]) -> None:
        """Let the believed engine go on from what was seen."""
        ids = shot.request_ids
        mean = self._mean[1]
        ends = [(own[k].predicted_output if k in own else mean, False) for k in ids]
        self._engine = shot.restore(self._config, self._spec.believed, ends)
        self._submitted = set(ids)


def _put_back(row: tuple[int, ...]) -> tuple[int, ...]:
    """Return a request without room in the batch, as one that waits with nothing computed."""
    return (*row[:4], 0, *row[5:9], 0, *row[10:14], _PREEMPTED if row[2] else _WAITING, 0)
