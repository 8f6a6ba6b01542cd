"""The ingress's side of devices that draft: checks their messages, and carries them to the replica of their session."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from drafter.edge.messages import FROM_DEVICE, LONGEST_DRAFT, Draft, Error, MessageError, Open, read, write
from pipeline.openai.errors import OpenAIError
from pipeline.serving.answering import no_model
from pipeline.serving.config import EdgeConfig, LimitsConfig
from pipeline.serving.handles import Answer, Device, Engines
from pipeline.serving.work_limits import LargeWork

_LARGE = 32 << 10  # first messages above this many characters are parsed in another thread, one at a time
_SHORT_SECONDS = 5.0  # longest wait for a replica to accept a connection


@dataclass(eq=False)
class _Place:
    """A session's place in a replica, and the device's connection, if it has one."""

    answer: Answer
    address: str
    watch: asyncio.Task[None]
    socket: WebSocket | None = None
    allowance: float = 0.0  # draft tokens that it may still send now
    filled: float = field(default_factory=time.monotonic)

    async def pay(self, tokens: int, rate: float) -> None:
        """Wait until `rate` draft tokens a second allow for so many more."""
        now = time.monotonic()
        self.allowance = min(rate, self.allowance + (now - self.filled) * rate) - tokens
        self.filled = now
        if self.allowance < 0:
            await asyncio.sleep(-self.allowance / rate)


class EdgeRoute:
    """Sessions by client and name. A client is whoever has a key; see `Keys.client`."""

    def __init__(self, engines: Engines, config: EdgeConfig, limits: LimitsConfig) -> None:
        self._engines, self.config, self._limits = engines, config, limits
        self._places: dict[tuple[str, str], _Place] = {}
        self._coming = Counter[str]()  # places that clients wait for
        self._large_work = LargeWork()

    async def serve(self, socket: WebSocket, client: str, *, may_teach: bool) -> None:
        """Talk with a device until it or the session leaves."""
        await socket.accept()
        try:
            text = await asyncio.wait_for(_receive(socket), self._limits.receive_seconds)
            reading = partial(read, text, [Open])
            opening = await self._large_work.run(client, reading) if len(text) > _LARGE else reading()
            place = await self._place((client, opening.session), opening, may_teach=may_teach)
            if place.socket is not None:
                await _end(place.socket, Error("replaced", "the session goes on over another connection"))
            place.socket = socket
            try:
                await self._carry(socket, place, text)
            finally:
                if place.socket is socket:
                    place.socket = None
        except MessageError as error:
            await _end(socket, Error(error.code, str(error)))
        except OpenAIError as error:
            await _end(socket, Error(error.code or "refused", error.message))
        except (WebSocketDisconnect, TimeoutError):
            await _end(socket)

    def end(self) -> None:
        """End all sessions, because the endpoint is shutting down."""
        for place in self._places.values():
            place.answer.cancel()

    async def _place(self, name: tuple[str, str], opening: Open, *, may_teach: bool) -> _Place:
        """Return the session's place, in any replica if it has none."""
        if (place := self._places.get(name)) is not None:
            return place
        client = name[0]
        self._make_room(client)
        wanted = opening.request.get("model")
        model = self._engines.names[0] if wanted is None else self._engines.called(str(wanted))
        if model is None:
            raise no_model(str(wanted), self._engines.names)
        self._coming[client] += 1
        try:
            answer = await self._engines.host(model, Device(client, may_teach))
        finally:
            self._coming[client] -= 1
        if (place := self._places.get(name)) is not None:  # the same message has come twice
            answer.cancel()
            return place
        place = _Place(answer, str(answer.first), asyncio.create_task(self._watch(name, answer)))
        self._places[name] = place
        return place

    def _make_room(self, client: str) -> None:
        """End the oldest session of a client that has its number of them and is not connected."""
        own = [(name, place) for name, place in self._places.items() if name[0] == client]
        if len(own) + self._coming[client] < self.config.sessions:
            return
        left = next(((name, place) for name, place in own if place.socket is None), None)
        if left is None:
            raise MessageError("too_many_sessions", f"a key may have {self.config.sessions} sessions: close one")
        self._places.pop(left[0])
        left[1].answer.cancel()

    async def _watch(self, name: tuple[str, str], answer: Answer) -> None:
        """Forget a session that is over, or whose replica has died."""
        try:
            await answer.over()
        finally:
            if (place := self._places.get(name)) is not None and place.answer is answer:
                del self._places[name]

    async def _carry(self, socket: WebSocket, place: _Place, opening: str) -> None:
        try:
            async with connect(
                place.address, compression=None, max_size=None, ping_interval=None, open_timeout=_SHORT_SECONDS
            ) as replica:
                await replica.send(opening)
                tasks = [
                    asyncio.create_task(self._upwards(socket, place, replica)),
                    asyncio.create_task(_downwards(socket, replica)),
                ]
                try:
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                finally:
                    for task in tasks:
                        task.cancel()
        except (WebSocketException, OSError) as error:
            raise MessageError("ended", "the session has ended: open it again") from error
        await _end(socket)

    async def _upwards(self, socket: WebSocket, place: _Place, replica: ClientConnection) -> None:
        while True:
            text = await _receive(socket)
            if len(text) > LONGEST_DRAFT:
                raise MessageError("malformed", f"a message may have {LONGEST_DRAFT} bytes, not {len(text)}")
            message = read(text, FROM_DEVICE)
            tokens = len(message.tokens) if isinstance(message, Draft) else 0
            await place.pay(max(tokens, 1), self.config.tokens_per_second)
            await replica.send(text)


async def _downwards(socket: WebSocket, replica: ClientConnection) -> None:
    async for text in replica:
        assert isinstance(text, str)
        await socket.send_text(text)


async def _receive(socket: WebSocket) -> str:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text")
    if text is None:
        raise MessageError("malformed", "messages are text")
    return str(text)


async def _end(socket: WebSocket, last: Error | None = None) -> None:
    """Close a connection, after a last message; whoever is gone is gone."""
    with suppress(RuntimeError, WebSocketDisconnect, OSError):
        if last is not None:
            await socket.send_text(write(last))
        if socket.application_state is not WebSocketState.DISCONNECTED:
            await socket.close()
