"""What a live router sees of its instances: snapshots from shared memory, or from its own streams and `/metrics`.

Whatever tells the state of an instance, a view gets a snapshot, and its own dispatches since are counted on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from simcluster import _native
from simcluster.instance import InstanceSpec
from simcluster.live.endpoints import METRICS, SHARED_MEMORY, Endpoint
from simcluster.live.router.gauges import Gauges
from simcluster.live.router.own import OwnRequests
from simcluster.live.router.streams import Others, OwnStreams, others_of
from simcluster.scenario import Live
from simcluster.units import PS_PER_NS, ps_from_seconds

__all__ = ["FRESH", "OLD", "SOURCES", "STREAMS", "TIERS", "USABLE", "LiveSight", "Sight", "SightLog"]

TIERS: Final = ("fresh", "usable", "old")
FRESH, USABLE, OLD = range(len(TIERS))
STREAMS: Final = "streams"  # the router's own streams alone
SOURCES: Final = (SHARED_MEMORY, METRICS, STREAMS)
_NOBODY = Others()
_QUIET_PS = ps_from_seconds(0.02)  # own streams make a new snapshot so often at most


class SightLog(Protocol):
    """Is told of every snapshot that a view gets."""

    def shown(self, instance: int, source: str, snapshot: _native.Snapshot) -> None:
        """Note a snapshot."""
        ...


@dataclass(slots=True)
class Sight:
    """The views of all instances, j of them.

    Attributes:
        views: (j,) what the router's policy looks at.
        own: the open requests.
        tiers: (j,) FRESH, USABLE or OLD: how far each view can be trusted.
        ages_ps: (j,) since when nothing was heard of each instance [ps]; -1 where nothing ever was.
        sources: (j,) what each view shows: one of SOURCES, or "" before the first look.
    """

    views: list[_native.InstanceView]
    own: OwnRequests
    tiers: list[int] = field(init=False)
    ages_ps: list[int] = field(init=False)
    sources: list[str] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.views)
        self.tiers, self.ages_ps, self.sources = [OLD] * count, [-1] * count, [""] * count

    def age_ps(self, instance: int) -> int:
        """Return since when nothing was heard of an instance [ps]; -1 where nothing ever was."""
        return self.ages_ps[instance]

    def look(self, now_ps: int) -> None:
        """Bring every view up to an instant [ps]; whoever is told what was seen has nothing to do."""

    def restarted(self) -> list[tuple[int, _native.SchedulerConfig]]:
        """Return which instances go on with which options, met since the last call."""
        return []

    def replace_view(self, instance: int, view: _native.InstanceView) -> None:
        """Go on with another view of an instance, which has seen nothing yet."""
        self.views[instance] = view
        self.sources[instance] = ""

    def show(self, instance: int, source: str, snapshot: _native.Snapshot) -> None:
        """Give a view a snapshot."""
        if source != self.sources[instance]:  # who knows which of the router's requests the new source has seen
            self.own.tell_again(instance, self.views[instance])
            self.sources[instance] = source
        self.views[instance].refresh(snapshot)


@dataclass(slots=True)
class _Heard:
    """What was heard of one instance.

    Attributes:
        token_ps: when a token or an end came last [ps].
        made_ps: when own streams made the last snapshot [ps].
        events: the count of events that it shows.
        gauges_ps: when `/metrics` was read last [ps]; -1: never.
        others: what it told of other clients.
        others_seen: the snapshot has them.
    """

    token_ps: int = 0
    made_ps: int = -_QUIET_PS
    events: int = -1
    gauges_ps: int = -1
    others: Others = _NOBODY
    others_seen: bool = True


class LiveSight(Sight):
    """Sight by the sources that a scenario names.

    Args:
        instances: (j,).
        views: (j,).
        own: the open requests.
        endpoints: (j,) where the states come from.
        live: how old a view may be.
        mean_tokens: (j,) prompt and answer length that stand for requests of others [tokens].
        epoch_ns: CLOCK_MONOTONIC at the router's 0 [ns].
        speed: seconds of the router's clock per second.
        log: told of every snapshot that is shown, or None.
        clock_ns: CLOCK_MONOTONIC [ns].
    """

    def __init__(
        self,
        instances: Sequence[InstanceSpec],
        views: list[_native.InstanceView],
        own: OwnRequests,
        endpoints: Sequence[Endpoint],
        live: Live,
        mean_tokens: Sequence[tuple[int, int]],
        epoch_ns: int,
        speed: float = 1.0,
        log: SightLog | None = None,
        clock_ns: Callable[[], int] = _native.monotonic_ns,
    ) -> None:
        super().__init__(views, own)
        self._endpoints = endpoints
        self._fresh_ps, self._usable_ps = ps_from_seconds(live.fresh_s), ps_from_seconds(live.usable_s)
        self._readers = {
            j: _native.SnapshotReader(each.channel, epoch_ns, speed)
            for j, each in enumerate(endpoints)
            if each.source == SHARED_MEMORY
        }
        self._changes = dict.fromkeys(self._readers, 0)
        self._all: _native.SnapshotReaders | None = None  # while every view shows shared memory
        self._fresh_ns, self._usable_ns = (int(each * 1e9 / speed) for each in (live.fresh_s, live.usable_s))
        self._all_fresh = [FRESH] * len(instances)
        self._generations = dict.fromkeys(self._readers, 0)
        self._num_met = self._num_followed = 0  # publishers, over all instances
        self._streams = [OwnStreams(spec, *mean) for spec, mean in zip(instances, mean_tokens, strict=True)]
        self._heard = [_Heard() for _ in instances]
        self._speed = speed
        self._log = log
        self._clock_ns = clock_ns

    def look(self, now_ps: int) -> None:
        """Bring every view up to an instant [ps], as far as anything is known."""
        if self._look_at_once():
            return
        self._all = None
        self.tiers = list(self.tiers)
        for j, endpoint in enumerate(self._endpoints):
            if endpoint.source == SHARED_MEMORY:
                self._look_into_memory(j)
            elif endpoint.source == METRICS:
                self._look_at_gauges(j, now_ps)
            else:
                self._note(j, OLD, -1)
            if self.tiers[j] == OLD:
                self._show_streams(j, STREAMS, now_ps, _NOBODY)

    def tokens_came(self, instance: int, now_ps: int) -> None:
        """Note that an instance sent a token or ended a request at an instant [ps]."""
        self._heard[instance].token_ps = now_ps

    def gauges_came(self, instance: int, gauges: Gauges, now_ps: int) -> None:
        """Note what `/metrics` of an instance told at an instant [ps]."""
        heard, own = self._heard[instance], self.own.open[instance].values()
        if gauges.running is None and gauges.waiting is None:
            return  # it tells nothing: it stays unknown
        heard.others = others_of(gauges, sum(1 for each in own if each.tokens), len(own))
        heard.gauges_ps, heard.others_seen = now_ps, False

    def meet(self) -> None:
        """Learn which publishers have gone or come; between decisions, since the kernel must be asked."""
        if self._all is not None:
            self._all.ask(self._clock_ns())
            self._num_met = self._all.num_writers

    def restarted(self) -> list[tuple[int, _native.SchedulerConfig]]:
        """Return whose publisher was met since the last call, with the options that it really has."""
        if self._all is None:  # each reader has just asked for itself
            self._num_met = sum(each.generation for each in self._readers.values())
        if self._num_met == self._num_followed:
            return []
        self._num_followed = self._num_met
        found = [(j, each.config) for j, each in self._readers.items() if each.generation != self._generations[j]]
        self._generations = {j: each.generation for j, each in self._readers.items()}
        return found

    def replace_view(self, instance: int, view: _native.InstanceView) -> None:
        """Go on with another view of an instance."""
        super().replace_view(instance, view)
        self._all = None

    def _note(self, instance: int, tier: int, age_ps: int) -> None:
        self.tiers[instance], self.ages_ps[instance] = tier, age_ps

    def _tier(self, age_ps: int) -> int:
        return FRESH if age_ps <= self._fresh_ps else USABLE if age_ps <= self._usable_ps else OLD

    def _look_at_once(self) -> bool:
        """Look in one call if every view shows shared memory; False if one is too old, or if looks are logged."""
        if self._all is None:
            if self._log is not None or self.sources.count(SHARED_MEMORY) < len(self.sources):
                return False
            self._all = _native.SnapshotReaders(list(self._readers.values()), self.views)
        late = self._all.refresh(self._clock_ns(), self._fresh_ns)
        self.tiers = self._all_fresh
        if late:
            self.tiers = list(self._all_fresh)
            for j in late:
                if self._readers[j].age_ns > self._usable_ns:
                    return False
                self.tiers[j] = USABLE
        return True

    def age_ps(self, instance: int) -> int:
        """Return since when nothing was heard of an instance [ps]; -1 where nothing ever was."""
        if self._all is not None:
            return int(self._readers[instance].age_ns * self._speed) * PS_PER_NS
        return self.ages_ps[instance]

    def _look_into_memory(self, j: int) -> None:
        reader = self._readers[j]
        snapshot, age_ns, state = reader.read(self._clock_ns())
        if snapshot is None or age_ns is None:
            self._note(j, OLD, -1)
            return
        age_ps = int(age_ns * self._speed) * PS_PER_NS
        # While its writer lives, an idle engine has nothing to publish; a busy one that is silent hangs or computes.
        resident = snapshot.num_running + snapshot.num_waiting + sum(snapshot.left_out[:2])
        idle = state == _native.SourceState.live and not resident
        tier = FRESH if idle else self._tier(age_ps)
        self._note(j, tier, age_ps)
        if tier == OLD:
            return
        if self._changes[j] != reader.num_changes or self.sources[j] != SHARED_MEMORY:
            self._changes[j] = reader.num_changes
            self._show(j, SHARED_MEMORY, snapshot)

    def _look_at_gauges(self, j: int, now_ps: int) -> None:
        heard = self._heard[j]
        if heard.gauges_ps < 0:
            self._note(j, OLD, -1)
            return
        age_ps = now_ps - max(heard.gauges_ps, heard.token_ps)
        self._note(j, self._tier(age_ps) if now_ps - heard.gauges_ps <= self._usable_ps else OLD, age_ps)
        if self.tiers[j] != OLD:
            self._show_streams(j, METRICS, now_ps, heard.others)

    def _show_streams(self, j: int, source: str, now_ps: int, others: Others) -> None:
        """Make a snapshot from own streams if anything was heard since the last one."""
        heard, events = self._heard[j], self.own.num_events[j]
        news = events != heard.events or heard.token_ps > heard.made_ps
        if source == METRICS:
            news = news or not heard.others_seen
        if source == self.sources[j] and (not news or now_ps < heard.made_ps + _QUIET_PS):
            return
        at_ps = min(now_ps, max(heard.token_ps, heard.gauges_ps if source == METRICS else 0))
        heard.made_ps, heard.events, heard.others_seen = now_ps, events, True
        self._show(j, source, self._streams[j].snapshot(self.own.open[j], at_ps, others))

    def _show(self, instance: int, source: str, snapshot: _native.Snapshot) -> None:
        self.show(instance, source, snapshot)
        if self._log is not None:
            self._log.shown(instance, source, snapshot)
