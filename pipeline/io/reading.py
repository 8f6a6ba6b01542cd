"""A chunk: some consecutive rows of an input file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError, RowProblem
from pipeline.io.column_types import as_text, infer_column
from pipeline.io.files import Location
from pipeline.io.listing import InputFile


@dataclass
class Chunk:
    """Consecutive rows of one file.

    Args:
        columns: The rows; a row with a problem is all null.
        numbers: Each row's number in the file, from 1; in files of lines, the line's number.
        problems: By index in the chunk, why a row is no record.
    """

    columns: pa.Table
    numbers: list[int]
    problems: dict[int, RowProblem] = field(default_factory=dict)


# ---- Files of tables: Parquet, CSV and Arrow. Their rows are records, or the file as a whole cannot be read.

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


# ---- Files of lines: JSON lines and plain text. A line that is no record becomes a row with a problem.

_TEXT_COLUMN = "prompt"
"""The only column of a text file."""
_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 32 << 20
"""A chunk takes no further line when it has this many bytes."""
_LONGEST_LINE = 256 << 20
"""Bytes of a line. Arrow's columns of text end at 2 GiB, and a row is held in memory several times."""
_KEPT_OF_LINE = 1 << 20
"""Bytes that are kept of a line that is too long."""
_DEEPEST = 200
"""Levels of objects and lists in a line. Python's own JSON reader and writer give up at about 1000."""


def read_json_lines(
    filesystem: fs.FileSystem,
    file: InputFile,
    rows: int,
    text_column: str | None,
    json_column: str | None,
    integer_column: str | None,
) -> Iterator[Chunk]:
    """Read a file of one JSON object a line; see `read_file`."""
    parse = partial(_parse_json, text_column=text_column, json_column=json_column, integer_column=integer_column)
    return _read_lines(filesystem, file, rows, parse)


def read_text_lines(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    """Read a file of one prompt a line; see `read_file`."""
    return _read_lines(filesystem, file, rows, lambda line: {_TEXT_COLUMN: _decode(line)})


def _read_lines(
    filesystem: fs.FileSystem, file: InputFile, rows: int, parse: Callable[[bytes], dict[str, Any]]
) -> Iterator[Chunk]:
    for some in _some_lines(_numbered_lines(filesystem, file), rows):
        records: list[dict[str, Any]] = []
        problems = {}
        for index, (_, line) in enumerate(some):
            try:
                if len(line) > _LONGEST_LINE:
                    raise ValueError(f"the line has more than {_LONGEST_LINE >> 20} MiB")
                records.append(parse(line))
            except (ValueError, RecursionError) as error:
                records.append({})
                kept = line if len(line) <= _LONGEST_LINE else line[:_KEPT_OF_LINE]
                problems[index] = RowProblem("BadRow", one_line(error), kept.decode("utf-8", "replace"))
        names = list(dict.fromkeys(name for record in records for name in record))
        columns = {name: infer_column([record.get(name) for record in records]) for name in names}
        # An Arrow table without columns has no rows either.
        table = pa.table(columns) if columns else pa.table({_TEXT_COLUMN: pa.nulls(len(some), pa.string())})
        yield Chunk(table, [number for number, _ in some], problems)


def _some_lines(lines: Iterable[tuple[int, bytes]], most: int) -> Iterator[list[tuple[int, bytes]]]:
    """Group lines: `most` of them, or fewer where they have many bytes."""
    some: list[tuple[int, bytes]] = []
    size = 0
    for number, line in lines:
        some.append((number, line))
        size += len(line)
        if len(some) == most or size >= _CHUNK_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _numbered_lines(filesystem: fs.FileSystem, file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without their ends, each with its number from 1.

    Of a line that is too long so much is returned that this shows.
    """
    with filesystem.open_input_stream(file.path, compression="detect", buffer_size=_BUFFER_BYTES) as stream:
        number, line = 0, bytearray()
        while data := stream.read(_BUFFER_BYTES):
            *ends, rest = bytes(data).split(b"\n")
            for end in ends:
                number += 1
                line += end
                if text := line.strip(b"\r"):
                    yield number, bytes(text)
                line.clear()
            if len(line) <= _LONGEST_LINE:
                line += rest
        if text := line.strip(b"\r"):
            yield number + 1, bytes(text)


def _parse_json(
    line: bytes, *, text_column: str | None, json_column: str | None, integer_column: str | None
) -> dict[str, Any]:
    text = _decode(line).strip()
    if not text:
        raise ValueError("the line is blank")
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the line is not JSON (one object a line): {error}") from error
    except RecursionError as error:
        raise ValueError(f"the line is nested too deeply: more than {_DEEPEST} levels") from error
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
    if text.count("{") + text.count("[") > _DEEPEST and _levels(record) > _DEEPEST:
        raise ValueError(f"the line is nested too deeply: more than {_DEEPEST} levels")
    if "\\ud" in text.lower():
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("the line has half a character: an unpaired surrogate") from error
    if text_column is not None and not isinstance(record.get(text_column), str | None):
        raise ValueError(f"{text_column!r} is {as_text(record[text_column])}, not text")
    if json_column in record:
        record[json_column] = as_text(record[json_column])
    if integer_column is not None and isinstance(record.get(integer_column), float):
        record[integer_column] = as_text(record[integer_column])
    return record


def _levels(value: Any) -> int:
    """Return how many objects and lists are around the innermost value."""
    levels, level = 0, [value]
    while level := [
        inner
        for one in level
        if isinstance(one, dict | list)
        for inner in (one.values() if isinstance(one, dict) else one)
    ]:
        levels += 1
    return levels


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: byte {error.start + 1} is {line[error.start]:#04x}") from error


# ---- Reading an input file of any format, in chunks of rows.


def read_file(
    filesystem: fs.FileSystem,
    file: InputFile,
    rows: int,
    text_column: str | None = None,
    json_column: str | None = None,
    integer_column: str | None = None,
) -> Iterator[Chunk]:
    """Read a file in chunks of at most `rows` rows, none of them empty.

    Args:
        filesystem: Where the file is.
        file: The file.
        rows: Most rows of a chunk.
        text_column: In JSON lines, a row whose value in this column is not text gets a problem.
        json_column: In JSON lines, objects of this column stay JSON text: as Arrow values, 1 and 1.0 would become one
            type.
        integer_column: In JSON lines, numbers of this column that are no integers stay JSON text: one of them, as an
            Arrow value, would make floats of all integers.

    Raises:
        InputError: The file is damaged or is not of its format.
    """
    try:
        if file.format == "jsonl":
            yield from read_json_lines(filesystem, file, rows, text_column, json_column, integer_column)
        else:
            readers = {"text": read_text_lines, "parquet": read_parquet, "csv": read_csv, "arrow": read_arrow}
            yield from readers[file.format](filesystem, file, rows)
    except InputError:
        raise
    except Exception as error:
        on_hub = filesystem.type_name == "py::fsspec+hf"  # its client raises errors of its own
        if not isinstance(error, (OSError, pa.ArrowException, EOFError)) and not on_hub:
            raise
        raise InputError(f"{file.path} cannot be read as {file.format}: {one_line(error, 300)}") from error
