"""What the command `simcluster` runs: the command line, and one line where it is interrupted while being imported."""

import os
import signal
from types import FrameType

__all__ = ["main"]

_EXIT_CODE = 130  # of a shell for an interrupted command


def main() -> None:
    """Import the command line, which takes a second, and run it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody ignores or handles it
    if is_usual:
        signal.signal(signal.SIGINT, _leave)
    from simcluster.cli import main as run  # noqa: PLC0415  (not before interrupts are handled)

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """End at once: nothing has been done yet, and an exception could be caught by whatever is being imported."""
    os.write(2, b"error: interrupted\n")
    os._exit(_EXIT_CODE)
