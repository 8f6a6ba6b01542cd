"""JSON as the standard has it: Python alone would read and write NaN and infinities, which others refuse.

Bodies of requests are read here, whether they come to the endpoint or as a line of a batch.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pipeline.openai.api_error import OpenAIError


def to_json(value: Any) -> str:
    """Return a value as compact JSON text.

    Raises:
        ValueError: It has a number that is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def parse_json(body: bytes) -> Any:
    """Return what JSON says, as the standard has it: UTF-8, no NaN or infinities, and text that can be encoded.

    Raises:
        OpenAIError: 400, it is not JSON.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_number)
        if b"\\u" in body:  # an escape can be half of a surrogate pair, which is not a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise OpenAIError(400, f"The body is not JSON: {_reason(error)}.", code="invalid_json") from error
    return value


def _number(text: str) -> float | int:
    """Return a number; a whole one is an integer, because JSON does not tell 1.0 from 1 and some clients write 1.0."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"{error.msg} at line {error.lineno}, column {error.colno}"
        case UnicodeDecodeError() | UnicodeEncodeError():
            return "it is not valid UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return "it has a number that cannot be read"
