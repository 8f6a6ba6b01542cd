"""Guards around a model's tokeniser and chat template, so that a failure affects one prompt only.

A tokeniser in Rust panics, which is no `Exception`; a template may loop or grow without limit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import getpagesize
from types import FrameType
from typing import Any

from drafter.errors import RequestError, one_line

_SECONDS = 5.0
"""Limit of a chat template's CPU time; a template of a hundred messages takes some milliseconds."""
_BYTES = 1 << 30
"""Limit of the process's memory growth while a template runs."""
_LOOK_SECONDS = 0.01
"""Interval of memory checks. Doubling with every line of code copies some hundred megabytes in it."""
_STATM = Path("/proc/self/statm")


@contextmanager
def refuse_panics() -> Iterator[None]:
    """Turn a tokeniser's panic in a `with` block into a `RequestError`.

    Raises:
        RequestError: The tokeniser has panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 makes the class, and gives it to no module
            raise
        raise RequestError(
            f"the tokenizer of the model fails on this text ({one_line(error, 200)}): change or leave out the text"
        ) from error


def tokenise(tokenizer: Any, texts: list[str], **settings: Any) -> Any:
    """Call a tokeniser.

    Raises:
        RequestError: The tokeniser panics on one of the texts.
    """
    with refuse_panics():
        return tokenizer(texts, **settings)


@contextmanager
def bounded_template() -> Iterator[None]:
    """Limit the CPU time and memory growth of this thread's Python code in a `with` block.

    Both are checked between two lines of code; a single operation is not interrupted.

    Raises:
        RequestError: Inside the block, when a limit is reached.
    """
    before, start, memory = sys.gettrace(), time.thread_time(), _resident()
    look = start + _LOOK_SECONDS

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal look
        if (now := time.thread_time()) > look:
            look = now + _LOOK_SECONDS
            if now - start > _SECONDS:
                raise RequestError(f"it takes more than {_SECONDS:g} seconds")
            if _resident() - memory > _BYTES:
                raise RequestError(f"it takes more than {_BYTES >> 20} MiB of memory")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def _resident() -> int:
    """Return the process's resident bytes; 0 if unknown."""
    try:
        return int(_STATM.read_text().split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
