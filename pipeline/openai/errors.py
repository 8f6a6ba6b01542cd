"""Errors in OpenAI's shape, and the JSON of bodies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from drafter.other_names import NOT_SUPPORTED

NOT_FINITE = "not_finite"
"""Code of the error for a model that overflows; a retry would overflow again."""
INTERRUPTED = "generation_interrupted"
"""Code of the error for a request whose replica failed; another replica may answer it."""
_LINE_ENDS = "\x85\u2028\u2029"
_LONGEST_SHOWN = 80
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_KINDS = {str: "text", dict: "an object", list: "a list", bool: "true or false"}


def to_json(value: Any) -> str:
    """Return a value as compact JSON text on one line; raises `ValueError` for a number that is not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for one in _LINE_ENDS:  # clients that read line by line, as Python splits lines, would cut an event there
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


def parse_json(body: bytes) -> Any:
    """Parse standard JSON: UTF-8, no NaN or infinities, and only text that can be encoded.

    Raises:
        OpenAIError: 400, it is not JSON.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=int, parse_float=_number)  # no NaN is an int
        if b"\\u" in body:  # an escape can be half of a surrogate pair, which is not a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise OpenAIError(400, f"The body is not JSON: {_reason(error)}.", code="invalid_json") from error
    return value


def _number(text: str) -> float | int:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")  # 1e999 would be an infinity, which no JSON can be written of
    return int(value) if value.is_integer() else value  # JSON does not tell 1.0 from 1, and some clients write 1.0


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeError):
        return "it is not valid UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it has a number that cannot be read"


class OpenAIError(Exception):
    """A request that cannot be answered, as an error that OpenAI's clients know.

    Args:
        status: HTTP status; 400 for a mistake in the request.
        param: The wrong parameter, as a path such as `messages[0].content`; None for the request as a whole.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None, code: str) -> OpenAIError:
    return OpenAIError(400, message, param, code)


def invalid(param: str, must: str, value: Any, code: str = "invalid_type") -> OpenAIError:
    return bad_request(f"Invalid '{param}': it must {must}, not {shown(value)}.", param, code)


def missing(param: str) -> OpenAIError:
    return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def not_finite() -> OpenAIError:
    """Return the error for a request on which the model's numbers overflow."""
    message = "The model's numbers are not finite for this request: its activations overflow."
    return OpenAIError(500, message, code=NOT_FINITE)


def server_error() -> OpenAIError:
    """Return the error for what is no client's mistake, and nothing that is expected."""
    return OpenAIError(500, "The server had an error.", code="internal_error")


def shown(value: Any) -> str:
    """Return a value as JSON, clipped for a message."""
    text = ""
    pieces = json.JSONEncoder(ensure_ascii=False, default=str)
    for piece in pieces.iterencode(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value):
        text += piece
        if len(text) > _LONGEST_SHOWN:
            break
    return clipped(text)


def clipped(text: str) -> str:
    """Return the beginning of a text, as long as a message shows it."""
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def can_only_be(name: str, only: str, value: Any) -> OpenAIError:
    message = f"Unsupported value: '{name}' can only be {only}, not {shown(value)}."
    return bad_request(message, name, "unsupported_value")


def not_supported(name: str) -> OpenAIError:
    why = f": {NOT_SUPPORTED[name]}" if name in NOT_SUPPORTED else ""
    return bad_request(f"Unsupported parameter: '{name}' is not supported{why}.", name, "unsupported_parameter")


def contradiction(message: str, param: str) -> OpenAIError:
    return bad_request(message, param, "invalid_parameter_combination")


def checked_fields(given: Any, kinds: Mapping[str, type], path: str) -> dict[str, Any]:
    """Return the fields of an object in a body that are not null; raises an `OpenAIError` for one of another type."""
    if not isinstance(given, dict):
        raise invalid(path, "be an object", given)
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        place = f"{path}.{clipped(name)}"
        if name not in kinds:
            raise bad_request(f"Unknown parameter: '{place}'.", place, "unknown_parameter")
        if not isinstance(value, kinds[name]):
            raise invalid(place, f"be {_KINDS[kinds[name]]}", value)
    return found


def checked_name(given: Mapping[str, Any], path: str) -> str:
    """Return the name of a function or a schema; raises an `OpenAIError` for one that OpenAI does not allow."""
    name = given.get("name")
    if name is None:
        raise missing(f"{path}.name")
    if not _NAME.fullmatch(name):
        raise invalid(f"{path}.name", "be up to 64 letters, digits, hyphens and underscores", name, "invalid_value")
    return str(name)
