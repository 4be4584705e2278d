"""How many files a process may have open: a stream through the router takes four."""

import resource

__all__ = ["allow_many_files"]


def allow_many_files() -> None:
    """Let this process have as many files open as the system allows at all; shells often begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
