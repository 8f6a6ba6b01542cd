"""Reads input files in chunks of consecutive rows."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyarrow import fs

from drafter.errors import one_line
from drafter.half_characters import refuse_escaped_halves
from pipeline.errors import InputError, RowProblem
from pipeline.io.arrays import largest_row, plain, refuse_unsafe
from pipeline.io.column_types import as_text, infer_column, refuse_many_columns
from pipeline.io.files import batches
from pipeline.settings import Format

HUB_FILES = "py::fsspec+hf"
"""Name of the hub's file system."""


@dataclass(frozen=True)
class InputFile:
    """A file of an input; `folders` are the columns that its Hive folders (`lang=en/`) name, with type and value."""

    path: str
    name: str
    size: int
    format: Format
    folders: tuple[tuple[str, pa.DataType, Any], ...] = ()


class UnreadableValueError(ValueError):
    """A table's value that cannot be read, such as text that is not UTF-8."""


@dataclass
class Chunk:
    """Consecutive rows of one file.

    Args:
        columns: The rows; a row with a problem is all null.
        numbers: Each row's number in the file, from 1; in files of lines, the line's number.
        problems: By index in the chunk, why a row is invalid.
        records: In JSON lines, the rows as read. Unlike columns, their types do not depend on other rows.
    """

    columns: pa.Table
    numbers: list[int]
    problems: dict[int, RowProblem] = field(default_factory=dict)
    records: list[dict[str, Any]] | None = None

    def values(self, name: str, most_bytes: int | None = None) -> list[Any]:
        """Return each row's value in a column, as in JSON; None where there is no such column.

        Nulls in structs and maps are left out: a table cannot express their absence otherwise. A value that cannot be
        read, or is larger than `most_bytes` in a table, is an `UnreadableValueError`.
        """
        if self.records is not None:
            return [record.get(name) for record in self.records]
        if name not in self.columns.column_names:
            return [None] * len(self.numbers)
        column = self.columns.column(name)
        if most_bytes is None or column.nbytes <= most_bytes:
            with suppress(Exception):  # Arrow raises what Python's own types raise, each in its own way
                return [without_nulls(value) for value in column.to_pylist(maps_as_pydicts="strict")]
        return [_value(column, row, most_bytes) for row in range(len(column))]


def _value(column: pa.ChunkedArray, row: int, most_bytes: int | None) -> Any:
    size = column.slice(row, 1).nbytes
    if most_bytes is not None and size > most_bytes:
        return UnreadableValueError(f"it has {size >> 20} MiB, and up to {most_bytes >> 20} MiB are read")
    try:
        return without_nulls(column[row].as_py(maps_as_pydicts="strict"))
    except UnicodeDecodeError as error:
        return UnreadableValueError(f"it is not UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}")
    except Exception as error:  # see `values`
        return UnreadableValueError(f"{type(error).__name__}: {error}")


def without_nulls(value: Any) -> Any:
    """Return a table's value as in JSON: a null in an object may be there because another row has the field."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):  # of a batch of NumPy's
        return [without_nulls(one) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


# Tables: Parquet, CSV and Arrow. Either all of their rows can be read, or none.

_CSV_BLOCK_BYTES = 32 << 20  # also the longest row
_TRIAL_ROWS = 1024
_BATCH_BYTES = 64 << 20  # approximately; a single row may be larger
_LARGEST_DICTIONARY = 256 << 20
_SMALL_COLUMN = 512 << 10  # such a column chunk needs no second look, another request in an object store
_PAGE_HEADER_BYTES = 32
_NEXT_INT32 = b"\x15"  # in Thrift's compact protocol: the next field, an int32
_ARROW_FILE = b"ARROW1"  # first bytes of Arrow's file format; its stream format has none


def _read_parquet(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    with filesystem.open_input_file(file.path) as stream:
        parquet = pa.parquet.ParquetFile(stream, page_checksum_verification=True)
        refuse_many_columns(parquet.metadata.num_columns, file.path)
        _check_names(file, parquet.schema_arrow.names)
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
    """Return the size of a column chunk's dictionary, an upper bound on its values.

    Each row of a batch may repeat the largest value, so a small file can take any amount of memory. The size is in the
    header of the dictionary page only: https://parquet.apache.org/docs/file-format/data-pages/
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


def _read_arrow(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    with filesystem.open_input_file(file.path) as stream:
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
        stream.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream) as reader:
            _check_names(file, reader.schema.names)
            yield from _chunks(map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader, rows)


def _read_csv(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    # Values stay text: a CSV has no types, and guessing them would turn `007` into 7.
    if file.size == 0:
        return
    read = pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    suffixes = [suffix.lower() for suffix in PurePosixPath(file.path).suffixes]
    parse = pa.csv.ParseOptions(delimiter="\t" if ".tsv" in suffixes else ",", newlines_in_values=True)
    with _unpacked(filesystem, file) as stream:
        # Arrow needs 9 KB for each column before it tells their number. It skips blank lines.
        header = bytes(stream.read(_CSV_BLOCK_BYTES)).lstrip(b"\r\n")[:_BUFFER_BYTES].decode("utf-8", "replace")
        with suppress(csv.Error):
            refuse_many_columns(len(next(csv.reader(StringIO(header), delimiter=parse.delimiter), ())), file.path)
    with _unpacked(filesystem, file) as stream:
        names = pa.csv.open_csv(stream, read, parse).schema.names
    _check_names(file, names)
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with _unpacked(filesystem, file) as stream:
        yield from _chunks(pa.csv.open_csv(stream, read, parse, convert), rows)


def _check_names(file: InputFile, names: list[str]) -> None:
    refuse_many_columns(len(names), file.path)
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise InputError(f"{file.path} has several columns named {', '.join(map(repr, duplicates))}")


def _chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[Chunk]:
    first = 1
    valid: dict[int, pa.Array] = {}  # dictionaries, which all batches may share
    for batch in batches:
        for index, column in enumerate(batch.columns):
            refuse_unsafe(column, valid.get(index))
            if pa.types.is_dictionary(column.type):
                valid[index] = column.dictionary
        step = max(1, min(rows, _BATCH_BYTES // max(sum(map(largest_row, batch.columns)), 1)))
        for start in range(0, batch.num_rows, step):
            some = batch.slice(start, step)
            columns = [plain(column) for column in some.columns]
            table = pa.table(columns, some.schema.names, metadata=some.schema.metadata)
            yield Chunk(table, list(range(first, first + table.num_rows)))
            first += table.num_rows


# Compressed files.

COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
_BUFFER_BYTES = 1 << 20
_ALWAYS_READ = 1 << 30
_MOST_EXPANDED = 1000  # bytes of rows per byte of file; beyond it a decompression bomb would fill the disk


@contextmanager
def _unpacked(filesystem: fs.FileSystem, file: InputFile) -> Iterator[pa.NativeFile]:
    codec = COMPRESSIONS.get(PurePosixPath(file.path).suffix.lower())
    with filesystem.open_input_stream(file.path, compression=codec, buffer_size=_BUFFER_BYTES) as stream:
        yield stream if codec is None else pa.PythonFile(_Bounded(stream, file), mode="r")


class _Bounded:
    """A decompressed stream that ends with an `InputError` at what only a decompression bomb holds."""

    closed = False

    def __init__(self, stream: pa.NativeFile, file: InputFile) -> None:
        self._stream, self._file, self._size = stream, file, 0

    def read(self, size: int) -> bytes:
        data = bytes(self._stream.read(size))
        self._size += len(data)
        refuse_bomb(self._file, self._size)
        return data


def refuse_bomb(file: InputFile, size: int) -> None:
    if size > max(_ALWAYS_READ, _MOST_EXPANDED * file.size):
        raise InputError(
            f"{file.path} has {file.size} bytes and expands to more than {size >> 20} MiB of rows, which looks "
            "like a decompression bomb: split the file, or store the repeated column once"
        )


# Files of lines: JSON lines and plain text. An invalid line becomes a row with a problem.

_TEXT_COLUMN = "prompt"
_CHUNK_BYTES = 32 << 20  # a chunk this large takes no further line
_LONGEST_LINE = 256 << 20  # Arrow's text columns end at 2 GiB, and a row is held in memory several times
_KEPT_OF_LINE = 1 << 20  # if it is too long
_MOST_BLANK = 10_000_000
_DEEPEST = 200  # levels of objects and lists; Python's JSON reader and writer fail at about 1000


def _read_lines(
    filesystem: fs.FileSystem, file: InputFile, rows: int, parse: Callable[[bytes], dict[str, Any]]
) -> Iterator[Chunk]:
    names: dict[str, None] = {}
    lines = _numbered_lines(filesystem, file)
    if (first := next(lines, None)) is None:
        return
    if file.format == "jsonl" and first[1].strip() in (b"[", b"{"):
        raise InputError(
            f"{file.path} is one JSON value over many lines: write one object a line, as `jq -c '.[]'` does for a list"
        )
    for some in batches(chain([first], lines), lambda one: len(one[1]), _CHUNK_BYTES, rows):
        records: list[dict[str, Any]] = []
        problems = {}
        for index, (number, line) in enumerate(some):
            try:
                if len(line) > _LONGEST_LINE:
                    raise ValueError(f"the line has more than {_LONGEST_LINE >> 20} MiB")
                records.append(parse(line))
                names.update(dict.fromkeys(records[-1]))
            except (ValueError, RecursionError) as error:
                records.append({})
                kept = line if len(line) <= _LONGEST_LINE else line[:_KEPT_OF_LINE]
                problems[index] = RowProblem("BadRow", one_line(error), kept.decode("utf-8", "replace"))
            refuse_many_columns(len(names), f"{file.path} up to line {number}")
        here = dict.fromkeys(name for record in records for name in record)
        columns = {name: infer_column([record.get(name) for record in records]) for name in here}
        # An Arrow table without columns has no rows either.
        table = pa.table(columns) if columns else pa.table({_TEXT_COLUMN: pa.nulls(len(some), pa.string())})
        yield Chunk(table, [number for number, _ in some], problems, records)


def _numbered_lines(filesystem: fs.FileSystem, file: InputFile) -> Iterator[tuple[int, bytes]]:
    # Lines are numbered from 1, and blank ones left out. One that is too long is cut, above `_LONGEST_LINE`.
    with _unpacked(filesystem, file) as stream:
        number, told, line = 0, 0, bytearray()
        while data := stream.read(_BUFFER_BYTES):
            *ends, rest = bytes(data).split(b"\n")
            for end in ends:
                number += 1
                line += end
                if line.strip():
                    yield number, bytes(line.strip(b"\r"))
                    told = number
                line.clear()
            if number - told > _MOST_BLANK:
                raise InputError(
                    f"{file.path} has more than {_MOST_BLANK} blank lines after line {told}: leave them out"
                )
            if len(line) <= _LONGEST_LINE:
                line += rest
        if line.strip():
            yield number + 1, bytes(line.strip(b"\r"))


def _parse_json(line: bytes, *, text_column: str | None, json_column: str | None) -> dict[str, Any]:
    text = _decode(line).strip()
    how = "write one object a line" + (", as `jq -c '.[]'` does for a list" if text.startswith("[") else "")
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the line is not JSON ({how}): {error}") from error
    except RecursionError as error:
        raise ValueError(f"the line is nested too deeply: more than {_DEEPEST} levels") from error
    if not isinstance(record, dict):
        raise ValueError(f"the line is not a JSON object: {how}")
    refuse_deep(record, text, "the line")
    refuse_escaped_halves(record, text, "the line")
    if text_column is not None and not isinstance(record.get(text_column), str | None):
        raise ValueError(f"{text_column!r} is {as_text(record[text_column])}, not text")
    if json_column in record:
        record[json_column] = as_text(record[json_column])
    return record


def refuse_deep(value: Any, text: str, what: str) -> None:
    """Raise `ValueError` if a value, whose JSON is `text`, has too many levels of objects and lists."""
    if text.count("{") + text.count("[") > _DEEPEST and _levels(value) > _DEEPEST:
        raise ValueError(f"{what} is nested too deeply: more than {_DEEPEST} levels")


def _levels(value: Any) -> int:
    levels, level = -1, [value]
    while level:
        levels += 1
        lists = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = list(chain.from_iterable(lists))
    return levels


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: byte {error.start + 1} is {line[error.start]:#04x}") from error


def read_file(
    filesystem: fs.FileSystem,
    file: InputFile,
    rows: int,
    text_column: str | None = None,
    json_column: str | None = None,
) -> Iterator[Chunk]:
    """Read a file of any format in non-empty chunks of at most `rows` rows.

    Args:
        text_column: In JSON lines, a row whose value in this column is not text gets a problem.
        json_column: In JSON lines, objects of this column stay JSON text.

    Raises:
        InputError: The file is damaged or is not of its format.
    """
    try:
        parse = partial(_parse_json, text_column=text_column, json_column=json_column)
        readers: dict[Format, Callable[..., Iterator[Chunk]]] = {
            "jsonl": partial(_read_lines, parse=parse),
            "text": partial(_read_lines, parse=lambda line: {_TEXT_COLUMN: _decode(line)}),
            "parquet": _read_parquet,
            "csv": _read_csv,
            "arrow": _read_arrow,
        }
        size = 0
        for chunk in readers[file.format](filesystem, file, rows):
            size += chunk.columns.nbytes
            refuse_bomb(file, size)
            yield _with_folders(file, chunk)
    except InputError:
        raise
    except Exception as error:
        on_hub = filesystem.type_name == HUB_FILES  # its client raises errors of its own
        if not isinstance(error, (OSError, pa.ArrowException, EOFError, UnicodeDecodeError)) and not on_hub:
            raise
        raise InputError(f"{file.path} cannot be read as {file.format}: {one_line(error, 300)}") from error


def _with_folders(file: InputFile, chunk: Chunk) -> Chunk:
    for name, kind, value in file.folders:
        if name in chunk.columns.column_names:
            raise InputError(
                f"{file.path} has a column {name!r}, and its folder sets {name!r}, too: leave one of them out"
            )
        column = pa.array([value] * len(chunk.numbers), kind)
        chunk.columns = chunk.columns.append_column(name, column)
        for record in chunk.records or ():
            record[name] = value
    return chunk


def read_through(filesystem: fs.FileSystem, file: InputFile) -> None:
    """Read a file to its end."""
    for _ in read_file(filesystem, file, _TRIAL_ROWS):
        pass
