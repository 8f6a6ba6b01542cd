"""GGUF files: which one a model's name stands for, and how transformers is asked to read it.

Such a file has a whole model: weights, which transformers dequantises, configuration, tokeniser and chat template.
Nothing here imports model code, which takes seconds.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from drafter.errors import LoadError

_SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_TOWER = re.compile(r"mmproj", re.IGNORECASE)  # in the name of a file with what sees, which is beside the model's
_OWNER_AND_NAME = 2  # parts of a hub id
_READING = threading.Lock()


def gguf_file(name: str | Path) -> Path | None:
    """Return the GGUF file that a model's name stands for; None for a folder or repository of another kind.

    The name is that of the file, or of a folder with one such file and no `config.json`, or on the hub
    `OWNER/NAME/FILE.gguf`, which is downloaded.

    Raises:
        LoadError: There is no such file, the folder has several, or it is one of a model's parts.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        found = [file for file in sorted(path.glob(f"*{_SUFFIX}")) if not _TOWER.search(file.name)]
        if len(found) > 1 and not _PART.search(found[0].name):
            names = ", ".join(file.name for file in found)
            raise LoadError(f"model {str(name)!r} is a folder of several GGUF files ({names}): name one of them")
        if not found:
            return None
        path = found[0]
    elif path.suffix != _SUFFIX:
        return None
    elif not path.is_file():
        path = _on_hub(str(name))
    if _PART.search(path.name):
        raise LoadError(
            f"model {str(name)!r}: {path.name} is one of several parts, and only whole files are read: merge them by "
            "`llama-gguf-split --merge FIRST_PART WHOLE.gguf`"
        )
    return path


def _on_hub(name: str) -> Path:
    from drafter.hub import hub_file, not_found  # late: most models need no hub

    parts = name.split("/")
    if name.startswith(("/", ".", "~")) or len(parts) <= _OWNER_AND_NAME:
        raise LoadError(f"no model at {name!r}: there is no such file (on the hub it is OWNER/NAME/FILE{_SUFFIX})")
    try:
        return hub_file("/".join(parts[:_OWNER_AND_NAME]), "/".join(parts[_OWNER_AND_NAME:]))
    except (OSError, ValueError, RuntimeError) as error:
        raise LoadError(f"no model at {name!r}: no such file, and on the hub: {not_found(error)}") from error


def pretrained(name: str) -> tuple[str, dict[str, Any]]:
    """Return what `from_pretrained` of transformers takes for a model, tokeniser or configuration: name and settings.

    Raises `LoadError` as `gguf_file` does.
    """
    from drafter.hub import local_only  # as in `_on_hub`

    file = gguf_file(name)
    if file is None:
        return name, {"local_files_only": local_only(name)}
    return str(file.parent), {"gguf_file": file.name}


def tensor_spans(file: Path) -> list[tuple[int, int]]:
    """Return the byte ranges of a file's tensors, in order; raise `ValueError` if it is damaged or of another kind."""
    from transformers.integrations.gguf.reader import GgufHeader  # with torch, which takes seconds

    header = GgufHeader.from_file(str(file))
    begins = ((header.data_start + one.offset, one.nbytes) for one in header.tensors)
    return sorted((begin, begin + size) for begin, size in begins)


@contextmanager
def metadata_read_once() -> Iterator[None]:
    """Let transformers reuse in a `with` block what the package `gguf` has read of a file, where that is installed.

    It reads 49,152 tokens and as many merges in Python, for five seconds, each for the configuration, the tokeniser and
    the weights, and makes the same table of names for each module.
    """
    try:
        import gguf
    except ModuleNotFoundError:  # transformers says so, where it needs it
        yield
        return

    class Reader(gguf.GGUFReader):
        """Takes parts of a file as plain arrays: parts of a map are larger, and slower to make."""

        @property
        def data(self) -> Any:
            return self._content

        @data.setter
        def data(self, mapped: Any) -> None:
            self._content = mapped.view(np.ndarray)

    with _READING:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
