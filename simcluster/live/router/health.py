"""Which servers may be asked: failures in a row mark one, marks expire, and one request at a time tries it again."""

from dataclasses import dataclass, field

from simcluster.scenario import Live
from simcluster.units import ps_from_seconds

__all__ = ["Health"]

_LONGEST = 12  # times the first mark


@dataclass(slots=True)
class Health:
    """One server.

    A failure is one of the server: no connection, no answer in time, a status of 500 and above. What is wrong with a
    request, or a server that is merely full (429), is none.

    Attributes:
        number: of the server.
        marks: numbers of all servers that are marked.
        failures: in a row.
        marked_until_ps: it is not asked before this instant [ps]; -1: it is well.
        probe: the request that tries it after a mark, or None.
    """

    number: int = 0
    marks: set[int] = field(default_factory=set)
    failures: int = 0
    marked_until_ps: int = -1
    probe: int | None = None
    _mark_ps: int = 0

    def may_be_asked(self, now_ps: int) -> bool:
        """Return whether it is well, or due to be tried and nobody does."""
        return self.marked_until_ps < 0 or (now_ps >= self.marked_until_ps and self.probe is None)

    @property
    def is_marked(self) -> bool:
        """Whether it has failed too often and has not answered since."""
        return self.marked_until_ps >= 0

    def asked(self, request: int) -> None:
        """Note that a request goes there; after a mark it is the one that tries."""
        if self.is_marked:
            self.probe = request

    def answered(self, request: int) -> None:
        """Note that it answered a request: it is well."""
        self.failures, self.marked_until_ps, self._mark_ps = 0, -1, 0
        self.marks.discard(self.number)
        self.gave_up(request)

    def failed(self, request: int, now_ps: int, live: Live, *, at_once: bool = False) -> None:
        """Note a failure.

        Args:
            request: whose.
            now_ps: this instant [ps].
            live: how many failures mark a server, and for how long.
            at_once: one is enough, since nobody is there.
        """
        self.failures += 1
        if self.is_marked or at_once or self.failures >= live.trip_after:
            first = ps_from_seconds(live.mark_s)
            if self.probe == request or not self.is_marked:  # others were sent before it was marked
                self._mark_ps = min(max(2 * self._mark_ps, first), _LONGEST * first)
            self.marked_until_ps = now_ps + self._mark_ps
            self.marks.add(self.number)
        self.gave_up(request)

    def gave_up(self, request: int) -> None:
        """Note that a request ended without telling anything of the server."""
        if self.probe == request:
            self.probe = None
