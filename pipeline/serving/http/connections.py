"""The `Host` header where only this machine can connect.

A web page may have its own name resolve to 127.0.0.1, and then its scripts may read what they ask of this machine. The
browser still names the page's host, by which such requests are known.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.openai.requests import OpenAIError, shown

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


# ---- Clients' connections: how long one may take to send a request, and how many there may be.

_LARGEST_HEAD = 64 * 1024
"""Bytes of a request's headers."""


def limited_http(most: int, seconds: float) -> type[asyncio.Protocol]:
    """Return a protocol for uvicorn's `http` setting.

    Args:
        most: Connections that may be open. For a further one, that which has owed a request for the longest is closed:
            a client that sends its request at once is answered, however many others send none.
        seconds: How long a connection may take to begin a request, and how long to send the rest of it.
    """

    class LimitedHttp(_LimitedHttp):
        debtors = _Debtors(most)
        patience = seconds

    return LimitedHttp


class _Debtors:
    """The connections of one server, and which of them owe a request.

    Args:
        most: Connections that may be open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[_LimitedHttp] = set()
        self._owing: dict[_LimitedHttp, None] = {}  # the one that has owed for the longest first

    def add(self, connection: _LimitedHttp) -> None:
        """Add a connection, which owes a request; close one if there are too many."""
        self._open.add(connection)
        self._owing[connection] = None
        if len(self._open) > self._most:
            longest = next(iter(self._owing))
            self.remove(longest)  # it is closed a little later, and another may come before that
            longest.transport.close()

    def owes(self, connection: _LimitedHttp, owing: bool) -> None:
        """Note whether a connection that is open owes a request."""
        if not owing:
            self._owing.pop(connection, None)
        elif connection in self._open:
            self._owing.setdefault(connection)

    def remove(self, connection: _LimitedHttp) -> None:
        """Remove a connection; nothing happens if it is gone already."""
        self._open.discard(connection)
        self._owing.pop(connection, None)


class _LimitedHttp(HttpToolsProtocol):
    """Uvicorn's HTTP, with a time limit for each request that is to come.

    A connection owes a request from its beginning, and from the end of a response, until the request is there as a
    whole.
    """

    debtors: _Debtors
    patience: float
    _deadline: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.debtors.add(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.debtors.remove(self)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _LARGEST_HEAD:
                self.send_400_response("The headers are too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._wait()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before it had come: the next one is owed already
            self._wait()
        else:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._answering:
            self._wait()

    @property
    def _answering(self) -> bool:
        """Whether a request has come and its response is not complete; further ones may be coming behind it."""
        waiting: Any = self.cycle
        return bool(self.pipeline) or (waiting is not None and not waiting.response_complete and not waiting.more_body)

    def _wait(self) -> None:
        self._stop_waiting()
        self.debtors.owes(self, True)
        self._deadline = self.loop.call_later(self.patience, self._time_is_up)

    def _stop_waiting(self) -> None:
        self.debtors.owes(self, False)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_is_up(self) -> None:
        if self._answering:  # a client that asks again before it is answered waits for itself
            self._wait()
        elif not self.transport.is_closing():
            self.transport.close()
