"""The loop that recordings and simulated engines follow is that of vLLM's own EngineCore.

Its `step` and `step_with_batch_queue` are run with a stand-in for the executor; passes and processed results must come
in the recorded order.
"""

import importlib
import queue
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from simcluster.backends.vllm_scheduler import VllmBatch, VllmScheduler
from simcluster.conformance.record import record_scenario
from simcluster.conformance.record_draw import DrawnScenario, draw_scenario

OUTPUT_BASE = 1_000_000


class Executor:
    """Answers a batch with the tokens fixed beforehand, as soon as it is asked."""

    def __init__(self, scheduler: VllmScheduler) -> None:
        self._scheduler = scheduler
        self._batch: VllmBatch | None = None

    def execute_model(self, output: Any, non_block: bool = False) -> "Future[Any]":
        assert non_block
        self._batch = self._scheduler.read_batch(output)
        return self._future(None if self._batch.rows else self._scheduler.model_output(self._batch))

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        assert grammar is None
        assert self._batch is not None
        answer = self._scheduler.model_output(self._batch)
        return self._future(answer) if non_block else answer

    @staticmethod
    def _future(value: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(value)
        return future


def engine_core(scheduler: VllmScheduler, asynchronous: bool) -> Any:
    """Return an EngineCore without processes, model and device."""
    core_class: Any = importlib.import_module("vllm.v1.engine.core").EngineCore
    core = core_class.__new__(core_class)
    core.scheduler, core.vllm_config = scheduler.vllm, scheduler.vllm.vllm_config
    core.model_executor = Executor(scheduler)
    core.batch_queue_size = 2 if asynchronous else 1
    core.batch_queue = deque(maxlen=2) if asynchronous else None
    core.aborts_queue = queue.Queue()
    core.async_scheduling = asynchronous
    core.log_stats = core.is_mm_encoder_only = core.is_pooling_model = False
    core.check_for_draft_tokens = core.use_spec_decode = False
    core._weight_version = "none"
    return core


def watch(vllm: Any) -> list[tuple[str, Any]]:
    """Note every pass and every processed batch from now on."""
    log: list[tuple[str, Any]] = []
    outputs: list[Any] = []
    schedule, update = vllm.schedule, vllm.update_from_output

    def scheduled(*args: Any) -> Any:
        output = schedule(*args)
        outputs.append(output)
        log.append(("pass", [[int(key), tokens] for key, tokens in output.num_scheduled_tokens.items()]))
        return output

    def updated(output: Any, answer: Any) -> Any:
        log.append(("results", next(number for number, known in enumerate(outputs) if known is output)))
        return update(output, answer)

    vllm.schedule, vllm.update_from_output = scheduled, updated
    return log


def run_core(scenario: DrawnScenario) -> list[tuple[str, Any]]:
    scheduler = VllmScheduler(scenario.config)
    core = engine_core(scheduler, scenario.config["async_scheduling"])
    log = watch(scheduler.vllm)
    requests = scenario.requests
    arrivals = deque(sorted(range(len(requests)), key=lambda r: (requests[r]["arrival_iter"], r)))
    aborts = deque(sorted((q["abort_iter"], r) for r, q in enumerate(requests) if q["abort_iter"] is not None))
    turn = 0
    while arrivals or scheduler.has_requests() or core.batch_queue:
        if not scheduler.has_requests() and not core.batch_queue:
            turn = max(turn, requests[arrivals[0]]["arrival_iter"])
        while arrivals and requests[arrivals[0]]["arrival_iter"] <= turn:
            r = arrivals.popleft()
            q = requests[r]
            at = round(q["arrival_time"] * 1e6)
            runs = [(first, count) for first, count in q["prompt"]]
            scheduler.add(
                r, q["prompt_len"], q["max_tokens"], q["eos_at"] or 0, q["priority"], at, runs, OUTPUT_BASE * (r + 1)
            )
        while aborts and aborts[0][0] <= turn:
            core.abort_requests([str(aborts.popleft()[1]).zfill(19)])
        (core.step if core.batch_queue is None else core.step_with_batch_queue)()
        turn += 1
    return log


@pytest.mark.parametrize("kind", ["small", "tight"])
def test_passes_and_results_come_in_the_order_of_vllms_own_loop(kind: Any) -> None:
    loops = set()
    for number in range(60):
        scenario = draw_scenario(kind, np.random.Generator(np.random.PCG64(number)))
        recorded = record_scenario("x", scenario, detailed=True)
        if recorded is None:
            continue
        expected: list[tuple[str, Any]] = []
        for record in recorded["iterations"]:
            if "sched" in record:
                expected.append(("pass", [[r, tokens] for r, _, tokens in record["sched"]]))
            if "update" in record:
                expected.append(("results", record["update"]))
        assert run_core(scenario) == expected, number
        loops.add(scenario.config["async_scheduling"])
    assert loops == {False, True}
