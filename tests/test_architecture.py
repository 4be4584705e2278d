"""The rules of the house: who may import whom, where randomness and time come from, how long things may be."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "simcluster"

# Each part of the package by its place in the house; nothing imports what is above it.
LAYERS = [
    ["_native"],
    ["units", "errors", "rng"],
    ["validation", "yaml_files", "shipped"],
    ["request", "card", "instance", "engine_options", "scenario", "records", "world"],
    ["backends", "routers"],
    ["workload", "predict", "calibrate", "conformance", "report"],
    ["experiment", "live"],
    ["validate"],  # plays real runs through the simulated cluster, so it stands above experiment
    ["paper"],
    ["bench"],
    ["cli"],
    ["entry"],
    ["__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names} | {"__init__": 0}
# These may read a clock; calibrate.record and .recorder since a recording is of real time, the publisher since it
# stamps what a real engine does.
DRIVERS = (
    "backends.simulated",
    "backends.vllm_publisher",
    "calibrate.record",
    "experiment",
    "live",
    "paper.overhead",
    "bench",
    "cli",
)
VLLM = ("calibrate.recorder", "backends.vllm_", "conformance.record")  # these may import vllm, inside of functions
MAX_FILE, MAX_FUNCTION = 400, 60


def source_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "data" not in path.relative_to(PACKAGE).parts[:1]]


def module_of(path: Path) -> str:
    """Return `routers.sfs` for simcluster/routers/sfs.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


TREES = {module_of(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in source_files()}


def is_part_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith((f"{package}.", package)) for package in packages)


def imported_by(node: ast.AST) -> list[str]:
    """Return what one statement imports, as `numpy` or `simcluster.rng.generator`; nothing for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield everything that is imported, anywhere."""
    for node in ast.walk(tree):
        yield from imported_by(node)


def own_imports(module: str) -> set[str]:
    """Return the modules of the package that one of them imports."""
    found = set()
    for name in imports(TREES[module]):
        parts = name.split(".")
        if parts[0] == "simcluster" and len(parts) > 1:
            path = ".".join(parts[1:])
            while path and path not in TREES and path not in RANK:
                path = path.rpartition(".")[0]
            found.add(path or "__init__")
    return found


def calls(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of whatever is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func)


# ---- who may import whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", TREES)
def test_no_module_imports_what_is_above_it(module: str) -> None:
    assert module.split(".", maxsplit=1)[0] in RANK, "give the new part a place in LAYERS"
    for other in own_imports(module):
        assert RANK[other.split(".")[0]] <= RANK[module.split(".", maxsplit=1)[0]], f"{module} imports {other}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    tuple(TopologicalSorter({module: own_imports(module) - {module} for module in TREES}).static_order())


def test_routers_decide_without_clock_chance_files_or_whoever_drives_them() -> None:
    forbidden = {"simpy", "asyncio", "time", "datetime", "random", "vllm", "socket", "aiohttp", "polars", "pyarrow"}
    for module, tree in TREES.items():
        if is_part_of(module, ("routers",)):
            assert not {name.split(".")[0] for name in imports(tree)} & forbidden, module
            assert not {name.split(".")[0] for name in own_imports(module)} & {"backends", "workload", "world"}, module


def test_reports_are_made_from_records_alone() -> None:
    for module in TREES:
        if is_part_of(module, ("report",)):
            own = {name.split(".")[0] for name in own_imports(module)}
            assert own <= {"report", "records", "units", "errors"}, module


def test_vllm_is_imported_only_where_it_is_driven_and_only_when_needed() -> None:
    for module, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if any(name.split(".")[0] == "vllm" for name in imported_by(node)):
                assert is_part_of(module, VLLM), f"{module} imports vllm"
                assert id(node) in inside, f"{module} imports vllm at once"


# ---- where things come from ------------------------------------------------------------------------------------


def test_every_random_generator_is_built_in_one_place() -> None:
    builders = {"default_rng", "Generator", "PCG64", "SeedSequence", "RandomState", "MT19937", "Philox", "SFC64"}
    for module, tree in TREES.items():
        built = {name for name in calls(tree) if name.rpartition(".")[2] in builders}
        assert not built or module == "rng", f"{module}: {built}; take simcluster.rng"


def test_only_drivers_read_a_clock() -> None:
    for module, tree in TREES.items():
        if is_part_of(module, DRIVERS):
            continue
        assert not {name for name in imports(tree) if name.split(".")[0] == "time"}, module
        assert not {name for name in calls(tree) if name.endswith((".now", ".utcnow", ".today"))}, module


def test_only_the_command_line_prints() -> None:
    for module, tree in TREES.items():
        assert is_part_of(module, ("cli",)) or "print" not in calls(tree), module


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    heavy = ["vllm", "torch", "ray", "lightgbm", "matplotlib"]
    everything = ", ".join(f"simcluster.{module}" for module in TREES if module not in {"__init__", "__main__"})
    program = (
        f"import sys, simcluster; first = set({heavy}) & set(sys.modules)\n"
        f"import {everything}\n"
        f"print(sorted(first), sorted(set({heavy}) - {{'lightgbm'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[] []\n"


# ---- size ------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> set[int]:
    """Return the lines that hold code: no blank lines, comments or docstrings."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in silent]
    lines = {line for each in tokens for line in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@pytest.mark.parametrize("path", source_files(), ids=module_of)
def test_functions_and_files_are_short_enough_to_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE
    lines = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines of code"


def test_files_of_the_core_are_short_enough_to_read() -> None:
    for path in [*ROOT.glob("native/**/*.cpp"), *ROOT.glob("native/**/*.hpp")]:
        assert path.read_text(encoding="utf-8").count("\n") <= MAX_FILE, path


# ---- the native module -----------------------------------------------------------------------------------------


def test_the_committed_stub_is_what_nanobind_writes_for_the_built_module(tmp_path: Path) -> None:
    pytest.importorskip("nanobind")
    stub = tmp_path / "_native.pyi"
    command = [sys.executable, "-P", "-m", "nanobind.stubgen", "-m", "simcluster._native", "-o", str(stub), "-q"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert stub.read_text() == (PACKAGE / "_native.pyi").read_text(), "regenerate simcluster/_native.pyi"
