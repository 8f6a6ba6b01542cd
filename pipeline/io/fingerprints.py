"""Fingerprints of input files: enough of their content to tell them from others, without reading large files whole."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drafter.errors import one_line
from pipeline.errors import InputError
from pipeline.io.listing import InputFile, InputListing

_SAMPLE_BYTES = 1 << 20
_READERS = 16


def input_fingerprints(listing: InputListing) -> list[list[Any]]:
    """Return each file's name, its size, and 16 hex digits for a sample of its content.

    Raises:
        InputError: A file cannot be read.
    """

    def fingerprint(one: InputFile) -> list[Any]:
        try:
            with listing.filesystem.open_input_file(one.path) as file:
                return [one.name, one.size, hashlib.sha256(_sample(file, one.size)).hexdigest()[:16]]
        except OSError as error:
            raise InputError(f"input {one.path} cannot be read: {one_line(error)}") from error

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(fingerprint, listing.files))


def _sample(file: Any, size: int) -> bytes:
    """Read all of a file of up to 2 MiB; of a larger one the first and the last MiB."""
    if size <= 2 * _SAMPLE_BYTES:
        return bytes(file.read())
    beginning = bytes(file.read(_SAMPLE_BYTES))
    file.seek(size - _SAMPLE_BYTES)
    return beginning + bytes(file.read())
