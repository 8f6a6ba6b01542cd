"""Files of lines: JSON lines and plain text. A line that is no record becomes a row with a problem."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import RowProblem
from pipeline.io.chunks import Chunk
from pipeline.io.column_types import as_text, infer_column
from pipeline.io.listing import InputFile

_TEXT_COLUMN = "prompt"
"""The only column of a text file."""
_BUFFER_BYTES = 1 << 20


def read_json_lines(
    filesystem: fs.FileSystem, file: InputFile, rows: int, text_column: str | None, json_column: str | None
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
    lines = _numbered_lines(filesystem, file)
    while some := list(islice(lines, rows)):
        records: list[dict[str, Any]] = []
        problems = {}
        for index, (_, line) in enumerate(some):
            try:
                records.append(parse(line))
            except (ValueError, RecursionError) as error:
                records.append({})
                problems[index] = RowProblem("BadRow", one_line(error), line.decode("utf-8", "replace"))
        names = list(dict.fromkeys(name for record in records for name in record))
        columns = {name: infer_column([record.get(name) for record in records]) for name in names}
        # An Arrow table without columns has no rows either.
        table = pa.table(columns) if columns else pa.table({_TEXT_COLUMN: pa.nulls(len(some), pa.string())})
        yield Chunk(table, [number for number, _ in some], problems)


def _numbered_lines(filesystem: fs.FileSystem, file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without their ends, each with its number from 1."""
    with filesystem.open_input_stream(file.path, compression="detect", buffer_size=_BUFFER_BYTES) as stream:
        number, rest = 0, b""
        while data := stream.read(_BUFFER_BYTES):
            lines = (rest + bytes(data)).split(b"\n")
            rest = lines.pop()
            for line in lines:
                number += 1
                if line := line.strip(b"\r"):
                    yield number, line
        if rest := rest.strip(b"\r"):
            yield number + 1, rest


def _parse_json(line: bytes, *, text_column: str | None, json_column: str | None) -> dict[str, Any]:
    text = _decode(line).strip()
    if not text:
        raise ValueError("the line is blank")
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the line is not JSON (one object a line): {error}") from error
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
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


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: byte {error.start + 1} is {line[error.start]:#04x}") from error
