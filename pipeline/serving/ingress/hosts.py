"""The `Host` header where only this machine can connect.

A web page may have its own name resolve to 127.0.0.1, and then its scripts may read what they ask of this machine. The
browser still names the page's host, by which such requests are known.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.openai.api_error import OpenAIError, shown

_HOST = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<name>[^:]+))(?::\d+)?")


def names_loopback(hosts: Sequence[str]) -> bool:
    """Return whether a request's `Host` headers are one, and name this machine's loopback address, with any port."""
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return False
    name = found["ipv6"] or found["name"]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


class LoopbackHosts:
    """Refuses requests that were meant for another host.

    Args:
        app: Answers the others.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and not names_loopback(hosts := Headers(scope=scope).getlist("host")):
            told = OpenAIError(
                421,
                "The endpoint listens on this machine's loopback address: the Host header must be localhost, 127.0.0.1 "
                f"or [::1], with or without a port, not {shown(', '.join(hosts))}.",
                code="wrong_host",
            )
            await JSONResponse(told.body(), told.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
