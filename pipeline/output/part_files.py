"""Files of results: atomic commits of parts, and checks.

A part's errors are written first, then its rows: the file of rows commits the part. Each file appears complete
(`Location.open_whole`) under a name that follows from the part's, so a repeated write replaces its own files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from drafter.errors import printable
from pipeline.command_line import say
from pipeline.io.column_notes import with_schema_notes
from pipeline.io.column_types import conform_struct, free_name, python_rows, seen_types, unify, whole
from pipeline.io.files import Location, in_parallel, parquet_rows
from pipeline.io.parts import Part
from pipeline.output.columns import (
    MOST_PROGRAM_COLUMNS,
    PROGRAM,
    too_many_program_columns,
    with_program_columns,
    without_program_columns,
)
from pipeline.output.folder import OutputFolder

ERROR_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("input", pa.string()),
        ("error_type", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int64()),
    ]
)
"""Columns of `errors/`: `input` is the row as it was read (JSON), `attempts` how often an engine had it."""


def commit_part(output: OutputFolder, part: str, rows: pa.Table) -> None:
    """Write a part's rows (`request_id`, `row`, `problem`, `generated`) as one commit: errors, then finished rows."""
    errors, errors_file = error_table(rows), output.errors / f"{part}.parquet"
    aside = output.temporary / f"{uuid.uuid4().hex}.parquet"
    if errors.num_rows:
        errors_file.write_parquet(errors, aside)
    else:
        errors_file.delete()  # of an attempt that was not committed
    (output.data / f"{part}.parquet").write_parquet(data_table(rows), aside)


def data_table(rows: pa.Table) -> pa.Table:
    """Return the finished rows, flat: `request_id`, the input's columns with notes about them, the generated ones.

    An input column with another one's name becomes `input_NAME`.
    """
    finished = rows.filter(pa.compute.is_null(rows["problem"]))
    given, generated = whole(finished["row"]), with_program_columns(whole(finished["generated"]))
    theirs, ours = ([field.name for field in one.type] for one in (given, generated))
    taken = {"request_id", *finished["generated"].type.names, *ours}
    fields = [field.with_name(free_name(field.name, taken, theirs)) for field in given.type]
    columns = {"request_id": finished["request_id"]}
    columns |= zip((field.name for field in fields), given.flatten(), strict=True)
    columns |= zip(ours, generated.flatten(), strict=True)
    return with_schema_notes(pa.table(columns), fields)


def unify_types(output: OutputFolder) -> None:
    """Give each column one type in all files of rows: what programs return is typed part by part.

    A file is replaced by one with the same rows, so that a kill meanwhile does no harm. Columns that some files lack
    become one of JSON text if they are too many.
    """
    files = [output.data / f"{name}.parquet" for name in sorted(output.data.parquets())]
    schemas = in_parallel(lambda file: pa.parquet.read_schema(file.path, filesystem=file.filesystem), files)
    if len(set(schemas)) < 2:
        return
    if texts := too_many_program_columns(schemas):
        many = f"more than {MOST_PROGRAM_COLUMNS:,} different columns"
        say(f"programs returned {many}: those that only some files have are in {PROGRAM!r}, as JSON text")

    def read(file: Location) -> pa.Table:
        table = file.read_parquet()
        return without_program_columns(table, texts) if texts else table

    seen = (one for file in files for one in seen_types(read(file), file.name))
    kind = unify(dict.fromkeys(seen), json_objects=True)
    for file, before in zip(files, schemas, strict=True):
        table = read(file)
        schema = pa.schema(list(kind), metadata=table.schema.metadata)
        if before != schema:
            columns = whole(pa.chunked_array(table.to_struct_array()))
            rows = conform_struct(columns, kind)
            aside = output.temporary / f"{uuid.uuid4().hex}.parquet"
            file.write_parquet(pa.Table.from_arrays(rows.flatten(), schema=schema), aside)


def error_table(rows: pa.Table) -> pa.Table:
    failed = rows.filter(pa.compute.is_valid(rows["problem"]))
    problems = failed["problem"].to_pylist()
    inputs = [
        problem["input"] if problem["input"] is not None else json.dumps(row, ensure_ascii=False, default=_as_text)
        for problem, row in zip(problems, python_rows(whole(failed["row"])), strict=True)
    ]
    columns = [[problem[name] for problem in problems] for name in ("type", "message", "attempts")]
    return pa.table([failed["request_id"], inputs, *columns], schema=ERROR_SCHEMA)


def _as_text(value: object) -> str:
    return f"({len(value):,} bytes)" if isinstance(value, bytes) else str(value)


# Checks of result files: a power loss or an aborted copy leaves incomplete ones.

_SHOWN = 3


@dataclass(frozen=True)
class ResultFile:
    """A part's file in `data/`, which commits it, or in `errors/`. `rows` is None where it is damaged."""

    place: Location
    commits: bool
    part: str
    rows: int | None


def is_whole(output: OutputFolder, parts: Sequence[Part]) -> bool:
    """Return whether an output holds all rows of all parts undamaged and once.

    A process of an earlier submission that was cut off may have written a part again after it was replaced.
    """
    files, rows = result_files(output), _rows(parts)
    committed = {file.part for file in files if file.commits}
    once = sum(file.rows or 0 for file in files) == sum(rows.values())
    return once and committed >= rows.keys() and not torn_files(files, rows)


def foreign_files(output: OutputFolder, parts: Sequence[Part]) -> list[str]:
    """Return the names of files in `data/` and `errors/` that belong to no part, Parquet files first."""
    known = {f"{part}.parquet" for part in _rows(parts)}
    found = [folder / info.base_name for folder in (output.data, output.errors) for info in folder.children()]
    names = [output.name_of(file) for file in found if file.name not in known]
    return sorted(names, key=lambda name: not name.endswith(".parquet"))


def whole_files(output: OutputFolder, parts: Sequence[Part]) -> list[ResultFile]:
    """Return the files of the parts, in their order, without those that `discard_torn` would delete."""
    rows, files = _rows(parts), result_files(output)
    torn = {file.place.path for file in torn_files(files, rows)}
    return [file for file in files if file.part in rows and file.place.path not in torn]


def discard_torn(output: OutputFolder, parts: Iterable[Part]) -> None:
    """Delete the files of incomplete parts, with a message. The caller must hold the lease."""
    torn = torn_files(result_files(output), _rows(parts))
    if not torn:
        return
    names = ", ".join(output.name_of(file.place) for file in torn[:_SHOWN])
    more = f" and {len(torn) - _SHOWN} others" if len(torn) > _SHOWN else ""
    say(f"results that are not whole are made again: {printable(names)}{more}")
    for file in torn:
        file.place.delete()


def result_files(output: OutputFolder) -> list[ResultFile]:
    found = [
        (folder / f"{part}.parquet", commits, part)
        for folder, commits in ((output.data, True), (output.errors, False))
        for part in folder.parquets()
    ]
    rows = in_parallel(parquet_rows, (place for place, _, _ in found))
    return [ResultFile(*facts, count) for facts, count in zip(found, rows, strict=True)]


def torn_files(files: Iterable[ResultFile], rows: Mapping[str, int]) -> list[ResultFile]:
    """Return the files to delete so that every part is complete or absent, those that commit parts first."""
    groups: dict[str, list[ResultFile]] = {}
    for file in files:
        groups.setdefault(file.part, []).append(file)
    torn: list[ResultFile] = []
    for part in groups.keys() & rows.keys():
        group = groups[part]
        damaged = [file for file in group if file.rows is None]
        committed = any(file.commits for file in group)  # otherwise the commit replaces the errors of an attempt
        data_is_whole = not any(file.commits for file in damaged)
        is_whole = data_is_whole and sum(file.rows or 0 for file in group) == rows[part]
        torn += damaged if is_whole or not committed else group
    return sorted(torn, key=lambda file: (not file.commits, file.place.path))


def _rows(parts: Iterable[Part]) -> dict[str, int]:
    return {part.name: part.rows for part in parts}
