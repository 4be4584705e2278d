"""Files for experiments: a recipe whose seeds differ, a scenario on it, and policies that misbehave."""

from pathlib import Path
from typing import Any

import yaml

from small_cluster import make_card, scenario_data

__all__ = ["write_experiment", "write_policy"]

RECIPE: dict[str, Any] = {
    "name": "drawn",
    "seed": 1,
    "requests": 40,
    "arrivals": {"kind": "poisson", "rate_rps": 10.0},
    "lengths": {
        "kind": "drawn",
        "prompt": {"median": 20, "sigma": 0.5, "low": 1, "high": 200},
        "answer": {"median": 10, "sigma": 0.5, "low": 1, "high": 100},
    },
}


def write_experiment(folder: Path, requests: int = 40, **sections: Any) -> Path:
    """Write card `u.json`, recipe `drawn.yaml` and scenario `s.yaml`; return the scenario's path."""
    make_card(folder)
    (folder / "drawn.yaml").write_text(yaml.safe_dump(RECIPE | {"requests": requests}))
    data = scenario_data(
        2,
        workload={"recipe": "drawn.yaml"},
        slo={"ttft": 0.05},
        routing={"policies": ["round_robin", "shortest_queue"]},
    )
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(data | sections))
    return path


def write_policy(folder: Path, name: str, body: str) -> str:
    """Write a policy that notes each run in `NAME.log` and runs `body` at its 20th decision; return its name."""
    (folder / f"{name}.py").write_text(
        "import os, signal, time\n\n"
        "class Policy:\n"
        "    def __init__(self):\n"
        "        self.count = 0\n"
        f"        with open({str(folder / name) + '.log'!r}, 'a') as log:\n"
        "            log.write('run\\n')\n\n"
        "    def route(self, request, view):\n"
        "        self.count += 1\n"
        "        if self.count == 20:\n"
        f"            {body}\n"
        "        return 0\n"
    )
    return f"{name}.py:Policy"
