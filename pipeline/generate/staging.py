"""Staging: rows of any input are named and written as parts, each a Parquet file.

Names and contents of the parts depend on the input alone, so every submission sees the same ones.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import ray

from drafter.errors import one_line, shown
from pipeline.command_line import say
from pipeline.errors import InputError, JobError, ProblemType, RowError, RowProblem
from pipeline.generate.row_images import IMAGE_STATES, IMAGES, PROMPTS_BYTES, ImageReading, StagedImage, take_row_images
from pipeline.generate.row_keys import Keys, content_hash, equal_before, numbered, text_keys
from pipeline.io.column_notes import with_column_notes
from pipeline.io.column_types import (
    SeenType,
    free_name,
    is_text,
    refuse_many_columns,
    replace_column,
    seen_types,
    unify,
    whole,
)
from pipeline.io.files import Location, batches, in_parallel
from pipeline.io.listing import NAME_ROWS, InputListing, PromptSource, check_types, read_apart
from pipeline.io.parts import Part, StagedInput, problem_column, row_name, with_problems, with_row_type
from pipeline.io.reading import Chunk, InputFile, UnreadableValueError, read_file
from pipeline.openai.batch import LINE_FIELDS, parse_line
from pipeline.openai.errors import OpenAIError
from pipeline.settings import SAMPLING_COLUMN, TEMPLATE_COLUMNS, ReadingConfig

PART_BYTES = 32 << 20
"""Size limit of a part with several rows. Ray Data's blocks have up to 128 MiB, and the output comes on top."""
SAMPLE_COLUMN, SEED_COLUMN = "sample", "seed"
BYTES = "__bytes__"
"""Only key of the object that stands for bytes, in base64, in what a row asks for that is a program."""
_MOST_SETTINGS = 1 << 20  # bytes of a row's own sampling settings
_GROUP_BYTES = 256 << 20  # of the input, for one task
_TASK_CPUS = 0.5
_TASK_RETRIES = 3  # a file that kills its reader does so each time
_EXAMPLES = 3
_ROWS_PER_PART, _MOST_ROWS_PER_PART = 128, 1024
_ROW_BYTES = 500  # of an input, by guess
_PARTS = 20_000  # so many cost a driver some minutes in all, and engines of a large cluster finish 20 a second


@dataclass(frozen=True)
class StagingPlan:
    """Settings of all staging tasks. A part has `rows_per_part` rows, or fewer at the end or beyond `part_bytes`.

    `images` says how images are read; None for a target model that sees none.
    """

    folder: Location
    reading: ReadingConfig
    prompts: PromptSource
    rows_per_part: int
    source: Any = None
    revision: int = 0
    part_bytes: int = PART_BYTES
    images: ImageReading | None = None


def rows_per_part(listing: InputListing, reading: ReadingConfig) -> int:
    """Return the rows of a part where settings do not say: more for a large input, of which the list becomes long.

    An engine's loss costs no more for it. But the ledger has the finished rows of all open parts in memory, and the
    last parts keep the last engines.
    """
    rows = sum(file.size for file in listing.files) // _ROW_BYTES
    rows = min(rows, reading.limit or rows) * reading.samples
    found = _ROWS_PER_PART
    while found < _MOST_ROWS_PER_PART and found * _PARTS < rows:
        found *= 2
    return found


def stage(listing: InputListing, plan: StagingPlan, before: StagedInput | None = None) -> StagedInput:
    """Stage an input on the cluster's workers. The caller completes staging by saving the returned list.

    Args:
        before: An earlier staging with damaged files, all of which are to be written again.

    Raises:
        InputError: A file is damaged or lacks a column, an id stands for several rows, there are no rows, or the parts
            differ from those staged before.
        JobError: The parts cannot be written.
    """
    plan.folder.make_folder()
    task = ray.remote(num_cpus=_TASK_CPUS, max_retries=_TASK_RETRIES)(stage_files)
    # `skip` and `limit` count rows over all files, so one task has to read them all.
    one_task = plan.reading.limit or plan.reading.skip
    groups = batches(listing.files, lambda file: file.size, sys.maxsize if one_task else _GROUP_BYTES)
    prefix = f"{plan.revision:03d}-" if plan.revision else ""
    listings = [InputListing(listing.filesystem, tuple(files)) for files in groups]
    work = [task.remote(files, f"{prefix}{index:05d}", plan) for index, files in enumerate(listings)]
    done = [staged_group(task, files) for task, files in zip(work, listings, strict=True)]
    parts = tuple(part for parts, _ in done for part in parts)
    refuse_empty(len(parts))
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
    if plan.prompts.kind == "messages" and listing.of_json:
        _say_what_chats_are(staged, plan.prompts.column)
    return told_apart(staged, plan)


def refuse_empty(count: int) -> None:
    """Raise `InputError` for an input without rows, or one of which `skip` leaves none."""
    if not count:
        raise InputError("the input has no rows")


def staged_group(task: ray.ObjectRef, files: InputListing) -> tuple[list[Part], list[SeenType]]:
    """Return what a task of `stage_files` returns. If its workers crashed, the files are read apart to find which."""
    try:
        staged: tuple[list[Part], list[SeenType]] = ray.get(task)
        return staged
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise JobError(f"the input cannot be staged: {one_line(error.cause)}") from error
    except ray.exceptions.WorkerCrashedError as error:
        read_apart(files)
        raise JobError(f"the input cannot be staged: {one_line(error)}") from error


def stage_files(listing: InputListing, group: str, plan: StagingPlan) -> tuple[list[Part], list[SeenType]]:
    """Stage files as parts named after `group`; return the parts, and their columns' types for `unify`. See `stage`."""
    parts: list[Part] = []
    seen: dict[SeenType, None] = {}
    image_bytes = 0 if plan.images is None else plan.images.prompt_bytes * plan.part_bytes // PROMPTS_BYTES
    for tables in cut(read_rows(listing, plan), plan.rows_per_part, plan.part_bytes, image_bytes):
        here: dict[SeenType, None] = {}
        for table in tables:
            file = table["place"][0].as_py().rpartition(":")[0]
            here |= dict.fromkeys(seen_types(pa.Table.from_struct_array(table["row"]), file))
        row_type = unify(here, json_objects=listing.of_json)
        rows = pa.concat_tables([with_row_type(table, row_type) for table in tables]).combine_chunks()
        part = Part(f"{group}-{len(parts):06d}", rows.num_rows, rows.nbytes)
        (plan.folder / f"{part.name}.parquet").write_parquet(rows)
        parts.append(part)
        seen |= here
        refuse_many_columns(len({one.name for one in seen}), "the input")
    return parts, list(seen)


def read_rows(listing: InputListing, plan: StagingPlan) -> Iterator[pa.Table]:
    """Read the named rows of all files, within `skip` and `limit`, each repeated for its samples."""
    prompts, reading = plan.prompts, plan.reading
    skip, left = reading.skip, sys.maxsize if reading.limit is None else reading.limit
    text_column = {"text": prompts.column, "openai": prompts.id_column}.get(prompts.kind)
    json_column = prompts.column if prompts.kind == "openai" else SAMPLING_COLUMN
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, plan.rows_per_part, text_column, json_column):
            check_types(file, chunk.columns.schema, prompts)
            rows = named_rows(file, chunk, prompts, plan.images)
            skipped, skip = skip, max(skip - rows.num_rows, 0)
            rows = rows.slice(skipped)
            yield from _with_samples(rows.slice(0, left), prompts, reading.samples, plan.part_bytes)
            left -= rows.num_rows
            if left <= 0:
                return


def named_rows(file: InputFile, chunk: Chunk, prompts: PromptSource, images: ImageReading | None = None) -> pa.Table:
    """Name the rows of a chunk by their id, or else by file and line.

    `seed_name` is what a row's seed follows from: its id, or else its content, wherever the row stands; null where the
    row has a problem. The column `asked` has the fields of a row that the job reads, as JSON text that depends on this
    row alone. Columns of `row`, which only pass through, have types that depend on other rows, too. With `images`,
    the columns `images` and `image_states` have the addresses of a row's images, and what these were.
    """
    places = [f"{file.name}:{number}" for number in chunk.numbers]
    problems = dict(chunk.problems)
    ids = list(places)
    if prompts.id_column is not None:
        for index, value in enumerate(chunk.values(prompts.id_column)):
            if (isinstance(value, str) and value) or (isinstance(value, int) and not isinstance(value, bool)):
                ids[index] = str(value)
            elif prompts.ids_found and index not in chunk.problems:  # a line that is no row has no columns at all
                raise InputError(f"column {prompts.id_column!r} names no row in {places[index]}: {NAME_ROWS}")
            else:
                why = "is empty" if value in (None, "") else f"is {shown(value)}, not text or an integer"
                why = f"cannot be read: {value}" if isinstance(value, UnreadableValueError) else why
                problems.setdefault(index, RowProblem("BadRow", f"the id column {prompts.id_column!r} {why}"))
    asked, seen = _asked(file, chunk, prompts, images, problems)
    by_content = prompts.id_column is None
    seed_names = [
        None if text is None else content_hash(text).hex() if by_content else name
        for name, text in zip(ids, asked, strict=True)
    ]
    columns = {
        "request_id": pa.array(ids, pa.string()),
        "place": pa.array(places, pa.string()),
        "seed_name": pa.array(seed_names, pa.string()),
        "asked": pa.array(asked, pa.string()),
        "row": whole(with_column_notes(chunk.columns).to_struct_array()),
        "problem": problem_column([vars(problems[n]) if n in problems else None for n in range(len(ids))]),
    }
    for place, name in enumerate((IMAGES, IMAGE_STATES) if images is not None else ()):
        values = [None if some is None else [one[place] for one in some] for some in seen]
        columns[name] = pa.array(values, pa.list_(pa.string()))
    return pa.table(columns)


def _asked(
    file: InputFile,
    chunk: Chunk,
    prompts: PromptSource,
    images: ImageReading | None,
    problems: dict[int, RowProblem],
) -> tuple[list[str | None], list[list[StagedImage] | None]]:
    """Return what each row asks for, null where it has a problem, and where its images are."""
    kinds: dict[str, ProblemType] = {SEED_COLUMN: "BadSampling", SAMPLING_COLUMN: "BadSampling"}
    if prompts.kind == "openai":
        kinds = dict.fromkeys(LINE_FIELDS, "BadRequest")
    if prompts.kind == "messages":
        kinds |= dict.fromkeys(TEMPLATE_COLUMNS, "BadPrompt")
    if prompts.kind == "program":  # which may read all of its row
        every: dict[str, ProblemType] = dict.fromkeys(chunk.columns.column_names, "BadRow")
        kinds = every | kinds
    kinds |= dict.fromkeys(filter(None, (prompts.column, prompts.images_column)), "BadPrompt")
    rows: list[dict[str, Any]] = [{} for _ in chunk.numbers]
    for name, kind in kinds.items():
        most_bytes = _MOST_SETTINGS if kind == "BadSampling" else None
        for index, value in enumerate(chunk.values(name, most_bytes)):
            if isinstance(value, UnreadableValueError):
                problems.setdefault(index, RowProblem(kind, f"column {name!r} cannot be read: {value}"))
            elif value is not None:
                rows[index][name] = value
    seen = [] if images is None else take_row_images(rows, prompts, file.path, images, problems)
    found: list[str | None] = []
    for index, row in enumerate(rows):
        settings = row.get(SAMPLING_COLUMN)
        if prompts.kind != "openai" and isinstance(settings, str) and len(settings) > _MOST_SETTINGS:
            message = f"column {SAMPLING_COLUMN!r} has {len(settings) >> 20} MiB, and up to 1 MiB are read"
            problems.setdefault(index, RowProblem("BadSampling", message))
        try:
            if chunk.records is None:
                refuse_schema_of_table(settings, SAMPLING_COLUMN)
            text = json.dumps(row, ensure_ascii=False, default=_json_text if prompts.column else _json_value)
        except RowError as error:
            problems.setdefault(index, error.problem)
        except TypeError as error:
            problems.setdefault(index, RowProblem("BadPrompt", f"the row cannot be read: {error}"))
        found.append(None if index in problems else text)
    return found, seen


def refuse_schema_of_table(settings: Any, column: str) -> None:
    """Raise `RowError` if a row's sampling settings, in a table, have a schema that is not JSON text.

    An object of a table has the keys of all rows, in one order, and null where a row has none: `{"const": null}` and
    `{}` are the same there, and are not the same schema.
    """
    asked = settings.get("structured_outputs") if isinstance(settings, dict) else None
    if isinstance(asked, dict) and isinstance(asked.get("json"), dict):
        why = "objects of a table have the keys of all rows"
        raise RowError("BadSampling", f"column {column!r}: give structured_outputs.json as JSON text, because {why}")


def _json_text(value: Any) -> str:
    if isinstance(value, bytes):
        raise TypeError("it has bytes where text belongs")
    return str(value)


def _json_value(value: Any) -> Any:
    return {BYTES: base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)


# Samples: a row repeated for several outputs, each with a name and a seed of its own.


def _with_samples(rows: pa.Table, prompts: PromptSource, samples: int, piece_bytes: int) -> Iterator[pa.Table]:
    # An OpenAI request is repeated for its own number, and a row with a problem stays one.
    problems = rows["problem"].to_pylist()
    if prompts.kind != "openai":
        counts = [samples if one is None else 1 for one in problems]
        yield from [rows] if samples == 1 else expand(rows, counts, piece_bytes)
        return
    counts = [1] * rows.num_rows
    for index, asked in enumerate(rows["asked"].to_pylist()):
        if problems[index] is None:
            try:
                counts[index] = parse_line(json.loads(asked)).choices
            except OpenAIError as error:
                problems[index] = vars(RowProblem("BadRequest", error.message))
    yield from expand(with_problems(rows, problems), counts, piece_bytes)


def expand(table: pa.Table, counts: Sequence[int], piece_bytes: int) -> Iterator[pa.Table]:
    """Repeat each staged row as often as `counts` says, as rows named `ID#0`, `ID#1`, …, in pieces that fit in memory.

    So is what their seeds follow from.

    The sample index goes to the column `sample`; a column of that name in the input becomes `input_sample`.
    """
    sizes = [table.slice(row, 1).nbytes for row in range(table.num_rows)]
    wanted = ((row, sample) for row, count in enumerate(counts) for sample in range(count))
    for some in batches(wanted, lambda one: sizes[one[0]], piece_bytes):
        yield _repeated(table, some)


def _repeated(table: pa.Table, held: Sequence[tuple[int, int]]) -> pa.Table:
    samples = [sample for _, sample in held]
    table = table.take(pa.array([row for row, _ in held]))
    structs = table["row"].combine_chunks()
    theirs = [field.name for field in structs.type]
    fields = [field.with_name(free_name(field.name, {SAMPLE_COLUMN}, theirs)) for field in structs.type]
    structs = pa.StructArray.from_arrays(
        [*structs.flatten(), pa.array(samples, pa.int64())], fields=[*fields, pa.field(SAMPLE_COLUMN, pa.int64())]
    )
    table = replace_column(table, "row", structs)
    for column in ("request_id", "seed_name"):
        named = zip(table[column].to_pylist(), samples, strict=True)
        names = [None if name is None else f"{name}#{sample}" for name, sample in named]
        table = replace_column(table, column, pa.array(names, pa.string()))
    return table


def cut(tables: Iterable[pa.Table], most_rows: int, most_bytes: int, image_bytes: int = 0) -> Iterator[list[pa.Table]]:
    """Yield pieces of `most_rows` rows, or fewer where the next row would exceed `most_bytes`; a single row may.

    Each image counts as `image_bytes` beside what the row has of it.
    """
    held: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        while table.num_rows:
            fitting = _fitting(table, most_rows - rows, most_bytes - size, image_bytes)
            if fitting or not held:
                held.append(table.slice(0, fitting or 1))
                rows, size = rows + held[-1].num_rows, size + _nbytes(held[-1], image_bytes)
                table = table.slice(held[-1].num_rows)
            if table.num_rows or rows == most_rows:
                yield held
                held, rows, size = [], 0, 0
    if held:
        yield held


def _fitting(table: pa.Table, most_rows: int, most_bytes: int, image_bytes: int) -> int:
    table = table.slice(0, most_rows)
    if _nbytes(table, image_bytes) <= most_bytes:
        return int(table.num_rows)
    sizes = np.cumsum([_nbytes(table.slice(row, 1), image_bytes) for row in range(table.num_rows)])
    return int(np.searchsorted(sizes, most_bytes, side="right"))


def _nbytes(table: pa.Table, image_bytes: int) -> int:
    count = 0
    if image_bytes and IMAGES in table.column_names:
        count = pa.compute.sum(pa.compute.list_value_length(table[IMAGES])).as_py() or 0
    return int(table.nbytes) + count * image_bytes


# Checks of all parts together.


def _say_what_is_text(row_type: pa.StructType, seen: Iterable[SeenType]) -> None:
    types: dict[str, list[SeenType]] = {}
    for one in seen:
        types.setdefault(one.name, []).append(one)
    for name, some in types.items():
        kinds = {one_line(str(one.type), 80): one.file for one in some if not pa.types.is_null(one.type)}
        if pa.types.is_string(row_type.field(name).type) and len(kinds) > 1:
            found = ", ".join(f"{kind} in {file}" for kind, file in list(kinds.items())[:_EXAMPLES])
            say(f"column {name!r} is kept as text: it has {found}")


def _say_what_chats_are(staged: StagedInput, column: str) -> None:
    index = staged.row_type.get_field_index(column)
    if index < 0 or not is_text(staged.row_type.field(index).type):
        return
    asked = staged.file(staged.parts[0]).read_parquet(["asked"])["asked"].to_pylist()
    if any(isinstance(json.loads(row).get(column), list) for row in asked if row is not None):
        say(f"column {column!r} is kept as JSON text: no type holds its messages, as contents of both text and parts")


def told_apart(staged: StagedInput, plan: StagingPlan) -> StagedInput:
    """Return an input with its equal rows counted, where rows have no ids; `InputError` where two share one."""
    by_content = plan.prompts.id_column is None
    column = "seed_name" if by_content else "request_id"

    def read(part: Part) -> Keys:
        return text_keys(staged.file(part).read_parquet([column])[column].to_pylist())

    keys = np.concatenate(in_parallel(read, staged.parts))
    if not by_content:
        columns = ["request_id", "place"]
        refuse_shared_ids(keys, lambda: (staged.file(part).read_parquet(columns) for part in staged.parts), plan)
        return staged
    each = np.split(equal_before(keys), np.cumsum([part.rows for part in staged.parts])[:-1])
    parts = (
        replace(part, repeats=tuple(own.tolist()) if own.any() else ())
        for part, own in zip(staged.parts, each, strict=True)
    )
    return replace(staged, parts=tuple(parts))


def refuse_shared_ids(keys: Keys, read: Callable[[], Iterable[pa.Table]], plan: StagingPlan) -> None:
    """Raise `InputError` if a `request_id` stands for several rows.

    Args:
        keys: Those of the rows' `request_id`.
        read: Reads the rows, once more, for what to say: with their `request_id` and `place`.
    """
    (numbers,) = numbered(keys)
    shared = np.bincount(numbers, minlength=1)[numbers] > 1
    if not shared.any():
        return
    expanded = plan.prompts.kind == "openai" or plan.reading.samples > 1
    places: dict[str, dict[str, None]] = {}
    begin = 0
    for table in read():
        theirs = pa.array(shared[begin : begin + table.num_rows])
        begin += table.num_rows
        for row in table.select(["request_id", "place"]).filter(theirs).to_pylist():
            name = row_name(row["request_id"]) if expanded else row["request_id"]
            places.setdefault(name, {})[row["place"]] = None
    examples = "; ".join(f"{name!r}: {', '.join(lines)}" for name, lines in list(places.items())[:_EXAMPLES])
    column = plan.prompts.id_column
    problem = f"column {column!r} does not name rows: {len(places)} ids stand for several rows ({examples})"
    raise InputError(f"{problem}: make them unique" if plan.prompts.kind == "openai" else f"{problem}: {NAME_ROWS}")
