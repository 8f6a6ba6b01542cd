"""Models' folders: what tells one from another without loading it, and whether a file of weights is whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SUFFIXES = (".json", ".jinja", ".safetensors", ".model", ".txt", ".py")
"""Files of these kinds decide what a model computes, and which texts it is given."""
_TEMPLATES = "additional_chat_templates/*"
"""The only files of a folder's folders that transformers reads. A base with weights in one is refused when it loads."""
_WHOLE_BYTES = 256 << 20
"""A file of up to this size is hashed whole, which takes a fraction of a second."""
_BLOCK, _EVERY = 4 << 10, 1 << 20
"""Of each tensor of a larger file, so many bytes of every so many bytes are hashed."""
_READERS = 16
_BLOCKS_AT_ONCE = 256
_LENGTH_BYTES = 8
"""A file of safetensors begins with the length of its header."""

Span = tuple[int, int]
"""First byte and the one after the last."""


def folder_fingerprint(folder: Path) -> str:
    """Return `v2-` and 16 hex digits for a model's folder: of the names, sizes and contents of its files.

    Files of weights that are too large to be hashed whole are sampled; every tensor takes part.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.iterdir(), *folder.glob(_TEMPLATES)]):
        if path.suffix in _SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(_digest(path))
    return f"v2-{digest.hexdigest()[:16]}"


def file_fingerprint(file: Path) -> str:
    """Return `v2-` and 16 hex digits for what is in a file; a large one is sampled as a model's are."""
    return f"v2-{hashlib.sha256(_digest(file)).hexdigest()[:16]}"


def tensor_spans(file: Any, size: int) -> list[Span]:
    """Return where the tensors of a file of safetensors lie in it.

    Args:
        file: The file, opened at its beginning, as a stream of bytes.
        size: Its size in bytes.

    Raises:
        ValueError: It is no such file, or not all of it is there.
    """
    begin = _LENGTH_BYTES + int.from_bytes(bytes(file.read(_LENGTH_BYTES)), "little")
    if not _LENGTH_BYTES < begin <= size:
        raise ValueError("its header is incomplete")
    header = json.loads(bytes(file.read(begin - _LENGTH_BYTES)))
    try:
        places = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
        spans = sorted((begin + first, begin + end) for first, end in places)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("its header is not that of safetensors") from error
    if max((end for _, end in spans), default=begin) != size:
        raise ValueError(f"it has {size} bytes, and its header says otherwise")
    return spans


def _digest(path: Path) -> bytes:
    """Hash a file: all of it, or its header and blocks of each of its tensors."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        try:
            spans = tensor_spans(file, size)
        except ValueError:  # what loads the model will say what is wrong; until then it is a file like others
            spans = []
        header = spans[0][0] if spans else 0
        digest = hashlib.sha256(os.pread(file.fileno(), header, 0))
        blocks = list(_blocks(spans or [(0, size)]))
        groups = [blocks[first : first + _BLOCKS_AT_ONCE] for first in range(0, len(blocks), _BLOCKS_AT_ONCE)]

        def read(group: list[Span]) -> bytes:
            return b"".join(os.pread(file.fileno(), end - begin, begin) for begin, end in group)

        with ThreadPoolExecutor(_READERS) as pool:
            for content in pool.map(read, groups):
                digest.update(content)
        return digest.digest()


def _blocks(spans: list[Span]) -> Iterator[Span]:
    for begin, end in spans:
        for place in range(begin, end, _EVERY):
            yield place, min(place + _BLOCK, end)
