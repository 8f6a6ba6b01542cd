"""Whether an output belongs to the job that is to write to it.

A job's *meaning* is all that decides which results come out. `run.json` keeps it, and a later submission goes on only
where the meaning is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import Location
from pipeline.output.output_folder import RUN_FILE

_LONGEST_CHANGE = 120
"""Characters of two values that a message still shows."""
_SHOWN_CHANGES = 3
_IN_WORDS = {"draw": "the version that began it draws other tokens from the same seeds"}
"""What it means that a value differs, where the value is no setting."""


def check_output(uri: str, root: Location, meant: dict[str, Any]) -> None:
    """Refuse an output that is neither new nor empty nor of a job with this meaning.

    Args:
        uri: The output as it was given, for messages.
        root: The output.
        meant: The job's meaning.

    Raises:
        InputError: The output is another job's, or cannot be read.
    """
    try:
        if root.type == fs.FileType.File:
            raise InputError(f"output {uri} is a file: give a folder")
        holds = [info for info in root.children() if not _holds_nothing(root / info.base_name)]
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    run_file = root / RUN_FILE
    if run_file.type == fs.FileType.File:
        try:
            before = json.loads(run_file.read_text())["meaning"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"output {uri} has a damaged run.json: choose another output") from error
        if different := list(_changes(before, json.loads(json.dumps(meant)))):
            shown = "; ".join(different[:_SHOWN_CHANGES])
            raise InputError(f"output {uri} belongs to another job ({shown}): choose another output")
    elif holds:
        raise InputError(f"output {uri} is not empty and has no run.json: choose a new folder")


def _holds_nothing(found: Location) -> bool:
    """Whether it may be of a submission that ended before it wrote `run.json`."""
    return found.name == f"{RUN_FILE}.partial" or (found.type == fs.FileType.Directory and not found.children())


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Say what differs between two meanings, as `name was X, is now Y`."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{prefix}{name}.")
        elif old != new and not prefix and name in _IN_WORDS:
            yield _IN_WORDS[name]
        elif old != new:
            long = len(repr(old)) + len(repr(new)) > _LONGEST_CHANGE
            yield f"{prefix}{name} " + ("is another" if long else f"was {old!r}, is now {new!r}")
