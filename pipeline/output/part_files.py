"""Results on disk: a part is in the output as a whole, once, or not at all.

A part's errors are written first, and then its rows: the file of its rows commits the part. Each file appears as a
whole (`Location.open_whole`). Its name follows from the part's, so a write that is repeated replaces its own files and
adds nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from pyarrow import fs
from ray.data.datasource import Datasink

from pipeline.io.column_types import free_name, python_rows, whole
from pipeline.io.files import Location
from pipeline.output.output_folder import OutputFolder
from pipeline.staging.part_rows import unpack

ERROR_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("input", pa.string()),
        ("error_type", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int64()),
    ]
)
"""Columns of `errors/`: the row's name, the row as it was read (JSON), the kind of error, what is wrong, and how often
an engine had the row."""


@dataclass
class PartsDatasink(Datasink[None]):
    """Ray Data's writer: commits the parts in the blocks that it is given.

    Args:
        output: Where to.
        committed: Called with each part's name after its commit, on a worker.
    """

    output: OutputFolder
    committed: Callable[[str], None] = lambda part: None

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> None:
        """Commit every part in `blocks`; runs on a worker."""
        for block in blocks:
            for part, rows in unpack(block):
                commit_part(self.output, part, rows)
                self.committed(part)


def commit_part(output: OutputFolder, part: str, rows: pa.Table) -> None:
    """Write a part's finished rows and its errors, both or neither.

    Args:
        output: Where to.
        part: The part's name.
        rows: Its rows, with the columns `request_id`, `row`, `problem` and `generated`.
    """
    errors, errors_file = error_table(rows), output.errors / f"{part}.parquet"
    if errors.num_rows:
        _write(output, errors, errors_file)
    elif errors_file.type == fs.FileType.File:
        errors_file.filesystem.delete_file(errors_file.path)  # of an attempt that was not committed
    _write(output, data_table(rows), output.data / f"{part}.parquet")


def _write(output: OutputFolder, table: pa.Table, file: Location) -> None:
    with file.open_whole(aside=output.temporary / f"{uuid.uuid4().hex}.parquet") as stream:
        pa.parquet.write_table(table, stream, compression="zstd")


def data_table(rows: pa.Table) -> pa.Table:
    """Return the finished rows, flat: `request_id`, the input's columns, the generated ones.

    An input column with the name of another becomes `input_NAME`.
    """
    finished = rows.filter(pa.compute.is_null(rows["problem"]))
    given, generated = whole(finished["row"]), whole(finished["generated"])
    theirs, ours = ([field.name for field in one.type] for one in (given, generated))
    taken = {"request_id", *ours}
    columns = {"request_id": finished["request_id"]}
    columns |= {free_name(name, taken, theirs): column for name, column in zip(theirs, _fields(given), strict=True)}
    columns |= dict(zip(ours, _fields(generated), strict=True))
    return pa.table(columns)


def _fields(structs: pa.StructArray) -> list[pa.Array]:
    """Fields of structs, by number because names may hold dots."""
    return [pa.compute.struct_field(structs, [index]) for index in range(structs.type.num_fields)]


def error_table(rows: pa.Table) -> pa.Table:
    """Return the rows that could not be generated, as `ERROR_SCHEMA`."""
    failed = rows.filter(pa.compute.is_valid(rows["problem"]))
    problems = failed["problem"].to_pylist()
    inputs = [
        problem["input"] if problem["input"] is not None else json.dumps(row, ensure_ascii=False, default=str)
        for problem, row in zip(problems, python_rows(whole(failed["row"])), strict=True)
    ]
    return pa.table(
        {
            "request_id": failed["request_id"],
            "input": inputs,
            "error_type": [problem["type"] for problem in problems],
            "message": [problem["message"] for problem in problems],
            "attempts": [problem["attempts"] for problem in problems],
        },
        schema=ERROR_SCHEMA,
    )
