"""`simcluster policy`."""

import inspect
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from simcluster.experiment.policy_check import check_router
from simcluster.routers import POLICIES, WRAPPERS, check_policy, entry_point_names
from simcluster.routers.names import parameters

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="List the router policies, test one of your own.")


@app.command("list")
def list_policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List every policy with its parameters.

    Example: `simcluster policy list`
    """
    policies = {name: _described(factory) for name, factory in POLICIES.items()}
    wrappers = {name: _described(factory) for name, factory in WRAPPERS.items()}
    installed = entry_point_names()
    if as_json:
        content = {"policies": policies, "wrappers": wrappers, "entry_points": installed}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("rule, source, parameters", overflow="fold")
    for name, item in (policies | {f"{name}(POLICY)": item for name, item in wrappers.items()}).items():
        given = ", ".join(f"{key}={value}" for key, value in item["parameters"].items())
        parts = [item["rule"], f"[dim]{item['source']}[/]"] + [f"[cyan]{given}[/]"] * bool(given)
        table.add_row(name, "\n".join(parts))
    for name in installed:
        table.add_row(name, "an installed package's")
    console = Console()
    console.print(table)
    console.print("your own: file.py:Class or module:Class; parameters: POLICY:key=value,...", style="dim")


def _described(factory: Callable[..., Any]) -> dict[str, Any]:
    text = inspect.getdoc(factory) or ""
    source = [line.removeprefix("Source: ") for line in text.splitlines() if line.startswith("Source: ")]
    return {
        "rule": text.splitlines()[0] if text else "",
        "source": source[0] if source else "",
        "parameters": {name: parameter.default for name, parameter in parameters(factory).items()},
    }


@app.command("test")
def check(
    policy: Annotated[str, typer.Argument(help="A policy, as my_policy.py:MyRouter or sfs.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of clusters, requests and the policy.")] = 1,
    decisions: Annotated[int, typer.Option(min=100, max=1_000_000, help="Decisions per check.")] = 400,
    limit_us: Annotated[float, typer.Option(min=0, help="Limit on the median time of a decision [us].")] = 1000.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what every policy must promise; exit code 1 if something does not hold.

    It never chooses an unhealthy instance, decides the same for the same seed, treats equal instances alike, and is
    fast.

    Example: `simcluster policy test my_policy.py:MyRouter`
    """
    check_policy(policy)
    checks = check_router(policy, seed=seed, decisions=decisions, limit_us=limit_us)
    passed = all(check.passed for check in checks)
    if as_json:
        content = {"policy": policy, "passed": passed, "checks": [check.as_dict() for check in checks]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        table = Table(title=policy, title_justify="left", box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
        for heading in ("check", "result", "detail"):
            table.add_column(heading, overflow="fold")
        for check in checks:
            table.add_row(check.name, "[green]pass[/]" if check.passed else "[bold red]FAIL[/]", check.detail)
        Console().print(table)
    if not passed:
        raise typer.Exit(1)
