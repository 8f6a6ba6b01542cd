"""The walls that carry weight: imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
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


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert not imported(file) & FORBIDDEN[package], file


def test_what_checks_counts_or_writes_does_without_torch() -> None:
    """Its import takes seconds, in each process and before each message about a mistake."""
    modules = [
        "command_line",
        "engines.ledger",
        "generate.generate_job",
        "output.part_files",
        "progress.board",
        "staging.stage_input",
        "training.training_board",
    ]
    program = f"import sys, {', '.join(f'pipeline.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
