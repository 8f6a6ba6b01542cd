"""What a copy of the code says of its commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.source_commit import CHANGED, COMMIT, ROOT

_ASK = "from drafter.source_commit import has_changes, source_commit; print(source_commit(), has_changes())"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "None False"),
        ({COMMIT: "abc", CHANGED: ""}, "abc False"),
        ({COMMIT: "abc", CHANGED: "1"}, "abc True"),
    ],
)
def test_a_copy_without_git_says_what_it_was_told(tmp_path: Path, told: dict[str, str], said: str) -> None:
    package = tmp_path / "drafter"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "drafter" / "source_commit.py", package)
    found = subprocess.run(
        [sys.executable, "-c", _ASK], cwd=tmp_path, env=told, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == said


def test_a_checkout_says_its_own(tmp_path: Path) -> None:
    package = tmp_path / "drafter"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "drafter" / "source_commit.py", package)

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    def ask() -> str:
        return subprocess.run(
            [sys.executable, "-B", "-c", _ASK], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    assert ask() == f"{git('rev-parse', 'HEAD')} False"
    (package / "__init__.py").write_text("# changed\n")
    assert ask() == f"{git('rev-parse', 'HEAD')} True"
