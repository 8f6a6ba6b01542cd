"""A job's output folder: its layout, and `run.json` with the configuration, versions and state of the job."""

from __future__ import annotations

import json
import platform
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from pyarrow import fs
from safetensors import SafetensorError, safe_open

from drafter.errors import one_line, without_secrets
from drafter.source_commit import source_commit
from pipeline.errors import InputError
from pipeline.io.files import Location, is_copy, make_folders, mend, partials, read_either, write_twice

RUN_FILE = "run.json"
LEASE_FILE = "_lease.json"
HEAD_CONFIG = "config.json"


_CARD = """\
---
configs:
- config_name: default
  description: rows of -
  data_files:
  - split: train
    path: data/*.parquet
---

# Generated rows

`data/` has the rows of a generation job: the columns of its input, and what the model answered. `run.json` says how
they were made. `errors/` has the rows that failed, with the reasons.
"""
_FIRST_PARTS = ("00000-000000", "001-00000-000000")  # of an input, and of one that has changed
_EDITION = re.compile(r"(?m)^(  description: rows of ).*$")


class _Below:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, output: OutputFolder, owner: type) -> Location:
        return output.root / self._name


@dataclass(frozen=True)
class OutputFolder:
    """A job's output folder."""

    root: Location

    data = _Below("data")
    errors = _Below("errors")
    head = _Below("head")  # the newest version of a head that learns from the rows
    staged = _Below("_staged")
    temporary = _Below("_temporary")
    unfinished = _Below("_unfinished.parquet")  # finished rows of uncommitted parts, of a stopped submission
    told = _Below("_told")  # an empty file for each part that `on_part` was called with
    lease = _Below(LEASE_FILE)
    run_file = _Below(RUN_FILE)
    card = _Below("README.md")
    status_file = _Below("status.json")
    learner_state = _Below("_learner.safetensors")  # for resuming
    batch_output = _Below("batch_output.jsonl")  # answers to the requests of an OpenAI batch
    batch_errors = _Below("batch_errors.jsonl")  # its unanswered requests with the reasons

    def create(self) -> None:
        """Make the folders, or raise `InputError`."""
        make_folders(self.root, [self.data, self.errors, self.temporary], self.temporary)

    def describe(self) -> None:
        """Write the card by which `datasets` and the hub find the rows; a README of the user's own stays as it is."""
        # The cache of `datasets` knows a folder with a card by its name and card alone, whatever the files hold.
        edition = f"{datetime.now(UTC).isoformat(timespec='seconds')} {uuid.uuid4().hex[:8]}"
        try:
            text = self.card.read_text() if self.card.exists else _CARD
        except ValueError:  # it is no text
            return
        new = _EDITION.sub(rf"\g<1>{edition}", text)
        if new != text:
            self.card.write_text(new)

    def visible(self, *, batch: bool) -> list[str]:
        """Return the paths, within the output, of what a job writes and an input might take; `batch` adds answers."""
        parts = [folder / f"{part}.parquet" for folder in (self.data, self.errors) for part in _FIRST_PARTS]
        files = [*parts, self.run_file, self.status_file, self.card, self.head / HEAD_CONFIG]
        files += [self.batch_output, self.batch_errors] if batch else []
        return [self.name_of(file) for file in files]

    def name_of(self, place: Location) -> str:
        """Return a file's path within the output."""
        return place.path.removeprefix(f"{self.root.path.rstrip('/')}/")

    def delete_temporary(self) -> None:
        """Delete partially written files of earlier submissions. The caller must hold the lease."""
        self.temporary.filesystem.delete_dir_contents(self.temporary.path, missing_dir_ok=True)
        for folder in (self.root, self.data, self.errors, self.staged, self.head):
            for partial in partials(folder):
                if not partial.name.startswith(LEASE_FILE):  # which the lease itself writes, and cleans up
                    partial.delete()

    def drop_temporary(self) -> None:
        """Delete the folder of temporary files if it is empty; `create` makes it again."""
        with suppress(OSError):  # it costs nobody anything
            if not self.temporary.children():
                self.temporary.filesystem.delete_dir(self.temporary.path)

    def has_results(self) -> bool:
        """Return whether there are generated rows to keep: of a committed part, or of a stopped submission."""
        return bool(self.committed()) or self.unfinished.exists

    def forget_job(self) -> None:
        """Delete the remains of a job without results, except `run.json`. The caller must hold the lease."""
        from pipeline.io.parts import STAGED_LIST  # which imports Ray

        self.staged.empty(first=STAGED_LIST)
        self.errors.filesystem.delete_dir_contents(self.errors.path, missing_dir_ok=True)
        self.head.empty(first=HEAD_CONFIG)
        self.learner_state.delete()

    def committed(self) -> set[str]:
        return set(self.data.parquets())


# `run.json`.

FORMAT = 3
"""Incremented when outputs of earlier releases cannot be resumed. In format 1, fingerprints of models did not cover
every tensor; in format 2, rows did not name their drafter.
"""
_RUN_KEYS = ("meaning", "state")
_PACKAGES = ("drafter", "torch", "transformers", "tokenizers", "ray", "pyarrow")


def read_run(run_file: Location) -> dict[str, Any]:
    """Read `run.json`, whose `state` is `running` or `finished`; see `read_either` for errors."""
    return read_either(run_file, _RUN_KEYS)


def mend_run(run_file: Location) -> None:
    mend(run_file, _RUN_KEYS)


NAMED_BY = "named_by"
"""Key in `run.json`: the column of the input that names the rows; null where their files and lines do."""


def save_run(run_file: Location, config: dict[str, Any], meant: dict[str, Any], **facts: Any) -> None:
    """Write `run.json`, without credentials. `meant` is everything that determines the results; see `job_meaning`."""
    run = {
        "format": FORMAT,
        "config": json.loads(without_secrets(json.dumps(config))),
        "meaning": meant,
        "versions": versions(),
        "git_commit": source_commit(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    write_twice(run_file, run, indent=2)


def versions(*more: str) -> dict[str, str | None]:
    """Return versions of Python, of the packages that affect results, and of `more`; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # such as `drafter`, run from a checkout
            found[package] = None
    return found


_LONGEST_CHANGE = 120  # characters of two values in a message
_SHOWN_CHANGES = 3
_OTHER_DRAW = "the version that began it draws other tokens from the same seeds"


class JobFolder(Protocol):
    """A job's output, as in `OutputFolder`."""

    @property
    def root(self) -> Location: ...

    def has_results(self) -> bool: ...

    def forget_job(self) -> None: ...


def check_output(uri: str, output: JobFolder, meant: dict[str, Any]) -> None:
    """Raise `InputError` for an output that has results of another job or release, or cannot be read."""
    root = output.root
    try:
        if root.type == fs.FileType.File:
            raise InputError(f"output {uri} is a file: give a folder")
        holds = [info for info in root.children() if not _holds_nothing(root / info.base_name)]
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    run_file = root / RUN_FILE
    if run_file.exists:
        why_not = _why_not(uri, run_file, meant)
        if why_not is not None and output.has_results():
            raise InputError(why_not)
    elif holds:
        raise InputError(f"output {uri} is not empty and has no run.json: choose a new folder")


def take_output(uri: str, output: JobFolder, meant: dict[str, Any]) -> bool:
    """Take an output over from another job without results, and return whether it was not this job's before."""
    check_output(uri, output, meant)
    run_file = output.root / RUN_FILE
    if not run_file.exists:
        return True
    another = _why_not(uri, run_file, meant) is not None
    if another:
        output.forget_job()
    return another


def _why_not(uri: str, run_file: Location, meant: dict[str, Any]) -> str | None:
    try:
        run = read_run(run_file)
    except ValueError as error:
        raise InputError(f"output {uri} has a damaged run.json: choose another output") from error
    if ("training" in run["meaning"]) != ("training" in meant):
        # One kind does not know the other's results: it would see none, and delete them.
        made = "trained a head" if "training" in run["meaning"] else "generated rows"
        raise InputError(f"output {uri} is of a job that {made}: choose another output")
    if run.get("format") != FORMAT:
        return (
            f"output {uri} was made by another release (its format is {run.get('format', 1)}, and this release "
            f"writes {FORMAT}): go on with that release, or choose another output"
        )
    before, now = run["meaning"], json.loads(json.dumps(meant))
    draws = before.pop("draw", None), now.pop("draw", None)
    # Settings and rows decide whether tokens are sampled at all; only then does the version of the draw matter.
    different = list(_changes(before, now)) or ([_OTHER_DRAW] if None not in draws and draws[0] != draws[1] else [])
    if different:
        return f"output {uri} belongs to another job ({'; '.join(different[:_SHOWN_CHANGES])}): choose another output"
    return None


def _holds_nothing(found: Location) -> bool:
    # The entry may stem from a submission that ended before it wrote `run.json`.
    of_lease = found.name == LEASE_FILE or is_copy(found.name, LEASE_FILE)  # the caller's own, or that of a dead one
    of_run = is_copy(found.name, RUN_FILE)
    return of_lease or of_run or (found.type == fs.FileType.Directory and not found.children())


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict | None):
            yield from _changes(old, new or {}, f"{prefix}{name}.")
        elif old != new:
            long = len(repr(old)) + len(repr(new)) > _LONGEST_CHANGE
            yield f"{prefix}{name} " + ("is another" if long else f"was {old!r}, is now {new!r}")


def read_status(file: Location) -> dict[str, Any]:
    """Return `status.json`; empty where it is missing or damaged."""
    if not file.exists:
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# Folders of draft heads.

_HEAD_WEIGHTS = "model.safetensors"


def fetch_head(folder: Location, here: Path) -> None:
    """Copy a draft head's folder to this machine, or raise `OSError`."""
    for name in (HEAD_CONFIG, _HEAD_WEIGHTS):
        (folder / name).copy_to(here / name)


def put_head(here: Path, folder: Location) -> None:
    """Copy a draft head's folder from this machine, or raise `OSError`; each file appears complete."""
    folder.make_folder()
    for name in (_HEAD_WEIGHTS, HEAD_CONFIG):  # without a configuration there is no head yet
        (folder / name).copy_from(here / name)


def check_head(folder: Location) -> None:
    """Raise `OSError` if a draft head's files cannot be read or are missing, and `ValueError` if they are damaged."""
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        fetch_head(folder, here)
        config = json.loads((here / HEAD_CONFIG).read_text(encoding="utf-8"))
        try:
            with safe_open(here / _HEAD_WEIGHTS, framework="numpy") as weights:
                whole = isinstance(config, dict) and bool(weights.keys())
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    if not whole:
        raise ValueError("it is not what a job wrote")
