"""Problems of rows as a column: each stage adds its own, and rows with one pass by the later stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.errors import RowProblem
from pipeline.io.column_types import conform_struct, replace_column
from pipeline.io.listing import InputFile
from pipeline.io.prompt_source import PromptSource
from pipeline.io.reading import Chunk
from pipeline.openai.batch import parse_line
from pipeline.openai.requests import OpenAIError
from pipeline.staging.samples import expand

PROBLEM_TYPE = pa.struct(
    [("type", pa.string()), ("message", pa.string()), ("input", pa.string()), ("attempts", pa.int64())]
)
"""Arrow type of a `RowProblem`; null where a row has none."""


def problem_column(problems: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    """Make the column `problem` of each row's `RowProblem`, given by its fields."""
    return pa.array(problems, PROBLEM_TYPE)


def with_problems(rows: pa.Table, problems: Sequence[Mapping[str, Any] | None]) -> pa.Table:
    """Return `rows` with these problems instead of those that they had."""
    return replace_column(rows, "problem", problem_column(problems))


# ---- Rows of a file get their names: a table of `request_id`, `place`, `row` and `problem`.


def named_rows(file: InputFile, chunk: Chunk, id_column: str | None) -> pa.Table:
    """Name the rows of a chunk by their id, or else by their file and line.

    Args:
        file: Where the rows are from.
        chunk: The rows.
        id_column: The column of their ids; None where they have none.
    """
    places = [f"{file.name}:{number}" for number in chunk.numbers]
    problems = dict(chunk.problems)
    ids = places
    if id_column is not None:
        has_ids = id_column in chunk.columns.column_names
        values = chunk.columns.column(id_column).to_pylist() if has_ids else [None] * len(places)
        ids = [str(value) if _is_id(value) else place for value, place in zip(values, places, strict=True)]
        for index, value in enumerate(values):
            if not _is_id(value):
                problems.setdefault(index, RowProblem("BadRow", f"the id column {id_column!r} is empty"))
    row = pa.StructArray.from_arrays(
        [column.combine_chunks() for column in chunk.columns.columns], fields=list(chunk.columns.schema)
    )
    return pa.table(
        {
            "request_id": pa.array(ids, pa.string()),
            "place": pa.array(places, pa.string()),
            "row": row,
            "problem": problem_column([vars(problems[n]) if n in problems else None for n in range(len(ids))]),
        }
    )


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, int) and not isinstance(value, bool)


def with_samples(rows: pa.Table, prompts: PromptSource, samples: int, piece_bytes: int) -> Iterator[pa.Table]:
    """Repeat each row for the texts that are wanted of it; a row with a problem stays one.

    Args:
        rows: Named rows.
        prompts: Lines of an OpenAI batch say themselves how many texts they want.
        samples: Texts of each other row.
        piece_bytes: See `expand`.

    Yields:
        All these rows, in pieces.
    """
    problems = rows["problem"].to_pylist()
    if prompts.kind != "openai":
        counts = [samples if one is None else 1 for one in problems]
        yield from [rows] if samples == 1 else expand(rows, counts, piece_bytes)
        return
    counts = [1] * rows.num_rows
    for index, line in enumerate(rows["row"].to_pylist()):
        if problems[index] is None:
            try:
                counts[index] = parse_line(line).choices
            except OpenAIError as error:
                problems[index] = vars(RowProblem("BadRequest", error.message))
    yield from expand(with_problems(rows, problems), counts, piece_bytes)


def with_row_type(table: pa.Table, row_type: pa.StructType) -> pa.Table:
    """Return `table` with its column `row` brought to a type that holds it."""
    return replace_column(table, "row", conform_struct(table.column("row").combine_chunks(), row_type))
