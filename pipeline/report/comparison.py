"""Another output beside this one: what it cost, whether its tokens are the same, and what else differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.cost import Cost
from pipeline.report.output_files import open_output, output_cost, read_run_of, read_status
from pipeline.report.row_scan import RowSummary, open_rows, read_errors, read_full, read_rows

COMPARED_ROWS = 100
"""Rows that are drawn from both outputs, to be compared token by token."""
_COMPARED = ("model", "loading", "sampling", "reading")
"""What of two jobs' meanings is compared."""


@dataclass(frozen=True)
class Comparison:
    """Another output beside this one.

    Args:
        name: Where it is.
        rows: What its rows say.
        cost: What it cost, or why that is not known.
        same_tokens: How many of the compared rows have the same tokens in both.
        compared: How many rows were drawn from both, and compared token by token.
        differences: What else differs between the two, so that drafting alone does not explain the costs; sentences.
    """

    name: str
    rows: RowSummary
    cost: Cost | str
    same_tokens: int
    compared: int
    differences: Sequence[str]


def compare(against: str, run: Mapping[str, Any], rows: RowSummary, drawn: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare an output with another one.

    Args:
        against: Folder or URI of the other output.
        run: This output's `run.json`.
        rows: What this output's rows say.
        drawn: Rows drawn from this output; of the same rows, the other output has the same ones drawn.

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
    """Return what makes two costs differ besides drafting."""
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
