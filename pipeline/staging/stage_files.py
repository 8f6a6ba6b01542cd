"""Some files of the input become parts: a task that runs on a worker.

A part has so many rows as are asked for, or fewer where rows are large: engines, Ray's object store and a failure that
is done again all hold whole parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from pipeline.io.column_types import SeenType, refuse_many_columns, seen_types, unify
from pipeline.io.files import Location
from pipeline.io.listing import InputListing
from pipeline.io.prompt_source import PromptSource, check_types
from pipeline.io.reading import read_file
from pipeline.io.reading_config import ReadingConfig
from pipeline.staging.named_rows import named_rows, with_row_type, with_samples
from pipeline.staging.staged_input import Part

PART_BYTES = 32 << 20
"""A part closes before it has more bytes than this; one row may have more. Ray Data's blocks have up to 128 MiB, and
what is generated comes on top."""


@dataclass(frozen=True)
class StagingPlan:
    """What every task of staging needs to know.

    Args:
        folder: Where the parts go.
        reading: How rows become prompts.
        prompts: Where the prompts are.
        rows_per_part: Rows of each part but the last of a task, and those that close by their bytes.
        source: See `StagedInput`.
        revision: See `StagedInput`.
        part_bytes: A part with several rows has at most this many bytes.
    """

    folder: Location
    reading: ReadingConfig
    prompts: PromptSource
    rows_per_part: int
    source: Any = None
    revision: int = 0
    part_bytes: int = PART_BYTES


def stage_files(listing: InputListing, group: str, plan: StagingPlan) -> tuple[list[Part], list[SeenType]]:
    """Stage the files of `listing` as parts named after `group`.

    Returns:
        The parts, and the types of their columns, for `unify`.

    Raises:
        InputError: A file is damaged, lacks a column, or has one that cannot be kept beside that of another file.
    """
    parts: list[Part] = []
    seen: dict[SeenType, None] = {}
    json_objects = listing.of_json
    for tables in cut(read_rows(listing, plan), plan.rows_per_part, plan.part_bytes):
        here = dict.fromkeys(one for table in tables for one in _seen_types(table))
        row_type = unify(here, json_objects=json_objects)
        rows = pa.concat_tables([with_row_type(table, row_type) for table in tables]).combine_chunks()
        part = Part(f"{group}-{len(parts):06d}", rows.num_rows, rows.nbytes)
        with (plan.folder / f"{part.name}.parquet").open_whole() as stream:
            pa.parquet.write_table(rows, stream, compression="zstd")
        parts.append(part)
        seen |= here
        refuse_many_columns(len({one.name for one in seen}), "the input")
    return parts, list(seen)


def _seen_types(rows: pa.Table) -> list[SeenType]:
    """Return the types of the columns of rows of one file."""
    return seen_types(pa.Table.from_struct_array(rows["row"]), rows["place"][0].as_py().rpartition(":")[0])


def read_rows(listing: InputListing, plan: StagingPlan) -> Iterator[pa.Table]:
    """Read the named rows of all files, without those that `skip` and `limit` leave out."""
    prompts, skip, left = plan.prompts, plan.reading.skip, plan.reading.limit
    text_column = {"text": prompts.column, "openai": prompts.id_column}.get(prompts.kind)
    json_column = prompts.column if prompts.kind == "openai" else plan.reading.sampling_column
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, plan.rows_per_part, text_column, json_column):
            check_types(file, chunk.columns.schema, prompts)
            rows = named_rows(file, chunk, prompts, plan.reading.sampling_column)
            skipped, skip = skip, max(skip - rows.num_rows, 0)
            rows = rows.slice(skipped)
            rows_taken = rows if left is None else rows.slice(0, left)
            yield from with_samples(rows_taken, prompts, plan.reading.samples, plan.part_bytes)
            if left is not None:
                left -= rows.num_rows
                if left <= 0:
                    return


def cut(tables: Iterable[pa.Table], most_rows: int, most_bytes: int) -> Iterator[list[pa.Table]]:
    """Cut the same rows to pieces of `most_rows` rows, or of fewer, where another row would make one too large.

    Args:
        tables: The rows, however they come.
        most_rows: Rows of a piece.
        most_bytes: Bytes of a piece; one that has a single row may have more.

    Yields:
        The tables of each piece.
    """
    held: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        while table.num_rows:
            fitting = _fitting(table, most_rows - rows, most_bytes - size)
            if fitting or not held:
                held.append(table.slice(0, fitting or 1))
                rows, size = rows + held[-1].num_rows, size + held[-1].nbytes
                table = table.slice(held[-1].num_rows)
            if table.num_rows or rows == most_rows:
                yield held
                held, rows, size = [], 0, 0
    if held:
        yield held


def _fitting(table: pa.Table, most_rows: int, most_bytes: int) -> int:
    """Return how many rows at the beginning of a table are within both limits."""
    table = table.slice(0, most_rows)
    if table.nbytes <= most_bytes:
        return int(table.num_rows)
    sizes = np.cumsum([table.slice(row, 1).nbytes for row in range(table.num_rows)])
    return int(np.searchsorted(sizes, most_bytes, side="right"))
