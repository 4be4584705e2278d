"""Plain data from YAML files, strictly: no key twice, no text that no file can hold, 1e-4 is a number."""

import re
from pathlib import Path
from typing import Any

import yaml

from simcluster.errors import ConfigError
from simcluster.validation import one_line

__all__ = ["load_yaml", "parse_yaml"]


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice and text that no file can hold.

    As in YAML 1.2, 1e-4 is a number, and off, no, on and yes are text: `decisions: off` means what it says.
    """

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        value.encode("utf-8")  # an escaped half of a surrogate pair raises a ValueError
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^([Tt]rue|TRUE|[Ff]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_yaml(path: Path) -> Any:
    """Read a YAML file of plain data.

    Raises:
        ConfigError: the file cannot be read or is not such YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({one_line(str(error))}); give a YAML file") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Read plain data from YAML text.

    Args:
        text: the YAML.
        where: what it is, for messages.

    Raises:
        ConfigError: it is not such YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a subclass of SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        # the last three: what PyYAML's constructors let through for a value that does not fit its tag
        raise ConfigError(f"{where}: not valid YAML ({one_line(str(error))[:200]}); correct the file") from None
