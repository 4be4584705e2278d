"""Where the instances of a scenario are when they are real: their addresses, and where their snapshots come from."""

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from simcluster.errors import ConfigError
from simcluster.scenario import Scenario
from simcluster.validation import explain

__all__ = ["METRICS", "NOTHING", "SHARED_MEMORY", "Endpoint", "endpoints", "publishing", "require_urls"]

SHARED_MEMORY, METRICS, NOTHING = "shm", "metrics", "none"
_LAST_PORT = 65535
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One instance of a live cluster.

    Attributes:
        url: where its server listens, without a slash at the end; None where the scenario does not say.
        source: SHARED_MEMORY, METRICS or NOTHING: what tells its state.
        channel: the name of its shared memory, or "".
    """

    url: str | None
    source: str
    channel: str = ""

    @property
    def label(self) -> str:
        """The source as a scenario writes it."""
        return f"{self.source}:{self.channel}" if self.channel else self.source

    @property
    def local_port(self) -> int | None:
        """Its port, if it is on this machine."""
        parts = urllib.parse.urlsplit(self.url or "")
        return parts.port if parts.hostname in _LOCAL else None


def endpoints(scenario: Scenario, path: Path) -> list[Endpoint]:
    """Return where each instance is, (j,), in the order of the instances; replicas count ports and names up.

    Raises:
        ConfigError: the ports of replicas end, or two instances share an address or a shared memory.
    """
    found: list[Endpoint] = []
    taken: dict[str, str] = {}
    for number, item in enumerate(scenario.cluster.instances):
        where = f"{path}: cluster.instances[{number}]"
        source, _, channel = item.snapshot.partition(":")
        for replica in range(item.replicas):
            name = f"{channel}-{replica + 1}" if channel and item.replicas > 1 else channel
            url = None if item.url is None else _counted_up(item.url, replica, f"{where}.url")
            for what, value in (("url", url), ("snapshot", f"shm:{name}" if name else None)):
                if value is not None and taken.setdefault(value, where) != where:
                    raise ConfigError(
                        f"{where}.{what} = {value}; {taken[value]} has it too; every instance needs its own"
                    )
            found.append(Endpoint(url, source, name))
    return found


def publishing(scenario: Scenario, name: str) -> Scenario:
    """Return a scenario whose instances tell their state in shared memory, as NAME-1, NAME-2, ....

    Raises:
        ConfigError: that is no name.
    """
    data = scenario.model_dump()
    for number, item in enumerate(data["cluster"]["instances"]):
        item["snapshot"] = f"shm:{name}-{number + 1}"
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"--publish: {explain(error, Scenario)}") from None


def _counted_up(url: str, replica: int, where: str) -> str:
    parts = urllib.parse.urlsplit(url.rstrip("/"))
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = _LAST_PORT + 1
    if not parts.hostname or port + replica > _LAST_PORT:
        raise ConfigError(f"{where} = {url}; must be an address with ports up to {_LAST_PORT}, one for each replica")
    if replica == 0:
        return url.rstrip("/")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return urllib.parse.urlunsplit((parts.scheme, f"{host}:{port + replica}", parts.path, "", ""))


def require_urls(found: list[Endpoint], path: Path) -> list[str]:
    """Return the address of every instance, (j,).

    Raises:
        ConfigError: one has none.
    """
    urls = [each.url for each in found if each.url is not None]
    if len(urls) < len(found):
        number = next(k for k, each in enumerate(found) if each.url is None)
        raise ConfigError(
            f"{path}: instance {number + 1} of {len(found)} has no url; live use needs one for each: give "
            "cluster.instances[...].url"
        )
    return urls
