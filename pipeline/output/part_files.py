"""Results on disk: a part is in the output as a whole, once, or not at all.

A part's errors are written first, and then its rows: that they appear commits the part. Each file appears as a whole,
by a rename, or by itself on an object store (`Location.open_whole`). Names follow from the parts, so a write that is
repeated replaces its own files and adds nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from pyarrow import fs
from ray.data.datasource import Datasink

from pipeline.io.files import Location
from pipeline.output.output_folder import OutputFolder

ERROR_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("input", pa.string()),
        ("error_type", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int64()),
    ]
)
"""Columns of the errors dataset: the row's name, the row as it was read (JSON), what kind of error, what is wrong, and
how often an engine had it."""


def data_table(table: pa.Table, left_out: Collection[str] = ()) -> pa.Table:
    """The finished rows of a part, flat: `request_id`, the input's columns, the generated ones but for `left_out`.

    An input column with the name of one of ours becomes `input_NAME`.
    """
    table = table.filter(pa.compute.is_null(table["problem"]))
    generated = table.schema.field("generated").type
    columns = {"request_id": table["request_id"]}
    ours = {"request_id", *(one.name for one in generated)} - {*left_out}
    rows = table["row"].combine_chunks()
    theirs = [one.name for one in table.schema.field("row").type]
    for name in theirs:
        columns[free_name(name, ours, theirs)] = pa.compute.struct_field(rows, name_path(rows.type, name))
    results = table["generated"].combine_chunks()
    for index, one in enumerate(generated):
        if one.name not in left_out:
            columns[one.name] = pa.compute.struct_field(results, [index])
    return pa.table(columns)


def name_path(row_type: pa.StructType, name: str) -> list[int]:
    """Where a field is in a struct, as `struct_field` wants it (by number: names may hold dots)."""
    return [row_type.get_field_index(name)]


def free_name(name: str, ours: set[str], theirs: list[str]) -> str:
    """The output's name for an input column: its own, unless it is one of ours."""
    while name in ours:
        name = f"input_{name}"
        if name in theirs:
            ours = ours | {name}
    return name


def error_table(table: pa.Table) -> pa.Table:
    """The rows of a part that could not be generated, as `ERROR_SCHEMA`."""
    table = table.filter(pa.compute.is_valid(table["problem"]))
    problems = table["problem"].to_pylist()
    inputs = [
        problem["input"] if problem["input"] is not None else json.dumps(row, ensure_ascii=False, default=str)
        for problem, row in zip(problems, table["row"].to_pylist(), strict=True)
    ]
    return pa.table(
        {
            "request_id": table["request_id"],
            "input": pa.array(inputs, pa.string()),
            "error_type": pa.array([problem["type"] for problem in problems], pa.string()),
            "message": pa.array([problem["message"] for problem in problems], pa.string()),
            "attempts": pa.array([problem["attempts"] for problem in problems], pa.int64()),
        },
        schema=ERROR_SCHEMA,
    )


@dataclass
class PartsDatasink(Datasink[None]):
    """Ray Data's writer: commits the parts in the blocks it is given.

    Args:
        output: Where to.
        left_out: Generated columns that are not wanted.
        committed: Called with each part's name after its commit, on a worker.
    """

    output: OutputFolder
    left_out: Collection[str] = ()
    committed: Callable[[str], None] = lambda part: None

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> None:
        """Commit every part in `blocks`; runs on a worker."""
        for block in blocks:
            for name in block["part"].unique().to_pylist():
                rows = block.filter(pa.compute.equal(block["part"], name))
                if rows.num_rows != rows["part_rows"][0].as_py():
                    raise RuntimeError(f"part {name} came in pieces: {rows.num_rows} of {rows['part_rows'][0]} rows")
                commit_part(self.output, name, rows, self.left_out)
                self.committed(name)


def commit_part(output: OutputFolder, name: str, rows: pa.Table, left_out: Collection[str] = ()) -> None:
    """Write a part's rows and errors, both or neither."""
    filesystem = output.root.filesystem
    data, errors = data_table(rows, left_out), error_table(rows)
    place = output.errors / f"{name}.parquet"
    if errors.num_rows:
        _write(output, errors, place)
    elif place.type == fs.FileType.File:
        filesystem.delete_file(place.path)  # of an attempt that was not committed
    _write(output, data, output.data / f"{name}.parquet")


def _write(output: OutputFolder, table: pa.Table, place: Location) -> None:
    with place.open_whole(aside=output.temporary / f"{uuid.uuid4().hex}.parquet") as stream:
        pa.parquet.write_table(table, stream, compression="zstd")
