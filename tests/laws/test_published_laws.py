"""A view that reads a published snapshot when it is asked decides as one that reads every snapshot at once."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import MS, submit
from law_helpers import ended_ids, events_of, law
from simcluster import _native
from strategies import World, any_worlds

NUMBERS = itertools.count()
ORIGIN = 10**12
INSTANCES = 4
OWN = 1000  # numbers of the router's own requests from here on

Lengths = tuple[int, int]  # prompt and output tokens


@dataclass
class Side:
    """One way of reading: a reader and a view of each instance."""

    readers: list[_native.SnapshotReader]
    views: list[_native.InstanceView]
    fleet: _native.Fleet = field(init=False)

    def __post_init__(self) -> None:
        self.fleet = _native.Fleet(self.views, [0, 0, 1, 1])

    def decide(self, number: int, lengths: Lengths, at: int, explain: _native.Explain) -> tuple[str, list[int]]:
        prompt, output, when, hop = (np.full(INSTANCES, value) for value in (*lengths, at, 0))
        because, _, best, _, _ = self.fleet.decide(
            number, np.array([0.5, 0.5, 0.9, 0.9]), prompt, output, when, hop, arrival_time=at, target_s=0.3,
            explain=explain,
        )  # fmt: skip
        return because, best.tolist()

    def estimates(self, number: int, lengths: Lengths, at: int) -> list[int]:
        prompt, output, when = (np.full(INSTANCES, value) for value in (*lengths, at))
        return _native.estimate_first_token(self.views, number, prompt, output, when).tolist()

    def counts(self) -> list[tuple[float, ...]]:
        return [
            (v.num_running, v.num_waiting, v.num_dispatched_since, v.prefill_tokens_left, v.decode_tokens_left)
            for v in self.views
        ]


@dataclass
class Published:
    """Instances that publish, and two routers that read."""

    world: World
    engines: list[_native.Engine]
    writers: list[_native.SnapshotWriter]
    eager: Side
    lazy: Side
    ended: list[list[int]] = field(default_factory=lambda: [[] for _ in range(INSTANCES)])

    def publish(self, at: int, who: set[int]) -> None:
        """Let all instances run, of which these publish; the routers are told of every other end."""
        for j, engine in enumerate(self.engines):
            engine.advance_to(at)
            for number in ended_ids(events_of(engine)):
                for side in (self.eager, self.lazy):
                    if number >= OWN and number % 2:
                        side.views[j].forget_dispatch(number)
            if j in who:
                self.writers[j].publish(engine, ORIGIN, now_ns=ORIGIN + at // 1000)

    def refresh(self, at: int) -> None:
        now = ORIGIN + at // 1000
        together = _native.SnapshotReaders(self.lazy.readers, self.lazy.views)
        together.ask(now)
        together.refresh(now, 0)
        for reader, view in zip(self.eager.readers, self.eager.views, strict=True):
            snapshot, _, _ = reader.read(now)
            if snapshot is not None:
                view.refresh(snapshot)

    def dispatch(self, number: int, lengths: Lengths, instance: int, at: int) -> None:
        self.engines[instance].submit(number, *lengths, at)
        for side in (self.eager, self.lazy):
            side.views[instance].record_dispatch(number, *lengths, at)


@contextmanager
def published(world: World, capacity: int) -> Iterator[Published]:
    engines = []
    for j in range(INSTANCES):
        engine = world.engine() if j == 0 else _native.Engine(world.config, world.model)
        for number, ask in enumerate(world.asks[j:] if j else ()):
            submit(engine, number, ask)
        engines.append(engine)
    names = [f"test-published.{os.getpid()}.{next(NUMBERS)}" for _ in engines]
    writers = [_native.SnapshotWriter(name, capacity, world.config) for name in names]
    sides = [
        Side(
            [_native.SnapshotReader(name, ORIGIN) for name in names],
            [_native.InstanceView(world.config, world.model, 5, True) for _ in names],
        )
        for _ in range(2)
    ]
    try:
        yield Published(world, engines, writers, *sides)
    finally:
        for writer in writers:
            writer.close()


LOOKS = st.lists(
    st.tuples(
        st.sampled_from([1, 7, 40, 300]),  # ms until the next look
        st.sets(st.integers(0, INSTANCES - 1)),  # who publishes
        st.tuples(st.integers(1, 60), st.integers(1, 12)),
        st.sampled_from(["nothing", "decide", "dispatch", "dispatch", "estimate"]),
    ),
    min_size=4,
    max_size=14,
)


@law(150)
@given(world=any_worlds(), looks=LOOKS, capacity=st.sampled_from([3, 40]))
def test_reading_late_decides_as_reading_at_once(
    world: World, looks: list[tuple[int, set[int], Lengths, str]], capacity: int, loop: bool
) -> None:
    world = world.without_cancels().without_sharing().with_options(async_scheduling=loop, enable_prefix_caching=False)
    at = 0
    with published(world, capacity) as cluster:
        for number, (delay, who, lengths, act) in enumerate(looks, OWN):
            at += delay * MS
            try:
                cluster.publish(at, who)
            except _native.LivelockError:
                assert world.may_livelock
                return
            cluster.refresh(at)
            if act == "nothing":
                continue
            for explain in (_native.Explain.choice, _native.Explain.runner_up):
                choices = [side.decide(number, lengths, at + MS, explain) for side in (cluster.lazy, cluster.eager)]
                assert choices[0] == choices[1]
            if act == "dispatch":
                cluster.dispatch(number, lengths, choices[0][1][0], at + MS)
            if act == "estimate":
                asked = number, lengths, at + MS
                assert cluster.lazy.estimates(*asked) == cluster.eager.estimates(*asked)
                assert cluster.lazy.counts() == cluster.eager.counts()
