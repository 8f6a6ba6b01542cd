"""Connection limits of the HTTP server."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from functools import partial
from typing import Any, Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.serving.config import LimitsConfig
from pipeline.serving.keys import Keys
from pipeline.serving.request_checks import DISCARDED
from pipeline.serving.web_socket import WebSocketInTurn
from pipeline.serving.work_limits import Turns

Reason = Literal["crowded", "late", "refused", "slow", "unread"]
"""Reasons to cut a connection: there were too many; a request did not come, was no request or too large; an answer took
too long; or the client does not read."""
FILES = "/v1/files"
"""Where files are uploaded."""
_BESIDE_BODY = 64 << 10
"""Most bytes of a request that are not its body: request line, headers, sizes and extensions of chunks, trailers."""
_HEADERS = 128
_PIPELINED = 8  # requests that may wait behind the one being answered. Clients hardly ever send any.
_PIECE = 16 << 10  # bytes that the parser gets at once: limits are checked in between
_GUEST_PIECE = 1 << 10  # likewise of a guest, who sends the first one without waiting: the head of nearly every request
_TURN_BYTES = 4 << 10
"""Bytes beside the body that a guest may send at each of its turns; so many chunks of one byte take 3 ms to parse."""
_DISCARDED_BYTES, _READ_BYTES = 16, 64
"""Bytes of a body that cost as much as one of these, if it is discarded or read."""
_TURNS = 64.0  # these turns a second: of all guests together, and of all others
_SEND_BUFFER = 128 << 10
"""Bytes that the kernel holds for a client that does not read; by itself it would hold megabytes."""
_GUEST_TURNS = 50.0  # answers to guests, and refusals, a second: of all connections together
_LAST_SECONDS = 1.0  # longest time for which a client may leave an answer unread once the server is to end
_RAYS_OWN = frozenset(
    b"serve-multiplexed-model-id x-request-disconnect-disabled x-request-id x-request-timeout-seconds "
    b"x-session-id".split()
)
"""Headers by which clients could command Ray Serve: to keep the slot of a client that has left, for one."""


class Connections:
    """All connections of one server.

    Args:
        upgrades: Path to which clients may make WebSockets.
        file_bytes: Largest file that clients may upload; None where they may upload none.
    """

    def __init__(
        self, limits: LimitsConfig, keys: Keys | None = None, upgrades: str | None = None, file_bytes: int | None = None
    ) -> None:
        self.limits, self.keys, self.upgrades, self._file_bytes = limits, keys or Keys(), upgrades, file_bytes
        self.patience = limits.receive_seconds
        self.turns: Turns[_Connection] = Turns(_GUEST_TURNS)
        self.guests_pieces: Turns[_Connection] = Turns(_TURNS)
        self.pieces: Turns[_Connection] = Turns(_TURNS)
        self.cuts: Counter[Reason] = Counter()
        self._listening = False
        self._open: dict[_Connection, None] = {}  # the oldest first
        self._owing: dict[_Connection, None] = {}  # the one that has owed for the longest first

    def protocol(self) -> type[asyncio.Protocol]:
        """Return a protocol for uvicorn's `http` setting."""

        class Limited(_Connection):
            budget = self

        self._listening = True
        return Limited

    def body_bytes(self, path: str) -> int:
        """Return the largest body of a request to `path`, of a file's upload with the form around it."""
        is_file = path == FILES and self._file_bytes is not None
        return (self._file_bytes or 0) + _BESIDE_BODY if is_file else self.limits.body_bytes

    def state(self) -> dict[str, int] | None:
        """Return the connection counts for `/health`; None behind Serve's own proxy."""
        unread = sum(connection.is_unread for connection in self._open)
        return {"open": len(self._open), "unread": unread} if self._listening else None

    def families(self) -> list[Metric]:
        """Return the connection counts for Prometheus."""
        state = self.state()
        if state is None:
            return []
        cuts = CounterMetricFamily("drafter_connections_cut", "Connections closed by the server.", labels=["reason"])
        for reason in get_args(Reason):
            cuts.add_metric([reason], self.cuts[reason])
        unread = "Connections with an answer that the client does not read."
        return [
            GaugeMetricFamily("drafter_connections", "Connections that are open.", state["open"]),
            GaugeMetricFamily("drafter_connections_unread", unread, state["unread"]),
            cuts,
        ]

    def add(self, connection: _Connection) -> None:
        """Add a connection; cut one if there are too many."""
        self._open[connection] = None
        self._owing[connection] = None
        if len(self._open) > self.limits.connections:
            self.cut(self._dearest(connection), "crowded")

    def _dearest(self, newcomer: _Connection) -> _Connection:
        owing = next(iter(self._owing))
        if owing is not newcomer:
            return owing
        # All others wait for an answer: the last guest in the queue, or else the one that has been here the longest.
        return self.turns.last or next(one for one in self._open if one.is_guest)

    def owes(self, connection: _Connection, owing: bool) -> None:
        """Note whether an open connection waits for its client: for a request, or until an answer is read."""
        if not owing:
            self._owing.pop(connection, None)
        elif connection in self._open:
            self._owing.setdefault(connection)

    def cut(self, connection: _Connection, reason: Reason) -> None:
        """Close a connection at once and drop unsent data."""
        if connection in self._open:
            self.cuts[reason] += 1
            self.remove(connection)  # it is lost a little later, and another may come before that
            connection.transport.abort()

    def remove(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        self._owing.pop(connection, None)
        for turns in (self.turns, self.guests_pieces, self.pieces):
            turns.forget(connection)

    def end(self) -> None:
        """Stop waiting for clients that do not read, because the server is shutting down."""
        self.patience = min(self.patience, _LAST_SECONDS)
        for connection in [one for one in self._open if one.is_unread]:
            self.cut(connection, "unread")


class _RefusedError(Exception):
    """Raised in the parser's callbacks: it ends with an error of its own."""


class _Connection(HttpToolsProtocol):
    """Uvicorn's HTTP within the budget.

    A connection waits for its client in two ways, each with a time limit: for a request, from its own beginning or the
    end of a response until the request is complete; and for a reader, while the send buffer is full, or from the end
    of what is to be sent until all is sent.
    """

    budget: Connections
    is_guest = True
    _in_head = False
    _refused = False
    _beside_body = 0
    _body = 0
    _unparsed = memoryview(b"")
    _paid = _GUEST_PIECE  # bytes that may come before its next turn
    _pays = _queues = _upgraded = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application: Any = self.app
        self.app = self._answer
        self._waits: dict[Reason, asyncio.TimerHandle] = {}

    @property
    def is_unread(self) -> bool:
        return "unread" in self._waits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.budget.add(self)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self.budget.remove(self)
        for timer in self._waits.values():
            timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        super().eof_received()
        self._wait_for_reader()  # the transport closes once all is sent

    def data_received(self, data: bytes) -> None:
        if self._refused or self._queues:  # uvicorn reads on when a body is read, and after an answer
            self.flow.pause_reading()
        if self._refused:
            return
        self._unparsed = memoryview(bytes(self._unparsed) + data)
        if not self._queues:
            self._parse()

    def _parse(self) -> None:
        while self._unparsed and not (self._refused or self._upgraded or self.transport.is_closing()):
            if self._paid <= 0:
                self._queue()
                return
            self._pays = self.is_guest
            size = _GUEST_PIECE if self._pays else _PIECE
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._beside_body += len(piece)  # `on_body` takes off what is body
            self._paid -= len(piece) if self._pays else 0
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
            if self._beside_body > _BESIDE_BODY:
                self.send_400_response("The request is too large beside its body.")

    def _queue(self) -> None:
        """Read on at this connection's turn."""

        def read_on(turn: asyncio.Future[bool]) -> None:
            self._queues = False
            if turn.result() and not self.transport.is_closing():
                self._paid += _TURN_BYTES
                self._parse()
                if not (self._refused or self._queues):
                    self.flow.resume_reading()

        self._queues = True
        self.flow.pause_reading()
        pieces = self.budget.guests_pieces if self.is_guest else self.budget.pieces
        pieces.take(self).add_done_callback(read_on)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and all that comes after it, at this connection's turn."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.flow.pause_reading()

        def refuse(turn: asyncio.Future[bool]) -> None:
            if not turn.result() or self.transport.is_closing():
                return
            if self.cycle is None:
                super(_Connection, self).send_400_response(msg)
                self._wait_for_reader()
            else:  # in the middle of another request, or of its answer
                self.budget.cut(self, "refused")

        self.budget.turns.take(self).add_done_callback(refuse)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _PIPELINED:
            raise _RefusedError
        super().on_message_begin()
        self._in_head, self._beside_body, self._body = True, 0, 0
        self._wait_for_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer: uvicorn would take it for a header
            return
        if len(self.headers) >= _HEADERS:
            raise _RefusedError
        if name.lower().replace(b"_", b"-") not in _RAYS_OWN:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self.is_guest = self._is_guests(self.scope)

    def on_body(self, body: bytes) -> None:
        size, guest = len(body), self.is_guest
        most = self.budget.limits.body_bytes if guest else self.budget.body_bytes(self.scope["path"])
        self._beside_body -= size
        self._paid += size if self._pays else 0
        self._body += size
        if self._body > (most if guest else DISCARDED * most):
            self.budget.cut(self, "refused")
        elif guest or self._body - size > most or self.cycle.response_complete:
            self._paid -= size // _DISCARDED_BYTES
        else:
            self._paid -= size // _READ_BYTES
            super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        if self.cycle.response_complete:  # it was answered before it had come: the next one is owed already
            self._wait_for_request()
        else:
            self._stop_waiting("late")

    def _should_upgrade_to_ws(self) -> bool:
        self.scope["path"] = self.url.partition(b"?")[0].decode("latin-1")  # uvicorn sets it later
        return self.scope["path"] == self.budget.upgrades and not self._is_guests(self.scope)

    def handle_websocket_upgrade(self) -> None:
        """Go on as a WebSocket, which stays a connection of the budget until it is lost."""
        self._upgraded = True
        self._stop_waiting("late")
        self.config.ws_max_size = self.budget.limits.body_bytes
        self.ws_protocol_class = partial(WebSocketInTurn, self, _PIECE)  # type: ignore[assignment]
        super().handle_websocket_upgrade()

    def next_turn(self) -> asyncio.Future[bool]:
        return self.budget.pieces.take(self)

    def refuse_more(self, waiting: int) -> bool:
        """Cut a WebSocket of which more bytes than a message has wait for their turn; return whether it was."""
        if waiting <= self.budget.limits.body_bytes + _BESIDE_BODY:
            return False
        self.budget.cut(self, "refused")
        return True

    def _is_guests(self, scope: Any) -> bool:
        given = (value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization")
        return not (scope["path"].startswith("/v1/") and self.budget.keys.may_ask(next(given, None)))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request: a guest's at its turn, and another one's at its turn where it is refused."""
        budget, guest = self.budget, self._is_guests(scope)
        if guest and not await budget.turns.take(self):
            # Uvicorn hears of a cut later, and until then would say to a transport that refuses it that the application
            # gave no answer. `send` is a method of its record of this request.
            send.__self__.disconnected = True
            self.transport.abort()
            return
        longest = budget.limits.seconds + budget.limits.receive_seconds
        slow = self.loop.call_later(longest, budget.cut, self, "slow")

        async def send_in_turn(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not guest:
                await budget.turns.take(self)
            await send(message)

        try:
            await self._application(scope, receive, send_in_turn)
        finally:
            slow.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_waiting("unread")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()
        elif not self._answering:
            self._wait_for_request()

    @property
    def _answering(self) -> bool:
        """True if a request has come and its response is not complete."""
        waiting: Any = self.cycle
        return bool(self.pipeline) or (waiting is not None and not waiting.response_complete and not waiting.more_body)

    def _wait_for_request(self) -> None:
        self._stop_waiting("late")
        self._waits["late"] = self.loop.call_later(self.budget.limits.receive_seconds, self._is_late)
        self.budget.owes(self, True)

    def _wait_for_reader(self) -> None:
        if not self.is_unread:
            self._waits["unread"] = self.loop.call_later(self.budget.patience, self.budget.cut, self, "unread")
            self.budget.owes(self, True)

    def _stop_waiting(self, reason: Reason) -> None:
        timer = self._waits.pop(reason, None)
        if timer is not None:
            timer.cancel()
            self.budget.owes(self, bool(self._waits))

    def _is_late(self) -> None:
        if self._answering:  # a client that asks again before it is answered waits for itself
            self._wait_for_request()
        else:
            self.budget.cut(self, "late")
