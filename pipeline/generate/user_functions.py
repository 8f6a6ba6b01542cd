"""Functions of the user that a job calls: programs of rows, and what is told of finished parts."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drafter.errors import one_line, shown
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.io.files import address_below
from pipeline.output.folder import OutputFolder


def user_function(setting: str, name: str) -> Callable[..., Any]:
    """Import `module:function` of the user, from the working directory, too.

    Raises:
        InputError: It cannot be imported, or is no function.
    """
    module, _, function = name.partition(":")
    if not (module and function):
        raise InputError(f"{setting} must be module:function, such as programs:write, not {name!r}")
    if os.getcwd() not in sys.path:  # of `drafter`, the console script, and of an engine's process
        sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:  # whatever the user's module does
        why = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{setting} {name} cannot be imported from {os.getcwd()}: {why}") from error
    if not callable(found):
        raise InputError(f"{setting} {name} is {shown(found)}, not a function")
    return found  # type: ignore[no-any-return]


def rollout_function(name: str) -> Callable[..., Any]:
    """Import a rollout's function; `InputError` unless it is `async` and takes a row and `generate`."""
    found = user_function("rollout", name)
    wanted = f"rollout {name} must be an async function of two arguments: async def f(row, generate)"
    if not inspect.iscoroutinefunction(found):
        raise InputError(f"{wanted}; it is not async")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise InputError(f"{wanted}; {error}") from error
    return found


def function_file(name: str) -> Path | None:
    """Return the file of an imported `module:function`; None for a module without one."""
    file = sys.modules[name.partition(":")[0]].__file__
    return None if file is None else Path(file)


class PartCalls:
    """Calls `on_part` with the path of each committed part, in the order of commits, at least once in a job.

    A file of a part's name says that it has been called, so that the next submission calls it for the others alone.

    Args:
        uri: The output, as the user has named it.
    """

    def __init__(self, name: str, uri: str, output: OutputFolder) -> None:
        self._name, self._function = name, user_function("on_part", name)
        self._output, self._called = output, {info.base_name for info in output.told.children()}
        self._uri = uri
        output.told.make_folder()

    def look(self, committed: Sequence[str]) -> None:
        """Call for those of the `committed` parts, in the order of their commits, that it was not called for."""
        for part in committed:
            if part not in self._called:
                self._called.add(part)
                self._call(part)

    def end(self) -> None:
        """Call for all parts that it was not called for, or in vain."""
        told = {info.base_name for info in self._output.told.children()}
        for part in sorted(self._output.data.parquets().keys() - told):
            self._call(part)

    def _call(self, part: str) -> None:
        path = address_below(self._uri, f"data/{part}.parquet")
        try:
            self._function(path)
        except Exception as error:  # whatever the user's function does: the job goes on
            say(f"on_part {self._name} failed with {path}: {type(error).__name__}: {one_line(error)}")
            return
        (self._output.told / part).write_text("")
