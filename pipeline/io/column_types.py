"""Columns whose type is known only when all rows have been seen: inferred by chunk, unified at the end.

Parquet cannot hold every column: no object without fields, which is what a column that is always `{}` has, and none
that is nested too deeply. Such a column is kept as JSON text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

_DEEPEST = 48
"""Levels that a column may be nested. Parquet reads 100, and a list takes two. Arrow between processes reads 64, of
which a part's own lists and structs take some."""


_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


def as_text(value: Any) -> str | None:
    """Return text and None as they are, and any other value as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def infer_column(values: Sequence[Any]) -> pa.Array:
    """Make an Arrow column of Python values; where no type holds all of them, a column of text (`as_text`)."""
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _text_column(values)
    return _text_column(values) if _too_deep(column.type) else column


def _text_column(values: Iterable[Any]) -> pa.Array:
    return pa.array([as_text(value) for value in values], pa.string())


def unify_types(types: Sequence[pa.DataType]) -> pa.DataType:
    """Return the type that holds values of all `types`: a wider number, a struct with all fields, or else text."""
    if _have_nothing_in_common(types):
        return pa.string()
    schemas = [pa.schema([("x", one)]) for one in types]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return pa.string()


def _have_nothing_in_common(types: Sequence[pa.DataType]) -> bool:
    """Whether pyarrow has a type for these, or for fields or items of these, that does not hold all values."""
    structs = [one for one in types if pa.types.is_struct(one)]
    names = {one.field(index).name for one in structs for index in range(one.num_fields)}
    inner = [[one.field(name).type for one in structs if one.get_field_index(name) >= 0] for name in sorted(names)]
    inner.append([one.value_type for one in types if isinstance(one, _LISTS)])
    inner.append([one.item_type for one in types if pa.types.is_map(one)])
    return (
        _have_no_common_number(types)
        or _have_no_common_time(types)
        or any(_have_nothing_in_common(some) for some in inner if some)
    )


def _have_no_common_time(types: Sequence[pa.DataType]) -> bool:
    """Whether some are in nanoseconds, which reach from 1677 to 2262, and others are coarser and reach farther."""
    timed = [one for one in types if pa.types.is_timestamp(one) or pa.types.is_duration(one) or pa.types.is_date(one)]
    units = {getattr(one, "unit", "day") for one in timed}
    return "ns" in units and len(units) > 1


def _have_no_common_number(types: Sequence[pa.DataType]) -> bool:
    """Whether pyarrow has a type for numbers of these types that does not hold all of them."""
    decimals = [pa.types.is_decimal(one) for one in types]
    exact = [pa.types.is_decimal(one) or pa.types.is_floating(one) or pa.types.is_null(one) for one in types]
    unsigned = pa.uint64() in types and any(pa.types.is_signed_integer(one) for one in types)
    return unsigned or (any(decimals) and (not all(exact) or pa.float16() in types))


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column of type `kind` has in a Parquet file: its own, or text if Parquet has no such."""
    return pa.string() if _too_deep(kind) or not _fits_parquet(kind) else kind


def stored_struct(fields: Iterable[pa.Field]) -> pa.StructType:
    """Return the type that rows of these columns have in a Parquet file."""
    return pa.struct([field.with_type(stored_type(field.type)) for field in fields])


def known_type(kind: pa.DataType) -> pa.DataType:
    """Return what is known of a column's type, for `unify_types`, after it has been stored as `stored_type(kind)`.

    A column that is always `{}` in one part, and is stored there as text, may be an object with fields in another. Its
    JSON tells all that such a column held, so that `conform` can read it back; it does not tell dates, for instance.
    """
    return kind if stored_type(kind) == kind or (not _too_deep(kind) and _is_json(kind)) else pa.string()


def _too_deep(kind: pa.DataType) -> bool:
    """Whether more than `_DEEPEST` lists, structs and the like are around a type's values."""
    level = [kind]
    for _ in range(_DEEPEST + 1):
        level = [one.field(index).type for one in level if pa.types.is_nested(one) for index in range(one.num_fields)]
    return bool(level)


@lru_cache
def _fits_parquet(kind: pa.DataType) -> bool:
    try:
        pa.parquet.write_table(pa.schema([("x", kind)]).empty_table(), io.BytesIO())
    except pa.ArrowNotImplementedError:
        return False
    return True


def _is_json(kind: pa.DataType) -> bool:
    """Whether JSON has these values, so that what `as_text` writes can be read back."""
    if pa.types.is_nested(kind):
        known = pa.types.is_struct(kind) or pa.types.is_list(kind)
        return known and all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    return kind in (pa.null(), pa.bool_(), pa.int64(), pa.float64(), pa.string())


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
    """Convert `column` to `target`, a type that `unify_types` made of the column's and others.

    An integer beyond 2⁵³ in a column of floats becomes the nearest of these.
    """
    if column.type == target:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target)
    if pa.types.is_string(target) and pa.types.is_timestamp(column.type):
        return column.cast(target)
    if pa.types.is_string(target) and not pa.types.is_large_string(column.type):
        return _text_column(column.to_pylist())
    if pa.types.is_string(column.type) and pa.types.is_nested(target):  # see `known_type`
        return pa.array([None if text is None else json.loads(text) for text in column.to_pylist()], target)
    try:
        return column.cast(target)
    except pa.ArrowException:
        pass
    try:
        return pa.array(column.to_pylist(), target)
    except (pa.ArrowException, OverflowError):
        return column.cast(options=pa.compute.CastOptions(target, allow_float_truncate=True))


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
