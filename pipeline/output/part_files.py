"""Files of results: atomic commits of parts, checks, and compaction.

A part's errors are written first, then its rows: the file of rows commits the part. Each file appears complete
(`Location.open_whole`) under a name that follows from the part's, so a repeated write replaces its own files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from drafter.errors import printable
from pipeline.command_line import say
from pipeline.io.column_notes import with_schema_notes
from pipeline.io.column_types import conform_struct, free_name, python_rows, seen_types, unify, whole
from pipeline.io.files import Location, batches, in_parallel, parquet_rows, write_twice
from pipeline.io.parts import Part
from pipeline.output.columns import with_program_columns
from pipeline.output.folder import CompactionPlan, OutputFolder

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
    taken = {"request_id", *ours}
    fields = [field.with_name(free_name(field.name, taken, theirs)) for field in given.type]
    columns = {"request_id": finished["request_id"]}
    columns |= zip((field.name for field in fields), given.flatten(), strict=True)
    columns |= zip(ours, generated.flatten(), strict=True)
    return with_schema_notes(pa.table(columns), fields)


def unify_types(output: OutputFolder) -> None:
    """Give each column one type in all files of rows: what programs return is typed part by part.

    A file is replaced by one with the same rows, so that a kill meanwhile does no harm.
    """
    files = [output.data / f"{name}.parquet" for name in sorted(output.data.parquets())]
    if len(set(in_parallel(_schema, files))) < 2:
        return
    seen = (one for file in files for one in seen_types(file.read_parquet(), file.name))
    kind = unify(dict.fromkeys(seen), json_objects=True)
    for file in files:
        table = file.read_parquet()
        schema = pa.schema(list(kind), metadata=table.schema.metadata)
        if table.schema != schema:
            columns = whole(pa.chunked_array(table.to_struct_array()))
            rows = conform_struct(columns, kind)
            aside = output.temporary / f"{uuid.uuid4().hex}.parquet"
            file.write_parquet(pa.Table.from_arrays(rows.flatten(), schema=schema), aside)


def _schema(file: Location) -> pa.Schema:
    with file.filesystem.open_input_file(file.path) as stream:
        return pa.parquet.read_schema(stream)


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
    """A file in `data/`, which commits its parts, or in `errors/`. `rows` is None where it is damaged."""

    place: Location
    commits: bool
    parts: frozenset[str]
    rows: int | None


def is_whole(output: OutputFolder, parts: Sequence[Part]) -> bool:
    """Return whether an output holds all rows of all parts undamaged and once.

    A process of an earlier submission that was cut off may have written a part again after it was merged or replaced.
    """
    files, rows = result_files(output), _rows(parts)
    committed = {part for file in files if file.commits for part in file.parts}
    once = sum(file.rows or 0 for file in files) == sum(rows.values())
    return once and committed >= rows.keys() and not torn_files(files, rows)


def foreign_files(output: OutputFolder, parts: Sequence[Part]) -> list[str]:
    """Return the names of files in `data/` and `errors/` that belong to no part."""
    known = _rows(parts).keys()
    return [output.name_of(file.place) for file in result_files(output) if not file.parts <= known]


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
    plan = output.compaction() or CompactionPlan({}, {})
    found = [
        (folder / f"{name}.parquet", commits, frozenset(merges.get(name, [name])))
        for folder, merges, commits in ((output.data, plan.data, True), (output.errors, plan.errors, False))
        for name in folder.parquets()
    ]
    rows = in_parallel(parquet_rows, (place for place, _, _ in found))
    return [ResultFile(*facts, count) for facts, count in zip(found, rows, strict=True)]


def torn_files(files: Iterable[ResultFile], rows: Mapping[str, int]) -> list[ResultFile]:
    """Return the files to delete so that every part is complete or absent, those that commit parts first."""
    torn: list[ResultFile] = []
    for group in _groups(files):
        parts = frozenset[str]().union(*(file.parts for file in group))
        if not parts <= rows.keys():
            continue
        if not any(file.commits for file in group):
            # Its parts are missing. Their commits replace the errors of an attempt, but not those that are merged.
            torn += [file for file in group if file.rows is None or len(file.parts) > 1]
            continue
        damaged = [file for file in group if file.rows is None]
        standing = _standing([file for file in group if file.rows is not None])
        committed = frozenset[str]().union(*(file.parts for file in standing if file.commits))
        whole = committed == parts and sum(file.rows or 0 for file in standing) == sum(rows[part] for part in parts)
        torn += damaged if whole else group
    return sorted(torn, key=lambda file: (not file.commits, file.place.path))


def _groups(files: Iterable[ResultFile]) -> list[list[ResultFile]]:
    """Group the files that share parts, directly or through others."""
    group_of: dict[str, list[ResultFile]] = {}
    for file in files:
        joined = [file]
        for group in {id(group): group for part in file.parts for group in [group_of.get(part, [])]}.values():
            joined += group
        for part in frozenset[str]().union(*(one.parts for one in joined)):
            group_of[part] = joined
    return list({id(group): group for group in group_of.values()}.values())


def _standing(files: list[ResultFile]) -> list[ResultFile]:
    """Leave out parts' own files beside the merged one with their rows: a compaction has not deleted them yet."""
    return [
        file for file in files if not any(file.commits == other.commits and file.parts < other.parts for other in files)
    ]


def _rows(parts: Iterable[Part]) -> dict[str, int]:
    return {part.name: part.rows for part in parts}


# Compaction: merges small files of results into large ones, once all rows are committed. A plan is saved before any
# file is touched, and kept, as it tells the parts of a merged file. A merged file appears complete, and only then are
# its parts' own files deleted. So a part's rows are always in its own file, in the merged one, or in both.

_ROW_GROUP_BYTES = 64 << 20
_THREADS = 4


def compact(output: OutputFolder, target_bytes: int | None) -> None:
    """Merge small files of a completed job up to `target_bytes`; None finishes what an earlier submission began."""
    plan = output.compaction()
    if plan is None:
        if target_bytes is None:
            return
        plan = CompactionPlan(merges(_sizes(output.data), target_bytes), merges(_sizes(output.errors), target_bytes))
        write_twice(output.compaction_file, vars(plan))
    with ThreadPoolExecutor(_THREADS) as threads:
        for folder, planned in ((output.data, plan.data), (output.errors, plan.errors)):
            merge = partial(_merge, folder, folder.parquets().keys(), output.temporary)
            list(threads.map(merge, planned.keys(), planned.values()))


def merges(sizes: Iterable[tuple[str, int]], target_bytes: int) -> dict[str, list[str]]:
    """Plan merged files of at least `target_bytes`, but for the last: the names of their sources, by their names."""
    groups = [[name for name, _ in group] for group in batches(sizes, lambda one: one[1], target_bytes)]
    # A name that begins with its first part's keeps the files in the order of their rows.
    return {f"{group[0]}-to-{group[-1]}": group for group in groups if len(group) > 1}


def _sizes(folder: Location) -> list[tuple[str, int]]:
    return [(name, info.size) for name, info in folder.parquets().items()]


def _merge(folder: Location, there: Collection[str], aside: Location, merged: str, parts: list[str]) -> None:
    place = folder / f"{merged}.parquet"
    if merged not in there:
        with place.open_whole(aside / f"{folder.name}-{merged}.parquet") as stream:
            tables = ((folder / f"{part}.parquet").read_parquet() for part in parts)
            groups = map(pa.concat_tables, batches(tables, lambda table: table.nbytes, _ROW_GROUP_BYTES))
            first = next(groups)
            with pa.parquet.ParquetWriter(stream, first.schema, compression="zstd") as writer:
                for table in chain([first], groups):
                    writer.write_table(table)
    for part in parts:
        if part in there:
            folder.filesystem.delete_file((folder / f"{part}.parquet").path)
