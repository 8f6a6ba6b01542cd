"""Whether an output belongs to the job that is to write to it.

A job's *meaning* is all that decides which results come out. `run.json` keeps it, and a later submission goes on only
where the meaning is the same. As long as there is no result, the meaning binds nobody: a submission that failed on its
settings is followed by one with better settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import Location, is_copy
from pipeline.output.output_folder import LEASE_FILE, RUN_FILE
from pipeline.output.run_file import FORMAT, read_run

_LONGEST_CHANGE = 120
"""Characters of two values that a message still shows."""
_SHOWN_CHANGES = 3
_OTHER_DRAW = "the version that began it draws other tokens from the same seeds"


class JobFolder(Protocol):
    """A job's output, as far as it matters here."""

    @property
    def root(self) -> Location:
        """The output that was asked for."""

    def has_results(self) -> bool:
        """Return whether something has been made that another job could not use."""

    def forget_job(self) -> None:
        """Delete all that a job without results has left, but `run.json`."""


def check_output(uri: str, output: JobFolder, meant: dict[str, Any]) -> None:
    """Refuse an output that is neither new nor empty nor of a job with this meaning, nor without results.

    Args:
        uri: The output as it was given, for messages.
        output: The output.
        meant: The job's meaning.

    Raises:
        InputError: The output is another job's or an earlier release's, or cannot be read.
    """
    root = output.root
    try:
        if root.type == fs.FileType.File:
            raise InputError(f"output {uri} is a file: give a folder")
        holds = [info for info in root.children() if not _holds_nothing(root / info.base_name)]
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    run_file = root / RUN_FILE
    if run_file.type == fs.FileType.File:
        why_not = _why_not(uri, run_file, meant)
        if why_not is not None and output.has_results():
            raise InputError(why_not)
    elif holds:
        raise InputError(f"output {uri} is not empty and has no run.json: choose a new folder")


def take_output(uri: str, output: JobFolder, meant: dict[str, Any]) -> bool:
    """Take an output over from a job that has no results, if it is not this job's; the lease's holder does this.

    Args:
        uri: The output as it was given, for messages.
        output: The output.
        meant: This job's meaning.

    Returns:
        Whether it was not this job's, so that its `run.json` has to be written anew.

    Raises:
        InputError: It has results of another job by now.
    """
    check_output(uri, output, meant)
    run_file = output.root / RUN_FILE
    if run_file.type != fs.FileType.File:
        return True
    another = _why_not(uri, run_file, meant) is not None
    if another:
        output.forget_job()
    return another


def _why_not(uri: str, run_file: Location, meant: dict[str, Any]) -> str | None:
    """Say why a job with this meaning cannot go on with what an output holds; None if it can."""
    try:
        run = read_run(run_file)
    except ValueError as error:
        raise InputError(f"output {uri} has a damaged run.json: choose another output") from error
    if run.get("format") != FORMAT:
        return (
            f"output {uri} was made by another release (its format is {run.get('format', 1)}, and this release "
            f"writes {FORMAT}): go on with that release, or choose another output"
        )
    before, now = run["meaning"], json.loads(json.dumps(meant))
    draws = before.pop("draw", None), now.pop("draw", None)
    # Whether tokens are drawn at all follows from the settings and the rows: only where they are, the way may differ.
    different = list(_changes(before, now)) or ([_OTHER_DRAW] if None not in draws and draws[0] != draws[1] else [])
    if different:
        return f"output {uri} belongs to another job ({'; '.join(different[:_SHOWN_CHANGES])}): choose another output"
    return None


def _holds_nothing(found: Location) -> bool:
    """Whether it may be of a submission that ended before it wrote `run.json`."""
    of_lease = found.name == LEASE_FILE or is_copy(found.name, LEASE_FILE)  # the caller's own, or that of a dead one
    of_run = is_copy(found.name, RUN_FILE)
    return of_lease or of_run or (found.type == fs.FileType.Directory and not found.children())


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Say what differs between two meanings, as `name was X, is now Y`."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{prefix}{name}.")
        elif old != new:
            long = len(repr(old)) + len(repr(new)) > _LONGEST_CHANGE
            yield f"{prefix}{name} " + ("is another" if long else f"was {old!r}, is now {new!r}")
