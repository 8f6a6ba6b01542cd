"""WebSockets whose bytes are parsed in turns, like those of other connections."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


class Budgeted(Protocol):
    """The connection that became a WebSocket, and that the budget of all connections still knows."""

    def next_turn(self) -> asyncio.Future[bool]:
        """Return a future that is done at its turn: true, or false if it is lost before."""

    def refuse_more(self, waiting: int) -> bool: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class WebSocketInTurn(WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket, which parses up to `piece` bytes at each turn, also of what comes behind its own end."""

    def __init__(self, connection: Budgeted, piece: int, **given: Any) -> None:
        super().__init__(**given)
        self._connection, self._piece = connection, piece
        self._unparsed = b""
        self._paid = piece  # bytes that may come before its next turn
        self._queues = False

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if not (self._connection.refuse_more(len(self._unparsed)) or self._queues):
            self._parse()

    def _parse(self) -> None:
        while self._unparsed and not self.transport.is_closing():
            if self._paid <= 0:
                self._queues = True
                self.transport.pause_reading()
                self._connection.next_turn().add_done_callback(self._read_on)
                return
            piece, self._unparsed = self._unparsed[: self._piece], self._unparsed[self._piece :]
            self._paid -= len(piece)
            super().data_received(piece)

    def _read_on(self, turn: asyncio.Future[bool]) -> None:
        self._queues = False
        if turn.result() and not self.transport.is_closing():
            self._paid += self._piece
            self._parse()
            if not (self._queues or self.read_paused):
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.connection_lost(exc)
