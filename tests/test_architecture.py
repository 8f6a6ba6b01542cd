"""The walls of the house: imports go one way and never in a circle; names and rooms stay small and distinct."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FORBIDDEN = {
    "drafter": {"ray", "pipeline", "jobs", "recipes", "benchmarks", "tests"},
    "pipeline": {"jobs", "recipes", "benchmarks", "tests"},
    "pipeline/openai": {"ray", "pyarrow", "fastapi", "starlette"},
    "jobs": {"drafter", "ray", "recipes", "benchmarks", "tests"},
    "benchmarks": {"jobs", "tests"},
}
"""What no file of a package imports. A package is named by its folder, what it imports by the top-level package."""

WALLS = {
    "drafter.native": {"drafter.host_memory"},
    "drafter.base": {"drafter.devices", "drafter.errors", "drafter.host_memory", "drafter.hub", "drafter.native"},
    "drafter.tree": set[str](),
    "drafter.search": {"drafter.devices", "drafter.tree"},
    "drafter.heads": {
        "drafter.base",
        "drafter.devices",
        "drafter.drafters.contract",
        "drafter.errors",
        "drafter.hub",
        "drafter.native",
        "drafter.search",
        "drafter.statistics",
        "drafter.tree",
    },
    "drafter.learning": {
        "drafter.base",
        "drafter.devices",
        "drafter.drafters.contract",
        "drafter.embedded",
        "drafter.errors",
        "drafter.heads",
        "drafter.statistics",
        "drafter.training",
        "drafter.tree",
    },
    "drafter.training": {"drafter.base", "drafter.errors", "drafter.heads", "drafter.tree"},
}
"""Of `drafter`, all that some rooms may import beside themselves."""

INFERENCE = ("heads", "search", "drafters", "engine", "base", "tree", "verifiers", "budget")
NAMES_DRAFTERS = ("drafter.llm", "drafter.evaluation.", "jobs.", "pipeline.")
"""Only these may ask the registry of drafters for one by name."""

SAME_NAMES = {"contract", "registry", "errors", "plan"}
"""Module names that several rooms may have: each says what it is together with its room's name."""

MOST_MODULES = 12


def files(package: str) -> list[Path]:
    found = [file for file in (ROOT / package).rglob("*.py") if file.name != "__init__.py"]
    assert found, f"{package} has no modules"
    return found


@cache
def imports(file: Path) -> list[str]:
    """Every module or name that a file imports anywhere in it, also in functions and for type checkers."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> dict[str, set[str]]:
    """The modules of the project that each of its modules imports."""
    modules = {module_name(file): file for package in ("drafter", "pipeline", "jobs") for file in files(package)}
    graph = {}
    for module, file in modules.items():
        # `from a.b import c` is of the module a.b.c, if there is one, or else of a.b.
        named = {one if one in modules else one.rpartition(".")[0] for one in imports(file)}
        graph[module] = {one for one in named if one in modules}
    return graph


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    for file in [*files(package), *(ROOT / package).rglob("__init__.py")]:
        assert not {one.split(".")[0] for one in imports(file)} & FORBIDDEN[package], file


def test_no_modules_import_each_other() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' ← '.join(error.args[1])}")


@pytest.mark.parametrize("room", WALLS)
def test_rooms_keep_their_walls(room: str) -> None:
    for module, imported in import_graph().items():
        for one in imported if within(module, room) else ():
            assert any(within(one, allowed) for allowed in (room, *WALLS[room])), f"{module} imports {one}"


def test_inference_does_without_training() -> None:
    for module, imported in import_graph().items():
        if any(within(module, f"drafter.{room}") for room in INFERENCE):
            assert not [one for one in imported if within(one, "drafter.training")], module


def test_drafters_are_named_at_the_edge_only() -> None:
    """Whatever is handed a drafter works with one that has no name, too."""
    for module, imported in import_graph().items():
        if "drafter.drafters.registry" in imported:
            assert module.startswith(NAMES_DRAFTERS), module


@pytest.mark.parametrize("package", ["drafter", "pipeline", "jobs", "benchmarks", "recipes"])
def test_rooms_are_small(package: str) -> None:
    by_folder: dict[Path, list[str]] = defaultdict(list)
    for file in files(package):
        by_folder[file.parent].append(file.name)
    assert not {str(folder): len(names) for folder, names in by_folder.items() if len(names) > MOST_MODULES}


def test_a_module_is_known_by_its_name() -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for package in ("drafter", "pipeline", "jobs"):
        for file in files(package):
            by_name[file.stem].append(str(file.relative_to(ROOT)))
    assert not {name: some for name, some in by_name.items() if len(some) > 1 and name not in SAME_NAMES}


def test_what_checks_counts_or_writes_does_without_torch() -> None:
    """Its import takes seconds, in each process and before each message about a mistake."""
    modules = [
        "command_line",
        "engines.ledger",
        "generate.job",
        "output.part_files",
        "progress.board",
        "staging.staging",
        "training.board",
    ]
    program = f"import sys, {', '.join(f'pipeline.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
