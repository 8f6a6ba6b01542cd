"""Runs a function on untrusted files in a process of its own, which may crash, hang or need too much memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from drafter.confined import BoundError, Bounds, Confined
from pipeline.errors import InputError

_SECONDS = 86_400.0  # an input may be large


class Apart:
    """Calls a function of a module in other processes.

    Args:
        seconds: Limit of a call's processor time.
        memory: Limit of its memory, in bytes.
    """

    def __init__(self, function: Callable[..., Any], seconds: float = _SECONDS, memory: int = sys.maxsize) -> None:
        self._confined, self._bounds = Confined(_own, function), Bounds(memory, seconds)

    def __call__(self, *arguments: Any, what: str) -> Any:
        """Return what the function returns. Errors name the input `what`.

        Raises `InputError` if the process died or exceeded a limit, and `Exception` if what the function raised.
        """
        try:
            return self._confined.run(*arguments, bounds=self._bounds)
        except BoundError as error:
            raise InputError(f"{what} cannot be read: {error}. It may be damaged: write it again") from error


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
