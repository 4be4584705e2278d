"""`simcluster scenario`."""

import json
import sys
from typing import Annotated

import typer
import yaml

from simcluster.cli.building import built
from simcluster.routers import check_policy, located
from simcluster.scenario import Scenario, load_scenario

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Check, show and describe scenario files.")

_Name = Annotated[str, typer.Argument(help="Scenario file, or the name of a shipped one.")]


@app.command()
def check(scenario: _Name) -> None:
    """Check a scenario and everything that it names, without running it.

    Example: `simcluster scenario check my_scenario.yaml`
    """
    loaded, path = load_scenario(scenario)
    for policy in loaded.routing.policies:
        check_policy(located(policy, path.parent))
    world = built(loaded, path)
    for warning in world.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    sys.stdout.write(
        f"{path}: fine; {len(world.known):,} requests, {len(world.instances)} instances, "
        f"policies {', '.join(loaded.routing.policies)}\n"
    )


@app.command()
def show(scenario: _Name) -> None:
    """Print a scenario with every default filled in, as YAML.

    Example: `simcluster scenario show quickstart`
    """
    loaded, _ = load_scenario(scenario)
    sys.stdout.write(yaml.safe_dump(loaded.resolved(), sort_keys=False, allow_unicode=True))


@app.command()
def schema() -> None:
    """Print the JSON schema of scenario files.

    Example: `simcluster scenario schema > scenario.schema.json`
    """
    sys.stdout.write(json.dumps(Scenario.model_json_schema(), indent=2) + "\n")
