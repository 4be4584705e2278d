"""Two vLLM servers of different size with cards that were recorded before, and routers in front of them."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from openai import AsyncOpenAI

from live_traffic import draw_mix, open_client
from record_processes import recording
from simcluster.card import Card, load_card
from simcluster.engine_options import EngineOptions, resolve_engine_options
from simcluster.experiment.build import build_world
from simcluster.live.router.core import RouterSetup
from simcluster.live.router.outcome import Outcome
from simcluster.live.router.server import RouterServer
from simcluster.scenario import load_scenario
from simcluster.validate.runs import Requests
from simcluster.validate.simulate import Tuning, play
from trace_files import write_file
from vllm_servers import VOCABULARY, VllmServer, cpu_environment, engine_words, write_tokenizer

__all__ = ["LONGEST", "SIZES", "Routed", "TwoServers", "say", "two_servers"]

SIZES = {"small": (4, "64M"), "large": (12, "256M")}  # layers; KV cache
_MINUTES = 0.5  # of the plan that a card is recorded by
_RUN_S = 900.0  # generous: other jobs may hold the cores
LONGEST = 96  # answer; none of the mix is longer
_ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "enable_prefix_caching": False, "async_scheduling": False}


def say(*words: object) -> str:
    """Give simcluster a command, which may wait for servers; return what it prints."""
    parts = [sys.executable, "-P", "-m", "simcluster", *map(str, words)]
    done = subprocess.run(parts, capture_output=True, text=True, check=False, timeout=_RUN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Routed:
    """A router in this process, with a client.

    Attributes:
        server: the router.
        client: talks to it.
        outcomes: of the requests that have ended.
    """

    server: RouterServer
    client: AsyncOpenAI
    outcomes: list[Outcome] = field(default_factory=list)

    async def quiet(self) -> None:
        """Wait until nothing is open, and make sure that everything was counted back."""
        async with asyncio.timeout(60):
            while self.server.num_open:
                await asyncio.sleep(0.01)
        assert [len(each) for each in self.server.core.dispatcher.own.open] == [0, 0]
        assert all(each.probe is None for each in self.server.core.dispatcher.health)


@dataclass
class TwoServers:
    """The servers and their cards, by name."""

    folder: Path
    servers: dict[str, VllmServer]
    cards: dict[str, Card]

    def scenario(self, **live: Any) -> Path:
        """Write the scenario of a router, which looks into shared memory; return its file."""
        mix = draw_mix(200, 7, "live")
        write_file(
            self.folder / "trace.parquet",
            arrival_s=[each.at_s for each in mix],
            prompt_tokens=[each.prompt for each in mix],
            output_tokens=[LONGEST] * len(mix),  # so that an expected answer is as long as its limit
        )
        instances = [
            {
                "name": name,
                "card": f"{name}.json",
                "price": {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0},
                "quality": 0.5,
                "engine": _ENGINE,
                "url": server.url,
                "snapshot": f"shm:{server.channel}",
            }
            for name, server in self.servers.items()
        ]
        content = {
            "name": "two-servers",
            "workload": {"trace": "trace.parquet"},
            "cluster": {"instances": instances},
            "routing": {
                "policies": ["sfs"],
                "objective": "weighted",
                "tokenizer": str(self.folder / "small-model" / "tokenizer.json"),
            },
            "slo": {"ttft": "none"},
            "output": {"estimators": ["throughput", "lps"]},
            "live": live,
        }
        file = self.folder / "two-servers.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    def capacity_rps(self) -> float:
        """Return how many requests of the mix the servers answer per second when all wait, by their cards."""
        mix = draw_mix(200, 7, "live")
        lengths = [np.array([getattr(each, name) for each in mix], dtype=np.int64) for name in ("prompt", "output")]
        never = np.full(len(mix), np.nan)
        at_once = Requests(np.zeros(len(mix)), *lengths, never, never)
        total = 0.0
        for name, card in self.cards.items():
            config, _ = resolve_engine_options(EngineOptions.model_validate(_ENGINE), card, name)
            played, _ = play(Tuning().model(card), config, card.front_end, at_once)
            total += len(mix) / played.duration_s
        return total

    @asynccontextmanager
    async def router(self, **live: Any) -> AsyncIterator[Routed]:
        """Run a router in this process."""
        scenario, path = load_scenario(str(self.scenario(**live)))
        outcomes: list[Outcome] = []
        world = build_world(scenario, path)
        server = RouterServer(
            RouterSetup(scenario=scenario, path=path, world=world, policy="sfs", on_end=outcomes.append)
        )
        url = await server.start("127.0.0.1", 0)
        try:
            async with open_client(url) as client:
                yield Routed(server, client, outcomes)
        finally:
            await server.stop()

    @contextmanager
    def router_command(self) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
        """Run the router's command; give its address and its process, which SIGTERM makes report."""
        command = [sys.executable, "-P", "-m", "simcluster", "router", "serve", str(self.scenario())]
        command += ["--policy", "sfs", "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield json.loads(process.stdout.readline())["url"], process
            finally:
                process.kill()


@contextmanager
def two_servers(folder: Path) -> Iterator[TwoServers]:
    """Record a card of each of two models, both at the same time, then serve them; nothing of it is left afterwards."""
    for name, (layers, _) in SIZES.items():
        model = folder / f"{name}-model"
        shape = ("--layers", layers, "--hidden", 512, "--vocabulary", VOCABULARY)
        say("calibrate", "dummy-model", model, *shape)
        write_tokenizer(model)
    with ExitStack() as stack:
        runs = []
        for number, (name, (_, cache)) in enumerate(SIZES.items()):
            words = ("--model", str(folder / f"{name}-model"), "--name", name, "--minutes", str(_MINUTES))
            options = (*words, *engine_words(cache), "--quiet")
            started = recording(folder / f"{name}-before", *options, environment=cpu_environment(number))
            runs.append(stack.enter_context(started))
        for process in runs:
            _, errors = process.communicate(timeout=_RUN_S)
            assert process.returncode == 0, errors
    with ExitStack() as stack:
        servers = {}
        for number, (name, (_, cache)) in enumerate(SIZES.items()):
            servers[name] = server = VllmServer(name, folder / f"{name}-model", folder, number, cache)
            stack.callback(server.remove)
            server.start()
        for name in SIZES:
            say("calibrate", "fit", folder / f"{name}-before", "--out", folder / f"{name}.json", "--json")
        for server in servers.values():
            server.wait()
        yield TwoServers(folder, servers, {name: load_card(folder / f"{name}.json") for name in SIZES})
