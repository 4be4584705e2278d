"""Events of SimPy without processes: an action at an instant, with a fixed order of what happens at the same one."""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappush
from typing import Any

import simpy
from simpy.events import EventPriority

from simcluster._native import NEVER

__all__ = ["Alarm", "Order", "at_once"]


class Order(IntEnum):
    """Order of events at one instant."""

    END = 0
    CAPTURE = 1
    REFRESH = 2
    ARRIVAL = 3
    SAMPLE = 4
    STOP = 5


def at_once(env: simpy.Environment, order: Order, action: Callable[[], None], delay_ps: int = 0) -> None:
    """Do something once, after a delay [ps]."""
    event = simpy.Event(env)
    event._ok, event._value = True, None  # as simpy.Timeout does: it happens without being triggered
    event.callbacks.append(lambda _: action())
    env.schedule(event, priority=EventPriority(int(order)), delay=delay_ps)


class Alarm(simpy.Event):
    """One thing to do again and again, planned for one instant at a time; to set it anew is to move it.

    The action is told the instant [ps].

    Attributes:
        at_ps: when it will happen [ps]; NEVER while it is not planned.
    """

    def __init__(self, env: simpy.Environment, order: Order, action: Callable[[int], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._priority, self._action = EventPriority(int(order)), action
        self.at_ps: int = NEVER
        self._queue, self._ids = env._queue, env._eid
        self._again: list[Callable[[Any], None]] = [self._happen]
        self.callbacks = self._again

    def set(self, at_ps: int) -> None:
        """Plan it for an instant [ps], not before now."""
        if at_ps != self.at_ps:
            self.at_ps = at_ps
            heappush(self._queue, (at_ps, self._priority, next(self._ids), self))  # as Environment.schedule does

    def _happen(self, _event: simpy.Event) -> None:
        self.callbacks = self._again  # SimPy takes them away, since its own events happen once
        now = self.at_ps
        if now == self.env._now:  # else it was moved
            self.at_ps = NEVER
            self._action(now)
