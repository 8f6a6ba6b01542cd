"""Files wherever they are: local paths and URIs through `pyarrow.fs`."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError

_GLOB = re.compile(r"[*?\[]")
_OBJECT_STORES = ("s3", "gcs", "abfs")
_COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class Location:
    """A path on a file system.

    Args:
        filesystem: Any of pyarrow's; may travel to workers.
        path: Absolute, `/` between parts.
    """

    filesystem: fs.FileSystem
    path: str

    def __truediv__(self, name: str) -> Location:
        return Location(self.filesystem, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def info(self) -> fs.FileInfo:
        """What the file system knows of it."""
        return self.filesystem.get_file_info(self.path)

    @property
    def type(self) -> fs.FileType:
        """Whether there is a file, a folder, or nothing."""
        return self.info.type

    def children(self) -> list[fs.FileInfo]:
        """What a folder holds, by name; nothing where there is no folder."""
        found = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return sorted(found, key=lambda info: str(info.path))

    def read_text(self) -> str:
        """Content of a small UTF-8 file."""
        with self.filesystem.open_input_stream(self.path, compression=None) as stream:
            return bytes(stream.readall()).decode("utf-8")

    def write_text(self, text: str) -> None:
        """Write a small UTF-8 file as a whole or not at all."""
        with self.open_whole() as stream:
            stream.write(text.encode("utf-8"))

    def copy_from(self, file: Path) -> None:
        """Copy a local file here, as a whole or not at all."""
        with file.open("rb") as source, self.open_whole() as stream:
            shutil.copyfileobj(source, stream, _COPY_BYTES)

    @contextmanager
    def open_whole(self, aside: Location | None = None) -> Iterator[Any]:
        """A stream of bytes to a file that appears as a whole when all is written, or not at all.

        On a file system it is written aside and takes its place by one rename. Object stores have no rename, only
        copies, but an object appears by itself when all of it has arrived: so it is collected first, and put at once.

        Args:
            aside: Where to write it until then; by default beside it.
        """
        if self.filesystem.type_name in _OBJECT_STORES:
            with tempfile.TemporaryFile() as collected:
                yield collected
                collected.seek(0)
                with self.filesystem.open_output_stream(self.path, compression=None) as stream:
                    shutil.copyfileobj(collected, stream, _COPY_BYTES)
            return
        partial = f"{self.path}.partial" if aside is None else aside.path
        with self.filesystem.open_output_stream(partial, compression=None) as stream:
            yield stream
        self.filesystem.move(partial, self.path)


def make_folders(output: Location, folders: Sequence[Location], probe_in: Location) -> None:
    """Make the folders of an output, and see that one can write there.

    Args:
        output: What was asked for.
        folders: In it.
        probe_in: Where to try.

    Raises:
        InputError: They cannot be made or written to.
    """
    try:
        for folder in folders:
            folder.filesystem.create_dir(folder.path, recursive=True)
        probe = probe_in / f"probe-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.filesystem.delete_file(probe.path)
    except OSError as error:
        raise InputError(f"output {output.path} cannot be written to: {one_line(error)}") from error


def locate(uri: str) -> Location:
    """A local path, or a URI such as `s3://bucket/folder`.

    Raises:
        InputError: A URI that pyarrow cannot open.
    """
    if "://" not in uri:
        return Location(fs.LocalFileSystem(), str(Path(uri).expanduser().absolute()))
    try:
        path, query = split_query(uri)
        plain = uri.startswith("hf://")  # the hub's paths are no parts of a URI
        filesystem, path = fs.FileSystem.from_uri(uri if plain else quote(path, safe="/:@%") + query)
    except (OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{uri} cannot be opened: {one_line(error)}") from error
    return Location(filesystem, path)


def split_query(uri: str) -> tuple[str, str]:
    """A path, or a URI in two: up to its first `?`, which is no wildcard there, and the rest."""
    if "://" not in uri:
        return uri, ""
    path, mark, query = uri.partition("?")
    return path, mark + query


def has_glob(uri: str) -> bool:
    """Whether a path has `*`, `?` or `[…]` in it."""
    return _GLOB.search(split_query(uri)[0]) is not None


def glob_base(pattern: str) -> str:
    """The folder above a pattern's first wildcard."""
    path, query = split_query(pattern)
    first = _GLOB.search(path)
    assert first is not None
    return (path[: first.start()].rpartition("/")[0] or "/") + query


def glob_regex(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regular expression: `**` spans folders, `*`, `?` and `[…]` stay within a name."""
    translated = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", pattern, flags=re.DOTALL):
        if token == "**/":
            translated += "(?:.*/)?"
        elif token == "**":
            translated += ".*"
        elif token == "*":
            translated += "[^/]*"
        elif token == "?":
            translated += "[^/]"
        elif len(token) > 1:
            translated += "[" + token[1:-1].replace("\\", r"\\").replace("!", "^", token[1] == "!") + "]"
        else:
            translated += re.escape(token)
    return re.compile(translated, flags=re.DOTALL)
