"""The rows that a submission leaves to the next: they are finished, but their parts are not."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet
from pyarrow import fs

from pipeline.engines.ledger import SavedRow
from pipeline.io.table_files import parquet_rows
from pipeline.output.output_folder import OutputFolder


def read_unfinished(output: OutputFolder) -> list[SavedRow]:
    """Read what an earlier submission left; nothing, and a line that says so, where the file is damaged."""
    if output.unfinished.type != fs.FileType.File:
        return []
    if parquet_rows(output.unfinished) is None:
        print(f"{output.unfinished.path} is damaged: its rows are generated again", file=sys.stderr, flush=True)
        return []
    table = pa.parquet.read_table(output.unfinished.path, filesystem=output.root.filesystem)
    return [SavedRow(**row) for row in table.to_pylist()]


def write_unfinished(output: OutputFolder, rows: list[SavedRow]) -> None:
    """Leave these rows to the next submission, instead of those that are there; no rows leave no file."""
    if not rows:
        delete_unfinished(output)
        return
    with output.unfinished.open_whole(aside=output.temporary / output.unfinished.name) as stream:
        pa.parquet.write_table(pa.Table.from_pylist([vars(row) for row in rows]), stream)


def delete_unfinished(output: OutputFolder) -> None:
    """Leave nothing to the next submission."""
    if output.unfinished.type == fs.FileType.File:
        output.unfinished.filesystem.delete_file(output.unfinished.path)
