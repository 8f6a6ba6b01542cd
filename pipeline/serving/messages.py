"""What the ingress and the replicas say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.openai.api_error import OpenAIError
from pipeline.openai.request_body import ParsedRequest

BUSY_SECONDS = 1
"""When to come again if there is no room, or a replica is being replaced."""


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica.

    Args:
        request: What was asked for.
        speculation: Whether the answer tells what became of the draft.
    """

    request: ParsedRequest
    speculation: bool


@dataclass(frozen=True)
class Failure:
    """Why there is no answer: what the client is told, with its status. Nothing else has been sent before it.

    Args:
        status: HTTP status.
        body: JSON body, in OpenAI's shape.
        headers: Further HTTP headers.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @classmethod
    def of(cls, error: OpenAIError) -> Failure:
        """The failure that an error is, with what its status needs for headers."""
        headers = {}
        if error.status in (429, 503):
            headers["Retry-After"] = str(BUSY_SECONDS)
        if error.status == 408:
            headers["x-should-retry"] = "false"  # OpenAI's clients would, and it would take as long again
        if error.status == 413:
            headers["Connection"] = "close"  # or the rest of the body would have to be read
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return cls(error.status, error.body(), headers)


Reply = str | Failure
"""Events of a stream, or a whole JSON body; or, before anything else, a failure."""


def overloaded() -> OpenAIError:
    """All slots and all places to wait are taken."""
    return OpenAIError(429, "The server is busy: try again later.", code="rate_limit_exceeded")


def unavailable() -> OpenAIError:
    """There is no replica that works, for now."""
    return OpenAIError(503, "The model is not available at the moment: try again later.", code="model_unavailable")


def interrupted() -> OpenAIError:
    """A replica failed while it answered."""
    return OpenAIError(503, "The model failed while it answered: try again.", code="generation_interrupted")
