"""Files that rows name, such as images: read below folders that the operator has named, and nowhere else.

A row may come from anybody. It makes no file system, whose address could send the operator's credentials to any host:
what it names is read by the file system of the folder that it lies in.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from pyarrow import fs

from drafter.errors import RequestError, one_line
from drafter.images.opening import refuse_large
from pipeline.io.files import Location, locate, locate_input

_SAME = {"file": "", "gcs": "gs", "abfss": "abfs"}  # schemes by other names; that of local paths is empty
_ROOTS = {"s3": 1, "gs": 1, "abfs": 1, "hf": 3}  # parts of a path that are a bucket, a container or a repository
_HUB = "hf"


@dataclass(frozen=True)
class NamedFolder:
    """A folder whose files rows may name: `place`, at addresses of this scheme."""

    scheme: str
    place: Location

    def holds(self, path: str) -> bool:
        """Return whether a path without links and `..` lies in the folder."""
        root = os.path.realpath(self.place.path) if not self.scheme else self.place.path.rstrip("/")
        return path.startswith(f"{root.rstrip('/')}/")


def scheme_of(address: str) -> str:
    """Return the scheme of an address; an empty one for a local path."""
    scheme = address.partition("://")[0].lower() if "://" in address else ""
    return _SAME.get(scheme, scheme)


def named_folder(uri: str) -> NamedFolder:
    """Return a folder that an operator names; raise `InputError` if it cannot be opened."""
    return NamedFolder(scheme_of(uri), locate(uri))


def folder_of_input(uri: str) -> NamedFolder:
    """Return the folder of an input: its own, that of its file, or in a store all of its bucket."""
    (place, _), scheme = locate_input(uri), scheme_of(uri)
    parts = _ROOTS.get(scheme)
    if parts is not None:
        place = Location(place.filesystem, "/".join(place.path.split("/")[:parts]))
    elif place.type == fs.FileType.File:
        place = place.parent
    return NamedFolder(scheme, place)


def full_address(source: str, file: str, scheme: str) -> str:
    """Return the address of what a row of a file names by a path from there, or by an address."""
    if "://" in source or (scheme and source.startswith("/")):
        return source
    path = posixpath.join(posixpath.dirname(file), source)
    return f"{scheme}://{path}" if scheme else path


def read_named(address: str, folders: Sequence[NamedFolder], most: int) -> bytes:
    """Return the content of a file that a row names, of at most `most` bytes.

    Raises `RequestError` if it is in none of the folders, cannot be read, or is larger.
    """
    with _errors_said():
        folder, path = _found(address, folders)
        if not folder.scheme:
            with os.fdopen(_opened(path, folder), "rb") as stream:
                return bytes(refuse_large(stream.read(most + 1), most))
        info = folder.place.filesystem.get_file_info(path)
        if info.type != fs.FileType.File:
            raise RequestError("there is no such file")
        if info.size is not None and info.size > most:
            raise RequestError(f"it has {info.size:,} bytes, and {most:,} are the limit")
        with folder.place.filesystem.open_input_stream(path, compression=None) as stream:
            return bytes(refuse_large(stream.read(most + 1), most))


def state_of(address: str, folders: Sequence[NamedFolder]) -> str:
    """Return what is another once a file's content is: size and times, of which a store has one. Raises `RequestError`.

    A local file's second time cannot be set back.
    """
    with _errors_said():
        folder, path = _found(address, folders)
        if not folder.scheme:
            status = os.stat(path)
            return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
        info = folder.place.filesystem.get_file_info(path)
        return f"{info.size}:{info.mtime_ns}"


def _found(address: str, folders: Sequence[NamedFolder]) -> tuple[NamedFolder, str]:
    """Return the folder that an address lies in, and its path there, without links."""
    scheme, path = scheme_of(address), address
    if "://" in address:
        path = address.partition("://")[2]
        if "?" in path or "@" in path.partition("/")[0]:
            raise RequestError("an address in a row has no query, user or password")
        path = path if scheme == _HUB else unquote(path)
    if not scheme and not path.startswith("/"):
        raise RequestError("it is a path from a folder, and there is none here: give all of the path")
    path = os.path.realpath(path) if not scheme else posixpath.normpath(path)
    for folder in folders:
        if folder.scheme == scheme and folder.holds(path):
            return folder, path
    raise RequestError(
        "it is not in the input's folder, and rows name no others: add its folder to images.folders if it may"
    )


def _opened(path: str, folder: NamedFolder) -> int:
    """Open a regular file, and close it again unless it lies in the folder: a link may have taken its place."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # others, such as a pipe, might do something as they are opened
        raise RequestError("there is no such file")
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode) or not folder.holds(os.readlink(f"/proc/self/fd/{opened}")):
            raise RequestError("it is being replaced")
    except BaseException:
        os.close(opened)
        raise
    return opened


@contextmanager
def _errors_said() -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except (OSError, ValueError) as error:  # of an address that leads nowhere, or has a null byte
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise RequestError("there is no such file") from error
        raise RequestError(f"it cannot be read: {one_line(error, 200)}") from error
