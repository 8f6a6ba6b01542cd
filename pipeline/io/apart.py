"""Runs a function on untrusted files in a process of its own, which may crash, hang or need too much memory."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any, BinaryIO, TypeVar

from drafter.errors import one_line
from pipeline.errors import InputError

T = TypeVar("T")

_frames: BinaryIO | None = None  # in the other process: where it writes what it does


def apart(
    function: Callable[..., T], *arguments: Any, what: str, seconds: float | None = None, gib: int | None = None
) -> T:
    """Return `function(*arguments)` from a new process, which imports the function by its name.

    Args:
        what: The input, for errors; the file last given to `at` is named instead.
        seconds: Time limit, with the imports.
        gib: Limit of the process's address space.

    Raises:
        InputError: The process died or took too long.
        Exception: What the function raised.
    """
    task = pickle.dumps((function, arguments, gib))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from {__name__} import _serve; _serve()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            written, said = child.communicate(task, seconds)
        except subprocess.TimeoutExpired:
            raise InputError(f"{what} cannot be read within {seconds:.0f} seconds") from None
        finally:
            child.kill()
    for kind, value in _read_frames(written):
        match kind:
            case "result":
                return value  # type: ignore[no-any-return]
            case "error":
                raise value
            case "at":
                what = value
    if child.returncode < 0:
        ended = f"by {signal.Signals(-child.returncode).name}"
    else:
        ended = f"with {one_line(said.decode(errors='replace').strip().rpartition(chr(10))[2] or 'no result', 200)}"
    raise InputError(f"{what} cannot be read: a process that tried ended {ended}. The file is damaged: write it again")


def at(path: str) -> None:
    """Name the file that is read next: in a process of `apart`, a crash is reported as this file's."""
    if _frames is not None:
        pickle.dump(("at", path), _frames)
        _frames.flush()


def _read_frames(written: bytes) -> list[tuple[str, Any]]:
    frames, stream = [], BytesIO(written)
    while stream.tell() < len(written):
        try:
            frames.append(pickle.load(stream))
        except (EOFError, pickle.UnpicklingError):  # cut by a crash
            break
    return frames


def _serve() -> None:
    global _frames
    _frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no result
    function, arguments, gib = pickle.load(sys.stdin.buffer)
    if gib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    try:
        frame = pickle.dumps(("result", function(*arguments)))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        frame = pickle.dumps(("error", error))
        pickle.loads(frame)  # some errors need more than their message to be made again
    _frames.write(frame)
    _frames.flush()
    os._exit(0)  # threads of libraries may wait for what does not come
