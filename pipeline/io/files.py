"""Files on any file system: local paths and URIs through `pyarrow.fs`, and patterns (`*`, `?`, `[…]`, `**`)."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet
from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError

_WILDCARD = re.compile(r"[*?\[]")
_TOKENS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", flags=re.DOTALL)


def split_query(uri: str) -> tuple[str, str]:
    """Split a URI before its first `?`, which is no wildcard there; a path has no query."""
    if "://" not in uri:
        return uri, ""
    path, mark, query = uri.partition("?")
    return path, mark + query


def address_below(folder: str, name: str) -> str:
    """Return the address of a path below a folder's address, whose query stays at the end; `~` becomes the home."""
    path, query = split_query(folder)
    if "://" not in path:
        path = os.path.expanduser(path)
    return f"{path.rstrip('/')}/{name}{query}"


def is_pattern(uri: str) -> bool:
    return _WILDCARD.search(split_query(uri)[0]) is not None


def pattern_base(pattern: str) -> str:
    """Return the folder before a pattern's first wildcard; without a slash before it, the working directory."""
    path, query = split_query(pattern)
    first = _WILDCARD.search(path)
    assert first is not None
    folder, slash, _ = path[: first.start()].rpartition("/")
    return (folder or slash or ".") + query


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Translate a pattern to a regular expression (`glob.translate` does this from Python 3.13 on), or `InputError`."""
    translated = ""
    for token in _TOKENS.findall(pattern):
        if token == "**/":
            translated += "(?:.*/)?"
        elif token == "**":
            translated += ".*"
        elif token == "*":
            translated += "[^/]*"
        elif token == "?":
            translated += "[^/]"
        elif len(token) > 1:
            inside = re.sub(r"[\\[]", r"\\\g<0>", token[1:-1])
            translated += "[" + inside.replace("!", "^", token[1] == "!") + "]"
        else:
            translated += re.escape(token)
    try:
        return re.compile(translated, flags=re.DOTALL)
    except re.error as error:
        why = f"{error.msg}; a bracket that is meant itself is written [[]"
        raise InputError(f"{pattern} is no pattern of files: {why}") from error


_GOOGLE = ("gs://", "gcs://")
_RETRY_SECONDS = 10
_OBJECT_STORES = ("s3", "gcs", "abfs")
_READERS = 64  # an object store answers after some tens of milliseconds, and a large job has ten thousands of footers
_COPY_BYTES = 8 << 20
_COPY = ".copy"
_PARTIAL = ".partial"
_PARQUET_MARK = b"PAR1"
_FOOTER_BYTES = 64 << 10  # covers most files' footers; a longer one needs a second read
_NOTHING_TO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # of mounted stores that cannot sync, above all folders

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Location:
    """An absolute path, with `/` between parts, on one of pyarrow's file systems; it can be sent to workers."""

    filesystem: fs.FileSystem
    path: str

    def __truediv__(self, name: str) -> Location:
        return Location(self.filesystem, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return Location(self.filesystem, self.path.rstrip("/").rpartition("/")[0] or "/")

    @property
    def info(self) -> fs.FileInfo:
        return self.filesystem.get_file_info(self.path)

    @property
    def type(self) -> fs.FileType:
        return self.info.type

    @property
    def exists(self) -> bool:
        return bool(self.type == fs.FileType.File)

    def children(self) -> list[fs.FileInfo]:
        found = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return sorted(found, key=lambda info: str(info.path))

    def parquets(self) -> dict[str, fs.FileInfo]:
        """Return a folder's Parquet files by their names without suffix, sorted."""
        files = [info for info in self.children() if info.path.endswith(".parquet")]
        return {info.base_name.removesuffix(".parquet"): info for info in files}

    def read_text(self) -> str:
        with self.filesystem.open_input_stream(self.path, compression=None) as stream:
            return bytes(stream.readall()).decode("utf-8")

    def read_parquet(self, columns: list[str] | None = None) -> pa.Table:
        with self.filesystem.open_input_file(self.path) as stream:
            return pa.parquet.ParquetFile(stream).read(columns)

    def write_parquet(self, table: pa.Table, aside: Location | None = None) -> None:
        with self.open_whole(aside) as stream:
            pa.parquet.write_table(table, stream, compression="zstd")

    def write_text(self, text: str) -> None:
        """Write a small UTF-8 file atomically; of two concurrent writers one wins."""
        with self.open_whole() as stream:
            stream.write(text.encode("utf-8"))

    def make_folder(self) -> None:
        if self.type != fs.FileType.Directory:
            self.filesystem.create_dir(self.path, recursive=True)
            sync(self.parent)

    def empty(self, first: str) -> None:
        """Delete the folder's contents, first the file `first`, which describes the rest."""
        if (self / first).type == fs.FileType.File:
            self.filesystem.delete_file((self / first).path)
        self.filesystem.delete_dir_contents(self.path, missing_dir_ok=True)

    def delete(self) -> None:
        if self.exists:
            self.filesystem.delete_file(self.path)

    def copy_to(self, file: Path) -> None:
        with self.filesystem.open_input_stream(self.path, compression=None) as source, file.open("wb") as stream:
            shutil.copyfileobj(source, stream, _COPY_BYTES)

    def copy_from(self, file: Path) -> None:
        with file.open("rb") as source, self.open_whole() as stream:
            shutil.copyfileobj(source, stream, _COPY_BYTES)

    @contextmanager
    def open_whole(self, aside: Location | None = None) -> Iterator[Any]:
        """Open a stream of bytes to a file that appears complete or not at all.

        A file system writes under another name and renames. Object stores have no rename, but an object appears only
        once complete: its bytes are collected first and sent at once.

        Args:
            aside: Temporary file on a file system; by default beside the file. Concurrent writers of the file must use
                different ones. It is deleted on failure.
        """
        if self.filesystem.type_name in _OBJECT_STORES:
            with tempfile.TemporaryFile() as collected:
                yield collected
                collected.seek(0)
                with self.filesystem.open_output_stream(self.path, compression=None) as stream:
                    shutil.copyfileobj(collected, stream, _COPY_BYTES)
            return
        partial = aside or Location(self.filesystem, f"{self.path}.{uuid.uuid4().hex[:8]}{_PARTIAL}")
        try:
            with self.filesystem.open_output_stream(partial.path, compression=None) as stream:
                yield stream
            sync(partial)
            self.filesystem.move(partial.path, self.path)
        except BaseException:
            with suppress(OSError):  # what went wrong before is what matters
                partial.delete()
            raise
        sync(self.parent)


def sync(place: Location) -> None:
    """Wait until a file's bytes, or a folder's entries, are on a local disk; other file systems are left alone."""
    if not isinstance(place.filesystem, fs.LocalFileSystem):
        return
    opened = os.open(place.path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOTHING_TO_SYNC:
            raise
    finally:
        os.close(opened)


def write_twice(file: Location, values: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a small, irreplaceable JSON file and a copy of it; see `read_either`."""
    text = json.dumps(values, indent=indent, ensure_ascii=False) + "\n"
    _copy_of(file).write_text(text)
    file.write_text(text)


def read_either(file: Location, keys: Collection[str]) -> dict[str, Any]:
    """Read a file of `write_twice` with these keys; `ValueError` if it is damaged, and its copy damaged or missing."""
    try:
        return _parsed(file.read_text(), keys)
    except ValueError as damage:
        try:
            return _parsed(_copy_of(file).read_text(), keys)
        except (FileNotFoundError, ValueError):
            raise ValueError(f"{file.path} is damaged ({one_line(damage)})") from damage


def mend(file: Location, keys: Collection[str]) -> None:
    """Restore a damaged file of `write_twice` from an intact copy."""
    try:
        _parsed(file.read_text(), keys)
    except ValueError:
        text = _copy_of(file).read_text()
        _parsed(text, keys)
        file.write_text(text)


def _parsed(text: str, keys: Collection[str]) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict) or not values.keys() >= set(keys):
        raise ValueError("it is not what a job wrote")
    return values


def is_copy(name: str, of: str) -> bool:
    """Return whether a name is that of the copy of a file `of`, or of an incomplete write of either."""
    return name == f"{of}{_COPY}" or (name.startswith(of) and name.endswith(_PARTIAL))


def partials(folder: Location) -> list[Location]:
    """Return the partially written files in a folder. Those of dead processes may be deleted."""
    return [folder / info.base_name for info in folder.children() if info.path.endswith(_PARTIAL)]


def partials_of(file: Location) -> list[Location]:
    """Return the incomplete writes of a file."""
    return [one for one in partials(file.parent) if one.name.startswith(file.name)]


def parquet_rows(file: Location) -> int | None:
    """Return the row count in a Parquet file's footer; None if the file is missing or incomplete.

    The footer is written last, so a file that has one is complete. `OSError` if the file exists and cannot be read.
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
        # Parsed separately from reading: an error of the store proves nothing about the file.
        footer = pa.BufferReader(_PARQUET_MARK + end[-length:])
        return int(pa.parquet.ParquetFile(footer).metadata.num_rows)
    except (OSError, pa.ArrowException):
        return None


def _copy_of(file: Location) -> Location:
    return Location(file.filesystem, f"{file.path}{_COPY}")


def make_folders(output: Location, folders: Sequence[Location], probe_in: Location, what: str = "output") -> None:
    """Make the folders of an output and write a test file to `probe_in`; raise `InputError` if that fails."""
    try:
        for folder in folders:
            folder.make_folder()
        probe = probe_in / f"probe-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.filesystem.delete_file(probe.path)
    except OSError as error:
        raise InputError(f"{what} {output.path} cannot be written to: {one_line(error)}") from error


def in_parallel(read: Callable[[S], T], files: Iterable[S]) -> list[T]:
    """Read files in threads, and return the results in order."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, files))


def batches(
    items: Iterable[T], size: Callable[[T], int], most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield consecutive items, in batches that end with the item that reaches `most_bytes`, or at `most` items."""
    held: list[T] = []
    total = 0
    for item in items:
        held.append(item)
        total += size(item)
        if total >= most_bytes or len(held) == most:
            yield held
            held, total = [], 0
    if held:
        yield held


def locate(uri: str) -> Location:
    """Find a local path, or a URI such as `s3://bucket/folder`; `InputError` if pyarrow cannot open it."""
    if "://" not in uri:
        return Location(fs.LocalFileSystem(), str(Path(uri).expanduser().absolute()))
    # By default pyarrow has 25 connections to a store at most.
    pa.set_io_thread_count(max(pa.io_thread_count(), _READERS))
    try:
        path, query = split_query(uri)
        if uri.startswith(_GOOGLE) and "retry_limit_seconds" not in query:  # by default, a quarter of an hour
            query = f"{query or '?'}&retry_limit_seconds={_RETRY_SECONDS}"
        plain = uri.startswith("hf://")  # the hub's client takes paths as they are, without URI quoting
        filesystem, path = fs.FileSystem.from_uri(uri if plain else quote(path, safe="/:@%") + query)
    except (OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{uri} cannot be opened: {one_line(error)}") from error
    return Location(filesystem, path)


def locate_input(uri: str) -> tuple[Location, bool]:
    """Return the place of an input, of a pattern the folder that all of it lies in, and whether it is one."""
    by_pattern = is_pattern(uri) and ("://" in uri or locate(uri).type == fs.FileType.NotFound)
    return locate(pattern_base(uri) if by_pattern else uri), by_pattern


def local_path(name: str) -> str:
    """Return the absolute path of what is on this machine, since workers run in other folders; other names as given."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name
