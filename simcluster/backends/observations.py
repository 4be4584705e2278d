"""What routers are told about the requests that they sent, at the time at which the client saw it."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from simcluster import _native
from simcluster.request import Request
from simcluster.units import PS_PER_S

__all__ = ["Observations"]

_FIRST, _END = 0, 1  # at one instant a request's first token comes before its end
_FIRST_TOKEN = int(_native.EventKind.first_token)


class Observations:
    """Holds back what happens until the router's next decision, then tells it in order of time.

    What a router hears does not depend on when engines were advanced: at a decision all events up to then are
    known, and they are sorted by instant, kind and request.
    """

    def __init__(self, routers: Sequence[object]) -> None:
        self._dispatch = [_method(router, "observe_dispatch") for router in routers]
        self._tell = [(_method(router, "observe_first_token"), _method(router, "observe_end")) for router in routers]
        self._pending: list[list[tuple[int, int, int, int, int]]] = [[] for _ in routers]
        self._sent: dict[int, tuple[int, int, int]] = {}  # request: router, instance, arrival [ps]

    def wanted(self, router: int) -> bool:
        """Whether a router listens to what happens to its requests."""
        return self._tell[router] != (None, None)

    def tells_dispatches(self, router: int) -> bool:
        """Whether `sent` has anything to do for a router."""
        return self._dispatch[router] is not None or self.wanted(router)

    def sent(self, router: int, request: Request, instance: int) -> None:
        """Note who sent a request, and tell that router."""
        if self.wanted(router):
            self._sent[request.index] = (router, instance, request.arrival_ps)
        tell = self._dispatch[router]
        if tell is not None:
            tell(request, instance)

    def add(self, request: int, kind: int, seen_ps: int) -> None:
        """Take what a client was told: the first token or the end of a request."""
        if request not in self._sent:
            return
        what = _FIRST if kind == _FIRST_TOKEN else _END
        router, instance, arrival_ps = self._sent[request] if what == _FIRST else self._sent.pop(request)
        heappush(self._pending[router], (seen_ps, what, request, instance, arrival_ps))

    def deliver(self, router: int, now_ps: int) -> None:
        """Tell a router what its clients have seen up to now."""
        pending, (on_first_token, on_end) = self._pending[router], self._tell[router]
        while pending and pending[0][0] <= now_ps:
            seen_ps, what, request, instance, arrival_ps = heappop(pending)
            if what == _END and on_end is not None:
                on_end(request, instance)
            elif what == _FIRST and on_first_token is not None:
                on_first_token(request, instance, (seen_ps - arrival_ps) / PS_PER_S)


def _method(router: object, name: str) -> Callable[..., Any] | None:
    method: Callable[..., Any] | None = getattr(router, name, None)
    return method
