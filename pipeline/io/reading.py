"""Input files of several formats, as chunks of rows.

A file that cannot be read stops the job before anything is generated. A line that is not a record does not: it
goes to `errors/` with the row's place, and the others are unharmed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError, RowProblem
from pipeline.generate.generate_config import Format, ReadingConfig
from pipeline.io.columns import as_text, infer_column
from pipeline.io.files import Location, glob_base, glob_regex, has_glob, locate
from pipeline.io.hf_datasets import HUB, dataset_files

SUFFIXES: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "csv": (".csv",),
    "text": (".txt", ".text"),
    "arrow": (".arrow",),
}
_ARROW_FILE = b"ARROW1"
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
TEXT_COLUMN = "prompt"
"""The only column of a text file."""


@dataclass(frozen=True)
class InputFile:
    """One file to read.

    Args:
        path: On its file system.
        name: Path below the folder that was asked for; names the file's rows.
        size: Bytes.
        format: How to read it.
    """

    path: str
    name: str
    size: int
    format: Format


@dataclass(frozen=True)
class InputListing:
    """The files of an input, in the order of their names."""

    filesystem: fs.FileSystem
    files: tuple[InputFile, ...]


@dataclass(frozen=True)
class PromptSource:
    """Where a row's prompt is.

    Args:
        column: Its column.
        kind: What it holds: text, chat messages, or the body of a request to OpenAI.
        id_column: The column that names a row; None where its place does.
    """

    column: str
    kind: Literal["text", "messages", "openai"] = "text"
    id_column: str | None = None


BATCH = PromptSource("body", "openai", "custom_id")
"""OpenAI's batch lines."""


@dataclass
class Chunk:
    """Some consecutive rows of one file.

    Args:
        columns: The rows; all null where there is a problem.
        numbers: Place of each row in the file, from 1 (the line, in files of lines).
        problems: By index, what makes a row no record.
    """

    columns: pa.Table
    numbers: list[int]
    problems: dict[int, RowProblem] = field(default_factory=dict)


def format_of(name: str) -> Format | None:
    """A file's format by its name, None if that does not tell."""
    lower = name.lower()
    for compression in _COMPRESSIONS:
        lower = lower.removesuffix(compression)
    return next((found for found, suffixes in SUFFIXES.items() if lower.endswith(suffixes)), None)


def list_input(uri: str, format: str = "auto", split: str | None = None, subset: str | None = None) -> InputListing:
    """The files behind a path, a folder, a pattern or a URI.

    In folders and patterns, files whose path has a part that begins with `.` or `_` are left out.

    Args:
        uri: The input.
        format: Of its files, or `auto`.
        split: Which split of a Hugging Face dataset.
        subset: Which subset of one.

    Raises:
        InputError: Nothing there, nothing readable there, or names that leave the format open.
    """
    kind = "jsonl" if format == "openai" else format
    found = _find(uri)
    if found.is_folder:
        names = _dataset_names(uri, found, split, subset)
    elif split is None and subset is None:
        names = None
    else:
        raise InputError(f"input {uri} is not a dataset's folder: leave out reading.split and reading.subset")
    files = []
    for name, info in found.files.items():
        if names is not None and name not in names:
            continue
        guess = format_of(name)
        chosen = guess if kind == "auto" else kind
        if found.is_folder and names is None and (guess is None or guess != chosen):
            continue
        if chosen is None:
            raise InputError(f"the name of input {info.path} does not tell its format: set reading.format")
        files.append(InputFile(info.path, name, info.size, chosen))  # type: ignore[arg-type]
    if not files:
        suffixes = [suffix for one, some in SUFFIXES.items() if kind in ("auto", one) for suffix in some]
        looked = f"holds no readable file (looked for {', '.join(suffixes)})"
        raise InputError(f"input {uri} {looked if found.is_folder else 'matches no file'}")
    formats = sorted({file.format for file in files})
    if found.is_folder and len(formats) > 1:
        raise InputError(f"input {uri} holds files of several formats ({', '.join(formats)}): set reading.format")
    return InputListing(found.root.filesystem, tuple(files))


@dataclass(frozen=True)
class _Found:
    """What is behind an input's name.

    Args:
        root: The file, or the folder.
        is_folder: Whether a folder was asked for, and not a file or a pattern.
        files: By their path below the folder, in the order of those; hidden ones are left out.
    """

    root: Location
    is_folder: bool
    files: dict[str, fs.FileInfo]


def _find(uri: str) -> _Found:
    is_pattern = has_glob(uri) and not _exists(uri)
    root = locate(glob_base(uri) if is_pattern else uri)
    with _listing(uri):
        info = root.info
        if info.type == fs.FileType.NotFound:
            raise InputError(f"input {uri} does not exist")
        if info.type == fs.FileType.File:
            return _Found(root, False, {root.name: info})
        infos = root.filesystem.get_file_info(fs.FileSelector(root.path, recursive=True))
    pattern = glob_regex(locate(uri).path) if is_pattern else None
    files = {}
    for info in sorted(infos, key=lambda info: str(info.path)):
        name = str(info.path[len(root.path) :].lstrip("/"))
        hidden = any(part[0] in "._" for part in name.split("/"))
        if info.type == fs.FileType.File and not hidden and (pattern is None or pattern.fullmatch(info.path)):
            files[name] = info
    return _Found(root, not is_pattern, files)


def _dataset_names(uri: str, found: _Found, split: str | None, subset: str | None) -> set[str] | None:
    with _listing(uri):
        names = dataset_files(uri, found.root, list(found.files), split, subset)
    return None if names is None else set(names)


@contextmanager
def _listing(uri: str) -> Iterator[None]:
    """Errors in reading a folder are the input's."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # The hub's client has errors of its own; the others are of folders that are no datasets after all.
        if not uri.startswith(HUB) and not isinstance(error, (OSError, ValueError, LookupError, TypeError)):
            raise
        raise InputError(f"input {uri} cannot be listed: {one_line(error)}") from error


def _exists(uri: str) -> bool:
    return "://" not in uri and locate(uri).type != fs.FileType.NotFound


def find_prompts(listing: InputListing, config: ReadingConfig) -> PromptSource:
    """Look at the first rows to see where the prompts are.

    Raises:
        InputError: There are no rows, they lack a column that was asked for, or it holds neither text nor messages.
    """
    if config.format == "openai":
        return BATCH
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, rows=100):
            if _is_batch(file, chunk.columns.column_names, config):
                return BATCH
            if len(chunk.problems) == len(chunk.numbers):
                problem = chunk.problems[0]
                raise InputError(f"no row at the start of {file.path} can be read: {problem.message}")
            return _choose_source(file, chunk.columns.schema, config)
    raise InputError(f"input has no rows: {', '.join(file.path for file in listing.files[:3])}")


def _is_batch(file: InputFile, columns: list[str], config: ReadingConfig) -> bool:
    """Whether rows are OpenAI's requests, and nothing was said that would make something else of them."""
    unsaid = config.prompt_column is None and config.messages_column is None and config.id_column is None
    return config.format == "auto" and file.format == "jsonl" and unsaid and {"custom_id", "url", "body"} <= {*columns}


def _choose_source(file: InputFile, schema: pa.Schema, config: ReadingConfig) -> PromptSource:
    if config.messages_column is not None:
        source = PromptSource(config.messages_column, "messages", config.id_column)
    elif config.prompt_column is None and "prompt" not in schema.names and "messages" in schema.names:
        source = PromptSource("messages", "messages", config.id_column)
    else:
        source = PromptSource(config.prompt_column or "prompt", "text", config.id_column)
    setting = "messages_column" if source.kind == "messages" else "prompt_column"
    for column, name in ((source.column, setting), (source.id_column, "id_column")):
        if column is not None and column not in schema.names:
            raise InputError(
                f"{file.path} has no column {column!r} (it has {', '.join(schema.names)}): set reading.{name}"
            )
    check_types(file, schema, source)
    return source


def check_types(file: InputFile, schema: pa.Schema, source: PromptSource) -> None:
    """Refuse columns of a typed file that cannot hold prompts or ids.

    Raises:
        InputError: Such a column, or one that is missing.
    """
    if file.format in ("jsonl", "text"):  # every row has types of its own, and is judged alone
        return
    for column in filter(None, (source.column, source.id_column)):
        if column not in schema.names:
            raise InputError(f"{file.path} has no column {column!r} (it has {', '.join(schema.names)})")
    kind = schema.field(source.column).type
    messages = source.kind == "messages" and (pa.types.is_list(kind) or pa.types.is_large_list(kind))
    if not (_is_text(kind) or messages or pa.types.is_null(kind)):
        wanted = "chat messages" if source.kind == "messages" else "text"
        raise InputError(f"column {source.column!r} of {file.path} holds {kind}, not {wanted}")
    if source.id_column is not None:
        kind = schema.field(source.id_column).type
        if not (_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
            raise InputError(f"column {source.id_column!r} of {file.path} holds {kind}: ids are text or integers")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def read_file(
    filesystem: fs.FileSystem,
    file: InputFile,
    rows: int,
    text_column: str | None = None,
    json_column: str | None = None,
) -> Iterator[Chunk]:
    """A file in chunks of at most `rows` rows, none of them empty.

    Args:
        filesystem: Where the file is.
        file: The file.
        rows: Most rows of a chunk.
        text_column: In JSON lines, a row whose value here is not text has a problem.
        json_column: In JSON lines, objects of this column stay JSON text: as Arrow, 1 and 1.0 would become one type.

    Raises:
        InputError: The file is damaged or is not what its format says.
    """
    try:
        if file.format == "jsonl":
            parse = partial(_parse_json, text_column=text_column, json_column=json_column)
            yield from _read_lines(filesystem, file, rows, parse)
        elif file.format == "text":
            yield from _read_lines(filesystem, file, rows, lambda line: {TEXT_COLUMN: _decode(line)})
        else:
            tables = {"parquet": _parquet_tables, "csv": _csv_tables, "arrow": _arrow_tables}[file.format]
            yield from _numbered(tables(filesystem, file, rows))
    except InputError:
        raise
    except Exception as error:
        on_hub = filesystem.type_name == "py::fsspec+hf"  # whose client has errors of its own
        if not isinstance(error, (OSError, pa.ArrowException, EOFError)) and not on_hub:
            raise
        raise InputError(f"{file.path} cannot be read as {file.format}: {one_line(error, 300)}") from error


# ---- lines


def _lines(filesystem: fs.FileSystem, file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, without their ends."""
    with filesystem.open_input_stream(file.path, compression="detect", buffer_size=1 << 20) as stream:
        number, rest = 0, b""
        while data := stream.read(1 << 20):
            lines = (rest + bytes(data)).split(b"\n")
            rest = lines.pop()
            for line in lines:
                number += 1
                if line := line.strip(b"\r"):
                    yield number, line
        if rest := rest.strip(b"\r"):
            yield number + 1, rest


def _read_lines(
    filesystem: fs.FileSystem, file: InputFile, rows: int, parse: Callable[[bytes], dict[str, Any]]
) -> Iterator[Chunk]:
    lines = _lines(filesystem, file)
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
        # A table without columns has no rows either.
        table = pa.table(columns) if columns else pa.table({TEXT_COLUMN: pa.nulls(len(some), pa.string())})
        yield Chunk(table, [number for number, _ in some], problems)


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


# ---- tables


def _parquet_tables(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[pa.Table]:
    with filesystem.open_input_file(file.path) as stream:
        parquet = pa.parquet.ParquetFile(stream)
        _refuse_twins(file, parquet.schema_arrow.names)
        for batch in parquet.iter_batches(batch_size=rows):
            yield _decoded(pa.Table.from_batches([batch]))


def _arrow_tables(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[pa.Table]:
    with filesystem.open_input_file(file.path) as stream:
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE  # or a stream, as datasets are saved
        stream.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream) as reader:
            _refuse_twins(file, reader.schema.names)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, batch.num_rows, rows):
                    yield _decoded(pa.Table.from_batches([batch.slice(start, rows)]))


def _csv_tables(filesystem: fs.FileSystem, file: InputFile, rows: int) -> Iterator[pa.Table]:
    """Every value stays the text it is: a CSV has no types, and guessing them turns `007` into 7."""
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    if file.size == 0:
        return
    with filesystem.open_input_stream(file.path, compression="detect") as stream:
        names = pa.csv.open_csv(stream, parse_options=parse).schema.names
    _refuse_twins(file, names)
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with filesystem.open_input_stream(file.path, compression="detect") as stream:
        for batch in pa.csv.open_csv(stream, parse_options=parse, convert_options=convert):
            for start in range(0, batch.num_rows, rows):
                yield pa.Table.from_batches([batch.slice(start, rows)])


def _refuse_twins(file: InputFile, names: list[str]) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise InputError(f"{file.path} has several columns named {', '.join(map(repr, twins))}")


def _numbered(tables: Iterator[pa.Table]) -> Iterator[Chunk]:
    first = 1
    for table in tables:
        if table.num_rows:
            yield Chunk(table, list(range(first, first + table.num_rows)))
            first += table.num_rows


def _decoded(table: pa.Table) -> pa.Table:
    """Without dictionary encoding and schema metadata, which differ from file to file."""
    for index, one in enumerate(table.schema):
        if pa.types.is_dictionary(one.type):
            table = table.set_column(index, one.name, table.column(index).cast(one.type.value_type))
    return table.replace_schema_metadata(None)
