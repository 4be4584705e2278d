"""The process that is recorded: vLLM's engine, and the plan that is run on it.

Started by `simcluster.calibrate.record` in a process group of its own, or by hand on a machine that has vLLM and
little else:

    python -m simcluster.calibrate.recorder_run job.json

The job names the model, vLLM's options, the plan and the folder. What happens is told line by line as JSON, to the
file descriptor --status, otherwise to standard output. If the descriptor --lifeline says anything, the plan is stopped
and what is recorded is kept; if its other end is closed, whoever started this is gone, and the whole process group is
killed: vLLM's engine core and workers do not end by themselves.
"""

import argparse
import difflib
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from simcluster.calibrate.plan import Limits, build_plan
from simcluster.calibrate.recorder import FOLDER_VARIABLE, OWNED_VARIABLE, vllm_name
from simcluster.calibrate.recorder_drive import Driver, Stopped
from simcluster.errors import ConfigError, SimclusterError

__all__ = ["main"]

_CLASSES = {"sync": "RecordingScheduler", "async": "RecordingAsyncScheduler"}


def main(arguments: list[str] | None = None) -> int:
    """Run a job; returns 0, or 1 after an error that was told."""
    parser = argparse.ArgumentParser(prog="python -m simcluster.calibrate.recorder_run")
    parser.add_argument("job", type=Path)
    parser.add_argument("--status", type=int, default=1)
    parser.add_argument("--lifeline", type=int)
    options = parser.parse_args(arguments)
    stop = threading.Event()
    if options.lifeline is not None:
        # Not killed with the parent itself: this process has to take the others with it.
        threading.Thread(target=_watch, args=(options.lifeline, stop), daemon=True).start()

    def tell(event: dict[str, Any]) -> None:
        os.write(options.status, (json.dumps(event) + "\n").encode())

    try:
        _run(json.loads(options.job.read_text(encoding="utf-8")), tell, stop)
    except SimclusterError as error:
        tell({"event": "error", "message": str(error)})
        return 1
    except Exception as error:  # whatever vLLM raises, it ends as one line; the rest is in the log
        sys.excepthook(type(error), error, error.__traceback__)
        tell({"event": "error", "message": one_cause(error)})
        return 1
    return 0


def _watch(lifeline: int, stop: threading.Event) -> None:
    while os.read(lifeline, 1):
        stop.set()
    os.killpg(0, signal.SIGKILL)


def one_cause(error: BaseException) -> str:
    """Return an error of vLLM as one line: what it says first, without pydantic's frame."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r"\d+ validation errors? for ", lines[0]):
        lines = [f"{lines[1]}: {lines[2]}" if len(lines) > 2 else lines[1]]
    text = re.sub(r" \[type=.*", "", " ".join(lines[:2]))
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__


def _run(job: dict[str, Any], tell: Any, stop: threading.Event) -> None:
    folder = Path(job["folder"])
    raw = folder / "raw"
    os.environ[FOLDER_VARIABLE] = str(raw.resolve())
    os.environ[OWNED_VARIABLE] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(job["model"]).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tell({"event": "starting"})
    engine, vocabulary = _start(job)
    try:
        limits = _limits(raw)
        settings = job["plan"]
        plan = build_plan(
            limits,
            seed=settings["seed"],
            minutes=settings["minutes"],
            phases=tuple(settings["phases"]),
            loads=tuple(settings["loads"]),
        )
        tell({"event": "plan", "skipped": plan.skipped, "seconds": plan.seconds})
        with (raw / "client.jsonl").open("a", encoding="utf-8") as clients:
            driver = Driver(engine, plan, vocabulary, clients, tell, stop)
            try:
                driver.run()
            except Stopped:
                tell({"event": "stopped"})
                return
        (raw / "complete").touch()
        tell({"event": "complete"})
    finally:
        engine.engine_core.shutdown()


def _limits(raw: Path) -> Limits:
    """Return what the engine can hold, as its own process has written it down."""
    options = json.loads(next(raw.glob("engine_*.json")).read_text(encoding="utf-8"))["engine"]
    return Limits(
        options["max_num_seqs"],
        options["max_num_batched_tokens"],
        options["max_model_len"],
        options["num_gpu_blocks"],
        options["block_size"],
    )


def _start(job: dict[str, Any]) -> tuple[Any, int]:
    """Start the engine; returns it and the size of its vocabulary."""
    context = vllm_name("vllm.usage.usage_lib", "UsageContext").LLM_CLASS
    loop = job["loop"]
    words = [
        *("--model", job["model"], "--skip-tokenizer-init", "--no-enable-prefix-caching", "--disable-log-stats"),
        *(("--no-async-scheduling",) if loop == "sync" else ("--async-scheduling",)),
        *("--scheduler-cls", f"simcluster.calibrate.recorder.{_CLASSES[loop]}"),
        *("--worker-cls", "simcluster.calibrate.recorder.RecordingWorker"),
        *job["engine_options"],
    ]
    config = _engine_arguments(words).create_engine_config(context)
    if loop == "async" and not config.scheduler_config.async_scheduling:
        raise ConfigError(
            "loop async: vLLM resolved async_scheduling = False, as it always does on a CPU and with some options; "
            "record with --loop sync"
        )
    kind = vllm_name("vllm.v1.engine.llm_engine", "LLMEngine")
    engine = kind.from_vllm_config(config, context, disable_log_stats=True)
    return engine, int(config.model_config.get_vocab_size())


def _engine_arguments(words: list[str]) -> Any:
    """Parse options as `vllm serve` does.

    Raises:
        ConfigError: one is unknown, or has a value that vLLM refuses.
    """

    def error(self: Any, message: str) -> None:
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        if unknown is None:
            raise ConfigError(f"engine option: {message}; see `vllm serve --help=all`")
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
        raise ConfigError(f"engine option {unknown[1]}: vLLM has no such option; {hint}")

    base = vllm_name("vllm.utils.argparse_utils", "FlexibleArgumentParser")
    arguments = vllm_name("vllm.engine.arg_utils", "EngineArgs")
    parser = arguments.add_cli_args(type("Parser", (base,), {"error": error})(add_help=False))
    return arguments.from_cli_args(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
