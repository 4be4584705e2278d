"""What a replay has to know at the beginning of a file: open requests and what each view was shown last."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from simcluster import _native
from simcluster.live.router.log.columns import ENDED, FORGOTTEN, OPEN, RECONFIGURED, SHOWN, Event
from simcluster.live.router.own import OwnRequest

__all__ = ["InstanceState"]


@dataclass(slots=True)
class InstanceState:
    """What has happened at one instance, as far as its view remembers it.

    Attributes:
        index: the instance.
        options: as JSON, if it has others than the scenario says.
        source: of the last snapshot.
        snapshot: the last one, or None.
        open: own requests.
        sent_since: those of them that were sent since the last snapshot.
        unseen: those of them that no snapshot has told of yet.
        ended_since: requests that were open at the last snapshot and are not any more: it tells of them nevertheless.
    """

    index: int
    options: str | None = None
    source: str = ""
    snapshot: _native.Snapshot | None = None
    open: dict[int, OwnRequest] = field(default_factory=dict)
    sent_since: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)
    ended_since: list[OwnRequest] = field(default_factory=list)

    def shown(self, source: str, snapshot: _native.Snapshot) -> None:
        """Note a snapshot."""
        if source != self.source:
            self.unseen = set(self.open)  # which the view is told of again
        self.source, self.snapshot = source, snapshot
        if self.unseen:
            self.unseen.difference_update(snapshot.request_ids)
        if self.sent_since:
            self.sent_since = set()
        if self.ended_since:
            self.ended_since = []

    def reconfigured(self, options: str) -> None:
        """Note that a view was made anew."""
        self.options, self.source, self.snapshot = options, "", None
        self.sent_since, self.ended_since = set(), []
        self.unseen = set(self.open)  # which the new view is told of again

    def sent(self, own: OwnRequest) -> None:
        """Note a request that left."""
        self.open[own.id] = own
        self.sent_since.add(own.id)
        self.unseen.add(own.id)

    def ended(self, number: int) -> None:
        """Note that a request is not open any more."""
        own = self.open.pop(number)
        self.unseen.discard(number)
        if number in self.sent_since:
            self.sent_since.discard(number)
        else:
            self.ended_since.append(own)

    def events(self) -> Iterator[Event]:
        """Yield what makes a new view know what the dispatcher's does."""
        j = self.index
        if self.options is not None:
            yield RECONFIGURED, True, j, self.options
        before = [each for number, each in self.open.items() if number not in self.sent_since]
        for own in (*self.ended_since, *before):
            yield OPEN, True, j, own
        if self.snapshot is not None:
            yield SHOWN, True, j, self.source, self.snapshot
            for number in self._seen_before(before, self.snapshot):
                yield FORGOTTEN, True, j, number
        for own in self.ended_since:
            yield ENDED, True, own.id, j, 0
        for number in self.open:
            if number in self.sent_since:
                yield OPEN, True, j, self.open[number]

    def _seen_before(self, before: list[OwnRequest], snapshot: _native.Snapshot) -> list[int]:
        """Return open requests that were in earlier snapshots and are not in the last: the engine has ended them.

        Where ids alone tell what a snapshot includes, a view made anew would take them for requests to come.
        """
        if snapshot.intake >= 0:
            return []
        inside = set(snapshot.request_ids)
        return [each.id for each in before if each.id not in inside and each.id not in self.unseen]
