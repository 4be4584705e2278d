"""The figures of `simcluster bench` by name, with their goals."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from simcluster import _native
from simcluster.bench import (
    alone,
    decision_figures,
    engine_figures,
    instructions,
    live,
    predict_figures,
    router_figures,
    run_figures,
)
from simcluster.bench.machine import machine_class, today
from simcluster.bench.measure import Goal, Measured
from simcluster.errors import ConfigError

__all__ = ["FIGURES", "Benchmark", "Figure", "chosen", "measure_figures", "report"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """How one figure is measured.

    Attributes:
        what: what it is.
        unit: its unit.
        goal: the limit that it should keep.
        measure: called with whether to be quick.
        counts_instructions: needs valgrind.
    """

    what: str
    unit: str
    goal: Goal
    measure: Callable[[bool], Measured]
    counts_instructions: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as measured."""

    name: str
    benchmark: Benchmark
    measured: Measured

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if the goal is about another size."""
        return self.benchmark.goal.met(self.measured.value) if self.measured.judged else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "name": self.name,
            "what": self.benchmark.what,
            "value": self.measured.value,
            "low": self.measured.low,
            "high": self.measured.high,
            "unit": self.benchmark.unit,
            "goal": str(self.benchmark.goal),
            "met": self.met,
            "size": self.measured.size,
        }


def _at_most(limit: float) -> Goal:
    return Goal(limit, at_least=False)


def _at_least(limit: float) -> Goal:
    return Goal(limit, at_least=True)


def _decide(explain: str, models: int) -> Callable[[bool], Measured]:
    return partial(decision_figures.decision, _native.Explain[explain], models)


_RATE = "req/CPU-s"
_DECISION = "decision over 1000 instances of {}, {}, repeated at one instant (upkeep not included)"

FIGURES: dict[str, Benchmark] = {
    "step-growth": Benchmark(
        "step cost at batch 256 over batch 16", "times", _at_most(1.2), engine_figures.step_growth
    ),
    "instructions": Benchmark(
        "instructions per request, 1 instance", "instructions", _at_most(1500), instructions.per_request, True
    ),
    "against-cpp": Benchmark("against the plain C++ stepper", "times", _at_least(8), engine_figures.against_cpp),
    "against-python": Benchmark(
        "against a plain Python stepper", "times", _at_least(300), engine_figures.against_python
    ),
    "python-step": Benchmark("that Python stepper, a step at batch 95", "us", _at_most(25), engine_figures.python_step),
    "core-16": Benchmark(
        "core, round robin, 16 instances", _RATE, _at_least(4e6), partial(engine_figures.core_rate, 16)
    ),
    "core-1000": Benchmark(
        "core, round robin, 1000 instances", _RATE, _at_least(2.5e6), partial(engine_figures.core_rate, 1000)
    ),
    "simpy": Benchmark(
        "through SimPy, completions on time, 16 instances, round robin", _RATE, _at_least(200e3), run_figures.simpy_rate
    ),
    "run": Benchmark(
        "whole run, 1M requests, 16 instances, round robin, records written",
        "CPU s",
        _at_most(12),
        run_figures.run_seconds,
    ),
    "run-memory": Benchmark("its peak memory", "GiB", _at_most(1), run_figures.run_memory),
    "live-bytes": Benchmark(
        "bytes per live request, native and Python, beside its row in the trace",
        "bytes",
        _at_most(200),
        live.live_bytes,
    ),
    "run-sfs": Benchmark(
        "whole run under SFS, 1M requests, 100 instances, winners kept",
        "CPU s",
        _at_most(40),
        run_figures.run_sfs_seconds,
    ),
    "python-policy": Benchmark(
        "a policy written in Python, 16 instances", _RATE, _at_least(30e3), run_figures.python_policy
    ),
    "sfs-snapshot": Benchmark(
        "SFS from a snapshot, 128 running and 50 waiting", "us", _at_most(1.5), engine_figures.sfs_snapshot
    ),
    "sfs-snapshot-p99": Benchmark(
        "SFS from a snapshot, p99 over states at 95 % load", "us", _at_most(6), engine_figures.sfs_snapshot_p99
    ),
    "sfs-frontier": Benchmark("SFS from a frontier", "ns", _at_most(15), engine_figures.sfs_frontier),
    "decide-exact": Benchmark(_DECISION.format("3 models", "all estimated"), "us", _at_most(12), _decide("all", 3)),
    "decide-exact-alike": Benchmark(
        _DECISION.format("1 model", "all estimated"), "us", _at_most(12), _decide("all", 1)
    ),
    "decide-pruned": Benchmark(
        _DECISION.format("3 models", "the best and the runner-up"), "us", _at_most(0.6), _decide("runner_up", 3)
    ),
    "decide-pruned-alike": Benchmark(
        _DECISION.format("1 model", "the best and the runner-up"), "us", _at_most(0.6), _decide("runner_up", 1)
    ),
    "routed-1000": Benchmark(
        "core, routed by SFS, 1000 instances of 3 models, views that foresee exactly",
        _RATE,
        _at_least(80e3),
        decision_figures.routed_rate,
    ),
    "decide-published": Benchmark(
        "decision over 100 instances of 3 models, each with 32 residents and a new snapshot in shared memory",
        "us",
        _at_most(50),
        alone.published_decision,
    ),
    "decide-live": Benchmark(
        "the same by the live router: look at all shared memories, then policy sfs",
        "us",
        _at_most(50),
        alone.routers_decision,
    ),
    "router-cpu": Benchmark(
        "live router, a streamed answer of 50 events, unpaced", "CPU ms", _at_most(0.5), router_figures.router_cpu
    ),
    "router-cpu-paced": Benchmark(
        "the same at 64 streams with 5 ms between events", "CPU ms", _at_most(1.2), router_figures.router_cpu_paced
    ),
    "router-ttft": Benchmark(
        "live router, added to the first event, one stream", "ms", _at_most(1), router_figures.router_added_ttft
    ),
    "predict": Benchmark(
        "predictions for one request: features and both heads for all models",
        "us",
        _at_most(300),
        predict_figures.prediction,
    ),
}


def chosen(names: list[str], *, count_instructions: bool) -> list[str]:
    """Return the figures to measure: those named, else all; those that need valgrind only if asked for.

    Raises:
        ConfigError: no figure has such a name.
    """
    for name in names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, [*FIGURES, "cost"], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIGURES)}, and cost"
            raise ConfigError(f"bench {name}: no figure has this name; {hint}")
        if FIGURES[name].counts_instructions and not count_instructions:
            raise ConfigError(f"bench {name}: counts instructions under valgrind; add --instructions")
    if names:
        return list(dict.fromkeys(names))
    return [name for name, each in FIGURES.items() if count_instructions or not each.counts_instructions]


def measure_figures(
    names: list[str], *, quick: bool = False, on_start: Callable[[str], None] = lambda _: None
) -> list[Figure]:
    """Measure figures one after the other.

    Args:
        names: keys of FIGURES.
        quick: smaller sizes; each figure says its own.
        on_start: called with each name before it is measured.

    Raises:
        ConfigError: valgrind is needed and missing.
        SimulationError: a run that is measured failed.
    """
    figures = []
    for name in names:
        on_start(name)
        figures.append(Figure(name, FIGURES[name], FIGURES[name].measure(quick)))
    return figures


def report(figures: list[Figure]) -> dict[str, Any]:
    """Return figures with the date and the class of machine, as plain data."""
    return {"date": today(), "machine": machine_class(), "figures": [figure.as_dict() for figure in figures]}
