"""Messages between the ingress and the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from pipeline.openai.requests import NOT_FINITE, OpenAIError, ParsedRequest

_RETRY_SECONDS = 1
"""`Retry-After` if there is no room, or a replica is being replaced."""


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica; `may_teach` if its client agreed that a head learns from it."""

    request: ParsedRequest
    speculation: bool
    may_teach: bool = False


@dataclass(frozen=True)
class Failure:
    """HTTP error response, with a body in OpenAI's format. Nothing has been sent before it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @classmethod
    def of(cls, error: OpenAIError) -> Failure:
        """Return an error's response, with the headers of its status."""
        headers = {}
        if error.status in (429, 503):
            headers["Retry-After"] = str(_RETRY_SECONDS)
        if error.status == 408 or error.code == NOT_FINITE:
            headers["x-should-retry"] = "false"  # OpenAI's clients would, and it would end the same
        if error.status == 413:
            headers["Connection"] = "close"  # or the rest of the body would have to be read
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return cls(error.status, error.body(), headers)


Reply = str | Failure
"""A part of a stream's events, or of a JSON body; or, before anything else, a failure."""


@dataclass(frozen=True)
class Snapshot:
    """A replica's metrics at one moment, without a label that names the replica."""

    replica: str
    families: list[Metric]


def overloaded() -> OpenAIError:
    """Return the error for a request that finds all slots and the whole queue taken."""
    return OpenAIError(429, "The server is busy: try again later.", code="rate_limit_exceeded")


def unavailable() -> OpenAIError:
    """Return the error for a request that finds no working replica."""
    return OpenAIError(503, "The model is not available at the moment: try again later.", code="model_unavailable")


def interrupted() -> OpenAIError:
    """Return the error for a request whose replica failed while it answered."""
    return OpenAIError(503, "The model failed while it answered: try again.", code="generation_interrupted")
