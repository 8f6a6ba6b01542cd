"""Input: its files, and where a row has its prompt."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset
from pyarrow import fs

from drafter.errors import one_line
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.io.apart import Apart
from pipeline.io.column_types import is_list, is_text
from pipeline.io.files import Location, in_parallel, locate, locate_input, pattern_regex
from pipeline.io.reading import COMPRESSIONS, HUB_FILES, InputFile, read_file, read_through
from pipeline.io.splits import METADATA, UNREAD, refuse_missing_shards, split_files
from pipeline.settings import SAMPLING_COLUMN, Format, ReadingConfig

_SAMPLE_BYTES = 1 << 20
_HASH_BYTES = 4 << 20


def input_fingerprints(listing: InputListing) -> list[list[Any]]:
    """Return each file's name, size, and 16 hex digits for its content, or raise `InputError`.

    A large file of a store is known by a sample, and by the time or the number that the store gives each content.
    """

    def fingerprint(one: InputFile) -> list[Any]:
        try:
            return [one.name, one.size, _content(listing.filesystem, one).hexdigest()[:16]]
        except OSError as error:
            raise InputError(f"input {one.path} cannot be read: {one_line(error)}") from error

    return in_parallel(fingerprint, listing.files)


def _content(filesystem: fs.FileSystem, one: InputFile) -> Any:
    with filesystem.open_input_file(one.path) as file:
        if isinstance(filesystem, fs.LocalFileSystem) or one.size <= 2 * _SAMPLE_BYTES:
            content = hashlib.sha256()
            while data := file.read(_HASH_BYTES):
                content.update(data)
            return content
        content = hashlib.sha256(file.read(_SAMPLE_BYTES))
        file.seek(one.size - _SAMPLE_BYTES)
        content.update(file.read())
    changed = filesystem.get_file_info(one.path).mtime_ns
    if changed is None and isinstance(filesystem, fs.PyFileSystem):
        changed = filesystem.handler.fs.info(one.path).get("blob_id")  # the hub's
    content.update(str(changed).encode())
    return content


_SUFFIXES: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json", ".jsonlines", ".jl"),
    "parquet": (".parquet", ".pq", ".parq"),
    "csv": (".csv", ".tsv"),
    "text": (".txt", ".text"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
_UNREADABLE = (".xz", ".zip", ".br", ".7z", ".lzma")
"""Compressions of files that would otherwise be missed without a word among others of a folder."""
_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi", "metadata": "Iceberg"}
_ICEBERG = re.compile(r"(?:(.*)/)?metadata/[^/]*\.metadata\.json")
_MOST_FOLDERS = 100_000
_EXAMPLES = 3


@dataclass(frozen=True)
class InputListing:
    """The files of an input, sorted by path. All have one format."""

    filesystem: fs.FileSystem
    files: tuple[InputFile, ...]

    @property
    def of_json(self) -> bool:
        return any(file.format == "jsonl" for file in self.files)

    @property
    def of_arrays(self) -> bool:
        """Whether a damaged file may crash the process that reads it."""
        return any(file.format in ("parquet", "arrow") for file in self.files)


@dataclass(frozen=True)
class _Found:
    # The input's root, its files by their path below it, without hidden ones, and the folders of tables with a log.
    root: Location
    is_folder: bool
    files: dict[str, fs.FileInfo]
    tables: dict[str, str]


def list_input(uri: str, format: str = "auto", split: str | None = None, subset: str | None = None) -> InputListing:
    """List the files of an input, without those that have a path part that begins with `.` or `_`.

    A line on stderr names files of a folder that are left out.

    Raises:
        InputError: The input does not exist, holds no readable file, or its names do not tell their format.
    """
    wanted = "jsonl" if format == "openai" else format
    with _errors_name(uri):
        found = _find(uri)
        there = [name for name, info in found.files.items() if info.type == fs.FileType.File or format_of(name)]
        meant = set(there)
        if found.is_folder:
            data = [name for name in there if name.rpartition("/")[2] not in METADATA and format_of(name)]
            of_split = split_files(uri, found.root, there, data, split, subset)
            meant = set(data if of_split is None else of_split)
        elif split is not None or subset is not None:
            raise InputError(f"input {uri} is not a dataset's folder: leave out reading.split and reading.subset")
        files, left_out = _chosen(found, meant, wanted)
        if found.is_folder:
            refuse_missing_shards(uri, [file.name for file in files])
        _refuse_tables(uri, found, [file.name for file in files])
        folders = _folder_columns([file.name for file in files])
    files = [replace(file, folders=folders.get(file.name, ())) for file in files]
    if not files:
        suffixes = [suffix for one, some in _SUFFIXES.items() if wanted in ("auto", one) for suffix in some]
        looked = f"holds no readable file (looked for {', '.join(suffixes)})"
        raise InputError(f"input {uri} {looked if found.is_folder else 'matches no file'}")
    formats = sorted({file.format for file in files})
    if found.is_folder and len(formats) > 1:
        raise InputError(f"input {uri} holds files of several formats ({', '.join(formats)}): set reading.format")
    if left_out:
        more = f", and {len(left_out) - _EXAMPLES} more" if len(left_out) > _EXAMPLES else ""
        say(f"input {uri}: left out, as no {formats[0]} by name: {', '.join(left_out[:_EXAMPLES])}{more}")
    return InputListing(found.root.filesystem, tuple(files))


def _chosen(found: _Found, meant: Collection[str], wanted: str) -> tuple[list[InputFile], list[str]]:
    # The files that are read, and the names of those that are left out.
    files, left_out = [], []
    for name, info in found.files.items():
        guess = format_of(name)
        chosen = guess if wanted == "auto" else wanted
        may_be_folder = info.type == fs.FileType.NotFound and "." not in info.base_name
        if found.is_folder and not may_be_folder and (name not in meant or guess != chosen):
            if (guess is None or name in meant) and info.base_name not in METADATA:
                left_out.append(name)
            continue
        if info.type != fs.FileType.File:
            what = "is a link to nothing" if info.type == fs.FileType.NotFound else "is neither a file nor a folder"
            raise InputError(f"input {info.path} {what}: put the file there, or take the name away")
        if name.lower().endswith(_UNREADABLE):
            raise InputError(
                f"input {info.path} cannot be unpacked ({', '.join(COMPRESSIONS)} can): compress it like these"
            )
        if chosen is None:
            raise InputError(f"the name of input {info.path} does not tell its format: set reading.format")
        files.append(InputFile(info.path, name, info.size, chosen))  # type: ignore[arg-type]
    return files, left_out


def read_apart(listing: InputListing) -> None:
    """Raise `InputError` if one of the files cannot be read, or crashes the process that tries."""
    if listing.of_arrays:
        read = Apart(read_through)
        for file in listing.files:
            read(listing.filesystem, file, what=f"input {file.path}")


def format_of(name: str) -> Format | None:
    """Return a file's format by its name; None if the name does not tell."""
    lower = name.lower()
    for compression in (*COMPRESSIONS, *_UNREADABLE):
        lower = lower.removesuffix(compression)
    return next((found for found, suffixes in _SUFFIXES.items() if lower.endswith(suffixes)), None)


def _find(uri: str) -> _Found:
    root, by_pattern = locate_input(uri)
    info = root.info
    if info.type == fs.FileType.NotFound:
        raise InputError(f"input {uri} does not exist")
    if info.type == fs.FileType.File:
        return _Found(root, False, {root.name: info}, {})
    if info.type != fs.FileType.Directory:
        raise InputError(f"input {uri} is neither a file nor a folder")
    pattern = pattern_regex(locate(uri).path) if by_pattern else None
    files, tables = {}, _tables_above(root)
    for info in sorted(_below(root), key=lambda info: str(info.path)):
        name = str(info.path[len(root.path) :]).removeprefix("/")
        *above, last = name.rstrip("/").split("/")
        if last in _LOGS and last != "metadata":
            tables["/".join(above)] = _LOGS[last]
        elif iceberg := _ICEBERG.fullmatch(name):
            tables[iceberg[1] or ""] = _LOGS["metadata"]
        elif name == UNREAD and not by_pattern:
            raise InputError(f"input {uri} declares its splits in {UNREAD}, which is not read: give a pattern")
        hidden = any(part.startswith((".", "_")) for part in (*above, last))
        if info.type == fs.FileType.Directory or hidden or (pattern is not None and not pattern.fullmatch(info.path)):
            continue
        if "" in above:
            raise InputError(f"input {info.path} has nothing between two slashes, and cannot be opened: rename it")
        files[name] = info
    return _Found(root, not by_pattern, files, tables)


def taken_as_input(uri: str, folder: Location, files: Sequence[str]) -> str | None:
    """Return the first of some files that an input would have if they were there, by their paths below a folder."""
    root, by_pattern = locate_input(uri)
    pattern = pattern_regex(locate(uri).path) if by_pattern else None
    for name in files:
        for way in _ways_down(root, folder):
            path = way / name
            hidden = any(part.startswith((".", "_")) for part in path.parts)
            if pattern is None or (not hidden and pattern.fullmatch((root / str(path)).path)):
                return name
    return None


def _ways_down(root: Location, folder: Location) -> list[PurePosixPath]:
    # A folder's paths below another one, as they are given and without links: an input's are followed.
    if not root.filesystem.equals(folder.filesystem):
        return []
    pairs = [(root.path, folder.path)]
    if isinstance(root.filesystem, fs.LocalFileSystem):
        pairs = [(clean(root.path), clean(folder.path)) for clean in (os.path.normpath, os.path.realpath)]
    paths = [(PurePosixPath(above), PurePosixPath(below)) for above, below in pairs]
    return [below.relative_to(above) for above, below in paths if below.is_relative_to(above)]


def _below(root: Location) -> list[fs.FileInfo]:
    if not isinstance(root.filesystem, fs.LocalFileSystem):
        return list(root.filesystem.get_file_info(fs.FileSelector(root.path, recursive=True)))
    # On a local disk, pyarrow leaves out broken links, and follows circular ones again and again.
    paths: list[str] = []
    left: list[tuple[str, frozenset[tuple[int, int]]]] = [(root.path, frozenset())]
    count = 0
    while left:
        folder, above = left.pop()
        status = os.stat(folder)
        here, count = (status.st_dev, status.st_ino), count + 1
        if here in above:
            raise InputError(f"input {folder} is a link to a folder that it is in: its rows would have no end")
        if count > _MOST_FOLDERS:
            raise InputError(
                f"input {root.path} has more than {_MOST_FOLDERS} folders, such as {folder}: give one of them"
            )
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))
                if is_folder and entry.name[0] not in "._":
                    left.append((entry.path, above | {here}))
                elif not is_folder or entry.name in _LOGS:  # other hidden folders need not even be readable
                    paths.append(entry.path)
    return list(root.filesystem.get_file_info(paths))


def _tables_above(root: Location) -> dict[str, str]:
    # A table that the input lies in, as one at the input itself: all of its files are the table's.
    if root.filesystem.type_name == HUB_FILES:  # which has no folder above a repository
        return {}
    above, place = [], root
    while (place := place.parent).path != "/":
        above += [place / log for log in _LOGS]
    with suppress(OSError):  # what lies above may be hidden from us
        for log, info in zip(above, root.filesystem.get_file_info([log.path for log in above]), strict=True):
            if info.type == fs.FileType.Directory and (
                log.name != "metadata" or any(".metadata.json" in one.base_name for one in log.children())
            ):
                return {"": _LOGS[log.name]}
    return {}


def _refuse_tables(uri: str, found: _Found, names: Sequence[str]) -> None:
    logs = {kind: log for log, kind in _LOGS.items()}
    for table, kind in found.tables.items():
        if any(name.startswith(f"{table}/" if table else "") for name in names):
            how = "DeltaTable(path).to_pyarrow_dataset() of deltalake" if kind == "Delta" else f"a reader for {kind}"
            raise InputError(
                f"input {uri} is of a table ({kind}{f', in {table}' if table else ''}), and only its log "
                f"({logs[kind]}) tells which rows are current: write these to Parquet, with {how}, and give that"
            )


def _folder_columns(names: Sequence[str]) -> dict[str, tuple[tuple[str, pa.DataType, Any], ...]]:
    """Return the columns that Hive folders (`lang=en/`) name, with types over all files, as in `pyarrow.dataset`."""
    if not any("=" in name.rpartition("/")[0] for name in names):
        return {}
    hive = pa.dataset.FileSystemFactoryOptions(
        partitioning=pa.dataset.HivePartitioning.discover(), exclude_invalid_files=False
    )
    # No file is opened: their format does not matter.
    some = pa.dataset.FileSystemDatasetFactory(fs.LocalFileSystem(), list(names), pa.dataset.ParquetFileFormat(), hive)
    schema = some.inspect(fragments=0)
    columns = {}
    for fragment in some.finish(schema).get_fragments():
        values = pa.dataset.get_partition_keys(fragment.partition_expression)
        columns[fragment.path] = tuple((field.name, field.type, values.get(field.name)) for field in schema)
    return columns


@contextmanager
def _errors_name(uri: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # The hub's client raises errors of its own. Elsewhere these four come from files that only look like a dataset.
        if not uri.startswith("hf://") and not isinstance(error, (OSError, ValueError, LookupError, TypeError)):
            raise
        raise InputError(f"input {uri} cannot be listed: {one_line(error)}") from error


# Prompts: their column, and its kind.

_ID_COLUMN = "id"
_LOOK_ROWS = 100


@dataclass(frozen=True)
class PromptSource:
    """Location of a row's prompt.

    Args:
        kind: `openai` is the body of an OpenAI request; a `program` makes prompts itself, of all columns of its row.
        id_column: The column that names a row; None where the row's file and line do.
        own_sampling: Whether the first rows bring sampling settings of their own.
        ids_found: Whether `id_column` was detected, not configured.
        images_column: The column of a row's images, beside those in messages.
    """

    column: str
    kind: Literal["text", "messages", "openai", "program"] = "text"
    id_column: str | None = None
    own_sampling: bool = False
    ids_found: bool = False
    images_column: str | None = None


NAME_ROWS = "set reading.id_column to a column that names each row, or to '' to name rows by file and line"


BATCH = PromptSource("body", "openai", "custom_id", own_sampling=True)


def find_prompts(listing: InputListing, config: ReadingConfig, *, programs: bool = False) -> PromptSource:
    """Find the prompts by the first rows; `InputError` if there are none, or a column is missing or unusable.

    Args:
        programs: Rows are programs, which need no column of a prompt.
    """
    if config.format == "openai":
        return BATCH
    if listing.of_arrays:
        return Apart(_look)(listing, config, programs, what=f"input {listing.files[0].path}")  # type: ignore[no-any-return]
    return _look(listing, config, programs)


def _look(listing: InputListing, config: ReadingConfig, programs: bool) -> PromptSource:
    for file in listing.files:
        for chunk in read_file(listing.filesystem, file, _LOOK_ROWS):
            if not programs and _is_batch(file, chunk.columns.column_names, config):
                return BATCH
            if len(chunk.problems) == len(chunk.numbers):
                problem = chunk.problems[0]
                raise InputError(f"no row at the start of {file.path} can be read: {problem.message}")
            return _choose_source(file, chunk.columns.schema, config, programs)
    raise InputError(f"input has no rows: {', '.join(file.path for file in listing.files[:3])}")


def _is_batch(file: InputFile, columns: list[str], config: ReadingConfig) -> bool:
    given = (config.prompt_column, config.messages_column, config.id_column, config.images_column)
    unset = all(one is None for one in given)
    return config.format == "auto" and file.format == "jsonl" and unset and {"custom_id", "url", "body"} <= {*columns}


def _choose_source(file: InputFile, schema: pa.Schema, config: ReadingConfig, programs: bool) -> PromptSource:
    own = SAMPLING_COLUMN in schema.names
    found = config.id_column is None and _ID_COLUMN in schema.names and _may_be_ids(schema.field(_ID_COLUMN).type)
    ids = _ID_COLUMN if found else config.id_column or None
    messages = config.messages_column
    if messages is None and config.prompt_column is None and "prompt" not in schema.names:
        messages = "messages" if "messages" in schema.names else None
    if programs:
        source = PromptSource("", "program", ids, True, found)
    elif messages is not None:
        source = PromptSource(messages, "messages", ids, own, found, config.images_column)
    else:
        source = PromptSource(config.prompt_column or "prompt", "text", ids, own, found, config.images_column)
    setting = "prompt_column" if messages is None else "messages_column"
    if messages is None and config.prompt_column is None:
        setting += ", or for chats reading.messages_column"
    names = ((source.column, setting), (source.id_column, "id_column"), (source.images_column, "images_column"))
    for column, name in names:
        if column and column not in schema.names:
            raise InputError(
                f"{file.path} has no column {column!r} (it has {', '.join(schema.names)}): set reading.{name}"
            )
    check_types(file, schema, source)
    return source


def check_types(file: InputFile, schema: pa.Schema, source: PromptSource) -> None:
    """Raise `InputError` if a table's columns cannot hold prompts or ids. In files of lines, rows are judged alone."""
    if file.format in ("jsonl", "text"):
        return
    for column in filter(None, (source.column, source.id_column)):
        if column not in schema.names:
            problem = f"{file.path} has no column {column!r} (it has {', '.join(schema.names)})"
            raise InputError(f"{problem}: {NAME_ROWS}" if column == source.id_column else problem)
    kind = schema.field(source.column).type if source.column else pa.null()
    messages = source.kind == "messages" and is_list(kind)
    if not (_is_text(kind) or messages or pa.types.is_null(kind)):
        wanted = "chat messages" if source.kind == "messages" else "text"
        raise InputError(f"column {source.column!r} of {file.path} holds {kind}, not {wanted}")
    if source.id_column is not None and not _may_be_ids(kind := schema.field(source.id_column).type):
        problem = f"column {source.id_column!r} of {file.path} holds {kind}: ids are text or integers"
        raise InputError(f"{problem}: {NAME_ROWS}")


def _may_be_ids(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(pa.types.is_integer(kind) or pa.types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    return is_text(kind) or isinstance(kind, pa.JsonType)
