"""What an output has besides its rows: `run.json` and `status.json`, and what it cost by these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.output.output_folder import OutputFolder
from pipeline.output.run_file import read_run
from pipeline.report.cost import Cost, cost_of
from pipeline.report.row_scan import RowSummary


def open_output(uri: str) -> OutputFolder:
    """Open the output of a generation job.

    Raises:
        InputError: It cannot be read, or is something else.
    """
    output = OutputFolder(locate(uri))
    try:
        exists = output.run_file.type == fs.FileType.File
    except OSError as error:
        raise InputError(f"output {uri} cannot be read: {one_line(error)}") from error
    if not exists:
        raise InputError(f"{uri} is not the output of a generation job: it has no {output.run_file.name}")
    return output


def read_run_of(output: OutputFolder) -> dict[str, Any]:
    """Return `run.json`.

    Raises:
        InputError: It is damaged.
    """
    try:
        return read_run(output.run_file)
    except ValueError as error:
        raise InputError(one_line(error)) from error


def read_status(output: OutputFolder) -> dict[str, Any]:
    """Return `status.json`; empty where there is none, or it is damaged."""
    if output.status_file.type != fs.FileType.File:
        return {}
    try:
        found = json.loads(output.status_file.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def output_cost(status: Mapping[str, Any], rows: RowSummary, errors: int) -> Cost | str:
    """Return what an output cost, or why that is not known.

    Args:
        status: Its `status.json`.
        rows: What its rows say.
        errors: How many errors it has.
    """
    return cost_of(status.get("submissions", ()), rows.rows + errors, rows.counts.num_output_tokens)
