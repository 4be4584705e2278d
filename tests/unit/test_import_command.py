"""`simcluster trace import` at the command line."""

import io
import json
import sys
from pathlib import Path

import pytest

from command_line import run_command
from simcluster.workload import read_trace
from trace_files import FILES

LINE = '{"timestamp": %d, "input_length": 5, "output_length": 3}\n'
UNCLEAR = LINE % 0 + LINE % 3000


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


@pytest.fixture
def unclear(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text(UNCLEAR)
    return path


def test_the_command_says_what_was_recognised_and_skipped(out: Path) -> None:
    code, text, errors = run_command("trace", "import", FILES / "burstgpt.csv", "--out", out)
    assert (code, errors) == (0, "")
    assert text.splitlines() == [
        "format burstgpt (BurstGPT): it has the columns Timestamp, Request tokens, Response tokens",
        "time unit s: the format counts seconds",
        "columns: arrival = 'Timestamp', prompt_tokens = 'Request tokens', output_tokens = 'Response tokens', "
        "session_id = 'Session ID', task = 'Log Type'",
        "ignored columns: 'Elapsed time', 'Model', 'Total tokens'",
        "skipped 1 row (zero_output): line 3",
        "rebased: the first arrival was at 100 s and is now at 0 s",
        f"{out}: 3 requests of 4 rows over 10.5 s, 0.1905 requests/s",
    ]


def test_the_report_is_also_there_for_machines_or_not_at_all(out: Path) -> None:
    _, text, _ = run_command("trace", "import", FILES / "burstgpt.csv", "--out", out, "--json")
    assert json.loads(text)["requests"] == 3
    code, text, errors = run_command("trace", "import", FILES / "burstgpt.csv", "--out", out, "--quiet")
    assert (code, text, errors) == (0, "", "")


def test_every_option_reaches_the_import(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "ms,in,out,who\n0,5,1,a\n2000,5,,a\n3000,5,0,a\n4000,90,20,b\n9000,5,1,a\n20000,5,1,c\n30000,5,1,d\n"
    )
    mapping = ["arrival=ms", "prompt_tokens=in", "output_tokens=out", "request_id=who"]
    options = "--time-unit ms --missing-output drop --zero-output prefill --on-duplicate suffix --overflow drop "
    options += "--max-model-len 100 --speed 2 --max-gap 4 --start 1 --end 25 --format generic --hash-block 16"
    arguments = [each for text in mapping for each in ("--map", text)] + options.split()
    code, text, _ = run_command("trace", "import", path, "--out", out, *arguments)
    assert code == 0, text
    trace = read_trace(out)
    assert trace.request_id.tolist() == ["a", "a#2", "c"]
    assert (trace.arrival_ns / 1e9).tolist() == [0, 2, 4]
    assert trace.output_tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--map", "arrival"], "--map arrival; must be OURS=THEIRS"),
        (["--map", "=x"], "--map =x; must be OURS=THEIRS"),
        (["--map", "arrival=x", "--map", "arrival=y"], "--map arrival=y; arrival is mapped twice"),
        (["--time-unit", "0"], "time unit = '0'; must be one of s, ms, us, ns, date"),
        (["--speed", "0"], "--speed 0; must be a finite number above 0"),
        (["--overflow", "drop"], "--overflow drop; needs the context limit; add --max-model-len N"),
        (["--format", "csv"], "csv"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(out: Path, arguments: list[str], message: str) -> None:
    code, text, errors = run_command("trace", "import", FILES / "azure2023.csv", "--out", out, *arguments)
    assert (code, text) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1
    assert not out.exists()


def test_an_unclear_file_is_an_error_where_nobody_can_be_asked(unclear: Path, out: Path) -> None:
    code, text, errors = run_command("trace", "import", unclear, "--out", out)
    assert (code, text) == (2, "")
    assert errors.count("\n") == 1
    assert "--format mooncake" in errors
    assert "--time-unit s" in errors


@pytest.mark.parametrize(("answer", "last_s"), [("1\n", 3.0), ("7\n2\n", 3000.0)])
def test_an_unclear_file_is_asked_about_at_a_terminal(
    unclear: Path, out: Path, answer: str, last_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simcluster.cli.trace._can_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    code, _, errors = run_command("trace", "import", unclear, "--out", out)
    assert code == 0
    assert "1. mooncake, timestamps in ms (next time: --format mooncake)" in errors
    assert read_trace(out).arrival_ns[-1] == last_s * 10**9


def test_nothing_is_written_over_when_an_import_fails(out: Path, tmp_path: Path) -> None:
    run_command("trace", "import", FILES / "azure2023.csv", "--out", out)
    before = out.read_bytes()
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,x,1\n")
    assert run_command("trace", "import", path, "--out", out)[0] == 2
    assert out.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bad.csv", "out.parquet"]
