"""No change makes the engine or the estimate a tenth dearer, or cheaper, without saying so.

Counted by callgrind, which neither load nor clock speed can change. After a change that is meant to move a count:
python tests/perf/instruction_counts.py
"""

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from simcluster.bench.instructions import GUARDED


def _load() -> ModuleType:
    path = Path(__file__).with_name("instruction_counts.py")
    spec = importlib.util.spec_from_file_location("instruction_counts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


counts = _load()
REQUIRED = os.environ.get("SIMCLUSTER_REQUIRE_VALGRIND") == "1"


def test_the_counts_held_are_those_that_are_measured() -> None:
    assert set(counts.committed()["counts"]) == set(GUARDED)
    assert counts.committed()["tolerance"] == counts.TOLERANCE


@pytest.mark.skipif(not REQUIRED and shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize("name", GUARDED)
def test_instructions_stay_within_a_tenth_of_the_reference(name: str) -> None:
    reference = counts.committed()
    if not REQUIRED and counts.toolchain() != reference["toolchain"]:
        pytest.skip(f"measured with {reference['toolchain']}, not with {counts.toolchain()}")
    expected, found = reference["counts"][name], GUARDED[name]()
    assert abs(found / expected - 1) <= counts.TOLERANCE, (
        f"{name}: {found:,.0f} instructions, {expected:,.0f} when last measured with {reference['toolchain']}, now "
        f"{counts.toolchain()}; if this is meant: python tests/perf/instruction_counts.py"
    )
