"""Running a plan on vLLM's engine: submit requests, step, and note when each was sent and answered."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from simcluster.calibrate.plan import PHASES, Phase, Plan, Shape
from simcluster.calibrate.recorder import vllm_name
from simcluster.rng import seeded

__all__ = ["Driver", "Stopped"]

_TELL_NS = 200_000_000
_FEW = 3  # requests that arrive at every load, however slow the machine
_FIRST_ID = 10  # below are ids that tokenizers keep for themselves


class Stopped(Exception):  # noqa: N818  (not an error)
    """Somebody asked to stop; what is recorded is kept."""


class Driver:
    """Runs the phases of a plan one after another; between two of them the engine is empty.

    Args:
        engine: vLLM's LLMEngine.
        plan: what to run.
        vocabulary: number of token ids.
        clients: where a line goes for each request that has ended: id, sent, first token, last token [ns].
        tell: takes what happens, as a dict.
        stop: ends the plan when set.
    """

    def __init__(
        self,
        engine: Any,
        plan: Plan,
        vocabulary: int,
        clients: TextIO,
        tell: Callable[[dict[str, Any]], None],
        stop: threading.Event,
    ) -> None:
        params, kinds = (vllm_name("vllm.sampling_params", name) for name in ("SamplingParams", "RequestOutputKind"))

        def sampling(tokens: int) -> Any:
            return params(
                max_tokens=tokens,
                ignore_eos=True,
                temperature=0.0,
                detokenize=False,
                output_kind=kinds.DELTA,
            )

        self._sampling = sampling
        self._engine, self._plan, self._clients, self._tell, self._stop = engine, plan, clients, tell, stop
        self._ids = seeded(plan.seed, len(PHASES)).integers(_FIRST_ID, vocabulary, size=1 << 16).tolist()
        self._next = 0
        self._sent: dict[str, int] = {}  # requests in flight
        self._first: dict[str, int] = {}
        self._in_process = not hasattr(engine.engine_core, "resources")
        self._ended = self._tokens = 0
        self._told_ns = self._began_ns = 0
        self._phase = plan.phases[0]
        self._rate_rps = 1.0  # service rate under saturation

    def run(self) -> None:
        """Run all phases.

        Raises:
            Stopped: somebody asked for it.
        """
        for phase in self._plan.phases:
            self._phase, self._began_ns = phase, time.monotonic_ns()
            self._report(now=True)
            if phase.batches:
                self._run_batches(phase)
            elif phase.levels:
                self._run_levels(phase)
            else:
                self._run_loads(phase)
            self._drain()
            self._report(now=True)

    # ---- kinds of phases -----------------------------------------------------------------------------------------

    def _run_batches(self, phase: Phase) -> None:
        """Run batch after batch until the time is over; the warm-up runs each once, in its order."""
        once = phase.name == "warmup"
        for batch in phase.batches if once else self._plan.rounds(phase):
            if self._elapsed_s() > phase.seconds:
                return
            for shape in batch:
                self._submit(shape)
            self._drain()

    def _run_levels(self, phase: Phase) -> None:
        """Keep a number of requests in flight, then another."""
        shapes = self._plan.mixed() if phase.name == "mixed" else self._plan.served(phase)
        for place, level in enumerate(phase.levels):
            end_s = phase.seconds * (place + 1) / len(phase.levels)
            self._keep_in_flight(level, shapes, end_s)
            if phase.name == "saturation":
                continue
            self._drain()

    def _keep_in_flight(self, level: int, shapes: Iterator[Shape], end_s: float) -> None:
        """Submit a request for each that ends, and note the service rate: output tokens/s by mean output length.

        The second half counts, since the first has the start-up in it.
        """
        begin_s, outputs = self._elapsed_s(), []
        marks = [(begin_s, self._tokens)]  # when, and how many tokens there were: the begin, then the second half
        while (now_s := self._elapsed_s()) < end_s:
            if len(marks) == 1 and now_s > (begin_s + end_s) / 2:
                marks.append((now_s, self._tokens))
            while len(self._sent) < level:
                shape = next(shapes)
                outputs.append(shape[1])
                self._submit(shape)
            self._step()
        for at_s, before in reversed(marks):
            if self._tokens > before:
                mean_output = sum(outputs) / len(outputs)
                self._rate_rps = (self._tokens - before) / (self._elapsed_s() - at_s) / mean_output
                return

    def _run_loads(self, phase: Phase) -> None:
        """Let requests arrive at random at one rate, then at another."""
        shapes, gaps = self._plan.served(phase), self._plan.gaps(phase)
        for place, load in enumerate(phase.loads):
            seconds = phase.seconds * (place + 1) / len(phase.loads) - self._elapsed_s()
            rate_rps = load * self._rate_rps
            self._tell({"event": "load", "load": load, "rate_rps": rate_rps})
            self._serve(self._arrivals(shapes, gaps, rate_rps, seconds))
            self._drain()

    def _arrivals(
        self, shapes: Iterator[Shape], gaps: Iterator[float], rate_rps: float, seconds: float
    ) -> list[tuple[int, Shape]]:
        """Draw the arrivals [ns] of so many seconds, but at least a few."""
        begin_ns = time.monotonic_ns()
        times_s = itertools.accumulate(gap / rate_rps for gap in gaps)
        within = itertools.takewhile(lambda at: at[0] < _FEW or at[1] < seconds, enumerate(times_s))
        return [(begin_ns + round(at * 1e9), next(shapes)) for _, at in within]

    def _serve(self, arrivals: list[tuple[int, Shape]]) -> None:
        with self._sending(arrivals) as sending:
            while sending.is_alive() or self._sent:
                if self._sent:
                    self._step()
                else:
                    self._check_stop()
                    time.sleep(0.001)

    @contextmanager
    def _sending(self, arrivals: list[tuple[int, Shape]]) -> Iterator[Any]:
        """Send requests on time, while others are answered.

        With the engine in a process of its own a thread does it, as clients of a server would. Within this process
        the engine holds the loop, so requests enter between two steps, as they do in the engine core; they count as
        sent when they were due.
        """
        if self._in_process:
            yield _Due(self, arrivals)
            return
        sender = threading.Thread(target=self._send, args=(arrivals,), daemon=True)
        sender.start()
        yield sender
        sender.join()

    def _send(self, arrivals: list[tuple[int, Shape]]) -> None:
        for due_ns, shape in arrivals:
            if self._stop.wait(max(due_ns - time.monotonic_ns(), 0) / 1e9):
                return
            self._submit(shape)

    # ---- the engine ----------------------------------------------------------------------------------------------

    def _submit(self, shape: Shape, sent_ns: int | None = None) -> None:
        prompt, output = shape
        key = f"{self._phase.name}:{self._next}"
        start = self._next * 997 % len(self._ids)  # other tokens for every request
        self._next += 1
        tokens = (self._ids[start : start + prompt] + self._ids * (1 + prompt // len(self._ids)))[:prompt]
        self._sent[key] = sent_ns or time.monotonic_ns()
        self._engine.add_request(key, {"prompt_token_ids": tokens}, self._sampling(output))

    def _step(self) -> None:
        self._check_stop()
        answers = self._engine.step()
        now_ns = time.monotonic_ns()
        for answer in answers:
            key = answer.request_id
            if key not in self._sent:
                key = key.rpartition("-")[0]
            tokens = len(answer.outputs[0].token_ids)
            self._tokens += tokens
            if tokens and key not in self._first:
                self._first[key] = now_ns
            if answer.finished:
                self._ended += 1
                row = [key, self._sent.pop(key), self._first.pop(key, None), now_ns]
                self._clients.write(json.dumps(row) + "\n")
        self._report()

    def _drain(self) -> None:
        while self._sent:
            self._step()
        self._clients.flush()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _elapsed_s(self) -> float:
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def _report(self, *, now: bool = False) -> None:
        at_ns = time.monotonic_ns()
        if now or at_ns - self._told_ns > _TELL_NS:
            self._told_ns = at_ns
            done = {"seconds": self._elapsed_s(), "requests": self._ended, "tokens": self._tokens}
            self._tell({"event": "progress", "phase": self._phase.name, **done})


class _Due:
    """Stands in for the sending thread within one process: its question is when requests enter."""

    def __init__(self, driver: Driver, arrivals: list[tuple[int, Shape]]) -> None:
        self._driver, self._arrivals = driver, arrivals

    def is_alive(self) -> bool:
        """Submit what is due; whether more will come."""
        while self._arrivals and self._arrivals[0][0] <= time.monotonic_ns():
            due_ns, shape = self._arrivals.pop(0)
            self._driver._submit(shape, due_ns)
        return bool(self._arrivals)
