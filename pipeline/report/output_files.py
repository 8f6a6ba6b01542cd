"""Reads an output's `run.json` and `status.json`, computes its cost, and compares it with another output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from drafter.errors import one_line
from drafter.statistics import per_second
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.output.folder import OutputFolder, read_run
from pipeline.report.rows import RowSummary, open_rows, read_errors, read_full, read_rows


@dataclass(frozen=True)
class Cost:
    """The cost of an output.

    Args:
        unit: `GPU-seconds`, or `CPU-seconds` where there is no GPU.
        seconds: Time for which engines held their share of the cluster, in `unit`. Includes loading and repeated work.
        generating: Wall-clock seconds in which rows were generated.
        generated: New tokens generated in that time, including those of repeated rows.
        tokens: New tokens in the output.
    """

    unit: str
    seconds: float
    generating: float
    generated: int
    tokens: int
    devices: tuple[str, ...]

    @property
    def per_thousand(self) -> float:
        return 1000 * self.seconds / self.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens a second; None where the generation time is unknown. See `per_second`."""
        return per_second(self.generated, self.generating) if self.generating else None


def cost_of(submissions: Sequence[Mapping[str, Any]], rows: int, tokens: int) -> Cost | str:
    """Return the cost of an output, or the reason why it is unknown; `rows` includes errors."""
    if not submissions:
        return "status.json, which says how long the engines ran, is missing"
    if tokens == 0:
        return "no token was generated"
    counted = sum(one["rows"] for one in submissions)
    if counted < rows:
        return f"status.json has only {counted:,} of the {rows:,} rows"
    gpu, cpu = (sum(one[unit] for one in submissions) for unit in ("gpu_seconds", "cpu_seconds"))
    if gpu + cpu == 0:
        return "status.json does not say how long the engines ran"
    devices = dict.fromkeys(one["device"] for one in submissions if one["device"])
    unit, seconds = ("GPU-seconds", gpu) if gpu else ("CPU-seconds", cpu)
    generating, generated = (sum(one[name] for one in submissions) for name in ("seconds", "tokens"))
    return Cost(unit, seconds, generating, generated, tokens, tuple(devices))


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
    """Return `status.json`; empty where it is missing or damaged."""
    if output.status_file.type != fs.FileType.File:
        return {}
    try:
        found = json.loads(output.status_file.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def output_cost(status: Mapping[str, Any], rows: RowSummary, errors: int) -> Cost | str:
    """Return the cost of an output by its `status.json`, or the reason why it is unknown."""
    return cost_of(status.get("submissions", ()), rows.rows + errors, rows.counts.num_output_tokens)


# Comparison with another output.

COMPARED_ROWS = 100
"""Rows drawn from both outputs for the comparison token by token."""
_COMPARED = ("model", "loading", "sampling", "reading")
"""Keys of `meaning` in `run.json` that are compared."""


@dataclass(frozen=True)
class Comparison:
    """Another output beside this one.

    Args:
        name: Folder or URI of the other output.
        same_tokens: Compared rows with the same tokens in both.
        compared: Rows drawn from both and compared token by token.
        differences: Other differences, because of which drafting alone does not explain the costs; sentences.
    """

    name: str
    rows: RowSummary
    cost: Cost | str
    same_tokens: int
    compared: int
    differences: Sequence[str]


def compare(against: str, run: Mapping[str, Any], rows: RowSummary, drawn: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare an output with another one, token by token on the drawn rows that both have.

    Raises:
        InputError: The other output cannot be used.
    """
    output = open_output(against)
    other_run = read_run_of(output)
    other_rows = read_rows(open_rows(output), None, False, 0, COMPARED_ROWS)
    tokens = {row["request_id"]: row["token_ids"] for row in read_full(output, other_rows)}
    both = [row for row in drawn if row["request_id"] in tokens]
    return Comparison(
        name=against,
        rows=other_rows,
        cost=output_cost(read_status(output), other_rows, read_errors(output, 0).rows),
        same_tokens=sum(row["token_ids"] == tokens[row["request_id"]] for row in both),
        compared=len(both),
        differences=_differences(run, rows, other_run, other_rows),
    )


def _differences(
    run: Mapping[str, Any], rows: RowSummary, other_run: Mapping[str, Any], other_rows: RowSummary
) -> list[str]:
    found = []
    if other_rows.counts.num_spec_steps:
        found.append(f"The other output is not plain decoding: its drafter was {other_run['config']['drafter']}")
    if rows.rows != other_rows.rows:
        found.append(f"Not the same in both: the rows, {rows.rows:,} and {other_rows.rows:,}")
    same = {name: run["meaning"].get(name) == other_run["meaning"].get(name) for name in _COMPARED}
    same["input"] = run.get("input") == other_run.get("input")
    for name, is_same in same.items():
        if not is_same:
            found.append(f"Not the same in both: the {name}")
    return found
