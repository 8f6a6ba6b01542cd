"""Columns whose type is known only when all rows have been seen: inferred by chunk, unified at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa


def as_text(value: Any) -> str | None:
    """Return text and None as they are, and any other value as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def infer_column(values: Sequence[Any]) -> pa.Array:
    """Make an Arrow column of Python values; where no type holds all of them, a column of text (`as_text`)."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.array([as_text(value) for value in values], pa.string())


def unify_types(types: Iterable[pa.DataType]) -> pa.DataType:
    """Return the type that holds values of all `types`: a wider number, a struct with all fields, or else text."""
    schemas = [pa.schema([("x", one)]) for one in types]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return pa.string()


def unify_fields(groups: Iterable[Iterable[pa.Field]]) -> list[pa.Field]:
    """Return one field for each name, in order of first appearance, of the type that holds all of its values."""
    types: dict[str, list[pa.DataType]] = {}
    for fields in groups:
        for field in fields:
            seen = types.setdefault(field.name, [])
            if field.type not in seen:
                seen.append(field.type)
    return [pa.field(name, unify_types(seen)) for name, seen in types.items()]


def conform(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert `column` to `target`, a type that `unify_types` made of the column's and others."""
    if column.type == target:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target)
    if pa.types.is_string(target) and not pa.types.is_large_string(column.type):
        return pa.array([as_text(value) for value in column.to_pylist()], target)
    try:
        return column.cast(target)
    except pa.ArrowException:
        return pa.array(column.to_pylist(), target)


def conform_struct(rows: pa.StructArray, target: pa.StructType) -> pa.StructArray:
    """Convert each field of `rows` by `conform`; fields that they lack become null."""
    present = {field.name: rows.field(index) for index, field in enumerate(rows.type)}
    columns = [
        conform(present[field.name], field.type) if field.name in present else pa.nulls(len(rows), field.type)
        for field in target
    ]
    return pa.StructArray.from_arrays(columns, fields=list(target))


def replace_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    """Return `table` with another content of the column `name`."""
    return table.set_column(table.schema.get_field_index(name), name, column)


def free_name(name: str, ours: set[str], theirs: list[str]) -> str:
    """Return the name that a column of the input gets beside ours: its own, or else `input_NAME`.

    Args:
        name: The column's own name.
        ours: Names that are taken.
        theirs: Names of all columns of the input.
    """
    while name in ours:
        name = f"input_{name}"
        if name in theirs:
            ours = ours | {name}
    return name
