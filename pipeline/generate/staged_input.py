"""Every input becomes Parquet parts of named rows before anything is generated.

A row's name (`request_id`) is its own, or follows from its file and place. A part is what one engine call takes, what
one write commits and what a failure redoes, so the names and contents of the parts must not depend on chance: they
follow from the input alone. All damage to files and all twin ids are found here, before any GPU has worked.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pipeline.errors import InputError, RowProblem
from pipeline.generate.generate_config import ReadingConfig
from pipeline.generate.samples import expand
from pipeline.io.columns import conform_struct, unify_fields
from pipeline.io.files import Location
from pipeline.io.reading import Chunk, InputFile, InputListing, PromptSource, check_types, read_file
from pipeline.openai.api_error import OpenAIError
from pipeline.openai.batch import parse_line

PROBLEM_TYPE = pa.struct(
    [("type", pa.string()), ("message", pa.string()), ("input", pa.string()), ("attempts", pa.int64())]
)
"""Why a row goes to `errors/`: a `RowProblem`, null where there is none."""
BAD_REQUEST = "BadRequest"
"""The kind of error of a batch's line that is not a request that can be answered."""
_GROUP_BYTES = 256 << 20
"""One task stages about this much of the input."""


@dataclass(frozen=True)
class Part:
    """A staged file.

    Args:
        name: Without its suffix; the committed files have it too.
        rows: How many it holds.
        nbytes: How much they are in memory; 0 if nobody asked.
    """

    name: str
    rows: int
    nbytes: int = 0


@dataclass(frozen=True)
class StagedInput:
    """The staged rows of an input.

    Args:
        folder: Holds one file a part, of columns `request_id`, `place` (file and line), `row` (a struct of the input's
            columns) and `problem`.
        parts: The files.
        row_type: The type of `row` that fits them all.
    """

    folder: Location
    parts: tuple[Part, ...]
    row_type: pa.StructType

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def created(self) -> int:
        """When the input was staged, in seconds since 1970."""
        return int((self.folder / "parts.json").info.mtime_ns // 10**9)

    def names(self) -> Iterator[str]:
        """The `request_id` of every row, in order."""
        for part in self.parts:
            path = (self.folder / f"{part.name}.parquet").path
            table = pa.parquet.read_table(path, columns=["request_id"], filesystem=self.folder.filesystem)
            yield from table["request_id"].to_pylist()

    def save(self) -> None:
        """Write the list of parts: from now on the input is staged."""
        row_type = base64.b64encode(pa.schema(list(self.row_type)).serialize().to_pybytes()).decode()
        parts = [[part.name, part.rows, part.nbytes] for part in self.parts]
        (self.folder / "parts.json").write_text(json.dumps({"row_type": row_type, "parts": parts}))

    @classmethod
    def load(cls, folder: Location) -> StagedInput | None:
        """What an earlier submission staged; None if it did not come to the end of it."""
        try:
            saved = json.loads((folder / "parts.json").read_text())
        except FileNotFoundError:
            return None
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["row_type"])))
        return cls(folder, tuple(Part(*part) for part in saved["parts"]), pa.struct(list(schema)))


def stage(
    listing: InputListing, folder: Location, reading: ReadingConfig, source: PromptSource, rows_per_part: int
) -> StagedInput:
    """Stage an input on the cluster's workers.

    Raises:
        InputError: A damaged file, a column missing or of the wrong type, an id that is not unique, or no rows.
    """
    folder.filesystem.create_dir(folder.path, recursive=True)
    task = ray.remote(num_cpus=0.5, max_retries=-1)(stage_files)
    groups = [list(listing.files)] if reading.limit or reading.skip else _groups(listing.files)
    work = [
        task.remote(replace_files(listing, files), f"{index:05d}", folder, reading, source, rows_per_part)
        for index, files in enumerate(groups)
    ]
    try:
        staged = ray.get(work)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise
    parts = tuple(part for parts, _ in staged for part in parts)
    if not parts:
        raise InputError("the input has no rows")
    result = StagedInput(folder, parts, pa.struct(unify_fields(fields for _, fields in staged)))
    if source.id_column is not None:
        _refuse_twin_ids(result, source.id_column, named_apart=source.kind == "openai" or reading.samples > 1)
    result.save()
    return result


def replace_files(listing: InputListing, files: list[InputFile]) -> InputListing:
    """`listing` with fewer files."""
    return InputListing(listing.filesystem, tuple(files))


def _groups(files: Iterable[InputFile]) -> list[list[InputFile]]:
    """Consecutive files, so many that a task has enough to do."""
    groups: list[list[InputFile]] = []
    size = _GROUP_BYTES
    for file in files:
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def stage_files(
    listing: InputListing,
    group: str,
    folder: Location,
    reading: ReadingConfig,
    source: PromptSource,
    rows_per_part: int,
) -> tuple[list[Part], list[pa.Field]]:
    """Stage some files into parts named after `group`; return the parts and the fields of their rows."""
    parts: list[Part] = []
    schemas: list[list[pa.Field]] = []
    for table in _repacked(_staged_chunks(listing, reading, source, rows_per_part), rows_per_part):
        part = Part(f"{group}-{len(parts):06d}", table.num_rows, table.nbytes)
        with (folder / f"{part.name}.parquet").open_whole() as stream:
            pa.parquet.write_table(table, stream, compression="zstd")
        parts.append(part)
        schemas.append(list(table.schema.field("row").type))
    return parts, unify_fields(schemas)


def _staged_chunks(
    listing: InputListing, reading: ReadingConfig, source: PromptSource, rows: int
) -> Iterator[pa.Table]:
    ahead, left = reading.skip, reading.limit
    text_column = {"text": source.column, "openai": source.id_column}.get(source.kind)
    json_column = source.column if source.kind == "openai" else reading.sampling_column
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, rows, text_column, json_column):
            check_types(file, chunk.columns.schema, source)
            table = _named(file, chunk, source.id_column)
            passed, ahead = ahead, max(ahead - table.num_rows, 0)
            table = table.slice(passed)
            yield _expanded(table if left is None else table.slice(0, left), source, reading.samples)
            if left is not None:
                left -= table.num_rows
                if left <= 0:
                    return


def _named(file: InputFile, chunk: Chunk, id_column: str | None) -> pa.Table:
    """A chunk as columns `request_id`, `place`, `row` and `problem`."""
    places = [f"{file.name}:{number}" for number in chunk.numbers]
    problems = dict(chunk.problems)
    ids = places
    if id_column is not None:
        has_ids = id_column in chunk.columns.column_names
        values = chunk.columns.column(id_column).to_pylist() if has_ids else [None] * len(places)
        ids = []
        for index, value in enumerate(values):
            usable = (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and value)
            ids.append(str(value) if usable else places[index])
            if not usable:
                problems.setdefault(index, RowProblem("BadRow", f"the id column {id_column!r} is empty"))
    row = pa.StructArray.from_arrays(
        [column.combine_chunks() for column in chunk.columns.columns], fields=list(chunk.columns.schema)
    )
    problem = [vars(problems[index]) if index in problems else None for index in range(len(ids))]
    return pa.table(
        {
            "request_id": pa.array(ids, pa.string()),
            "place": pa.array(places, pa.string()),
            "row": row,
            "problem": pa.array(problem, PROBLEM_TYPE),
        }
    )


def _expanded(table: pa.Table, source: PromptSource, samples: int) -> pa.Table:
    """A row for each text that is wanted; rows with problems stay one."""
    problems = table["problem"].to_pylist()
    if source.kind != "openai":
        return table if samples == 1 else expand(table, [samples if one is None else 1 for one in problems])
    counts = [1] * table.num_rows
    for index, line in enumerate(table["row"].to_pylist()):
        if problems[index] is None:
            try:
                counts[index] = parse_line(line).choices
            except OpenAIError as error:
                problems[index] = vars(RowProblem(BAD_REQUEST, error.message))
    problem = pa.array(problems, PROBLEM_TYPE)
    return expand(table.set_column(table.schema.get_field_index("problem"), "problem", problem), counts)


def _repacked(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly `rows` rows, but for the last."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        held.append(table)
        count += table.num_rows
        while count >= rows:
            whole = _concatenated(held)
            yield whole.slice(0, rows)
            held, count = [whole.slice(rows)], count - rows
    if count:
        yield _concatenated(held)


def _concatenated(tables: list[pa.Table]) -> pa.Table:
    """Tables one after the other, their rows brought to one type."""
    row_type = pa.struct(unify_fields(list(table.schema.field("row").type) for table in tables))
    return pa.concat_tables([_with_row_type(table, row_type) for table in tables]).combine_chunks()


def _with_row_type(table: pa.Table, row_type: pa.StructType) -> pa.Table:
    row = conform_struct(table.column("row").combine_chunks(), row_type)
    return table.set_column(table.schema.get_field_index("row"), "row", row)


def _refuse_twin_ids(staged: StagedInput, column: str, *, named_apart: bool) -> None:
    """Refuse ids that stand for several rows; where `named_apart`, a row's texts have names of their own."""
    paths = [(staged.folder / f"{part.name}.parquet").path for part in staged.parts]
    filesystem = staged.folder.filesystem
    ids = pa.parquet.read_table(paths, columns=["request_id"], filesystem=filesystem)["request_id"]
    counts = pa.compute.value_counts(ids)
    twins = counts.filter(pa.compute.greater(counts.field("counts"), 1)).field("values")
    if not len(twins):
        return
    named = pa.parquet.read_table(paths, columns=["request_id", "place"], filesystem=filesystem)
    places: dict[str, list[str]] = {}
    for row in named.filter(pa.compute.is_in(named["request_id"], twins)).to_pylist():
        name = row["request_id"].rpartition("#")[0] if named_apart else row["request_id"]
        lines = places.setdefault(name, [])
        if row["place"] not in lines:
            lines.append(row["place"])
    examples = "; ".join(f"{name!r}: {', '.join(lines)}" for name, lines in list(places.items())[:3])
    raise InputError(f"column {column!r} does not name rows: {len(places)} ids stand for several rows ({examples})")


class StagedParts(Datasource):
    """Ray Data's view of some staged parts: one read task, and one block, a part.

    A block has the staged columns and `part` and `part_rows`, which follow it to the writer.

    Args:
        staged: The staged input.
        parts: Those to read.
    """

    def __init__(self, staged: StagedInput, parts: list[Part]) -> None:
        super().__init__()
        self._staged, self._parts = staged, parts

    def estimate_inmemory_data_size(self) -> int | None:
        """Not known."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One task a part, whatever the parallelism asked for."""
        return [
            ReadTask(
                partial(_read_part, self._staged.folder, part, self._staged.row_type),
                BlockMetadata(num_rows=part.rows, size_bytes=None, input_files=None, exec_stats=None),
            )
            for part in self._parts
        ]


def _read_part(folder: Location, part: Part, row_type: pa.StructType) -> list[pa.Table]:
    path = (folder / f"{part.name}.parquet").path
    table = pa.parquet.read_table(path, columns=["request_id", "row", "problem"], filesystem=folder.filesystem)
    table = _with_row_type(table, row_type)
    name = pa.array([part.name] * part.rows, pa.string())
    rows = pa.array([part.rows] * part.rows, pa.int64())
    return [table.append_column("part", name).append_column("part_rows", rows)]
