"""The rooms of the generation job are built on each other in one order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROOMS = ["io", "cluster", "output", "progress", "learning", "engines", "generate", "batches"]
"""Each may import from those before it, and from `openai`."""


def imported_rooms(file: Path) -> set[str]:
    """Rooms that a file imports from, anywhere in it."""
    modules = [node.module for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    parts = [module.split(".") for module in modules if module is not None and module.startswith("pipeline.")]
    return {names[1] for names in parts if (ROOT / "pipeline" / names[1]).is_dir()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_before_it(room: str) -> None:
    files = list((ROOT / "pipeline" / room).glob("*.py"))
    assert files
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "openai"}
    for file in files:
        assert imported_rooms(file) <= allowed, file


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_can_be_taken_in_at_a_glance(room: str) -> None:
    modules = [file for file in (ROOT / "pipeline" / room).glob("*.py") if file.name != "__init__.py"]
    assert len(modules) <= 12
