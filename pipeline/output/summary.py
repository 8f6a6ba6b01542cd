"""The closing summary of a job, computed from the Parquet files that it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.dataset
from pyarrow import fs
from tqdm import tqdm

from drafter.statistics import (
    DecodeCounts,
    draft_acceptance_rate,
    mean_acceptance_length,
    per_second,
    speculated_share,
    total,
)
from pipeline.io.files import Location
from pipeline.output.output_folder import OutputFolder

_COUNTS = (
    "num_output_tokens",
    "num_decode_steps",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "acceptance_histogram",
)
_BAR = 40


@dataclass(frozen=True)
class OutputTotals:
    """What an output holds.

    Args:
        rows: Finished rows.
        errors: Rows that could not be generated.
        counts: Counts of speculation, summed over all finished rows.
    """

    rows: int
    errors: int
    counts: DecodeCounts


def read_totals(output: OutputFolder) -> OutputTotals:
    """Add up what the files hold."""
    rows = 0

    def counts() -> Iterator[DecodeCounts]:
        nonlocal rows
        for batch in _dataset(output.data).to_batches(columns=list(_COUNTS)):
            rows += batch.num_rows
            yield total(DecodeCounts(**row) for row in batch.to_pylist())

    summed = total(counts())
    return OutputTotals(rows, _dataset(output.errors).count_rows(), summed)


def count_rows(output: OutputFolder) -> tuple[int, int]:
    """Return the numbers of finished rows and of errors, from the files' metadata."""
    return _dataset(output.data).count_rows(), _dataset(output.errors).count_rows()


def _dataset(folder: Location) -> pyarrow.dataset.Dataset:
    return pyarrow.dataset.dataset(folder.path, filesystem=folder.filesystem, format="parquet")


def summarise(output: OutputFolder, found: OutputTotals, new_tokens: int, new_rows: int, seconds: float) -> str:
    """Write the summary for a person.

    Args:
        output: Where everything is.
        found: What the output holds.
        new_tokens: Tokens that this submission generated.
        new_rows: Rows that this submission finished, errors included.
        seconds: How long it generated, without its start.
    """
    counts = found.counts
    lines = [
        f"rows        {found.rows:,} finished, {found.errors:,} errors",
        f"tokens      {counts.num_output_tokens:,} in {counts.num_decode_steps:,} decode steps of a row",
    ]
    if new_rows:
        rates = f"{per_second(new_tokens, seconds):,.0f} tokens/s, {per_second(new_rows, seconds):,.1f} rows/s"
        lines.append(f"speed       {rates} ({new_rows:,} rows in {tqdm.format_interval(seconds)} of generation)")
    lines += acceptance_lines(counts)
    lines.append(f"results     {output.data.path}")
    if found.errors:
        lines.append(f"errors      {output.errors.path}")
    for place in output.batch_files:
        if place.type == fs.FileType.File:
            lines.append(f"batch       {place.path}")
    lines.append(f"run         {output.run_file.path}")
    return "\n".join(lines)


def acceptance_lines(counts: DecodeCounts) -> list[str]:
    """Say how many tokens a step gave, in how many of the steps there were draft tokens, and how many came true."""
    if not counts.num_draft_tokens:
        return ["speculation none: no draft token was verified, so every step gave one token"]
    return [
        f"speculation {mean_acceptance_length(counts):.2f} tokens a step (plain decoding: 1.00); "
        f"{speculated_share(counts):.0%} of the steps speculated; "
        f"{draft_acceptance_rate(counts):.0%} of {counts.num_draft_tokens:,} draft tokens accepted",
        *histogram_lines(counts),
    ]


def histogram_lines(counts: DecodeCounts) -> list[str]:
    """Draw as bars how many draft tokens the steps accepted."""
    steps = sum(counts.acceptance_histogram)
    if not steps:
        return []
    most = max(counts.acceptance_histogram)
    return ["accepted    share of steps"] + [
        f"{accepted:>8}    {'█' * round(_BAR * number / most) or '▏':<{_BAR}} {number / steps:>6.1%}"
        for accepted, number in enumerate(counts.acceptance_histogram)
    ]
