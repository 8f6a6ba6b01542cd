"""Files of tables: Parquet, CSV and Arrow. Their rows are records, or the file as a whole cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyarrow import fs

from pipeline.errors import InputError
from pipeline.io.chunks import Chunk
from pipeline.io.files import Location
from pipeline.io.listing import InputFile

_CSV_BLOCK_BYTES = 32 << 20
"""What is parsed of a CSV at once; no row can be longer."""
_PARQUET_MARK = b"PAR1"
_FOOTER_BYTES = 64 << 10
"""The footers of most files are shorter; for a longer one a second piece is read."""
_ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format; its stream format, in which datasets are saved, has no such mark."""


def read_parquet(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    """Read a Parquet file; see `read_file`."""
    with filesystem.open_input_file(file.path) as stream:
        parquet = pa.parquet.ParquetFile(stream)
        _refuse_duplicate_names(file, parquet.schema_arrow.names)
        yield from _chunks(parquet.iter_batches(batch_size=rows), rows)


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
    _refuse_duplicate_names(file, names)
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with filesystem.open_input_stream(file.path, compression="detect") as stream:
        yield from _chunks(pa.csv.open_csv(stream, read, parse, convert), rows)


def _refuse_duplicate_names(file: InputFile, names: list[str]) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(f"{file.path} has several columns named {', '.join(map(repr, duplicates))}")


def _chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[Chunk]:
    """Cut batches to at most `rows` rows and number these."""
    first = 1
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            table = _plain(pa.Table.from_batches([batch.slice(start, rows)]))
            yield Chunk(table, list(range(first, first + table.num_rows)))
            first += table.num_rows


def _plain(table: pa.Table) -> pa.Table:
    """Drop dictionary encoding and schema metadata, which differ from file to file."""
    for index, one in enumerate(table.schema):
        if pa.types.is_dictionary(one.type):
            table = table.set_column(index, one.name, table.column(index).cast(one.type.value_type))
    return table.replace_schema_metadata(None)
