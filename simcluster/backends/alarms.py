"""Events of SimPy without processes: an action at an instant, with a fixed order of what happens at the same one."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import simpy
from simpy.events import EventPriority

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
    """

    def __init__(self, env: simpy.Environment, order: Order, action: Callable[[int], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._priority, self._action = EventPriority(int(order)), action
        self._at = -1
        self._again: list[Callable[[Any], None]] = [self._happen]
        self.callbacks = self._again

    def set(self, at_ps: int) -> None:
        """Plan it for an instant [ps], not before now."""
        if at_ps != self._at:
            self._at = at_ps
            self.env.schedule(self, self._priority, at_ps - self.env._now)

    def _happen(self, _event: simpy.Event) -> None:
        self.callbacks = self._again  # SimPy takes them away, since its own events happen once
        now = self._at
        if now == self.env._now:  # else it was moved
            self._at = -1
            self._action(now)
