"""Version and commit of the running code: the checkout's or, in a copy without git, that of the environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

VERSION = "0.1.0"
ROOT = Path(__file__).resolve().parents[1]
COMMIT, CHANGED = "DRAFTER_COMMIT", "DRAFTER_COMMIT_CHANGED"
"""Environment variables of a copy: its commit, and, if not empty, that its files differ from the commit."""


def source_commit() -> str | None:
    """Return the commit of this code; None if unknown."""
    return _git("rev-parse", "HEAD") or os.environ.get(COMMIT) or None


def has_changes() -> bool:
    """Return whether files of this code are known to differ from its commit."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return bool(os.environ.get(CHANGED) if changes is None else changes)


def for_a_copy() -> dict[str, str]:
    """Return the environment variables that tell a copy of this code its commit; none if it is unknown."""
    commit = source_commit()
    return {} if commit is None else {COMMIT: commit, CHANGED: "1" if has_changes() else ""}


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.check_output(
            ["git", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL, text=True, timeout=60
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None  # this is no checkout, or there is no git
