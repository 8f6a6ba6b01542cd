"""Column types: inferred where a format has none, and unified over all files without changing a value.

A column without a common type is kept as text: strings as they are, all else as JSON. So is a column that Parquet
cannot hold, such as one of objects without fields or with too deep nesting.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from pipeline.errors import InputError

# Parquet reads 100 levels, and a list takes two. Arrow between processes reads 64, some taken by a part's own structs.
_DEEPEST = 48
_MOST_COLUMNS = 10_000  # also of an object's fields; each part has its own copy of their names
_MOST_JOINED = 100  # fields of JSON objects that differ in them
_EXACT_FLOATS = 2**53  # integers up to this are exact as float64
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class _NoCommonTypeError(Exception):
    pass


@dataclass(frozen=True)
class SeenType:
    """A column's type in one file.

    Args:
        exact: Whether all integers are exact as float64, and all times as microseconds.
        notes: The field's metadata; see `pipeline.io.column_notes`.
    """

    name: str
    type: pa.DataType
    exact: bool
    file: str
    notes: tuple[tuple[bytes, bytes], ...] = ()


def as_text(value: Any) -> str | None:
    """Return strings and None as they are, JSON types as JSON, and anything else by `str`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return a column's values; those that Python cannot hold become text."""
    try:
        return list(column.to_pylist())
    except Exception:  # Arrow raises what Python's own types raise, each in its own way
        return [_python_value(cell) for cell in column]


def python_rows(rows: pa.Table | pa.RecordBatch | pa.StructArray) -> list[dict[str, Any]]:
    """Return rows, with values by `python_values`."""
    names = rows.type.names if isinstance(rows, pa.StructArray) else rows.schema.names
    columns = rows.flatten() if isinstance(rows, pa.StructArray) else rows.columns
    values = [python_values(column) for column in columns]
    return [{name: some[index] for name, some in zip(names, values, strict=True)} for index in range(len(rows))]


def _python_value(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py()
    except Exception:  # see `python_values`
        if isinstance(cell, pa.StringScalar | pa.LargeStringScalar):
            return bytes(cell.as_buffer()).decode("utf-8", "replace")
        kind = cell.type
        if pa.types.is_struct(kind):
            return {field.name: _python_value(cell[index]) for index, field in enumerate(kind)}
        if is_list(kind):
            return [_python_value(one) for one in cell.values]
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind):
            return f"{cell.value} {getattr(kind, 'unit', 'days')} since 1970"
        return str(kind)


def text_column(column: pa.Array) -> pa.Array:
    return pa.array([as_text(value) for value in python_values(column)], pa.string())


# JSON values


def infer_column(values: Sequence[Any]) -> pa.Array:
    """Make an Arrow column of JSON values; text if no type holds every value unchanged.

    Its type may be one that only `unify` can make one of Parquet, as that of objects that all have no fields.
    """
    try:
        kind = reduce(_COMMON_JSON, dict.fromkeys(map(_json_type, values)), pa.null())
        return pa.array(values, kind if _is_moderate(kind) else pa.string())
    except (_NoCommonTypeError, pa.ArrowException, OverflowError, TypeError):
        return pa.array([as_text(value) for value in values], pa.string())


def _json_type(value: Any, *, in_object: bool = False) -> pa.DataType:
    if isinstance(value, list):
        common = partial(_COMMON_JSON, in_object=in_object)
        return pa.list_(reduce(common, (_json_type(one, in_object=in_object) for one in value), pa.null()))
    if isinstance(value, dict):
        if len(value) > _MOST_COLUMNS:
            raise _NoCommonTypeError
        return pa.struct([(name, _json_type(one, in_object=True)) for name, one in value.items()])
    return _SCALARS[type(value)]


_SCALARS = {type(None): pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


# Unification over files


def seen_types(table: pa.Table, file: str) -> list[SeenType]:
    return [
        SeenType(
            field.name, field.type, all(map(_is_exact, column.chunks)), file, tuple((field.metadata or {}).items())
        )
        for field, column in zip(table.schema, table.columns, strict=True)
    ]


def _is_exact(column: pa.Array) -> bool:
    kind = column.type
    if is_list(kind):
        return _is_exact(column.flatten())
    if pa.types.is_struct(kind):
        return all(map(_is_exact, column.flatten()))
    if pa.types.is_map(kind):
        return _is_exact(column.items)
    if kind in (pa.int64(), pa.uint64()):
        return _largest(column) <= _EXACT_FLOATS
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return _largest(column.cast(pa.int64())) <= 2**63 * _PER_SECOND[kind.unit] // _PER_SECOND["us"]
    return True


def _largest(integers: pa.Array) -> int:
    ends = pa.compute.min_max(integers).as_py()
    return int(max(abs(ends["min"] or 0), abs(ends["max"] or 0)))


def unify(seen: Iterable[SeenType], *, json_objects: bool) -> pa.StructType:
    """Return one field per column, in order of first appearance, whose type holds every value unchanged, or text.

    It has the notes that all files agree on.

    Args:
        json_objects: Whether they come from JSON, where the order of an object's fields is kept, and the type of a
            number in it. A field that an object or a file lacks is null there.

    Raises:
        InputError: There are too many columns, or one whose types neither a type nor text can hold.
    """
    columns: dict[str, list[SeenType]] = {}
    for one in seen:
        columns.setdefault(one.name, []).append(one)
        refuse_many_columns(len(columns), one.file)
    fields = [pa.field(name, _unified(some, json_objects=json_objects)) for name, some in columns.items()]
    notes = [_common_notes(some, field.type) for field, some in zip(fields, columns.values(), strict=True)]
    return pa.struct([field.with_metadata(its) for field, its in zip(fields, notes, strict=True)])


def _common_notes(seen: Sequence[SeenType], kind: pa.DataType) -> dict[bytes, bytes]:
    same = all((one.type, one.notes) == (kind, seen[0].notes) for one in seen)
    return dict(seen[0].notes) if same else {}


def refuse_many_columns(count: int, where: str) -> None:
    """Raise `InputError` for an input with more columns than a part can have."""
    if count > _MOST_COLUMNS:
        raise InputError(
            f"{where} has more than {_MOST_COLUMNS} different columns: put what differs from row to row into one "
            "column, such as an object named metadata"
        )


def _unified(seen: Sequence[SeenType], *, json_objects: bool) -> pa.DataType:
    exact = all(one.exact for one in seen)
    kind, first = seen[0].type, seen[0]
    for one in seen[1:]:
        try:
            kind = _common_type(kind, one.type, exact=exact, json_objects=json_objects)
        except _NoCommonTypeError:
            if all(_text_tells(other.type) for other in seen):
                return pa.string()
            raise InputError(
                f"column {one.name!r} holds {first.type} in {first.file} and {one.type} in {one.file}, and no type "
                "holds both: convert one of them, or leave the column out"
            ) from None
    return stored_type(kind)


def _common_type(
    one: pa.DataType, other: pa.DataType, *, exact: bool, json_objects: bool, in_object: bool = False
) -> pa.DataType:
    # Fields of JSON objects keep their order, and numbers within them their types, because a chat template writes 1 and
    # 1.0 as different texts.
    common = partial(_common_type, exact=exact, json_objects=json_objects)
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if is_list(one) and is_list(other):
        item = common(one.value_type, other.value_type, in_object=in_object)
        return pa.large_list(item) if pa.types.is_large_list(one) or pa.types.is_large_list(other) else pa.list_(item)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        names = _in_both_orders(one.names, other.names) if json_objects else dict.fromkeys([*one.names, *other.names])
        fields = [{field.name: field.type for field in kind} for kind in (one, other)]
        kinds = ([some.get(name, pa.null()) for some in fields] for name in names)
        return pa.struct([(name, common(*pair, in_object=True)) for name, pair in zip(names, kinds, strict=True)])
    if json_objects:
        if {one, other} == {pa.int64(), pa.float64()} and exact and not in_object:
            return pa.float64()
        raise _NoCommonTypeError
    if pa.types.is_map(one) and pa.types.is_map(other) and one.key_type == other.key_type:
        return pa.map_(one.key_type, common(one.item_type, other.item_type))
    if _is_number(one) and _is_number(other) and pa.types.is_integer(one) != pa.types.is_integer(other):
        if not exact:
            raise _NoCommonTypeError
        return pa.float64()
    if _differ_in_kind(one, other) or (not exact and hasattr(one, "unit")):
        raise _NoCommonTypeError
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException as error:
        raise _NoCommonTypeError from error


def _in_both_orders(one: list[str], other: list[str]) -> list[str]:
    """Return the names of both lists, in the order of each."""
    shared = [name for name in one if name in other]
    if shared != [name for name in other if name in one]:
        raise _NoCommonTypeError
    names: list[str] = []
    for name in [*shared, None]:
        for some in (one, other):
            end = some.index(name) if name is not None else len(some)
            names += [each for each in some[:end] if each not in names]
        names += [name] if name is not None else []
    if len(names) > max(len(one), len(other), _MOST_JOINED):
        raise _NoCommonTypeError
    return names


# Of the values of one array. Whether integers are exact as floats is left to Arrow, which refuses to convert others.
_COMMON_JSON = partial(_common_type, exact=True, json_objects=True)


def _differ_in_kind(one: pa.DataType, other: pa.DataType) -> bool:
    # pyarrow's common type would lose or reinterpret values.
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        unsigned = [pa.types.is_unsigned_integer(kind) for kind in (one, other)]
        return pa.uint64() in (one, other) and not all(unsigned)
    if pa.types.is_decimal(one) or pa.types.is_decimal(other):
        return not (pa.types.is_decimal(one) and pa.types.is_decimal(other))
    if is_text(one) or is_text(other):
        return not (is_text(one) and is_text(other))
    units = {getattr(kind, "unit", "day") for kind in (one, other)}
    return "ns" in units and len(units) > 1  # nanoseconds reach from 1677 to 2262, and coarser units farther


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _text_tells(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return all(_text_tells(kind.field(index).type) for index in range(kind.num_fields))
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return not binary and (isinstance(kind, pa.JsonType) or not isinstance(kind, pa.BaseExtensionType))


# Parquet types


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return a column's type in a Parquet file: its own, or text if Parquet cannot hold it."""
    return kind if _is_moderate(kind) and _fits_parquet(kind) else pa.string()


def _is_moderate(kind: pa.DataType) -> bool:
    level, count = [kind], 0
    for _ in range(_DEEPEST + 1):
        level = [one.field(index).type for one in level if pa.types.is_nested(one) for index in range(one.num_fields)]
        count += len(level)
    return not level and count <= _MOST_COLUMNS


@lru_cache
def _fits_parquet(kind: pa.DataType) -> bool:
    try:
        with pa.parquet.ParquetWriter(io.BytesIO(), pa.schema([("x", kind)])):
            return True
    except pa.ArrowNotImplementedError:
        return False


def conform(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert `column` to a type from `unify`; `InputError` if a value does not fit, as the file changed meanwhile."""
    if column.type == target:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target)
    if pa.types.is_string(target) and not is_text(column.type):
        return text_column(column)
    try:
        if is_text(column.type) and pa.types.is_nested(target):  # no object of this part has a field
            return pa.array([text and json.loads(text) for text in column.to_pylist()], target)
        cast = column.cast(target)
        try:
            cast.validate()
        except pa.ArrowInvalid:  # Arrow (26) shortens lists of nulls alone where a struct around them changes
            return pa.array(column.to_pylist(), target)
        return cast
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"a value of type {column.type} cannot be kept as {target}: {error}") from error


def conform_struct(rows: pa.StructArray, target: pa.StructType) -> pa.StructArray:
    """Convert each field of `rows` by `conform`; missing fields become null."""
    present = {field.name: rows.field(index) for index, field in enumerate(rows.type)}
    columns = [
        conform(present[field.name], field.type) if field.name in present else pa.nulls(len(rows), field.type)
        for field in target
    ]
    return pa.StructArray.from_arrays(columns, fields=list(target))


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array. Arrow's `combine_chunks` fails on an extension type without rows."""
    return column.combine_chunks() if column.num_chunks else pa.nulls(0, column.type)


def replace_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def free_name(name: str, ours: set[str], theirs: list[str]) -> str:
    """Return an input column's name in the output: its own, or `input_NAME` if it is among `ours`."""
    while name in ours:
        name = f"input_{name}"
        if name in theirs:
            ours = ours | {name}
    return name
