"""What a request must be before anything reads it: its `Host`, and its body's type and length."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.openai.errors import OpenAIError, shown

DISCARDED = 16
"""Bodies up to this many times the limit are read and discarded, because many clients read the answer only then."""
_HOST = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<name>[^:]+))(?::\d+)?")


def names_loopback(hosts: Sequence[str]) -> bool:
    """Return whether there is exactly one `Host` header and it names a loopback address, with any port."""
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return False
    name = found["ipv6"] or found["name"]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


class LoopbackHosts:
    """Refuses requests meant for another host.

    A web page can have its own name resolve to 127.0.0.1 (DNS rebinding); the browser still sends that name as `Host`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not names_loopback(hosts := Headers(scope=scope).getlist("host")):
            refusal = OpenAIError(
                421,
                "The endpoint listens on this machine's loopback address: the Host header must be localhost, 127.0.0.1 "
                f"or [::1], with or without a port, not {shown(', '.join(hosts))}.",
                code="wrong_host",
            )
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a JSON request of at most `limit` bytes.

    Raises:
        OpenAIError: 413 for more bytes, 415 for another content type, 408 if the rest of it does not come.
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
