"""Files of lines: JSON lines and plain text. A line that is no record becomes a row with a problem."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import RowProblem
from pipeline.io.chunks import Chunk
from pipeline.io.column_types import as_text, infer_column, refuse_many_columns
from pipeline.io.listing import InputFile

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
) -> Iterator[Chunk]:
    """Read a file of one JSON object a line; see `read_file`."""
    parse = partial(_parse_json, text_column=text_column, json_column=json_column)
    return _read_lines(filesystem, file, rows, parse)


def read_text_lines(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[Chunk]:
    """Read a file of one prompt a line; see `read_file`."""
    return _read_lines(filesystem, file, rows, lambda line: {_TEXT_COLUMN: _decode(line)})


def _read_lines(
    filesystem: fs.FileSystem, file: InputFile, rows: int, parse: Callable[[bytes], dict[str, Any]]
) -> Iterator[Chunk]:
    names: dict[str, None] = {}
    for some in _some_lines(_numbered_lines(filesystem, file), rows):
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


def _parse_json(line: bytes, *, text_column: str | None, json_column: str | None) -> dict[str, Any]:
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
