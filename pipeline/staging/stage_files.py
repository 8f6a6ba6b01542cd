"""Some files of the input become parts: a task that runs on a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet

from pipeline.io.column_types import unify_fields
from pipeline.io.files import Location
from pipeline.io.listing import InputListing
from pipeline.io.prompt_source import PromptSource, check_types
from pipeline.io.reading import read_file
from pipeline.io.reading_config import ReadingConfig
from pipeline.staging.named_rows import named_rows, with_row_type, with_samples
from pipeline.staging.staged_input import Part


@dataclass(frozen=True)
class StagingPlan:
    """What every task of staging needs to know.

    Args:
        folder: Where the parts go.
        reading: How rows become prompts.
        prompts: Where the prompts are.
        rows_per_part: Rows of each part but the last of a task.
    """

    folder: Location
    reading: ReadingConfig
    prompts: PromptSource
    rows_per_part: int


def stage_files(listing: InputListing, group: str, plan: StagingPlan) -> tuple[list[Part], list[pa.Field]]:
    """Stage the files of `listing` as parts named after `group`.

    Returns:
        The parts, and the fields that hold every row of them.

    Raises:
        InputError: A file is damaged, or lacks a column.
    """
    parts: list[Part] = []
    fields: list[list[pa.Field]] = []
    for table in _cut(_rows(listing, plan), plan.rows_per_part):
        part = Part(f"{group}-{len(parts):06d}", table.num_rows, table.nbytes)
        with (plan.folder / f"{part.name}.parquet").open_whole() as stream:
            pa.parquet.write_table(table, stream, compression="zstd")
        parts.append(part)
        fields.append(list(table.schema.field("row").type))
    return parts, unify_fields(fields)


def _rows(listing: InputListing, plan: StagingPlan) -> Iterator[pa.Table]:
    """Read the named rows of all files, without those that `skip` and `limit` leave out."""
    prompts, skip, left = plan.prompts, plan.reading.skip, plan.reading.limit
    text_column = {"text": prompts.column, "openai": prompts.id_column}.get(prompts.kind)
    json_column = prompts.column if prompts.kind == "openai" else plan.reading.sampling_column
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, plan.rows_per_part, text_column, json_column):
            check_types(file, chunk.columns.schema, prompts)
            rows = named_rows(file, chunk, prompts.id_column)
            skipped, skip = skip, max(skip - rows.num_rows, 0)
            rows = rows.slice(skipped)
            yield with_samples(rows if left is None else rows.slice(0, left), prompts, plan.reading.samples)
            if left is not None:
                left -= rows.num_rows
                if left <= 0:
                    return


def _cut(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Cut the same rows to tables of exactly `rows` rows, but for the last."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        held.append(table)
        count += table.num_rows
        while count >= rows:
            whole = _concatenate(held)
            yield whole.slice(0, rows)
            held, count = [whole.slice(rows)], count - rows
    if count:
        yield _concatenate(held)


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    """Concatenate tables, with their rows brought to one type."""
    row_type = pa.struct(unify_fields(list(table.schema.field("row").type) for table in tables))
    return pa.concat_tables([with_row_type(table, row_type) for table in tables]).combine_chunks()
