"""Where live instances are, by the scenario: addresses and shared memory, counted up for replicas."""

from pathlib import Path
from typing import Any

import pytest

from simcluster.errors import ConfigError
from simcluster.live.endpoints import Endpoint, endpoints, require_urls
from simcluster.scenario import Scenario
from small_cluster import scenario_data

HERE = Path("here.yaml")


def scenario(*instances: dict[str, Any]) -> Scenario:
    return Scenario.model_validate(scenario_data([{"name": f"i{k}"} | each for k, each in enumerate(instances)]))


def test_replicas_count_ports_and_names_up() -> None:
    found = endpoints(scenario({"url": "http://[::1]:8000/a/", "snapshot": "shm:x", "replicas": 3}), HERE)
    assert found == [
        Endpoint("http://[::1]:8000/a", "shm", "x-1"),
        Endpoint("http://[::1]:8001/a", "shm", "x-2"),
        Endpoint("http://[::1]:8002/a", "shm", "x-3"),
    ]


def test_one_instance_keeps_its_name_and_metrics_are_the_default_source() -> None:
    found = endpoints(scenario({"url": "https://h", "snapshot": "shm:x"}, {"snapshot": "none"}, {}), HERE)
    assert found == [Endpoint("https://h", "shm", "x"), Endpoint(None, "none"), Endpoint(None, "metrics")]


def test_an_address_or_a_shared_memory_belongs_to_one_instance() -> None:
    with pytest.raises(ConfigError, match=r"instances\[1\]\.url = http://h:8001; .*instances\[0\] has it too"):
        endpoints(scenario({"url": "http://h:8000", "replicas": 2}, {"url": "http://h:8001"}), HERE)
    with pytest.raises(ConfigError, match=r"instances\[1\]\.snapshot = shm:x; "):
        endpoints(scenario({"snapshot": "shm:x"}, {"snapshot": "shm:x"}), HERE)


@pytest.mark.parametrize("url", ["http://h:65535", "http://h:99999"])
def test_ports_of_replicas_must_exist(url: str) -> None:
    with pytest.raises(ConfigError, match="ports up to 65535"):
        endpoints(scenario({"url": url, "replicas": 2}), HERE)


def test_live_use_needs_an_address_for_every_instance() -> None:
    found = endpoints(scenario({"url": "http://a"}, {}), HERE)
    with pytest.raises(ConfigError, match="instance 2 of 2 has no url"):
        require_urls(found, HERE)
    assert require_urls(found[:1], HERE) == ["http://a"]
