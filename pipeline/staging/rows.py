"""Named rows of the input: `request_id`, `place`, `asked`, `row` and `problem`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.errors import ProblemType, RowProblem
from pipeline.io.column_types import conform_struct, replace_column, whole
from pipeline.io.listing import InputFile
from pipeline.io.prompt_source import NoIdsError, PromptSource
from pipeline.io.reading import Chunk, UnreadableValueError
from pipeline.openai.batch import LINE_FIELDS, parse_line
from pipeline.openai.requests import OpenAIError
from pipeline.staging.samples import SEED_COLUMN, expand

PROBLEM_TYPE = pa.struct(
    [("type", pa.string()), ("message", pa.string()), ("input", pa.string()), ("attempts", pa.int64())]
)
"""Arrow type of a `RowProblem`; null where a row has none."""


def problem_column(problems: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    return pa.array(problems, PROBLEM_TYPE)


def with_problems(rows: pa.Table, problems: Sequence[Mapping[str, Any] | None]) -> pa.Table:
    return replace_column(rows, "problem", problem_column(problems))


_MOST_SETTINGS = 1 << 20
"""Most bytes of a row's own sampling settings."""


def named_rows(file: InputFile, chunk: Chunk, prompts: PromptSource, sampling_column: str) -> pa.Table:
    """Name the rows of a chunk by their id, or else by file and line.

    The column `asked` has the fields of a row that the job reads, as JSON text that depends on this row alone. Columns
    of `row`, which only pass through, have types that depend on other rows, too.
    """
    places = [f"{file.name}:{number}" for number in chunk.numbers]
    problems = dict(chunk.problems)
    ids = places
    if prompts.id_column is not None:
        values = chunk.values(prompts.id_column)
        ids = [str(value) if _is_id(value) else place for value, place in zip(values, places, strict=True)]
        for index, value in enumerate(values):
            if not _is_id(value) and prompts.ids_found:
                raise NoIdsError(f"column {prompts.id_column!r} names no row in {places[index]}")
            if not _is_id(value):
                why = f"cannot be read: {value}" if isinstance(value, UnreadableValueError) else "is empty"
                problems.setdefault(index, RowProblem("BadRow", f"the id column {prompts.id_column!r} {why}"))
    asked = _asked(chunk, prompts, sampling_column, problems)
    row = pa.StructArray.from_arrays(
        [whole(column) for column in chunk.columns.columns], fields=list(chunk.columns.schema)
    )
    return pa.table(
        {
            "request_id": pa.array(ids, pa.string()),
            "place": pa.array(places, pa.string()),
            "asked": pa.array(asked, pa.string()),
            "row": row,
            "problem": problem_column([vars(problems[n]) if n in problems else None for n in range(len(ids))]),
        }
    )


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _asked(
    chunk: Chunk, prompts: PromptSource, sampling_column: str, problems: dict[int, RowProblem]
) -> list[str | None]:
    """Return the fields of each row that the job reads; a row with an unreadable field gets a problem instead."""
    kinds: dict[str, ProblemType] = {SEED_COLUMN: "BadSampling", sampling_column: "BadSampling"}
    if prompts.kind == "openai":
        kinds = dict.fromkeys(LINE_FIELDS, "BadRequest")
    kinds[prompts.column] = "BadPrompt"
    rows: list[dict[str, Any]] = [{} for _ in chunk.numbers]
    for name, kind in kinds.items():
        most_bytes = _MOST_SETTINGS if kind == "BadSampling" else None
        for index, value in enumerate(chunk.values(name, most_bytes)):
            if isinstance(value, UnreadableValueError):
                problems.setdefault(index, RowProblem(kind, f"column {name!r} cannot be read: {value}"))
            elif value is not None:
                rows[index][name] = value
    found: list[str | None] = []
    for index, row in enumerate(rows):
        settings = row.get(sampling_column)
        if prompts.kind != "openai" and isinstance(settings, str) and len(settings) > _MOST_SETTINGS:
            message = f"column {sampling_column!r} has {len(settings) >> 20} MiB, and up to 1 MiB are read"
            problems.setdefault(index, RowProblem("BadSampling", message))
        try:
            text = json.dumps(row, ensure_ascii=False, default=_json_text)
        except TypeError as error:
            problems.setdefault(index, RowProblem("BadPrompt", f"the row cannot be read: {error}"))
        found.append(None if index in problems else text)
    return found


def _json_text(value: Any) -> str:
    if isinstance(value, bytes):
        raise TypeError("it has bytes where text belongs")
    return str(value)


def with_samples(rows: pa.Table, prompts: PromptSource, samples: int, piece_bytes: int) -> Iterator[pa.Table]:
    """Repeat each row for its samples; a row with a problem stays one.

    Args:
        prompts: Lines of an OpenAI batch have their own numbers of samples.

    Yields:
        All these rows, in pieces.
    """
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


def with_row_type(table: pa.Table, row_type: pa.StructType) -> pa.Table:
    """Return `table` with its column `row` converted to `row_type`."""
    return replace_column(table, "row", conform_struct(whole(table.column("row")), row_type))
