"""A request's body: read up to a limit, and only if it is JSON."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from pipeline.openai.api_error import OpenAIError

DISCARDED = 16
"""A body of up to this many times the limit is read to its end and thrown away, because many clients read the answer
only then. For a larger one the connection is cut."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request that says it is JSON.

    Args:
        request: The request.
        limit: Most bytes that it may have.

    Raises:
        OpenAIError: 413 for more bytes, 415 for another kind of content, 408 if the rest of it does not come.
    """
    # A web page may have a browser post any other kind of content to any address, this machine's own among them.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OpenAIError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    body = bytearray()
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                body += chunk
            elif size > DISCARDED * limit:
                break
    except ClientDisconnect as error:
        raise OpenAIError(408, "The body has not come.", code="timeout") from error
    if size > limit:
        raise OpenAIError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    return bytes(body)
