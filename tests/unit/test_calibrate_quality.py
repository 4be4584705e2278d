"""`simcluster calibrate quality`: answers of running models, scored by a judge that a test scripts."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from aiohttp import web

from command_line import run_command
from scripted_server import Body, ScriptedServer, completion, scripted_server
from simcluster.calibrate.quality.judge import parse_scores
from simcluster.predict.table import read_table

GRADES = {"big": 9.5, "small": 4}


def candidates(body: Body) -> dict[str, str]:
    """Return {label: answer} as a judge reads them."""
    text = body["messages"][1]["content"]
    return dict(re.findall(r"=== ANSWER ([A-Z]) ===\n(.*?)(?=\n\n=== |\Z)", text, re.DOTALL))


def grade(body: Body) -> web.Response:
    """Give every answer the grade of the model that signed it."""
    scores = {label: GRADES[answer.split()[0]] for label, answer in candidates(body).items()}
    return completion(json.dumps({"scores": scores}))


def sign(body: Body) -> web.Response:
    """Answer with the model's name and the prompt."""
    text = f"{body['model']} says {body['messages'][0]['content']}"
    return completion(text, output_tokens=len(text), finish="length" if body["model"] == "small" else "stop")


@pytest.fixture
def models() -> Iterator[ScriptedServer]:
    with scripted_server(sign) as server:
        yield server


@pytest.fixture
def judge() -> Iterator[ScriptedServer]:
    with scripted_server(grade) as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {
            "prompt_id": f"p{k}",
            "task": "sums" if k % 2 else "words",
            "prompt": f"what is {k}?",
            "reference": f"it is {k}",
        }
        for k in range(6)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(prompts: Path, models: ScriptedServer, judge: ScriptedServer, *more: object) -> tuple[int, Any, str]:
    out = prompts.with_name("answers.parquet")
    urls = ("--model", f"big={models.url}", "--model", f"small={models.url}", "--judge", f"j={judge.url}")
    code, text, errors = run_command("calibrate", "quality", prompts, *urls, "--out", out, "--json", *more)
    return code, json.loads(text) if text else None, errors


def test_every_answer_gets_its_own_score_whatever_its_label(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer
) -> None:
    code, found, _ = ask(prompts, models, judge)
    assert code == 0
    assert (found["answers"], found["scored"], found["failures"]) == (12, 12, [])
    table = pl.read_parquet(prompts.with_name("answers.parquet"))
    assert table["model"].to_list() == ["big", "small"] * 6
    assert set(table.select("model", "score").iter_rows()) == {("big", 0.95), ("small", 0.4)}
    assert table["output_tokens"].to_list() == [
        len(f"{name} says what is {k}?") for k in range(6) for name in ("big", "small")
    ]
    assert table["task"].to_list()[:4] == ["words", "words", "sums", "sums"]
    assert found["models"]["small"]["cut_at_max_tokens"] == 6
    orders = {tuple(text.split()[0] for text in candidates(body).values()) for body in judge.bodies}
    assert orders == {("big", "small"), ("small", "big")}, "the judge must not always see the same model first"


def test_the_judge_sees_all_answers_and_the_reference_but_no_name(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer
) -> None:
    ask(prompts, models, judge)
    assert len(judge.bodies) == 6
    for body in judge.bodies:
        assert len(candidates(body)) == 2
        assert "it is" in body["messages"][1]["content"]
        assert body["temperature"] == 0
        assert not re.search(r"\b(big|small)\b", body["messages"][0]["content"])


def test_what_predictors_train_reads_is_what_was_written(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer
) -> None:
    ask(prompts, models, judge)
    table = read_table(prompts.with_name("answers.parquet"))
    assert len(table) == 12
    assert sorted(set(table.score)) == [0.4, 0.95]
    assert table.task is not None


def test_a_repeated_command_asks_for_nothing_that_is_there(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer
) -> None:
    ask(prompts, models, judge, "--limit", 4)
    before = prompts.with_name("answers.parquet").read_bytes()
    ask(prompts, models, judge, "--limit", 4)
    assert (len(models.bodies), len(judge.bodies)) == (8, 4)
    assert prompts.with_name("answers.parquet").read_bytes() == before
    ask(prompts, models, judge)
    assert (len(models.bodies), len(judge.bodies)) == (12, 6)


def test_a_line_that_a_killed_run_left_half_is_done_again(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer
) -> None:
    ask(prompts, models, judge)
    journal = prompts.with_name("answers.parquet.work") / "scores.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    code, found, _ = ask(prompts, models, judge)
    assert (code, found["scored"]) == (0, 12)
    assert (len(models.bodies), len(judge.bodies)) == (12, 7)


def test_a_damaged_line_and_other_settings_are_one_clear_error(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer
) -> None:
    ask(prompts, models, judge)
    code, _, errors = ask(prompts, models, judge, "--max-tokens", 9)
    assert code == 2
    assert "was begun with max_tokens = 1024, now it is 9" in errors
    journal = prompts.with_name("answers.parquet.work") / "answers.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], "{", *lines[2:]]) + "\n")
    code, _, errors = ask(prompts, models, judge)
    assert code == 2
    assert "answers.jsonl: line 2 is damaged" in errors
    assert len(errors.splitlines()) == 1


def failing(first: int, then: Callable[[Body], web.Response], status: int = 503) -> Callable[[Body], web.Response]:
    left = [first]

    def script(body: Body) -> web.Response:
        if left[0]:
            left[0] -= 1
            return web.Response(status=status, headers={"Retry-After": "0"})
        return then(body)

    return script


def test_a_server_that_is_busy_is_asked_again(prompts: Path, judge: ScriptedServer) -> None:
    with scripted_server(failing(3, sign, 429)) as models:
        code, found, _ = ask(prompts, models, judge)
    assert (code, found["scored"], len(models.bodies)) == (0, 12, 15)


def test_what_stays_without_an_answer_is_counted_and_tried_again_next_time(
    prompts: Path, judge: ScriptedServer
) -> None:
    def script(body: Body) -> web.Response:
        refused = broken[0] and body["model"] == "small" and "2" in body["messages"][0]["content"]
        return web.Response(status=400, text="too\nlong") if refused else sign(body)

    broken = [True]
    with scripted_server(script) as models:
        code, found, _ = ask(prompts, models, judge)
        assert code == 1
        assert (found["answers"], found["scored"], found["failed_answers"], found["unscored_prompts"]) == (11, 10, 1, 1)
        reasons = {(each["prompt_id"], each["of"]): each["reason"] for each in found["failures"]}
        assert reasons["p2", "small"] == "status 400: too long"
        assert reasons["p2", "judge"] == "not asked, since there is no answer of small"
        table = pl.read_parquet(prompts.with_name("answers.parquet"))
        assert table.filter(pl.col("prompt_id") == "p2").select("model", "score").rows() == [("big", None)]
        broken[0] = False
        code, found, _ = ask(prompts, models, judge)
    assert (code, found["scored"], found["failures"]) == (0, 12, [])


@pytest.mark.parametrize("reply", [None, "  "])
def test_an_empty_answer_is_a_failure_not_a_score(prompts: Path, judge: ScriptedServer, reply: str | None) -> None:
    with scripted_server(lambda _: completion(reply)) as models:
        code, found, _ = ask(prompts, models, judge, "--limit", 1)
    assert (code, found["answers"], judge.bodies) == (1, 0, [])


def test_a_judge_that_replies_with_something_else_is_told_what_is_wrong(prompts: Path, models: ScriptedServer) -> None:
    def script(body: Body) -> web.Response:
        return completion("```json\n{}\n```") if len(body["messages"]) == 2 else grade(body)

    with scripted_server(script) as judge:
        code, found, _ = ask(prompts, models, judge, "--limit", 1)
    assert (code, found["scored"]) == (0, 2)
    assert "the reply is not JSON alone" in judge.bodies[1]["messages"][3]["content"]


def test_a_judge_that_never_replies_as_asked_leaves_its_prompts_unscored(prompts: Path, models: ScriptedServer) -> None:
    with scripted_server(lambda _: completion('{"scores": {"A": 11, "B": 3}}')) as judge:
        code, found, _ = ask(prompts, models, judge, "--limit", 1, "--attempts", 2)
    assert (code, found["answers"], found["scored"], found["unscored_prompts"]) == (1, 2, 0, 1)
    assert "the score of A must be a number from 0 to 10" in found["failures"][0]["reason"]
    assert len(judge.bodies) == 2


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("nonsense", "not JSON"),
        ('{"scores": {"A": 1, "B": 2}, "why": ""}', "one key"),
        ('{"scores": [1, 2]}', "one key"),
        ('{"scores": {"A": 1}}', "exactly the keys A, B"),
        ('{"scores": {"A": 1, "B": true}}', "score of B"),
        ('{"scores": {"A": -0.1, "B": 1}}', "score of A"),
        ('{"scores": {"A": NaN, "B": 1}}', "score of A"),
        ('{"scores": {"A": "7", "B": 1}}', "score of A"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse_scores(text, {"A": "x", "B": "y"})


def test_no_more_requests_are_open_at_once_than_allowed(prompts: Path, judge: ScriptedServer) -> None:
    with scripted_server(sign, hold_s=0.02) as models:
        ask(prompts, models, judge, "--concurrency", 2)
    assert models.most_open <= 2 * 2, "two models, two at once for each"


def test_keys_come_from_the_environment_and_stay_out_of_the_journal(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-of-mine")
    code, _, _ = ask(prompts, models, judge, "--judge-key-env", "MY_KEY")
    assert code == 0
    assert set(judge.keys) == {"Bearer secret-of-mine"}
    assert set(models.keys) == {None}
    for file in prompts.with_name("answers.parquet.work").iterdir():
        assert "secret" not in file.read_text()
    code, _, errors = ask(prompts, models, judge, "--judge-key-env", "MY_OTHER_KEY")
    assert code == 2
    assert "the variable MY_OTHER_KEY is not set" in errors


def test_a_refused_key_stops_at_once(prompts: Path, judge: ScriptedServer) -> None:
    with scripted_server(lambda _: web.Response(status=401)) as models:
        code, _, errors = ask(prompts, models, judge)
    assert code == 2
    assert "answers 401: the key is refused" in errors
    assert not prompts.with_name("answers.parquet").exists()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--model", "big=x"), "must begin with http"),
        (("--model", "big=http://127.0.0.1:1/v1"), "given twice"),
        (("--body", "[]"), "must be a JSON object"),
        (("--body", '{"stream": true}'), "set already"),
        (("--served-as", "other=x"), "must name one of the models"),
        (("--map", "prompt=question"), "no column question"),
        (("--map", "answer=x"), "must be one of"),
        (("--work", "/dev/null/x"), "give another folder"),
    ],
)
def test_bad_options_are_one_clear_line(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer, options: tuple[str, str], wrong: str
) -> None:
    code, _, errors = ask(prompts, models, judge, *options)
    assert code == 2
    assert wrong in errors
    assert len(errors.splitlines()) == 1
    assert not models.bodies


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no rows|cannot be read"),
        ('{"prompt": ""}\n', "row 1: is empty"),
        ('{"prompt": "a"}\n' * 2, "row 2: the same"),
    ],
)
def test_bad_prompts_are_one_clear_line(
    prompts: Path, models: ScriptedServer, judge: ScriptedServer, text: str, wrong: str
) -> None:
    prompts.write_text(text)
    code, _, errors = ask(prompts, models, judge)
    assert code == 2
    assert re.search(wrong, errors)
    assert len(errors.splitlines()) == 1


def test_the_report_shows_every_model_and_what_failed(prompts: Path, judge: ScriptedServer) -> None:
    with scripted_server(failing(1, sign, 400)) as models:
        out = prompts.with_name("answers.csv")
        urls = ("--model", f"big={models.url}", "--model", f"small={models.url}", "--judge", f"j={judge.url}")
        code, text, _ = run_command("calibrate", "quality", prompts, *urls, "--out", out, "--concurrency", 1)
    assert code == 1
    assert re.search(r"big.*0\.950", text)
    assert "2 failed in all" in text
    assert out.read_text().startswith("prompt_id,prompt,task,model,score")
