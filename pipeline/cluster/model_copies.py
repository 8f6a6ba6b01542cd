"""Target models in a bucket: each machine copies one once, and loads the copy."""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from pathlib import Path

from drafter.embedded import EMBEDDED_BASE
from drafter.errors import without_secrets
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.io.files import in_parallel, local_path, locate

_COPIES = Path("~/.cache/drafter/copies").expanduser()


def model_name(model: str | None) -> str:
    """Return the target model's hub id, or its folder as `local_path` does; None is the embedded one.

    Of a URI it is the folder's copy on this machine; see `copied_here`.
    """
    if model is None:
        return str(EMBEDDED_BASE)
    return copied_here(model) if "://" in model else local_path(model)


def copied_here(uri: str) -> str:
    """Return this machine's copy of a model's folder in a bucket, made by the first process that asks for it.

    It belongs to the names, sizes and times of the files, so that a folder with new ones is copied again.

    Raises:
        InputError: There are no such files.
        OSError: They cannot be read, or the copy not be written.
    """
    source = locate(uri)
    files = [info for info in source.children() if info.is_file]
    if not files:
        raise InputError(
            f"model {without_secrets(uri)} is no folder with files: give that of its config.json or GGUF file"
        )
    listed = json.dumps([uri, *([info.base_name, info.size, info.mtime_ns] for info in files)])
    folder = _COPIES / hashlib.sha256(listed.encode()).hexdigest()[:16]
    _COPIES.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        if not folder.exists():
            say(f"copying {without_secrets(uri)} to this machine")
            with tempfile.TemporaryDirectory(dir=_COPIES) as partial:
                target = Path(partial) / "model"
                target.mkdir()
                in_parallel(lambda info: (source / info.base_name).copy_to(target / info.base_name), files)
                target.rename(folder)
    return str(folder)
