"""Tokenisers and chat templates come with a model, and may fail on a text in ways that Python's own code does not.

A tokeniser in Rust panics, which is no `Exception`; a template may loop or grow for as long as it likes. Either is an
error of the one prompt that it happens with.
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
"""Most seconds of a processor that a chat template may take; one of a hundred messages takes some milliseconds."""
_BYTES = 1 << 30
"""Most memory that the process may come to need while a template runs."""
_LOOK_SECONDS = 0.01
"""Memory is looked at this often: what doubles with every line has copied some hundred megabytes by then."""
_STATM = Path("/proc/self/statm")


@contextmanager
def refuse_panics() -> Iterator[None]:
    """For a `with` block, turn the panic of a tokeniser into an error of the request.

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
        RequestError: It fails on one of the texts.
    """
    with refuse_panics():
        return tokenizer(texts, **settings)


@contextmanager
def bounded_template() -> Iterator[None]:
    """For a `with` block, let Python code of this thread run for seconds only, and memory grow by a gigabyte at most.

    Both are looked at between two lines of code. A single operation is not interrupted.

    Raises:
        RequestError: From inside of the block: a limit is reached.
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
    """Bytes of memory that the process holds; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
