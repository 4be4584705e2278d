"""Policies of users for tests, loaded as `recording_policy:Name`."""

# ruff: noqa: ARG002

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from simcluster.request import Request
from simcluster.routers import ClusterView, Decision, RouterSettings


class RoundRobin:
    """Takes no settings, returns an index, and notes what it is told in `LOG`."""

    built: ClassVar[int] = 0

    def __init__(self) -> None:
        self._next = -1
        self._number = RoundRobin.built
        RoundRobin.built += 1

    def route(self, request: Request, view: ClusterView) -> int:
        LOG.append(("route", request.index, view.now_ps, None))
        self._next = (self._next + 1) % len(view.instances)
        return self._next

    def observe_dispatch(self, request: Request, instance: int) -> None:
        LOG.append(("dispatch", request.index, instance, self._number))

    def observe_first_token(self, request_index: int, instance: int, ttft_s: float) -> None:
        LOG.append(("first_token", request_index, instance, ttft_s))

    def observe_end(self, request_index: int, instance: int) -> None:
        LOG.append(("end", request_index, instance, self._number))


LOG: list[tuple[str, int, int, float | None]] = []


@dataclass
class Fixed:
    """A dataclass with parameters: always the same answer, whatever it is."""

    settings: RouterSettings
    answer: str = "0"
    blind: bool = False
    factor: float = field(default=1.0)

    @property
    def needs_view(self) -> bool:
        return not self.blind

    def route(self, request: Request, view: ClusterView) -> Any:
        answers: dict[str, Any] = {
            "none": None,
            "true": True,
            "float": 0.5,
            "text": "a",
            "minus": -1,
            "big": Decision(7),
            "short": Decision(0, score=[1.0, 2.0, 3.0]),  # type: ignore[arg-type]
            "lists": Decision(1, "mine", score=[0, 1]),  # type: ignore[arg-type]
            "shed": Decision(-1, "mine"),
        }
        return answers.get(self.answer, int(self.answer) if self.answer.isdigit() else None)


class Raising:
    """Fails at its third request, or when it is told something."""

    needs_view = False

    def __init__(self, settings: RouterSettings, *, where: str = "route") -> None:
        self._where = where
        self._asked = 0
        if where == "init":
            raise KeyError("no such thing")

    def route(self, request: Request, view: ClusterView) -> int:
        self._asked += 1
        if self._where == "route" and self._asked == 3:
            return 1 // (self._asked - 3)
        return 0

    def observe_end(self, request_index: int, instance: int) -> None:
        if self._where == "observe":
            raise RuntimeError("two\nlines")


class Unfair:
    """Breaks what every policy promises: ignores health, uses global chance, takes the first of equals."""

    def route(self, request: Request, view: ClusterView) -> int:
        return 0 if random.random() < 0.9 else len(view.instances) - 1


NOT_A_POLICY = 3
