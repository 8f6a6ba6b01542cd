"""Halves of characters: unpaired surrogates, which texts and JSON's escapes may have, and no tokeniser takes."""

from __future__ import annotations

import json
from typing import Any

from drafter.errors import RequestError, one_line


def refuse_half_characters(value: Any, what: str = "the prompt") -> None:
    """Raise `RequestError` if a text, or one in lists and objects, has one; or if these are not like JSON's.

    Args:
        what: What the value is, as the message begins.
    """
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} has half a character: an unpaired surrogate") from error
    except (TypeError, ValueError, RecursionError) as error:  # such as a key that is no text, or a list in itself
        raise RequestError(f"{what} is not like JSON: {one_line(error)}") from error


def parsed_json(text: str) -> Any:
    """Return what a JSON text says, whose escapes may be such halves.

    Raises:
        RequestError: They are.
        ValueError: It is not JSON.
        RecursionError: It is nested too deeply.
    """
    value = json.loads(text)
    refuse_escaped_halves(value, text, "it")
    return value


def refuse_escaped_halves(value: Any, text: str, what: str) -> None:
    """Raise `RequestError` if a value that was read from a JSON text has one, of which each begins with D there."""
    if "\\ud" in text.lower():
        refuse_half_characters(value, what)
