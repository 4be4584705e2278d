"""Finds the data that is too large, or not ours, to keep in the repository."""

import os
from pathlib import Path

import pytest


def shared_data() -> Path | None:
    """Return the `data` folder of the shared material, or None where there is none.

    It is looked for in the folder that the variable SIMCLUSTER_SHARED names, else in `shared`
    beside the repository. With SIMCLUSTER_REQUIRE_SHARED=1 its absence fails the test.
    """
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("SIMCLUSTER_SHARED") or root.parent / "shared") / "data"
    if folder.is_dir():
        return folder
    if os.environ.get("SIMCLUSTER_REQUIRE_SHARED") == "1":
        pytest.fail(f"{folder} does not exist, but SIMCLUSTER_REQUIRE_SHARED=1")
    return None
