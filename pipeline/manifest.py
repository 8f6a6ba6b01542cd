"""`run.json`: what was run, and whether a later submission means the same."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pyarrow import fs

from pipeline.config import GenerateConfig
from pipeline.errors import InputError, one_line
from pipeline.files import locate
from pipeline.output import OutputFolder
from pipeline.reading import InputListing

_PACKAGES = ("drafter", "torch", "transformers", "tokenizers", "ray", "pyarrow")
_SAMPLE_BYTES = 1 << 20


def folder_fingerprint(folder: Path) -> str:
    """16 hex digits of a model's folder: its small files, and the size, beginning and end of the large ones."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".safetensors", ".model", ".txt"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            if size > 2 * _SAMPLE_BYTES:
                file.seek(-_SAMPLE_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()[:16]


def meaning(config: GenerateConfig, listing: InputListing, base: str, heads: dict[str, str]) -> dict[str, Any]:
    """All that decides which rows come out and what is in them. The machine's share and the batch's size are not.

    Args:
        config: The job's configuration.
        listing: Its input.
        base: Fingerprint of the base model.
        heads: Fingerprints of draft heads by name.
    """
    return {
        "input": [[file.name, file.size] for file in listing.files],
        "reading": asdict(config.reading),
        "model": base,
        "dtype": config.loading.dtype,
        "drafter": config.drafter,
        "heads": heads,
        "sampling": config.as_dict()["sampling"],
        "max_length": config.engine.max_length,
    }


def changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two meanings, as `name was X, is now Y`."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changes(old, new, f"{prefix}{name}.")
        elif old != new:
            long = len(repr(old)) + len(repr(new)) > 120
            yield f"{prefix}{name} " + ("is another" if long else f"was {old!r}, is now {new!r}")


def open_output(config: GenerateConfig, meant: dict[str, Any]) -> OutputFolder:
    """The output's folder, made if it is new; an earlier submission of the same job is gone on with.

    Raises:
        InputError: It holds something else or another job's results, or cannot be written to.
    """
    output = OutputFolder(locate(config.output))
    source = locate(config.input)
    if f"{output.root.path}/".startswith(f"{source.path}/") and source.filesystem.equals(output.root.filesystem):
        raise InputError(f"output {config.output} lies in the input: results would become input")
    try:
        if output.root.type == fs.FileType.File:
            raise InputError(f"output {config.output} is a file: give a folder")
        holds = output.root.children()
    except OSError as error:
        raise InputError(f"output {config.output} cannot be read: {one_line(error)}") from error
    if output.run_file.type == fs.FileType.File:
        try:
            before = json.loads(output.run_file.read_text())["meaning"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"output {config.output} has a damaged run.json: choose another output") from error
        if different := list(changes(before, json.loads(json.dumps(meant)))):
            raise InputError(
                f"output {config.output} belongs to another job ({'; '.join(different[:3])}): choose another output"
            )
    elif holds:
        raise InputError(f"output {config.output} is not empty and has no run.json: choose a new folder")
    output.create()
    return output


def read_state(output: OutputFolder) -> str:
    """How far the job came that wrote `run.json`: `running` or `finished`."""
    return str(json.loads(output.run_file.read_text())["state"])


def save_run(output: OutputFolder, config: GenerateConfig, meant: dict[str, Any], **facts: Any) -> None:
    """Write `run.json`: configuration, meaning, versions, commit, and what else is known by now."""
    run = {
        "config": config.as_dict(),
        "meaning": meant,
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "git_commit": _git_commit(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    output.run_file.write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def _versions() -> Iterator[tuple[str, str | None]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:  # run from a checkout
            yield package, None


def _git_commit() -> str | None:
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
