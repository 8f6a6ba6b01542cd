"""Columns whose type is only known once all rows have been seen: inferred by chunk, unified at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa


def as_text(value: Any) -> str | None:
    """A value as text: text stays as it is, anything else becomes JSON; None stays None."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def infer_column(values: Sequence[Any]) -> pa.Array:
    """An Arrow column of Python values; where their types do not go together, a column of text (`as_text`)."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.array([as_text(value) for value in values], pa.string())


def unify_types(types: Iterable[pa.DataType]) -> pa.DataType:
    """The type that holds values of all `types`: wider numbers, structs with all fields, or else text."""
    schemas = [pa.schema([("x", one)]) for one in types]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return pa.string()


def unify_fields(groups: Iterable[Iterable[pa.Field]]) -> list[pa.Field]:
    """Fields by name, in order of first appearance, each with the type that holds all of its values."""
    types: dict[str, list[pa.DataType]] = {}
    for fields in groups:
        for field in fields:
            seen = types.setdefault(field.name, [])
            if field.type not in seen:
                seen.append(field.type)
    return [pa.field(name, unify_types(seen)) for name, seen in types.items()]


def conform(column: pa.Array, target: pa.DataType) -> pa.Array:
    """`column` as `target`, a type that `unify_types` made of the column's and others."""
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
    """`conform` for each field of `rows`; fields that they lack are null."""
    present = {field.name: rows.field(index) for index, field in enumerate(rows.type)}
    columns = [
        conform(present[field.name], field.type) if field.name in present else pa.nulls(len(rows), field.type)
        for field in target
    ]
    return pa.StructArray.from_arrays(columns, fields=list(target))
