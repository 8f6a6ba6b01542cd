"""The walls of the house: imports go one way and never in a circle; names and rooms stay small and distinct."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

from drafter.plugins import Kind, methods, registered
from tests.support.paths import ROOT

FORBIDDEN = {
    "drafter": {"ray", "pydantic", "pipeline", "jobs", "recipes", "benchmarks", "studies", "tests"},
    "pipeline": {"jobs", "recipes", "benchmarks", "studies", "tests"},
    "pipeline/openai": {"ray", "pyarrow", "fastapi", "starlette"},
    "jobs": {"drafter", "ray", "recipes", "benchmarks", "studies", "tests"},
    "benchmarks": {"jobs", "studies", "tests"},
    "recipes": {"jobs", "benchmarks", "studies", "tests"},
    "examples": {"jobs", "benchmarks", "studies", "tests"},
    "studies": {"jobs", "tests"},
}
"""What no file of a package imports. A package is named by its folder, what it imports by the top-level package."""
OF_TYPES = {ROOT / "drafter" / "record_types.py": {"pydantic"}}
"""What reads records as types of Python may import what these are made by."""

WALLS = {
    "drafter.native": {"drafter.devices"},
    "drafter.target_model": {
        "drafter.devices",
        "drafter.errors",
        "drafter.gguf_files",
        "drafter.hub",
        "drafter.native",
        "drafter.prompt",
    },
    "drafter.tree": {"drafter.devices"},
    "drafter.heads": {
        "drafter.ctc.head",
        "drafter.devices",
        "drafter.drafters.contract",
        "drafter.drafters.slots",
        "drafter.drafters.target",
        "drafter.errors",
        "drafter.hub",
        "drafter.json_fields",
        "drafter.native",
        "drafter.plugins",
        "drafter.target_model",
        "drafter.tree",
    },
    "drafter.ctc": {
        "drafter.devices",
        "drafter.drafters.target",
        "drafter.heads",
        "drafter.native",
        "drafter.target_model",
        "drafter.tree",
    },
    "drafter.edge": {
        "drafter.drafters.contract",
        "drafter.drafters.registry",
        "drafter.drafters.slots",
        "drafter.errors",
        "drafter.half_characters",
        "drafter.plugins",
        "drafter.requests",
        "drafter.statistics",
        "drafter.text",
        "drafter.tree.paths",
    },
    "drafter.ranks": {
        "drafter.devices",
        "drafter.errors",
        "drafter.gguf_files",
        "drafter.images",
        "drafter.target_model",
    },
    "drafter.training": {
        "drafter.errors",
        "drafter.heads",
        "drafter.prompt",
        "drafter.target_model",
        "drafter.tree",
    },
    "drafter.plugins": set[str](),
}
"""Of `drafter`, all that some rooms may import beside themselves."""

INFERENCE = ("heads", "ctc", "drafters", "engine", "target_model", "tree", "acceptance", "budget")
NAMES_DRAFTERS = ("drafter.llm", "drafter.edge.", "drafter.evaluation.", "drafter.methods.", "jobs.", "pipeline.")
"""Only these may ask the registry of drafters for one by name."""


def files(package: str) -> list[Path]:
    found = [*(ROOT / package).rglob("*.py")]
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
        assert not {one.split(".")[0] for one in imports(file)} & FORBIDDEN[package] - OF_TYPES.get(file, set()), file


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


def test_heads_and_drafters_do_without_a_target_model() -> None:
    """A device that only drafts has neither the model nor the engine."""
    found = ["drafter.ctc.head", "drafter.drafters.registry", "drafter.heads.checkpoint", "drafter.methods.eagle3.head"]
    found.append("drafter.edge.client")
    for module in found:
        found += import_graph()[module] - set(found)
    assert not [one for one in found if within(one, "drafter.engine") or one == "drafter.target_model.model"]


def test_methods_are_rooms_that_can_be_deleted() -> None:
    """The core imports no method, and no method another one."""
    for module, imported in import_graph().items():
        room = ".".join(module.split(".")[:3])
        for one in imported:
            if module.startswith("drafter.") and within(one, "drafter.methods") and not within(one, room):
                assert one == "drafter.methods", f"{module} imports {one}"


def test_the_core_has_no_methods_name() -> None:
    """A name in a string of the code. What methods add is asked of `plugins`."""
    words_of_their_own = {"model", "grammar"}
    named = {*methods(), *(name for kind in get_args(Kind) for name in registered(kind))} - words_of_their_own
    for file in files("drafter"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        words = {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        found = {part for word in words for part in re.split(r"[+:,]", word)} & named
        assert not found or "methods" in file.parts, f"{file} names {found}"


def test_the_cores_tests_do_without_methods() -> None:
    """They go on to pass when a method's folder, and that of its tests, are gone."""
    for file in (ROOT / "tests" / "drafter").rglob("*.py"):
        assert not [one for one in imports(file) if one.startswith(("drafter.methods.", "tests.methods."))], file


def test_outputs_are_written_and_reported_without_a_method() -> None:
    """A method's own room may be gone from the pipeline, too."""
    methods = ("drafter.methods", "pipeline.learning")
    for module, imported in import_graph().items():
        if any(within(module, f"pipeline.{room}") for room in ("io", "output", "progress", "report")):
            assert not [one for one in imported if any(within(one, method) for method in methods)], module


LIGHT = [
    # A device's messages.
    ("drafter.edge.messages", "torch, ray, transformers"),
    # What checks, counts or writes: torch takes seconds, in each process and before each message about a mistake.
    (
        "pipeline.command_line, pipeline.engines.ledger, pipeline.generate.job, pipeline.generate.staging, "
        "pipeline.output.part_files, pipeline.progress.board, pipeline.serving.app",
        "torch",
    ),
    # A job's driver and a worker that tokenises: the code of models takes ten seconds of a processor.
    (
        "pipeline.generate.row_requests, pipeline.engines.engine_actor",
        "transformers.modeling_utils, torch._dynamo, drafter.engine.engine",
    ),
]
"""Modules, and what no process has imported that has imported them and those before."""


def test_no_process_imports_what_it_does_not_need() -> None:
    stages = (f"import {modules}\nprint({set(heavy.split(', '))} & sys.modules.keys())" for modules, heavy in LIGHT)
    program = "\n".join(["import sys", *stages])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["set()"] * len(LIGHT), done.stderr


@pytest.mark.xdist_group("any")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one process")
def test_tests_with_a_shared_fixture_are_kept_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist goes by the end of their names. Where it is missing, each process starts a cluster."""
    assert request.node.nodeid.endswith("@any")
