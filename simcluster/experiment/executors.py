"""Where cells are run. An executor is a function from cells to results, in whatever order they come."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol

from simcluster.experiment.cells import Cell, CellFailure, CellResult

__all__ = ["EXECUTORS", "Executor", "LocalProcesses", "Outcome", "Work", "run_cells"]

Outcome = CellResult | CellFailure
Work = Callable[[Cell], Outcome]


class Executor(Protocol):
    """Runs cells, somewhere."""

    def __call__(self, cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Outcome]]:
        """Run every cell once and yield its outcome as it comes; a cell that cannot be run is a failure."""


@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """Processes of this machine, each started afresh, so that nothing of this one leaks into a result.

    Attributes:
        workers: number of processes.
    """

    workers: int

    def __call__(self, cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Outcome]]:
        """Run the cells; one whose process dies fails, and the others go on in new processes."""
        waiting = deque(cells)
        while waiting:
            suspects = yield from self._run(waiting, work, min(self.workers, len(waiting)))
            for cell in suspects:  # one of them took the pool down; alone, it shows which
                if (yield from self._run(deque([cell]), work, 1)):
                    yield cell, CellFailure("its process died (killed, out of memory, or a crash)")

    def _run(self, waiting: deque[Cell], work: Work, workers: int) -> Generator[tuple[Cell, Outcome], None, list[Cell]]:
        """Run cells in one pool until all are done or a process dies; return those that were in flight then."""
        context = multiprocessing.get_context("spawn")
        running: dict[Future[Outcome], Cell] = {}
        others = set(multiprocessing.active_children())
        with _one_thread_each(), ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < workers:
                        with _no_interrupt():
                            running[pool.submit(work, waiting[0])] = waiting[0]
                        waiting.popleft()
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        error = future.exception()
                        if isinstance(error, BrokenProcessPool):
                            return list(running.values())
                        cell = running.pop(future)
                        yield cell, CellFailure(f"{type(error).__name__}: {error}") if error else future.result()
            except BrokenProcessPool:  # noticed while handing in the next cell
                return list(running.values())
            except BaseException:  # Ctrl-C: nobody waits for what is half done
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
                raise
        return []


EXECUTORS: dict[str, Callable[[int], Executor]] = {"local": LocalProcesses}


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let libraries use one thread per process: many processes, and sums in the same order on every machine."""
    wanted = dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back for a moment; a process that is started meanwhile never gets it, it is the parent's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    """Do not outlive the parent, even if it is killed."""
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    parent.join()
    os._exit(1)


class Store(Protocol):
    """Where results are kept."""

    def load(self, cell: Cell) -> CellResult | None:
        """Return a stored result."""

    def save(self, cell: Cell, result: CellResult) -> None:
        """Store a result."""


def run_cells(
    cells: Sequence[Cell],
    executor: Executor,
    work: Work,
    store: Store | None = None,
    on_done: Callable[[Cell, Outcome, bool], None] = lambda _cell, _outcome, _was_stored: None,
) -> dict[str, Outcome]:
    """Return the outcome of every cell by its key; what is stored is not run again.

    Args:
        cells: what to run; equal cells run once.
        executor: where.
        work: what runs one cell.
        store: where results are kept, or None.
        on_done: called with each cell, its outcome and whether it was stored before.
    """
    outcomes: dict[str, Outcome] = {}
    missing: dict[str, Cell] = {}
    for cell in {cell.key: cell for cell in cells}.values():
        stored = None if store is None else store.load(cell)
        if stored is None:
            missing[cell.key] = cell
        else:
            outcomes[cell.key] = stored
            on_done(cell, stored, True)
    with contextlib.closing(_as_generator(executor(list(missing.values()), work))) as results:
        for cell, outcome in results:
            if store is not None and isinstance(outcome, CellResult):
                store.save(cell, outcome)
            outcomes[cell.key] = outcome
            on_done(cell, outcome, False)
    return outcomes


def _as_generator(results: Iterator[tuple[Cell, Outcome]]) -> Generator[tuple[Cell, Outcome], None, None]:
    """Make sure that an executor can be closed early, whatever kind of iterator it returns."""
    yield from results
