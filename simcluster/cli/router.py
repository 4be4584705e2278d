"""`simcluster router`."""

import asyncio
import contextlib
import gc
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from simcluster.cli.router_replay import replay_log
from simcluster.cli.wide import print_wide
from simcluster.errors import ConfigError
from simcluster.experiment.build import build_world
from simcluster.live.endpoints import Endpoint, endpoints
from simcluster.live.open_files import allow_many_files
from simcluster.live.router.core import RouterSetup
from simcluster.live.router.log.journal import DecisionLog
from simcluster.live.router.server import RouterServer
from simcluster.scenario import load_scenario, override

__all__ = ["app"]

_YOUNG = 10_000  # objects before the garbage collector looks at them: hardly any of a request's are in a cycle


class _ServesByDefault(TyperGroup):
    """`router SCENARIO` is `router serve SCENARIO`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the command that was left out."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["serve", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ServesByDefault,
    no_args_is_help=True,
    help="Route requests to real servers: `simcluster router SCENARIO` serves.",
)


app.command("replay", no_args_is_help=True)(replay_log)


@app.command("serve", no_args_is_help=True)
def serve(
    scenario: Annotated[str, typer.Argument(help="Scenario file whose instances have a url.")],
    policy: Annotated[
        str | None, typer.Option("--policy", "-p", help="Who decides; default: the scenario's first policy.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    speed: Annotated[
        float,
        typer.Option(min=1e-4, max=1e4, help="In front of `mock --speed`: the same. 1 in front of real servers."),
    ] = 1.0,
    log: Annotated[
        Path | None, typer.Option(help="New folder for a log of all decisions; see `router replay`.")
    ] = None,
    log_rows: Annotated[int, typer.Option(min=1, help="Events in a file of the log, about.")] = 100_000,
    log_files: Annotated[int, typer.Option(min=1, help="Files of the log that stay, the newest.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on a line when ready, one when stopped.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing.")] = False,
) -> None:
    """Route requests to the real servers of a scenario, by the policy that was compared in simulation.

    Each instance needs a `url`; its `snapshot` says what tells its state: `shm:NAME` (vLLM on this machine with
    `--scheduler-cls simcluster.backends.vllm_publisher.PublishingAsyncScheduler`), `metrics` (any vLLM server) or
    `none`. Clients name a model, an instance, or `auto`, and may send the headers x-slo-ttft-ms, x-slo-tpot-ms and
    x-session-id. Answers tell instance, predicted TTFT and what the decision fell back to. Stop with Ctrl-C; open
    answers may end first.

    Examples:
    * `simcluster mock mine.yaml & simcluster router serve mine.yaml --policy sfs` (the word serve may be left out)

    * `curl -N 127.0.0.1:8000/v1/completions -d '{"model": "auto", "prompt": "Hi", "stream": true}'`
    """
    loaded, path = load_scenario(scenario)
    loaded = override(loaded, policies=None if policy is None else [policy])
    if len(loaded.routing.policies) > 1:
        names = ", ".join(loaded.routing.policies)
        raise ConfigError(f"{path}: routing.policies = {names}; a router has one; choose it with --policy")
    setup = RouterSetup(
        scenario=loaded, path=path, world=build_world(loaded, path), policy=loaded.routing.policies[0], speed=speed
    )
    allow_many_files()
    server = RouterServer(setup)
    found = endpoints(loaded, path)
    with _logging(setup, log, log_rows, log_files):
        asyncio.run(_serve(server, host, port, lambda url: _say_ready(setup, found, url, as_json=as_json, quiet=quiet)))
    report = {"requests": dict(sorted(server.core.ended.items())), "open": server.num_open}
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif not quiet:
        ends = ", ".join(f"{count:,} {kind}" for kind, count in sorted(server.core.ended.items())) or "no requests"
        sys.stdout.write(f"{ends}\n")


def _warn(line: str) -> None:
    sys.stderr.write(f"warning: {line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _logging(setup: RouterSetup, folder: Path | None, rows: int, files: int) -> Iterator[None]:
    """Keep a log while a router runs, if it is to."""
    if folder is None:
        yield
        return
    setup.journal = log = DecisionLog(
        folder,
        setup.world,
        setup.scenario,
        setup.policy,
        speed=setup.speed,
        rows=rows,
        files=files,
        warn=_warn,
    )
    try:
        yield
    finally:
        log.close()


async def _serve(server: RouterServer, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = await server.start(host, port)
    gc.collect()
    gc.freeze()  # what stays for ever need not be looked at again and again
    thresholds = gc.get_threshold()
    gc.set_threshold(_YOUNG)
    try:
        on_ready(url)
        await stop.wait()
    finally:
        await server.stop()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _say_ready(setup: RouterSetup, found: list[Endpoint], url: str, *, as_json: bool, quiet: bool) -> None:
    rows = [
        {"name": spec.name, "model": spec.model, "url": each.url, "snapshot": each.label}
        for spec, each in zip(setup.world.instances, found, strict=True)
    ]
    if as_json:
        sys.stdout.write(json.dumps({"url": url, "policy": setup.policy, "instances": rows}) + "\n")
        sys.stdout.flush()
    elif not quiet:
        table = Table(title=f"{setup.policy} at {url}", title_justify="left")
        for heading in ("instance", "model", "url", "snapshot"):
            table.add_column(heading)
        for row in rows:
            table.add_row(row["name"], row["model"], row["url"], row["snapshot"])
        print_wide(table)
