"""OpenAI's shape of an error."""

from __future__ import annotations

from typing import Any


class OpenAIError(Exception):
    """A request that cannot be answered, in the words that a client of OpenAI's knows.

    Args:
        status: HTTP status, 400 for a mistake in the request.
        message: What is wrong, and with what.
        param: The parameter that is wrong, as a path such as `messages[0].content`; None for the request as a whole.
        code: OpenAI's name of the kind of mistake.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The body of the HTTP response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
