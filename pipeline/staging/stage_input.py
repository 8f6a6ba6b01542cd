"""The input is staged on the cluster's workers, before anything is generated.

All damage to files and all ids that stand for several rows are found here, before any GPU has worked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import ray

from drafter.errors import one_line
from pipeline.errors import InputError, JobError
from pipeline.io.column_types import SeenType, unify
from pipeline.io.listing import InputFile, InputListing
from pipeline.io.prompt_source import NoIdsError
from pipeline.staging.samples import row_name
from pipeline.staging.stage_files import StagingPlan, stage_files
from pipeline.staging.staged_input import StagedInput

_GROUP_BYTES = 256 << 20
"""One task stages about this much of the input."""
_TASK_CPUS = 0.5
_EXAMPLES = 3
"""Ids that an error shows."""


def stage(listing: InputListing, plan: StagingPlan, before: StagedInput | None = None) -> StagedInput:
    """Stage an input; it counts as staged when the caller has saved the list that is returned.

    A column of ids that nobody has named, and that does not name all rows, is left alone, and a line says so.

    Args:
        listing: The input's files.
        plan: How it is staged.
        before: What an earlier submission staged, where some of its files are damaged and all are to be written again.

    Raises:
        InputError: A file is damaged or lacks a column, an id stands for several rows, there are no rows, or the parts
            are not those that were staged before.
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
    """Say which columns of tables become text, because files differ in their types."""
    types: dict[str, list[SeenType]] = {}
    for one in seen:
        types.setdefault(one.name, []).append(one)
    for name, some in types.items():
        kinds = {one_line(str(one.type), 80): one.file for one in some if not pa.types.is_null(one.type)}
        if pa.types.is_string(row_type.field(name).type) and len(kinds) > 1:
            found = ", ".join(f"{kind} in {file}" for kind, file in list(kinds.items())[:_EXAMPLES])
            print(f"column {name!r} is kept as text: it has {found}", file=sys.stderr, flush=True)


def _groups(files: Iterable[InputFile]) -> list[list[InputFile]]:
    """Group consecutive files, so that a task has enough to do."""
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
    """Refuse ids that stand for several rows.

    Raises:
        InputError: Such ids; it names some of them and their rows.
    """
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
