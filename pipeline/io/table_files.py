"""Files of tables: Parquet, CSV and Arrow. Their rows are records, or the file as a whole cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
from pyarrow import fs

from pipeline.errors import InputError
from pipeline.io.chunks import Chunk
from pipeline.io.column_types import refuse_many_columns, text_column
from pipeline.io.files import Location
from pipeline.io.listing import InputFile

_CSV_BLOCK_BYTES = 32 << 20
"""What is parsed of a CSV at once; no row can be longer."""
_BATCH_BYTES = 64 << 20
"""About what is read of a table at once; a single row may be larger."""
_LARGEST_DICTIONARY = 256 << 20
_SMALL_COLUMN = 512 << 10
"""A column chunk of so few bytes needs no second look, which is a request of its own in an object store."""
_PAGE_HEADER_BYTES = 32
_NEXT_INT32 = b"\x15"
"""In Thrift's compact protocol: the next field, an int32."""
_VIEW_BYTES = 16
_PARQUET_MARK = b"PAR1"
_FOOTER_BYTES = 64 << 10
"""The footers of most files are shorter; for a longer one a second piece is read."""
_ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format; its stream format, in which datasets are saved, has no such mark."""


def read_parquet(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    """Read a Parquet file; see `read_file`."""
    with filesystem.open_input_file(file.path) as stream:
        parquet = pa.parquet.ParquetFile(stream)
        refuse_many_columns(parquet.metadata.num_columns, file.path)
        _refuse_duplicate_names(file, parquet.schema_arrow.names)
        yield from _chunks(_parquet_batches(file, parquet, stream, rows), rows)


def _parquet_batches(
    file: InputFile, parquet: pa.parquet.ParquetFile, stream: pa.NativeFile, rows: int
) -> Iterator[pa.RecordBatch]:
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if not group.num_rows:
            continue
        row_bytes = group.total_byte_size // group.num_rows
        for index in range(group.num_columns):
            row_bytes = max(row_bytes, _dictionary_bytes(file, group.column(index), stream))
        most = max(1, min(rows, _BATCH_BYTES // max(row_bytes, 1)))
        yield from parquet.iter_batches(batch_size=most, row_groups=[number])


def _dictionary_bytes(file: InputFile, column: pa.parquet.ColumnChunkMetaData, stream: pa.NativeFile) -> int:
    """Return how large a column chunk's dictionary is, and so how large any of its values may be.

    The file's metadata does not say it. Each row of a batch may repeat the largest value, so that a small file can take
    any amount of memory. The header of the dictionary's page says it:
    https://parquet.apache.org/docs/file-format/data-pages/

    Raises:
        InputError: It is too large to be read.
    """
    if not column.has_dictionary_page or column.dictionary_page_offset is None:
        return 0
    if column.total_uncompressed_size <= _SMALL_COLUMN:
        return int(column.total_uncompressed_size)
    stream.seek(column.dictionary_page_offset)
    header = bytes(stream.read(_PAGE_HEADER_BYTES))
    place, size = 0, 0
    for _ in range(2):  # the page's type, and its uncompressed size: fields 1 and 2, each a varint in zigzag
        if header[place : place + 1] != _NEXT_INT32:
            return 0  # encrypted, or damaged: then it cannot be read at all
        place, shift, size = place + 1, 0, 0
        while place < len(header):
            size |= (header[place] & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if header[place - 1] < 0x80:
                break
        size >>= 1
    if size > _LARGEST_DICTIONARY:
        raise InputError(
            f"column {column.path_in_schema!r} of {file.path} has a dictionary of {size >> 20} MiB, and up to "
            f"{_LARGEST_DICTIONARY >> 20} MiB are read: write the file again without dictionaries"
        )
    return size


def parquet_rows(file: Location) -> int | None:
    """Return how many rows a Parquet file's footer speaks of; None where there is no file, or not the whole of it.

    A footer is written last. So a file that has one was complete.

    Raises:
        OSError: The file is there and cannot be read.
    """
    try:
        with file.filesystem.open_input_file(file.path) as stream:
            size = stream.size()
            stream.seek(max(size - _FOOTER_BYTES, 0))
            end = bytes(stream.read())
            length = int.from_bytes(end[-8:-4], "little") + 8
            if end[-4:] != _PARQUET_MARK or length + len(_PARQUET_MARK) > size:
                return None
            if length > len(end):
                stream.seek(size - length)
                end = bytes(stream.read())
    except FileNotFoundError:
        return None
    try:
        # What was read is parsed apart from reading it: an error of the store proves nothing about the file.
        footer = pa.BufferReader(_PARQUET_MARK + end[-length:])
        return int(pa.parquet.ParquetFile(footer).metadata.num_rows)
    except (OSError, pa.ArrowException):
        return None


def read_arrow(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    """Read a file or a stream of Arrow's IPC format; see `read_file`."""
    with filesystem.open_input_file(file.path) as stream:
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
        stream.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream) as reader:
            refuse_many_columns(len(reader.schema.names), file.path)
            _refuse_duplicate_names(file, reader.schema.names)
            yield from _chunks(map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader, rows)


def read_csv(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    """Read a CSV file with a header; see `read_file`.

    Every value stays the text it is: a CSV has no types, and guessing them would turn `007` into 7.
    """
    if file.size == 0:
        return
    read = pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    with filesystem.open_input_stream(file.path, compression="detect") as stream:
        names = pa.csv.open_csv(stream, read, parse).schema.names
    refuse_many_columns(len(names), file.path)
    _refuse_duplicate_names(file, names)
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with filesystem.open_input_stream(file.path, compression="detect") as stream:
        yield from _chunks(pa.csv.open_csv(stream, read, parse, convert), rows)


def _refuse_duplicate_names(file: InputFile, names: list[str]) -> None:
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise InputError(f"{file.path} has several columns named {', '.join(map(repr, duplicates))}")


def _chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[Chunk]:
    """Cut batches to at most `rows` rows, fewer where they are large, and number these."""
    first = 1
    for batch in batches:
        step = max(1, min(rows, _BATCH_BYTES // max(sum(map(_largest_row, batch.columns)), 1)))
        for start in range(0, batch.num_rows, step):
            some = batch.slice(start, step)
            table = pa.table([plain(column) for column in some.columns], some.schema.names)
            yield Chunk(table, list(range(first, first + table.num_rows)))
            first += table.num_rows


def _largest_row(column: pa.Array) -> int:
    """Return about how many bytes a row may have once its encodings are undone; 0 where these repeat nothing."""
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
        return sum(map(_largest_row, column.flatten()))
    return 0


def _largest_value(values: pa.Array) -> int:
    kind = values.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        views = values.buffers()[1]  # of 16 bytes each, which begin with the value's length as an int32
        lengths = np.frombuffer(views, np.int32)[:: _VIEW_BYTES // 4][values.offset : values.offset + len(values)]
        return int(lengths.max(initial=0))
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    ):
        return pa.compute.max(pa.compute.binary_length(values)).as_py() or 0
    return int(values.nbytes)


def plain(column: pa.Array) -> pa.Array:
    """Undo what is only another encoding of the same values, and has no place in a column that others read.

    These are dictionaries and run ends, which differ from file to file, and views, which Arrow cannot filter. Nested
    ones too. Seconds become milliseconds, as in Parquet, or text where these do not reach as far.
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
    if not pa.types.is_nested(kind):
        return column
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            return column
        fields = [plain(one) for one in column.flatten()]
        if all(one.type == field.type for one, field in zip(fields, kind, strict=True)):
            return column
        return pa.StructArray.from_arrays(fields, [field.name for field in kind], mask=column.is_null())
    if pa.types.is_map(kind):
        target = pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
        return column if target == kind else column.cast(target)
    if pa.types.is_fixed_size_list(kind):
        target = pa.list_(_plain_type(kind.value_type), kind.list_size)
        return column if target == kind else column.cast(target)
    if pa.types.is_union(kind):
        return column
    large = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
    values = plain(column.flatten())
    if values.type == kind.value_type and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return column
    offsets = _offsets(column, pa.int64() if large else pa.int32())
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return plain(pa.nulls(0, kind)).type


def _offsets(lists: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return where each list begins in the items of all, null for a list that is null, and where the last one ends."""
    lengths = pa.compute.list_value_length(lists)
    ends = pa.compute.cumulative_sum(pa.compute.fill_null(lengths.cast(kind), 0))
    begins = pa.concat_arrays([pa.array([0], kind), ends])
    known = pa.concat_arrays([lengths.is_valid(), pa.array([True])])
    return pa.compute.if_else(known, begins, pa.scalar(None, kind))
