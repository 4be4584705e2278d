"""Replay of a log: a dispatcher made anew is told what the router was told, and must decide the same, bit for bit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from simcluster import _native
from simcluster.errors import ConfigError, SimclusterError
from simcluster.live.router.dispatcher import Dispatcher
from simcluster.live.router.log.columns import (
    DECIDED,
    ENDED,
    FIRST_TOKEN,
    FORGOTTEN,
    OPEN,
    RECONFIGURED,
    SENT,
    SHOWN,
    EventRows,
    Row,
    outcome_of,
    own_request,
)
from simcluster.live.router.log.manifest import MANIFEST, options_from_json, policy_changes, rebuild, versions
from simcluster.live.router.log.reader import Log, open_log
from simcluster.live.router.sight import Sight
from simcluster.request import Request
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["Difference", "Report", "replay"]

_NUMBERS: Final = ("predicted_ttft_s", "score", "beside")


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise.

    Attributes:
        decision: its number among those replayed, from 0.
        request: the number that stands for its request.
        file: where it is logged.
        field: what differs first.
        logged: the value in the log.
        replayed: the value now.
    """

    decision: int
    request: int
    file: str
    field: str
    logged: Any
    replayed: Any


@dataclass(slots=True)
class Report:
    """What a replay found.

    Attributes:
        decisions: replayed.
        identical: of them.
        events: told, keyframes left out.
        first_file: number of the first file.
        files: how many were read.
        first_difference: or None.
        notes: what limits the comparison, for people.
    """

    decisions: int = 0
    identical: int = 0
    events: int = 0
    first_file: int = 1
    files: int = 0
    first_difference: Difference | None = None
    notes: list[str] = field(default_factory=list)


def replay(folder: Path, start: int | None = None) -> Report:
    """Replay a log.

    Args:
        folder: as it was given to `router --log`.
        start: number of the first file; None: the first that is there.

    Raises:
        ConfigError: the log cannot be read or is not whole.
        SimclusterError: its policy cannot be built.
    """
    log = open_log(folder, start)
    world, scenario = rebuild(log.manifest, str(folder / MANIFEST))
    telling = _Telling(world, scenario, log.manifest["policy"], from_start=min(log.files) == 1)
    report = telling.report
    report.first_file, report.files = min(log.files), len(log.files)
    report.notes += _notes(log)
    for path, row in log.rows():
        try:
            telling.tell(row, path.name, first=path == log.files[report.first_file])
        except SimclusterError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{path}: event {row['seq']} ({row['kind']}): {said}; the file was changed") from None
    return report


def _notes(log: Log) -> list[str]:
    notes = []
    if min(log.files) > 1:
        notes.append(
            f"starts at file {min(log.files)}: what the policy itself remembers from before (random numbers, turns, "
            "observed TTFTs) is not known, so that decisions that rest on it may differ; candidates that only one side "
            "estimated, since one estimate more was at hand, are not compared"
        )
    if log.unfinished:
        notes.append(f"not whole and left out: {', '.join(log.unfinished)}")
    now = versions()
    changed = [f"{name} {old} then, {now.get(name)} now" for name, old in log.manifest["versions"].items()
               if now.get(name) != old]  # fmt: skip
    if changed:
        notes.append(f"other versions: {'; '.join(changed)}")
    if gone := policy_changes(log.manifest):
        notes.append(f"changed since, or gone: {', '.join(gone)}")
    return notes


class _Telling:
    """Tells a dispatcher made anew what is in a log."""

    def __init__(self, world: World, scenario: Scenario, policy: str, *, from_start: bool) -> None:
        self.report = Report()
        self._from_start = from_start
        self._rows = EventRows(world.known.group_of_instance)
        self._dispatcher = Dispatcher(world, scenario, policy, lambda view, own: Sight(view.views, own))
        self._requests: dict[int, Request] = {}
        self._tellers = {
            SHOWN: self._shown,
            DECIDED: self._decided,
            SENT: self._sent,
            FIRST_TOKEN: self._first_token,
            ENDED: self._ended,
            RECONFIGURED: self._reconfigured,
            OPEN: self._open,
            FORGOTTEN: self._forgotten,
        }
        self._file = ""

    def tell(self, row: Row, file: str, *, first: bool) -> None:
        """Tell one event; of keyframes, those of the first file alone.

        Raises:
            ValueError, KeyError: the row makes no sense.
        """
        if row["keyframe"]:
            if first:
                self._tellers[row["kind"]](row)
            return
        self._file = file
        self.report.events += 1
        self._tellers[row["kind"]](row)

    def _shown(self, row: Row) -> None:
        snapshot = _native.Snapshot.from_bytes(row["snapshot"])
        self._dispatcher.sight.show(row["instance"], row["source"], snapshot)

    def _open(self, row: Row) -> None:
        self._dispatcher.own.resume(row["instance"], own_request(row), self._dispatcher.view.views[row["instance"]])

    def _forgotten(self, row: Row) -> None:
        self._dispatcher.view.views[row["instance"]].forget_dispatch(row["request"])

    def _sent(self, row: Row) -> None:
        self._dispatcher.sent(self._requests[row["request"]], row["instance"], row["at_ps"])

    def _first_token(self, row: Row) -> None:
        self._dispatcher.first_token(row["request"], row["instance"], row["at_ps"])

    def _ended(self, row: Row) -> None:
        self._requests.pop(row["request"], None)
        self._dispatcher.ended(row["request"], row["instance"], row["at_ps"])

    def _reconfigured(self, row: Row) -> None:
        self._dispatcher.reconfigure(row["instance"], options_from_json(row["options"]))

    def _decided(self, row: Row) -> None:
        request = self._rows.request(row)
        self._requests[request.index] = request
        sight, count = self._dispatcher.sight, len(self._dispatcher.health)
        sight.tiers[:] = row["tiers"]
        sight.ages_ps[:] = np.frombuffer(row["ages_ps"], np.int64).tolist()
        allowed = tuple(map(bool, row["allowed"]))
        if not len(allowed) == len(sight.tiers) == len(sight.ages_ps) == count:
            raise ValueError(f"is not for {count} instances")
        made = self._dispatcher.decide_among(request, row["at_ps"], allowed, none_healthy=row["none_healthy"])
        found = outcome_of(made)
        report = self.report
        logged = row if self._from_start else _where_both(row, found)
        differing = next((name for name, value in found.items() if value != logged[name]), None)
        if differing is None:
            report.identical += 1
        elif report.first_difference is None:
            then, now = (_shown_value(differing, each[differing]) for each in (row, found))
            report.first_difference = Difference(report.decisions, request.index, self._file, differing, then, now)
        report.decisions += 1


def _where_both(row: Row, found: Row) -> Row:
    """Return a logged decision with estimates that only one side made replaced by those of the replay.

    A candidate that can neither win nor come second is estimated only where a view has its estimate at hand already,
    which does not touch the choice and cannot be known after a keyframe.
    """
    then, now = row["predicted_ttft_s"], found["predicted_ttft_s"]
    if then is None or now is None or len(then) != len(now):
        return row
    one_side = np.isnan(np.frombuffer(then)) != np.isnan(np.frombuffer(now))
    if not one_side.any() or one_side[found["instance"]]:
        return row
    merged = dict(row)
    for name in ("predicted_ttft_s", "score"):
        if row[name] is not None and found[name] is not None:
            merged[name] = np.where(one_side, np.frombuffer(found[name]), np.frombuffer(row[name])).tobytes()
    return merged


def _shown_value(name: str, value: Any) -> Any:
    """Return a value for people: numbers to the last bit."""
    if name not in _NUMBERS or value is None:
        return value
    return [float(each).hex() if np.isfinite(each) else str(each) for each in np.frombuffer(value, np.float64)]
