"""Ask every model every prompt, have a judge score the answers, and make the table that predictors learn from."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import polars as pl

from simcluster.calibrate.quality.journal import Journal
from simcluster.calibrate.quality.judge import INSTRUCTION, MOST_MODELS, TOP_SCORE, score_answers
from simcluster.calibrate.quality.prompts import Prompt
from simcluster.calibrate.quality.service import Chat, Endpoint, Unanswered
from simcluster.errors import CalibrationError

__all__ = ["Plan", "Result", "collect"]

Progress = Callable[[str, int, int], None]

_SCHEMA = {
    "prompt_id": pl.String,
    "prompt": pl.String,
    "task": pl.String,
    "model": pl.String,
    "score": pl.Float64,
    "output_tokens": pl.Int64,
    "prompt_tokens": pl.Int64,
    "finish_reason": pl.String,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of whom.

    Attributes:
        prompts: at least one.
        models: at least one, with different names.
        judge: scores the answers.
        max_tokens: limit of an answer [tokens].
        temperature: of the models; the judge has 0.
        body: further fields of the requests to the models.
        seed: of the order in which the judge sees the answers.
        concurrency: requests at once, for each endpoint.
        attempts: how often to try one request, and how often a judge may reply with something else.
        timeout_s: limit of one request [s].
    """

    prompts: Sequence[Prompt]
    models: Sequence[Endpoint]
    judge: Endpoint
    max_tokens: int = 1024
    temperature: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    concurrency: int = 8
    attempts: int = 4
    timeout_s: float = 600.0

    def settings(self) -> dict[str, Any]:
        """Return everything that an answer or a score depends on, as JSON has it."""
        return {
            "models": {each.name: f"{each.model} at {each.url}" for each in self.models},
            "judge": f"{self.judge.model} at {self.judge.url}",
            "instruction": INSTRUCTION,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "body": dict(self.body),
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of every prompt and model.

    Attributes:
        table: one row per answer, with the columns that `predictors train` reads; prompts in the given order. An
            answer that no judge scored has a null score.
        failures: {(prompt id, model name or "judge"): reason}; they are tried again when the command is repeated.
    """

    table: pl.DataFrame
    failures: Mapping[tuple[str, str], str]

    @property
    def counts(self) -> dict[str, int]:
        """Answers there, of these scored, answers that failed, and prompts that the judge failed or skipped."""
        unscored = sum(1 for _, who in self.failures if who == "judge")
        return {
            "answers": len(self.table),
            "scored": len(self.table) - self.table["score"].null_count(),
            "failed_answers": len(self.failures) - unscored,
            "unscored_prompts": unscored,
        }


def collect(plan: Plan, work: Path, progress: Progress = lambda *_: None) -> Result:
    """Carry out a plan, or what an earlier run left of it.

    Args:
        plan: what is asked of whom.
        work: folder of the journal; every answer and score is there as soon as it came.
        progress: is called with "answers" or "scores", how many are there and how many there shall be.

    Raises:
        CalibrationError: the plan makes no sense, an endpoint cannot answer at all, or the journal is of another plan.

    Source: paper App. D and its training data (section B.4).
    """
    _check(plan)
    with Journal(work, plan.settings()) as journal:
        failures = asyncio.run(_carry_out(plan, journal, progress))
        return Result(table=_table(plan, journal), failures=failures)


def _check(plan: Plan) -> None:
    if not (plan.prompts and plan.models):
        raise CalibrationError("no prompts or no models; give at least one of each")
    if len(plan.models) > MOST_MODELS:
        raise CalibrationError(f"{len(plan.models)} models; a judge compares {MOST_MODELS} at most; leave some out")
    twice = [name for name, times in Counter(each.name for each in plan.models).items() if times > 1]
    if twice:
        raise CalibrationError(f"--model {twice[0]}=... is given twice; names must differ")


async def _carry_out(plan: Plan, journal: Journal, progress: Progress) -> dict[tuple[str, str], str]:
    failures: dict[tuple[str, str], str] = {}
    limits = aiohttp.ClientTimeout(total=plan.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)  # each endpoint has its own limit
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:
        common: dict[str, Any] = {"concurrency": plan.concurrency, "attempts": plan.attempts}
        asked = {"max_tokens": plan.max_tokens, "temperature": plan.temperature, **plan.body}
        chats = {each.name: Chat(session, each, body=asked, **common) for each in plan.models}
        judge = Chat(session, plan.judge, body={"temperature": 0}, **common)
        answers = _Stage("answers", len(plan.prompts) * len(plan.models), len(_answered(plan, journal)), progress)
        scores = _Stage("scores", len(plan.prompts), _scored(plan, journal), progress)

        async def one(prompt: Prompt) -> None:
            await _all([_answer(prompt, chat, journal, failures, answers) for chat in chats.values()])
            if prompt.id not in journal.scores:
                await _score(prompt, plan, judge, journal, failures, scores)

        await _in_order(plan, one)
    return failures


async def _in_order(plan: Plan, one: Callable[[Prompt], Awaitable[None]]) -> None:
    """Work on a window of prompts, so that a million of them are not a million tasks."""
    waiting = iter(plan.prompts)

    async def worker() -> None:
        for prompt in waiting:
            await one(prompt)

    await _all([worker() for _ in range(min(len(plan.prompts), 2 * plan.concurrency))])


async def _all(jobs: Sequence[Awaitable[None]]) -> None:
    """Wait for all; the first that raises stops the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Stage:
    """Counts what is done and says so."""

    def __init__(self, name: str, total: int, done: int, progress: Progress) -> None:
        self._name, self._total, self._done, self._progress = name, total, done, progress
        progress(name, done, total)

    def step(self) -> None:
        self._done += 1
        self._progress(self._name, self._done, self._total)


def _answered(plan: Plan, journal: Journal) -> list[tuple[str, str]]:
    wanted = ((prompt.id, model.name) for prompt in plan.prompts for model in plan.models)
    return [each for each in wanted if each in journal.answers]


def _scored(plan: Plan, journal: Journal) -> int:
    return sum(prompt.id in journal.scores for prompt in plan.prompts)


async def _answer(
    prompt: Prompt, chat: Chat, journal: Journal, failures: dict[tuple[str, str], str], stage: _Stage
) -> None:
    name = chat.endpoint.name
    if (prompt.id, name) in journal.answers:
        return
    try:
        found = await chat.ask([{"role": "user", "content": prompt.text}])
    except Unanswered as error:
        failures[prompt.id, name] = str(error)
    else:
        journal.add_answer(
            prompt.id,
            name,
            {
                "text": found.text,
                "output_tokens": found.output_tokens,
                "prompt_tokens": found.prompt_tokens,
                "finish_reason": found.finish_reason,
            },
        )
    stage.step()


async def _score(
    prompt: Prompt,
    plan: Plan,
    judge: Chat,
    journal: Journal,
    failures: dict[tuple[str, str], str],
    stage: _Stage,
) -> None:
    missing = [each.name for each in plan.models if (prompt.id, each.name) not in journal.answers]
    if missing:  # a judge that compares fewer answers grades on another scale
        failures[prompt.id, "judge"] = f"not asked, since there is no answer of {', '.join(missing)}"
    else:
        texts = {each.name: str(journal.answers[prompt.id, each.name]["text"]) for each in plan.models}
        try:
            found = await score_answers(judge, prompt, texts, seed=plan.seed, attempts=plan.attempts)
        except Unanswered as error:
            failures[prompt.id, "judge"] = str(error)
        else:
            journal.add_scores(prompt.id, found)
    stage.step()


def _table(plan: Plan, journal: Journal) -> pl.DataFrame:
    rows = []
    for prompt in plan.prompts:
        scores = journal.scores.get(prompt.id, {})
        for model in plan.models:
            answer = journal.answers.get((prompt.id, model.name))
            if answer is None:
                continue
            score = scores.get(model.name)
            rows.append(
                {
                    "prompt_id": prompt.id,
                    "prompt": prompt.text,
                    "task": prompt.task,
                    "model": model.name,
                    "score": None if score is None else score / TOP_SCORE,
                    "output_tokens": answer["output_tokens"],
                    "prompt_tokens": answer["prompt_tokens"],
                    "finish_reason": answer["finish_reason"],
                }
            )
    table = pl.DataFrame(rows, schema=_SCHEMA)
    return table.drop("task") if table["task"].null_count() else table
