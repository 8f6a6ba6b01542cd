"""Prompts as callers of the Python class give them: one or many, in lists, iterators, arrays and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from drafter.errors import RequestError, shown


def each_prompt(prompts: object) -> Iterator[object]:
    """Yield prompts one by one, as Python objects. A text, a list of token ids or a list of messages is one prompt.

    Raises:
        RequestError: `prompts` is neither a prompt nor a collection of prompts.
    """
    found = plain(prompts)
    if isinstance(found, str) or is_tokens(found) or is_chat(found):
        yield found
    elif isinstance(found, Mapping) or hasattr(found, "columns") or not isinstance(found, Iterable):
        kind = type(prompts).__name__
        raise RequestError(f"prompts must be a text, a list of token ids, messages, or many of these, not a {kind}")
    else:
        yield from map(plain, found)


def is_tokens(prompt: object) -> TypeGuard[list[int]]:
    """Return whether a prompt is a list of integers; an empty list is none."""
    return _is_list_of(int, prompt) and not _is_list_of(bool, prompt)


def is_chat(prompt: object) -> TypeGuard[list[Mapping[str, Any]]]:
    """Return whether a prompt is a list of messages."""
    return _is_list_of(Mapping, prompt)


def as_chat(prompt: object) -> list[Mapping[str, Any]]:
    """Return a prompt of `chat` as messages: a text is the user's.

    Raises:
        RequestError: It is neither a text nor messages.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not is_chat(prompt):
        raise RequestError(f"a conversation must be a text or a list of messages, not {shown(prompt)}")
    return list(prompt)


def plain(value: object) -> object:
    """Turn an array or a column into a list; a row of one, too."""
    for name in ("to_pylist", "to_list", "tolist"):  # Arrow; Polars and pandas; NumPy and PyTorch
        if callable(convert := getattr(value, name, None)):
            return convert()
    return value


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, kind) for one in value)
