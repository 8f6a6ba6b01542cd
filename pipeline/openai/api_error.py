"""OpenAI's shape of an error."""

from __future__ import annotations

import json
from typing import Any

NOT_FINITE = "not_finite"
"""Code of the error for a model that overflows; asked again, it would overflow again."""
_LONGEST_SHOWN = 80
"""Characters of a value that a message quotes."""
_IN_PIECES = json.JSONEncoder(ensure_ascii=False, default=str)


class OpenAIError(Exception):
    """A request that cannot be answered, in words that OpenAI's clients know.

    Args:
        status: HTTP status; 400 for a mistake in the request.
        message: What is wrong, and with what.
        param: The parameter that is wrong, as a path such as `messages[0].content`; None for the request as a whole.
        code: OpenAI's name for this kind of error.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the body of the HTTP response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None, code: str) -> OpenAIError:
    """Return the error for a mistake in a request's body."""
    return OpenAIError(400, message, param, code)


def missing(param: str) -> OpenAIError:
    """Return the error for a parameter that must be there."""
    return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def not_finite() -> OpenAIError:
    """Return the error for a request that the model computes no finite numbers for."""
    message = "The model's numbers are not finite for this request: its activations overflow."
    return OpenAIError(500, message, code=NOT_FINITE)


def shown(value: Any) -> str:
    """Return a value of a request as a message quotes it: JSON, and its beginning if it is long."""
    text = ""
    for piece in _IN_PIECES.iterencode(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value):
        text += piece
        if len(text) > _LONGEST_SHOWN:
            break
    return clipped(text)


def clipped(text: str) -> str:
    """Return a text, or its beginning if it is long."""
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
