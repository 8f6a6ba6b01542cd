"""`run.json`: what was run, with which versions, and whether it has finished."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drafter.source_commit import source_commit
from pipeline.io.files import Location, mend, read_either, write_twice

FORMAT = 3
"""Rises where this release must not go on with the outputs of earlier ones. In format 1, fingerprints of models did not
cover every tensor; in format 2, rows did not say who drafted them."""
_PACKAGES = ("drafter", "torch", "transformers", "tokenizers", "ray", "pyarrow")


def read_run(run_file: Location) -> dict[str, Any]:
    """Read what `save_run` wrote; `state` is `running` or `finished`.

    Raises:
        FileNotFoundError: There is no `run.json`.
        ValueError: It is damaged, and so is its copy.
    """
    return read_either(run_file, _parse)


def mend_run(run_file: Location) -> None:
    """Write `run.json` again from its copy, if it is damaged and the copy is not."""
    mend(run_file, _parse)


def _parse(text: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(text)
    if not isinstance(run, dict) or not {"meaning", "state"} <= run.keys():
        raise ValueError("it is not what a job wrote")
    return run


def save_run(run_file: Location, config: dict[str, Any], meant: dict[str, Any], **facts: Any) -> None:
    """Write `run.json`.

    Args:
        run_file: Where it is.
        config: The job's configuration.
        meant: All that decides what comes out of the job; see `same_job`.
        facts: What else is known by now.
    """
    run = {
        "format": FORMAT,
        "config": config,
        "meaning": meant,
        "versions": versions(),
        "git_commit": source_commit(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    write_twice(run_file, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def versions(*more: str) -> dict[str, str | None]:
    """Return the versions of Python, of the packages that decide results, and of `more`; None for one not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # such as `drafter`, run from a checkout
            found[package] = None
    return found
