"""Staging of the input as parts, each a Parquet file of named rows.

A part is the unit of one engine call, one atomic commit and one retry. Names and contents of the parts depend on the
input alone, so every submission sees the same ones.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from drafter.errors import one_line
from pipeline.errors import InputError, JobError
from pipeline.io.column_types import SeenType, refuse_many_columns, seen_types, unify, whole
from pipeline.io.files import Location, mend, read_either, write_twice
from pipeline.io.listing import InputFile, InputListing
from pipeline.io.prompt_source import NoIdsError, PromptSource, check_types
from pipeline.io.reading import parquet_rows, read_file
from pipeline.settings import ReadingConfig
from pipeline.staging.rows import named_rows, with_row_type, with_samples
from pipeline.staging.samples import row_name

_READERS = 16

STAGED_LIST = "parts.json"
"""The list of staged parts. It is written last: if it exists, staging is complete."""
STAGED_FORMAT = 2
"""Format 1 lacked the column `asked`: chat messages of several rows shared one Arrow column and changed one another."""


@dataclass(frozen=True)
class Part:
    """A staged file.

    Args:
        name: File name without suffix, shared with the result files.
        nbytes: Size in memory; 0 where not needed.
    """

    name: str
    rows: int
    nbytes: int = 0


@dataclass(frozen=True)
class StagedInput:
    """The staged rows of an input.

    Args:
        folder: Holds one file per part, with the columns `request_id`, `place` (file and line), `asked` (the fields of
            the row that the job reads, as JSON), `row` (a struct of the input's columns) and `problem`.
        rows_per_part: Rows of each part but the last of a task; 0 where the input will not be staged again.
        format: See `STAGED_FORMAT`. Of an older format, only the list can be used.
        source: Identity of the rows: fingerprints of the input's files, and the selection of rows.
        revision: Number of earlier changes of the input; part names begin with it, from 1 on.
    """

    folder: Location
    parts: tuple[Part, ...]
    row_type: pa.StructType
    rows_per_part: int = 0
    format: int = STAGED_FORMAT
    source: Any = None
    revision: int = 0

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def created(self) -> int:
        return int((self.folder / STAGED_LIST).info.mtime_ns // 10**9)

    def without(self, committed: Collection[str]) -> list[Part]:
        return [part for part in self.parts if part.name not in committed]

    def file(self, part: Part) -> Location:
        return self.folder / f"{part.name}.parquet"

    def damaged(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts whose file is missing or incomplete."""
        parts = list(parts)
        with ThreadPoolExecutor(_READERS) as pool:
            rows = pool.map(parquet_rows, map(self.file, parts))
            return [part for part, found in zip(parts, rows, strict=True) if found != part.rows]

    def request_ids(self) -> Iterator[str]:
        for part in self.parts:
            table = pa.parquet.read_table(
                self.file(part).path, columns=["request_id"], filesystem=self.folder.filesystem
            )
            yield from table["request_id"].to_pylist()

    def save(self) -> None:
        """Write the list of parts, which completes staging."""
        row_type = base64.b64encode(pa.schema(list(self.row_type)).serialize().to_pybytes()).decode()
        parts = [[part.name, part.rows, part.nbytes] for part in self.parts]
        saved = {"format": self.format, "row_type": row_type, "rows_per_part": self.rows_per_part, "parts": parts}
        saved |= {"source": self.source, "revision": self.revision}
        write_twice(self.folder / STAGED_LIST, json.dumps(saved))

    @classmethod
    def load(cls, folder: Location) -> StagedInput | None:
        """Load an earlier submission's staging; None if it is incomplete or its list is lost."""
        try:
            saved = read_either(folder / STAGED_LIST, _parse)
        except (FileNotFoundError, ValueError):
            return None
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["row_type"])))
        parts = tuple(Part(*part) for part in saved["parts"])
        saved_format, source, revision = saved.get("format", 1), saved.get("source"), saved.get("revision", 0)
        return cls(folder, parts, pa.struct(list(schema)), saved["rows_per_part"], saved_format, source, revision)


def mend_list(folder: Location) -> None:
    mend(folder / STAGED_LIST, _parse)


def _parse(text: str) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(text)
    if not isinstance(saved, dict) or not {"row_type", "rows_per_part", "parts"} <= saved.keys():
        raise ValueError("it is no list of parts")
    return saved


def pack(parts: Iterable[tuple[str, pa.Table]]) -> pa.Table:
    """Make a block for Ray Data: one row per part, with the part's rows as a list."""
    return pa.concat_tables([_packed(name, rows) for name, rows in parts])


def _packed(name: str, rows: pa.Table) -> pa.Table:
    structs = pa.StructArray.from_arrays([whole(column) for column in rows.columns], fields=list(rows.schema))
    return pa.table({"part": [name], "rows": pa.ListArray.from_arrays([0, len(structs)], structs)})


def unpack(block: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield the name and rows of each part in a block."""
    for name, rows in zip(block["part"].to_pylist(), block["rows"], strict=True):
        yield name, pa.Table.from_struct_array(rows.values)


class StagedParts(Datasource):
    """Ray Data source of staged parts: one read task and one block per part.

    A part's rows have the columns `request_id`, `asked`, `row` and `problem`.
    """

    def __init__(self, staged: StagedInput, parts: list[Part]) -> None:
        super().__init__()
        self._staged, self._parts = staged, parts

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return one task per part, whatever the parallelism."""
        return [
            ReadTask(
                _read_task(part.name, self._staged.file(part), self._staged.row_type),
                BlockMetadata(num_rows=1, size_bytes=None, input_files=None, exec_stats=None),
            )
            for part in self._parts
        ]


def _read_task(name: str, file: Location, row_type: pa.StructType) -> Callable[[], list[pa.Table]]:
    """Bind the part alone, so that the task is not serialized with the list of all parts."""
    read = partial(_read_part, name, file, row_type)
    return update_wrapper(read, _read_part)  # Ray warns of large tasks by their names


def _read_part(name: str, file: Location, row_type: pa.StructType) -> list[pa.Table]:
    rows = pa.parquet.read_table(
        file.path, columns=["request_id", "asked", "row", "problem"], filesystem=file.filesystem
    )
    return [pack([(name, with_row_type(rows, row_type))])]


PART_BYTES = 32 << 20
"""Size limit of a part with several rows. Ray Data's blocks have up to 128 MiB, and the output comes on top."""


@dataclass(frozen=True)
class StagingPlan:
    """Settings of all staging tasks.

    Args:
        rows_per_part: Rows of each part but the last of a task, and those closed by `part_bytes`.
    """

    folder: Location
    reading: ReadingConfig
    prompts: PromptSource
    rows_per_part: int
    source: Any = None
    revision: int = 0
    part_bytes: int = PART_BYTES


def stage_files(listing: InputListing, group: str, plan: StagingPlan) -> tuple[list[Part], list[SeenType]]:
    """Stage the files of `listing` as parts named after `group`. Runs as a task on a worker.

    Returns:
        The parts, and the types of their columns, for `unify`.

    Raises:
        InputError: A file is damaged, lacks a column, or has one incompatible with another file's.
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
    return seen_types(pa.Table.from_struct_array(rows["row"]), rows["place"][0].as_py().rpartition(":")[0])


def read_rows(listing: InputListing, plan: StagingPlan) -> Iterator[pa.Table]:
    """Read the named rows of all files, within `skip` and `limit`."""
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
    """Yield pieces of `most_rows` rows, or fewer where the next row would exceed `most_bytes`.

    A single row may exceed `most_bytes`.
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
    table = table.slice(0, most_rows)
    if table.nbytes <= most_bytes:
        return int(table.num_rows)
    sizes = np.cumsum([table.slice(row, 1).nbytes for row in range(table.num_rows)])
    return int(np.searchsorted(sizes, most_bytes, side="right"))


_GROUP_BYTES = 256 << 20
"""Approximate input size of one task."""
_TASK_CPUS = 0.5
_EXAMPLES = 3
"""Number of ids in an error message."""


def stage(listing: InputListing, plan: StagingPlan, before: StagedInput | None = None) -> StagedInput:
    """Stage an input on the cluster's workers. The caller completes staging by saving the returned list.

    An automatically found id column that does not name all rows is ignored, with a message.

    Args:
        before: An earlier staging with damaged files, all of which are to be written again.

    Raises:
        InputError: A file is damaged or lacks a column, an id stands for several rows, there are no rows, or the parts
            differ from those staged before.
        JobError: The parts cannot be written.
    """
    try:
        return _stage(listing, plan, before)
    except NoIdsError as why:
        print(f"{one_line(why)}: rows are named by file and line", file=sys.stderr, flush=True)
        return _stage(listing, replace(plan, prompts=replace(plan.prompts, id_column=None, ids_found=False)), before)


def _stage(listing: InputListing, plan: StagingPlan, before: StagedInput | None) -> StagedInput:
    plan.folder.make_folder()
    task = ray.remote(num_cpus=_TASK_CPUS, max_retries=-1)(stage_files)
    # `skip` and `limit` count rows over all files, so one task has to read them all.
    groups = [list(listing.files)] if plan.reading.limit or plan.reading.skip else _groups(listing.files)
    prefix = f"{plan.revision:03d}-" if plan.revision else ""
    work = [
        task.remote(InputListing(listing.filesystem, tuple(files)), f"{prefix}{index:05d}", plan)
        for index, files in enumerate(groups)
    ]
    try:
        done = ray.get(work)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise JobError(f"the input cannot be staged: {one_line(error.cause)}") from error
    parts = tuple(part for parts, _ in done for part in parts)
    if not parts:
        raise InputError("the input has no rows")
    if before is not None:
        if [(part.name, part.rows) for part in parts] != [(part.name, part.rows) for part in before.parts]:
            raise InputError(
                f"the staged input in {plan.folder.path} is damaged, and the input is no longer what was staged: "
                "choose another output"
            )
        return before
    seen = dict.fromkeys(one for _, types in done for one in types)
    row_type = unify(seen, json_objects=listing.of_json)
    _say_what_is_text(row_type, seen)
    staged = StagedInput(plan.folder, parts, row_type, plan.rows_per_part, source=plan.source, revision=plan.revision)
    if plan.prompts.id_column is not None:
        _refuse_shared_ids(staged, plan)
    return staged


def _say_what_is_text(row_type: pa.StructType, seen: Iterable[SeenType]) -> None:
    """Report columns of tables that become text because their types differ between files."""
    types: dict[str, list[SeenType]] = {}
    for one in seen:
        types.setdefault(one.name, []).append(one)
    for name, some in types.items():
        kinds = {one_line(str(one.type), 80): one.file for one in some if not pa.types.is_null(one.type)}
        if pa.types.is_string(row_type.field(name).type) and len(kinds) > 1:
            found = ", ".join(f"{kind} in {file}" for kind, file in list(kinds.items())[:_EXAMPLES])
            print(f"column {name!r} is kept as text: it has {found}", file=sys.stderr, flush=True)


def _groups(files: Iterable[InputFile]) -> list[list[InputFile]]:
    groups: list[list[InputFile]] = []
    size = _GROUP_BYTES
    for file in files:
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def _refuse_shared_ids(staged: StagedInput, plan: StagingPlan) -> None:
    paths, filesystem = [staged.file(part).path for part in staged.parts], staged.folder.filesystem
    ids = pa.parquet.read_table(paths, columns=["request_id"], filesystem=filesystem)["request_id"]
    counts = pa.compute.value_counts(ids)
    shared = counts.filter(pa.compute.greater(counts.field("counts"), 1)).field("values")
    if not len(shared):
        return
    expanded = plan.prompts.kind == "openai" or plan.reading.samples > 1
    named = pa.parquet.read_table(paths, columns=["request_id", "place"], filesystem=filesystem)
    places: dict[str, list[str]] = {}
    for row in named.filter(pa.compute.is_in(named["request_id"], shared)).to_pylist():
        lines = places.setdefault(row_name(row["request_id"]) if expanded else row["request_id"], [])
        if row["place"] not in lines:
            lines.append(row["place"])
    examples = "; ".join(f"{name!r}: {', '.join(lines)}" for name, lines in list(places.items())[:_EXAMPLES])
    column = plan.prompts.id_column
    problem = f"column {column!r} does not name rows: {len(places)} ids stand for several rows ({examples})"
    raise NoIdsError(problem) if plan.prompts.ids_found else InputError(problem)
