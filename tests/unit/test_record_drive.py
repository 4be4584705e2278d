"""A plan is run as it says, on an engine that is played here: one token per running request and step."""

import io
import json
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from simcluster.calibrate import recorder_drive
from simcluster.calibrate.plan import PHASES, Limits, build_plan
from simcluster.calibrate.recorder_drive import Driver, Stopped

LIMITS = Limits(4, 64, 128, 65, 16)
STEP_S = 0.0005


class Engine:
    """As much of vLLM's LLMEngine as a driver uses; it answers with ids of its own, as vLLM does."""

    def __init__(self, *, in_process: bool) -> None:
        self.engine_core = SimpleNamespace() if in_process else SimpleNamespace(resources=None)
        self.requests: dict[str, list[int]] = {}  # output tokens left, prompt tokens
        self.prompts: dict[str, int] = {}
        self.most_resident = Counter[str]()
        self.threads: set[int] = set()

    def add_request(self, key: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        self.threads.add(threading.get_ident())
        assert len(prompt["prompt_token_ids"]) + sampling.max_tokens <= LIMITS.max_model_len
        self.prompts[key] = len(prompt["prompt_token_ids"])
        self.requests[key] = [sampling.max_tokens]
        phase = key.partition(":")[0]
        self.most_resident[phase] = max(self.most_resident[phase], len(self.requests))

    def step(self) -> list[Any]:
        time.sleep(STEP_S)
        answers = []
        for key in list(self.requests)[: LIMITS.max_num_seqs]:
            self.requests[key][0] -= 1
            finished = self.requests[key][0] == 0
            if finished:
                del self.requests[key]
            output = SimpleNamespace(token_ids=[1])
            answers.append(SimpleNamespace(request_id=f"{key}-0f0f0f0f", outputs=[output], finished=finished))
        return answers


class Driven:
    """A driver, its engine, and what came of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, in_process: bool = True, minutes: float = 0.03) -> None:
        names = {"SamplingParams": SimpleNamespace, "RequestOutputKind": SimpleNamespace(DELTA=0)}
        monkeypatch.setattr(recorder_drive, "vllm_name", lambda _module, name: names[name])
        self.engine, self.events, self.clients = Engine(in_process=in_process), [], io.StringIO()
        self.stop = threading.Event()
        plan = build_plan(LIMITS, minutes=minutes)
        self.driver = Driver(self.engine, plan, 1000, self.clients, self.events.append, self.stop)

    def rows(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.clients.getvalue().splitlines()]


@pytest.mark.parametrize("in_process", [True, False])
def test_every_phase_runs_and_every_request_is_answered(monkeypatch: pytest.MonkeyPatch, *, in_process: bool) -> None:
    driven = Driven(monkeypatch, in_process=in_process)
    driven.driver.run()
    ended = [row[0] for row in driven.rows()]
    assert set(ended) == set(driven.engine.prompts)
    assert len(ended) == len(set(ended))
    assert {key.partition(":")[0] for key in ended} == set(PHASES)
    for _, sent, first, last in driven.rows():
        assert sent <= first <= last
    told = [event["phase"] for event in driven.events if event["event"] == "progress"]
    assert list(dict.fromkeys(told)) == list(PHASES)
    assert len(driven.engine.threads) == (1 if in_process else 2)


def test_the_phases_keep_in_flight_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(monkeypatch)
    driven.driver.run()
    most = driven.engine.most_resident
    assert most["lone_prefill"] == 1
    assert most["decode"] == most["mixed"] == LIMITS.max_num_seqs
    assert most["saturation"] == LIMITS.max_num_seqs + 4


def test_arrivals_come_at_shares_of_the_rate_that_the_saturation_phase_has_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driven = Driven(monkeypatch, minutes=0.1)
    driven.driver.run()
    rates = {event["load"]: event["rate_rps"] for event in driven.events if event["event"] == "load"}
    assert list(rates) == [0.5, 0.7, 0.9]
    assert rates[0.9] == pytest.approx(rates[0.5] * 1.8)
    # At most a token per running request and step; a busy machine is slower, but not by orders of magnitude.
    most = LIMITS.max_num_seqs / STEP_S / 2  # requests have at least two tokens
    assert most / 1000 < rates[0.5] / 0.5 < most


def test_a_request_counts_as_sent_when_it_was_due_if_the_engine_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(monkeypatch)
    before = time.monotonic_ns()
    arrivals = [(before + 1, (4, 2)), (before + 2, (4, 2))]
    driven.driver._serve(arrivals)
    assert [row[1] for row in driven.rows()] == [before + 1, before + 2]


@pytest.mark.parametrize("in_process", [True, False])
def test_a_plan_stops_when_asked(monkeypatch: pytest.MonkeyPatch, *, in_process: bool) -> None:
    driven = Driven(monkeypatch, in_process=in_process, minutes=10)
    threading.Timer(0.3, driven.stop.set).start()
    with pytest.raises(Stopped):
        driven.driver.run()
    assert driven.rows()
