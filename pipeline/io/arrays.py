"""Arrow arrays of untrusted files: they are checked before anything reads them, measured, and decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from pipeline.io.column_types import text_column

_VIEW_BYTES = 16
_LISTS = {
    pa.types.is_list: pa.list_,
    pa.types.is_large_list: pa.large_list,
    pa.types.is_list_view: pa.list_view,
    pa.types.is_large_list_view: pa.large_list_view,
}
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def refuse_unsafe(column: pa.Array, valid: pa.Array | None = None) -> None:
    """Raise `ArrowInvalid` unless all that a column refers to lies in its own buffers.

    A damaged file may point to any memory. A value may be any bytes (no UTF-8, no day, too many digits), because rows
    are judged alone.

    Args:
        valid: A dictionary that has been checked: batches share it, and it may be large.
    """
    if valid is not None and _buffers(valid) == _buffers(column.dictionary):
        column.indices.validate(full=True)
        pa.DictionaryArray.from_arrays(column.indices, pa.nulls(len(valid)))  # which checks their range
        return
    if pa.types.is_struct(column.type):
        column.validate()
        for field in column.flatten():  # not `field(n)`: below a null, Arrow's own arrays refer to values that are not
            refuse_unsafe(field)
        return
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column.validate()
        type(column).from_arrays(column.offsets, pa.nulls(len(column.values))).validate(full=True)
        refuse_unsafe(column.flatten())
        return
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        column.view(_of_bytes(column.type)).validate(full=True)


def _buffers(array: pa.Array) -> list[Any]:
    return [len(array), array.offset, *(None if one is None else one.address for one in array.buffers())]


def _of_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with the same layout, whose values are any bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return _of_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _of_bytes(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):  # inside of a map, say
        return pa.struct([field.with_type(_of_bytes(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_of_bytes(kind.key_type), _of_bytes(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_of_bytes(kind.value_type), kind.list_size)
    for is_kind, make in _LISTS.items():
        if is_kind(kind):
            return make(_of_bytes(kind.value_type))
    if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        return pa.binary(kind.bit_width // 8)
    return _BYTES.get(kind, kind)


def largest_row(column: pa.Array) -> int:
    """Return the approximate size of a decoded row in bytes; 0 where the encoding repeats nothing."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _largest_value(column.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return _largest_value(column.values)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _largest_value(column)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        longest = pa.compute.max(pa.compute.list_value_length(column)).as_py() or 0
        return int(longest * column.values.nbytes // max(len(column.values), 1))
    if pa.types.is_struct(kind) and kind.num_fields:
        return sum(map(largest_row, column.flatten()))
    return 0


def _largest_value(values: pa.Array) -> int:
    kind = values.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        views = values.buffers()[1]  # of 16 bytes each, which begin with the value's length as an int32
        numbers = np.frombuffer(views[: len(views) // _VIEW_BYTES * _VIEW_BYTES], np.int32)
        lengths = numbers[:: _VIEW_BYTES // 4][values.offset : values.offset + len(values)]
        return int(lengths.max(initial=0))
    if kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string()):
        return pa.compute.max(pa.compute.binary_length(values)).as_py() or 0
    return int(values.nbytes)


def plain(column: pa.Array) -> pa.Array:
    """Decode dictionaries and run ends, which differ between files, and views, which Arrow cannot filter, at any depth.

    Seconds become milliseconds, as in Parquet, or text where these overflow.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pa.compute.run_end_decode(column))
    if pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.binary())
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        try:
            return column.cast(pa.timestamp("ms", kind.tz))
        except pa.ArrowInvalid:
            return text_column(column)
    if not pa.types.is_nested(kind) or pa.types.is_union(kind) or (pa.types.is_struct(kind) and not kind.num_fields):
        return column
    if pa.types.is_struct(kind):
        fields = [plain(one) for one in column.flatten()]
        if all(one.type == field.type for one, field in zip(fields, kind, strict=True)):
            return column
        return pa.StructArray.from_arrays(fields, [field.name for field in kind], mask=column.is_null())
    if pa.types.is_map(kind):
        return column.cast(pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type)))
    if pa.types.is_fixed_size_list(kind):
        return column.cast(pa.list_(_plain_type(kind.value_type), kind.list_size))
    large = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
    values = plain(column.flatten())
    if values.type == kind.value_type and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return column
    offsets = _offsets(column, pa.int64() if large else pa.int32())
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return plain(pa.nulls(0, kind)).type


def _offsets(lists: pa.Array, kind: pa.DataType) -> pa.Array:
    # `[N + 1]`, with null for a null list.
    lengths = pa.compute.list_value_length(lists)
    ends = pa.compute.cumulative_sum(pa.compute.fill_null(lengths.cast(kind), 0))
    begins = pa.concat_arrays([pa.array([0], kind), ends])
    known = pa.concat_arrays([lengths.is_valid(), pa.array([True])])
    return pa.compute.if_else(known, begins, pa.scalar(None, kind))
