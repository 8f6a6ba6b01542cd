"""`run.json`: what was run, and whether a later submission means the same."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.generate.generate_config import GenerateConfig
from pipeline.io.files import Location, locate
from pipeline.io.reading import InputFile, InputListing
from pipeline.output.output_folder import RUN_FILE, OutputFolder

_PACKAGES = ("drafter", "torch", "transformers", "tokenizers", "ray", "pyarrow")
_SAMPLE_BYTES = 1 << 20
_READERS = 16


def folder_fingerprint(folder: Path) -> str:
    """16 hex digits of a model's folder: its small files, and the size, beginning and end of the large ones."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".safetensors", ".model", ".txt"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(_sample(file, size))
    return digest.hexdigest()[:16]


def input_fingerprints(listing: InputListing) -> list[list[Any]]:
    """Each file's name, size, and 16 hex digits of its content: all of a small file, beginning and end of a large one.

    Raises:
        InputError: A file cannot be read.
    """

    def fingerprint(one: InputFile) -> list[Any]:
        try:
            with listing.filesystem.open_input_file(one.path) as file:
                return [one.name, one.size, hashlib.sha256(_sample(file, one.size)).hexdigest()[:16]]
        except OSError as error:
            raise InputError(f"input {one.path} cannot be read: {one_line(error)}") from error

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(fingerprint, listing.files))


def _sample(file: Any, size: int) -> bytes:
    """What a fingerprint is made of."""
    if size <= 2 * _SAMPLE_BYTES:
        return bytes(file.read())
    beginning = bytes(file.read(_SAMPLE_BYTES))
    file.seek(size - _SAMPLE_BYTES)
    return beginning + bytes(file.read())


def model_fingerprint(name: str) -> str:
    """What tells a base from others without loading it: its folder's fingerprint, or its hub id.

    Raises:
        InputError: A path with no model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"model {name} is not a model's folder: it has no config.json")
        return folder_fingerprint(folder)
    if folder.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise InputError(f"model {name} is not a folder with a model")
    return name


def meaning(config: GenerateConfig, listing: InputListing, base: str, heads: dict[str, str]) -> dict[str, Any]:
    """All that decides which rows come out and what is in them. The machine's share and the batch's size are not.

    Args:
        config: The job's configuration.
        listing: Its input.
        base: Fingerprint of the base model.
        heads: Fingerprints of draft heads by name.
    """
    return {
        "input": input_fingerprints(listing),
        "reading": asdict(config.reading),
        "model": base,
        "dtype": config.loading.dtype,
        "drafter": config.drafter,
        "heads": heads,
        "sampling": config.as_dict()["sampling"],
        "max_length": config.engine.max_length,
        "per_step_accepted": config.writing.per_step_accepted,
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
    check_output(config.output, output.root, meant)
    output.create()
    if output.run_file.type != fs.FileType.File:
        save_run(output.run_file, config.as_dict(), meant, state="running")
    return output


def check_output(uri: str, root: Location, meant: dict[str, Any]) -> None:
    """Refuse an output that is not new, not empty, and not of a job with this meaning.

    Raises:
        InputError: It is another job's, or cannot be read.
    """
    try:
        if root.type == fs.FileType.File:
            raise InputError(f"output {uri} is a file: give a folder")
        holds = [info for info in root.children() if not _is_beginning(root / info.base_name)]
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    run_file = root / RUN_FILE
    if run_file.type == fs.FileType.File:
        try:
            before = json.loads(run_file.read_text())["meaning"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"output {uri} has a damaged run.json: choose another output") from error
        if different := list(changes(before, json.loads(json.dumps(meant)))):
            raise InputError(f"output {uri} belongs to another job ({'; '.join(different[:3])}): choose another output")
    elif holds:
        raise InputError(f"output {uri} is not empty and has no run.json: choose a new folder")


def _is_beginning(found: Location) -> bool:
    """Whether a submission that ended before it could write `run.json` may have made this: it holds nothing."""
    return found.name == f"{RUN_FILE}.partial" or (found.type == fs.FileType.Directory and not found.children())


def read_run(run_file: Location) -> dict[str, Any]:
    """What `save_run` wrote; `state` is `running` or `finished`."""
    run: dict[str, Any] = json.loads(run_file.read_text())
    return run


def save_run(run_file: Location, config: dict[str, Any], meant: dict[str, Any], **facts: Any) -> None:
    """Write `run.json`: configuration, meaning, versions, commit, and what else is known by now."""
    run = {
        "config": config,
        "meaning": meant,
        "versions": versions(),
        "git_commit": git_commit(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    run_file.write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def versions(*more: str) -> dict[str, str | None]:
    """Of Python, of the packages that decide results, and of `more`; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout
            found[package] = None
    return found


def git_commit() -> str | None:
    """Of this checkout; None where there is none."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
