"""The contract of a backend: something that serves requests and publishes snapshots."""

from typing import Protocol

from simcluster import _native
from simcluster.instance import InstanceSpec
from simcluster.request import Request

__all__ = ["Backend"]


class Backend(Protocol):
    """One instance behind the router, simulated or real."""

    spec: InstanceSpec

    def submit(self, request: Request, sent_ps: int) -> None:
        """Send a request that leaves the router at an instant [ps]."""
        ...

    def snapshot(self) -> _native.Snapshot:
        """Return the last complete snapshot."""
        ...
