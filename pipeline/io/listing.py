"""The files of an input: behind a path, a folder, a pattern or a URI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from pyarrow import fs

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.files import Location, locate
from pipeline.io.hf_datasets import HUB, dataset_files
from pipeline.io.path_patterns import is_pattern, pattern_base, pattern_regex
from pipeline.io.reading_config import Format

_SUFFIXES: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "csv": (".csv",),
    "text": (".txt", ".text"),
    "arrow": (".arrow",),
}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")


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
    """The files of an input, sorted by path.

    Args:
        filesystem: Where all of them are.
        files: The files.
    """

    filesystem: fs.FileSystem
    files: tuple[InputFile, ...]

    @property
    def of_json(self) -> bool:
        """Whether the files hold JSON; all of an input's files have one format."""
        return any(file.format == "jsonl" for file in self.files)


def list_input(uri: str, format: str = "auto", split: str | None = None, subset: str | None = None) -> InputListing:
    """List the files of an input.

    In folders and patterns, files whose path has a part that begins with `.` or `_` are left out.

    Args:
        uri: The input: a path, a folder, a pattern or a URI.
        format: Format of its files, or `auto`.
        split: Which split of a Hugging Face dataset.
        subset: Which subset of a Hugging Face dataset.

    Raises:
        InputError: The input does not exist, holds no file that can be read, or its names do not tell their format.
    """
    wanted = "jsonl" if format == "openai" else format
    found = _find(uri)
    of_split = _split_files(uri, found, split, subset)
    files = []
    for name, info in found.files.items():
        if of_split is not None and name not in of_split:
            continue
        guess = format_of(name)
        chosen = guess if wanted == "auto" else wanted
        may_be_folder = info.type == fs.FileType.NotFound and "." not in info.base_name
        if found.is_folder and of_split is None and (guess is None or guess != chosen) and not may_be_folder:
            continue  # a folder may hold other files beside its data
        if info.type != fs.FileType.File:
            what = "is a link to nothing" if info.type == fs.FileType.NotFound else "is neither a file nor a folder"
            raise InputError(f"input {info.path} {what}: put the file there, or take the name away")
        if chosen is None:
            raise InputError(f"the name of input {info.path} does not tell its format: set reading.format")
        files.append(InputFile(info.path, name, info.size, chosen))  # type: ignore[arg-type]
    if not files:
        suffixes = [suffix for one, some in _SUFFIXES.items() if wanted in ("auto", one) for suffix in some]
        looked = f"holds no readable file (looked for {', '.join(suffixes)})"
        raise InputError(f"input {uri} {looked if found.is_folder else 'matches no file'}")
    formats = sorted({file.format for file in files})
    if found.is_folder and len(formats) > 1:
        raise InputError(f"input {uri} holds files of several formats ({', '.join(formats)}): set reading.format")
    return InputListing(found.root.filesystem, tuple(files))


def format_of(name: str) -> Format | None:
    """Return a file's format by its name; None if the name does not tell."""
    lower = name.lower()
    for compression in _COMPRESSIONS:
        lower = lower.removesuffix(compression)
    return next((found for found, suffixes in _SUFFIXES.items() if lower.endswith(suffixes)), None)


@dataclass(frozen=True)
class _Found:
    """What stands at an input's path.

    Args:
        root: The file, or the folder.
        is_folder: Whether a folder was asked for, and not a file or a pattern.
        files: Files by their path below the folder, sorted by path, without hidden ones.
    """

    root: Location
    is_folder: bool
    files: dict[str, fs.FileInfo]


def _find(uri: str) -> _Found:
    by_pattern = is_pattern(uri) and not _exists(uri)
    root = locate(pattern_base(uri) if by_pattern else uri)
    with _errors_name(uri):
        info = root.info
        if info.type == fs.FileType.NotFound:
            raise InputError(f"input {uri} does not exist")
        if info.type == fs.FileType.File:
            return _Found(root, False, {root.name: info})
        if info.type != fs.FileType.Directory:
            raise InputError(f"input {uri} is neither a file nor a folder")
        infos = _below(root)
    pattern = pattern_regex(locate(uri).path) if by_pattern else None
    files = {}
    for info in sorted(infos, key=lambda info: str(info.path)):
        name = str(info.path[len(root.path) :].lstrip("/"))
        hidden = any(part[0] in "._" for part in name.split("/"))
        if info.type != fs.FileType.Directory and not hidden and (pattern is None or pattern.fullmatch(info.path)):
            files[name] = info
    return _Found(root, not by_pattern, files)


def _below(root: Location) -> list[fs.FileInfo]:
    """List everything below a folder, and what links lead to.

    On a local disk, pyarrow leaves out links that lead nowhere, and follows those in a circle again and again.

    Raises:
        InputError: Links lead in a circle.
        OSError: A folder cannot be read.
    """
    if not isinstance(root.filesystem, fs.LocalFileSystem):
        return list(root.filesystem.get_file_info(fs.FileSelector(root.path, recursive=True)))

    def refuse(error: OSError) -> NoReturn:
        raise error

    paths: list[str] = []
    for folder, folders, files in os.walk(root.path, onerror=refuse, followlinks=True):
        # Names that begin so are left out, and need not be readable.
        folders[:] = [name for name in folders if name[0] not in "._"]
        for name in folders:
            path = os.path.join(folder, name)
            if os.path.islink(path) and f"{os.path.realpath(folder)}/".startswith(f"{os.path.realpath(path)}/"):
                raise InputError(f"input {path} is a link to a folder that it is in: its rows would have no end")
        paths += [os.path.join(folder, name) for name in files]
    return list(root.filesystem.get_file_info(paths))


def _exists(uri: str) -> bool:
    """Whether a local path exists: names of files may look like patterns."""
    return "://" not in uri and locate(uri).type != fs.FileType.NotFound


def _split_files(uri: str, found: _Found, split: str | None, subset: str | None) -> set[str] | None:
    """Names of the files of a dataset's split; None where a folder is no more than its files."""
    if not found.is_folder:
        if split is not None or subset is not None:
            raise InputError(f"input {uri} is not a dataset's folder: leave out reading.split and reading.subset")
        return None
    there = [name for name, info in found.files.items() if info.type == fs.FileType.File or format_of(name)]
    with _errors_name(uri):
        names = dataset_files(uri, found.root, there, split, subset)
    return None if names is None else set(names)


@contextmanager
def _errors_name(uri: str) -> Iterator[None]:
    """Turn an error from reading a folder into one that names the input."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # The hub's client raises errors of its own. Elsewhere these four come from files that only look like a dataset.
        if not uri.startswith(HUB) and not isinstance(error, (OSError, ValueError, LookupError, TypeError)):
            raise
        raise InputError(f"input {uri} cannot be listed: {one_line(error)}") from error
