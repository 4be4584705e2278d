"""Printing tables wider than the terminal rather than with numbers cut off."""

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

__all__ = ["print_wide"]

_WIDE = Console(width=400)


def print_wide(part: RenderableType) -> None:
    """Print to standard output; a table as wide as it needs."""
    needed = Measurement.get(_WIDE, _WIDE.options, part).maximum if isinstance(part, Table) else 0
    Console(width=max(Console().width, needed)).print(part)
