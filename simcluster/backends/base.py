"""The contract of a backend: something that serves requests and publishes snapshots."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from simcluster import _native
from simcluster.instance import InstanceSpec
from simcluster.request import IntArray, Request

__all__ = ["Backend", "Engine", "EngineFactory"]


class Backend(Protocol):
    """One instance behind the router, simulated or real."""

    spec: InstanceSpec

    def submit(self, request: Request, sent_ps: int) -> None:
        """Send a request that leaves the router at an instant [ps]."""
        ...

    def snapshot(self) -> _native.Snapshot:
        """Return the last complete snapshot."""
        ...


class Engine(Protocol):
    """What a simulated instance needs of its engine: the native one, or one that schedules by vLLM's own classes."""

    def submit(
        self,
        id: int,  # noqa: A002
        prompt_tokens: int,
        output_tokens: int,
        at: int,
        max_tokens: int = -1,
        ends_by_length: bool = False,
        priority: int = 0,
        arrival_time: int = 0,
        prompt: list[tuple[int, int]] = ...,
    ) -> bool:
        """Hand over a request that reaches the engine at `at` [ps]; False if it is rejected."""
        ...

    def cancel(self, id: int, at: int) -> None:  # noqa: A002
        """Note that the client leaves at `at` [ps]."""
        ...

    def advance_to(self, t: int) -> None:
        """Process every step that ends at or before t [ps]."""
        ...

    def take_events(self) -> IntArray:
        """Rows (id, at [ps], value, kind, reason) since the last call, (n, 5)."""
        ...

    def snapshot(self) -> _native.Snapshot:
        """Return the state at the newest step boundary."""
        ...

    def next_end(self) -> int:
        """Earliest end of a request [ps] if nothing else arrives, or an earlier instant to ask again; NEVER if none."""
        ...

    @property
    def now(self) -> int:
        """Advanced to [ps]."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        ...

    @property
    def busy_time(self) -> int:
        """Time in steps so far [ps]."""
        ...

    @property
    def num_running(self) -> int:
        """Running requests."""
        ...

    @property
    def num_waiting(self) -> int:
        """Waiting requests that the loop has taken in."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        ...

    @property
    def prefix_stats(self) -> list[int]:
        """[queries, hits, preempted queries, preempted hits] in tokens."""
        ...


EngineFactory: TypeAlias = Callable[
    [_native.SchedulerConfig, _native.StepTimeModel, _native.StepNoise | None],
    Engine,
]
