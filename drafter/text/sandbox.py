"""Limits for chat templates, which come with a model and may be anything: time, memory, and what one operation makes.

transformers compiles and runs them. What it compiles from here on runs in `BoundedSandbox`.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from resource import getpagesize
from types import FrameType
from typing import Any

from jinja2 import Template
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Concat
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from drafter.errors import RequestError

_SECONDS = 5.0  # limit of a chat template's CPU time; a template of a hundred messages takes some milliseconds
_BYTES = 1 << 30  # limit of the process's memory growth while a template runs
_LOOK_SECONDS = 0.01  # interval of memory checks; doubling with every line of code copies some hundred megabytes in it
_LARGEST = 1 << 27  # limit of the characters, or entries of a list, that one operation makes
_LONGEST_NUMBER = 1 << 16  # bits of a power
_ENTRY = 16  # characters that a list counts for besides its entries, which may be one list many times
_STATM = Path("/proc/self/statm")
_GROWING_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill"}
)
_GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "pprint", "replace", "round", "string", "tojson")
_FORMATS = frozenset({"%", "format", "format_map"})
_WIDTH = re.compile(r"[0-9]{1,18}")
_GIVEN_WIDTH = re.compile(r"\*|\{[^{}]*\{")  # in formats, a width that is an argument


@contextmanager
def bounded_template() -> Iterator[None]:
    """Limit the CPU time and memory growth of this thread's Python code in a `with` block, or raise `RequestError`.

    Both are checked between two lines of code; a single operation is not interrupted.
    """
    before, start, memory = sys.gettrace(), time.thread_time(), _resident()
    look = time.perf_counter() + _LOOK_SECONDS  # this clock, unlike a thread's own, is read without a system call

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal look
        if event == "call" and frame.f_code.co_filename == __file__:  # a call of the sandbox, which has its own limits
            return None
        if (now := time.perf_counter()) > look:
            look = now + _LOOK_SECONDS
            if time.thread_time() - start > _SECONDS:
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
    try:
        return int(_STATM.read_text().split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


class _Code(CodeGenerator):
    def visit_Concat(self, node: Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        self.write("environment.texts((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Refuses an operation that makes much of little, before it runs: nothing could stop it."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def from_string(self, *arguments: Any, **named: Any) -> Template:
        self.filters |= {name: _bounded(name, self.filters[name]) for name in _GROWING_FILTERS}
        self.finalize = _of_bounded_size
        return super().from_string(*arguments, **named)

    def texts(self, values: Iterable[Any]) -> str:
        return self.concat(str(_of_bounded_size(value)) for value in values)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        found = list(pieces)
        if sum(map(len, found)) > _LARGEST:
            _refuse()
        return "".join(found)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            if len(left) + len(right) > _LARGEST:
                _refuse()
            return left + right
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            _refuse_large(operator, left, *(right if isinstance(right, tuple) else [right]))
        elif operator == "**" and isinstance(left, int) and abs(right) * left.bit_length() > _LONGEST_NUMBER:
            _refuse()
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *arguments: Any, **named: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str) and method.__name__ in _GROWING_METHODS:
            _refuse_large(method.__name__, text, *arguments, *named.values())
        return super().call(context, called, *arguments, **named)


chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)  # with the mark by which Jinja passes a context first
    def bounded(*arguments: Any, **named: Any) -> Any:
        values = arguments[1:] if hasattr(apply, "jinja_pass_arg") else arguments
        first = 1 if isinstance(values[0], int | float) else values[0]
        _refuse_large(name, first, *values[1:], *named.values())
        return apply(*arguments, **named)

    return bounded


def _refuse_large(operation: str, first: Any, *others: Any) -> None:
    """Raise `RequestError` if an operation may make more than `_LARGEST` of its operands."""
    factors = [abs(one) if isinstance(one, int) else _size(one) for one in (first, *others)]
    if operation == "+":
        size = sum(map(_size, (first, *others)))
    elif operation in _FORMATS and isinstance(first, str):
        widths = [int(width) for width in _WIDTH.findall(first)]
        size = sum(map(_size, (first, *others))) + max(
            widths + (factors if _GIVEN_WIDTH.search(first) else []), default=0
        )
    else:
        size = factors[0] * max(factors[1:], default=1)
    if size > _LARGEST:
        _refuse()


def _of_bounded_size(value: Any) -> Any:
    if not isinstance(value, str) and _size(value) > _LARGEST:
        _refuse()
    return value


def _size(value: Any, left: int = _LARGEST) -> int:
    """Return about how many characters a value has as text, counted up to `left`."""
    if isinstance(value, str):
        return len(value) or 1
    if isinstance(value, range):
        return len(value)
    if isinstance(value, Iterator):
        return MAX_RANGE
    if not isinstance(value, list | tuple | Mapping):
        return 1
    size = _ENTRY
    for one in value.items() if isinstance(value, Mapping) else value:
        size += _size(one, left - size)
        if size > left:
            break
    return size


def _refuse() -> None:
    raise RequestError(f"it makes more than {_LARGEST >> 20} million characters at once")
