"""A request's body: read up to a limit, and only if it is JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

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
