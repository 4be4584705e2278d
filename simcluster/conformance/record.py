"""Record what the installed vLLM's own scheduler classes decide, for `conformance check`.

Whoever upgrades vLLM records new scenarios and replays them: a difference is a rule that has changed. The scenarios
are drawn at random over every option; the same seed gives the same ones. The files follow tests/golden/README.md.
"""

import contextlib
import gzip
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from simcluster.backends.vllm_scheduler import VllmScheduler
from simcluster.backends.vllm_setup import missing_options, vllm_version
from simcluster.conformance.record_draw import DrawnScenario, Kind, draw_scenario
from simcluster.conformance.replay import EngineLoop
from simcluster.errors import ConfigError, ConformanceError
from simcluster.rng import seeded

__all__ = ["Recorded", "record_folder", "record_scenario"]

Json = dict[str, Any]

_MOST_ITERATIONS = 20_000
_MOST_DRAWS = 20
_LARGE_FIELDS = ("blocks", "running", "waiting")  # left out of long recordings
_SMALL_FIELDS = ("nrun", "nwait")  # and of short ones


@dataclass(slots=True)
class Recorded:
    """What was recorded.

    Attributes:
        version: of vLLM.
        scenarios: how many.
        tokens: output tokens.
        preemptions: victims.
        redrawn: scenarios that vLLM never ends, replaced by another draw.
        missing: options that this vLLM does not have, with the values that leave them unused.
    """

    version: str
    scenarios: int = 0
    tokens: int = 0
    preemptions: int = 0
    redrawn: int = 0
    missing: Json = field(default_factory=dict)


def _kind(number: int) -> Kind:
    """Of 30 scenarios, 1 is large, 9 are tight and 20 small."""
    if number % 30 == 29:
        return "large"
    return "tight" if number % 3 == 2 else "small"


def record_scenario(name: str, scenario: DrawnScenario, *, detailed: bool) -> Json | None:
    """Take one scenario through vLLM's scheduler.

    Args:
        name: its `id`.
        scenario: options and requests.
        detailed: keep queues and block tables, not only the queues' lengths.

    Returns:
        The recorded object; None if vLLM makes no end of it, as when two requests evict each other for ever.

    Raises:
        ConfigError: vLLM is missing or refuses the options.
    """
    scheduler = VllmScheduler(scenario.config)
    loop = EngineLoop({"config": scenario.config, "requests": scenario.requests}, scheduler)
    left_out = _SMALL_FIELDS if detailed else _LARGE_FIELDS
    iterations: list[Json] = []
    for record in loop.records():
        if len(iterations) == _MOST_ITERATIONS:
            return None
        iterations.append({key: value for key, value in record.items() if key not in left_out})
    return {
        "id": name,
        "vllm": vllm_version(),
        "scheduler": scheduler.class_name,
        "config": scenario.config,
        "requests": scenario.requests,
        "iterations": iterations,
        "summary": [asdict(summary) for summary in loop.summary],
        "totals": asdict(loop.totals),
    }


def _record_number(number: int, seed: int, recorded: Recorded) -> Json:
    """Draw and record one scenario, until one is drawn that vLLM ends."""
    kind = _kind(number)
    for draw in range(_MOST_DRAWS):
        scenario = draw_scenario(kind, seeded(seed, number, draw))
        scenario.config.update(recorded.missing)
        found = record_scenario(f"{kind}-{seed}-{number:05d}", scenario, detailed=kind != "large")
        if found is not None:
            return found
        recorded.redrawn += 1
    raise ConformanceError(
        f"vLLM ends none of {_MOST_DRAWS} draws of scenario {number} of seed {seed}; try another seed"
    )


@contextlib.contextmanager
def _compressed(path: Path) -> Iterator[IO[str]]:
    """Open a gzip file for text, whose bytes depend on its content alone: no name, no time."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text,
    ):
        yield text


def _record_into(folder: Path, count: int, seed: int, recorded: Recorded, on_progress: Callable[[int], None]) -> None:
    """Record the scenarios, one file per kind."""
    with contextlib.ExitStack() as stack:
        files: dict[Kind, IO[str]] = {}
        for number in range(count):
            kind = _kind(number)
            scenario = _record_number(number, seed, recorded)
            if kind not in files:
                files[kind] = stack.enter_context(_compressed(folder / f"{kind}.json.gz"))
                files[kind].write("[\n")
            else:
                files[kind].write(",\n")
            files[kind].write(json.dumps(scenario, separators=(",", ":"), allow_nan=False))
            recorded.scenarios += 1
            recorded.tokens += scenario["totals"]["tokens"]
            recorded.preemptions += scenario["totals"]["preemptions"]
            on_progress(number + 1)
        for file in files.values():
            file.write("\n]\n")


def record_folder(
    out: Path, count: int, seed: int, on_progress: Callable[[int], None] = lambda _done: None
) -> Recorded:
    """Record scenarios into a new folder, which appears when all of them are there.

    Args:
        out: the folder; it must not exist or be empty.
        count: how many scenarios.
        seed: of the draws.
        on_progress: called with the number of scenarios done.

    Raises:
        ConfigError: vLLM is missing, or the folder cannot be written.
        ConformanceError: no scenario could be recorded.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists and is not an empty folder; give a new one")
    recorded = Recorded(vllm_version(), missing=missing_options())
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); give another folder") from None
    try:
        _record_into(temporary, count, seed, recorded, on_progress)
        temporary.chmod(0o755)
        os.replace(temporary, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from None
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
    return recorded
