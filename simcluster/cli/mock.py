"""`simcluster mock`."""

import asyncio
import gc
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from simcluster.cli.wide import print_wide
from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.live.endpoints import Endpoint, endpoints, publishing
from simcluster.live.mock.run import MockCluster, serve
from simcluster.live.open_files import allow_many_files
from simcluster.predict.tokens import load_tokens
from simcluster.scenario import load_scenario, override

__all__ = ["mock"]

_PORT, _LAST_PORT = 8100, 65535


def mock(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or the name of a shipped one.")],
    speed: Annotated[
        float, typer.Option(min=1e-4, max=1e4, help="Simulated seconds per second; below 1 is slower than real.")
    ] = 1.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65000,
            help="Port of the first instance, then counting up; 0: free ones; default: those of the instances' urls "
            f"on this machine, else {_PORT}.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Take lengths of answers from this trace instead of the scenario's workload.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed instead of the scenario's.")] = None,
    publish: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Publish the state of every instance as shm:NAME-1, ..., whatever it says."),
    ] = None,
    until_input_ends: Annotated[
        bool, typer.Option("--until-input-ends", help="Stop when standard input ends, too.", hidden=True)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on a line when ready, one when stopped.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing.")] = False,
) -> None:
    """Serve every instance of a scenario as an OpenAI-compatible server that behaves like vLLM, without a GPU.

    The engines are those of `simcluster run`, in wall-clock time. A request whose X-Request-Id is in the trace gets
    the answer length and the ending that the trace has for it; any other ends at its max_tokens, or without one at
    the instance's mean answer length. An instance with `snapshot: shm:NAME` publishes its state there, as vLLM with
    simcluster's scheduler class does. Stop with Ctrl-C; then it says how many steps were told of late.

    Examples:
    * `simcluster mock quickstart`

    * `simcluster mock quickstart --speed 0.5 --port 9000`

    * `curl -N 127.0.0.1:8100/v1/completions -d '{"model": "Qwen3-0.6B", "prompt": "Hi", "stream": true}'`
    """
    loaded, path = load_scenario(scenario)
    loaded = override(loaded, trace=trace, seed=seed)
    if publish is not None:
        loaded = publishing(loaded, publish)
    tokenizer = loaded.routing.tokenizer
    world = build_world(loaded, path)
    tokens = load_tokens(None if tokenizer is None else path.parent / tokenizer)
    places = endpoints(loaded, path)
    cluster = MockCluster(world=world, tokens=tokens, speed=speed, channels=[each.channel for each in places])
    ports = _ports(places, port)
    allow_many_files()
    gc.freeze()  # what lives for ever need not be looked at again and again

    def say(ready: MockCluster) -> None:
        _say_ready(ready, as_json=as_json, quiet=quiet)

    try:
        asyncio.run(serve(cluster, host, ports, say, until_input_ends=until_input_ends))
    finally:
        gc.unfreeze()
    report = cluster.report()
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif not quiet:
        late = report["late_steps_share"]
        told = "" if late is None else f", {late:.2%} of them told of over 1 % of the median TTFT late"
        ends = ", ".join(f"{count:,} {kind}" for kind, count in report["requests"].items()) or "no requests"
        sys.stdout.write(f"{ends}; {report['steps']:,} steps{told}\n")


def _ports(places: list[Endpoint], first: int | None) -> list[int]:
    """Return where each instance listens: as its url says, unless `--port` was given."""
    if first == 0:
        return [0] * len(places)
    if (first or _PORT) + len(places) > _LAST_PORT:
        raise ConfigError(
            f"--port {first or _PORT}; {len(places)} instances need ports up to 65535; give a smaller one"
        )
    counted = [(first or _PORT) + number for number in range(len(places))]
    if first is not None:
        return counted
    return [each.local_port or other for each, other in zip(places, counted, strict=True)]


def _say_ready(cluster: MockCluster, *, as_json: bool, quiet: bool) -> None:
    rows = [
        {"name": spec.name, "model": spec.model, "url": url, "snapshot": f"shm:{channel}" if channel else None}
        for spec, url, channel in zip(cluster.world.instances, cluster.urls, cluster.channels, strict=True)
    ]
    if as_json:
        sys.stdout.write(json.dumps({"instances": rows, "speed": cluster.speed}) + "\n")
        sys.stdout.flush()
    elif not quiet:
        table = Table(title=f"listening, {cluster.speed:g} simulated seconds per second", title_justify="left")
        for heading in ("instance", "model", "url", "snapshot"):
            table.add_column(heading)
        for row in rows:
            table.add_row(row["name"], row["model"], row["url"], row["snapshot"] or "")
        print_wide(table)
