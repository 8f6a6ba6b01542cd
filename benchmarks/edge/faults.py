"""A way between devices and a server that delays, loses, repeats, reorders and cuts messages, by a seed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import WebSocketException


@dataclass(frozen=True)
class Faults:
    """How often each thing happens to a message, and the longest delay in seconds."""

    losses: float = 0.02
    repeats: float = 0.05
    reorders: float = 0.05
    cuts: float = 0.01
    delays: float = 0.1
    longest: float = 0.02


class Proxy:
    """Carries WebSocket messages to `server`; `counts` says what it did to them."""

    def __init__(self, server: str, faults: Faults, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server.replace("http", "ws", 1)
        self._faults, self._rng = faults, random.Random(seed)
        self.counts: Counter[str] = Counter(dict.fromkeys(("cuts", "repeats", "losses", "reorders", "delays"), 0))
        self.bytes = self.messages = 0
        self.open: set[ServerConnection] = set()
        self.refuses = False  # connections, as if the server could not be reached
        self.loop = loop

    def _happens(self, what: str) -> bool:
        happens: bool = self._rng.random() < getattr(self._faults, what)
        self.counts[what] += happens
        return happens

    async def carry(self, device: ServerConnection) -> None:
        """Carry the messages of one connection, until it ends or is cut."""
        assert device.request is not None
        if self.refuses:
            device.transport.abort()
            return
        headers = {name: value for name, value in device.request.headers.raw_items() if name == "Authorization"}
        self.open.add(device)
        with suppress(WebSocketException, OSError):
            async with connect(
                self._server + device.request.path, additional_headers=headers, max_size=None, compression=None
            ) as server:
                ways = [asyncio.create_task(self._one_way(*way)) for way in ((device, server), (server, device))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                    with suppress(asyncio.CancelledError, WebSocketException, OSError):
                        await way
        self.open.remove(device)

    async def _one_way(self, source: Any, target: Any) -> None:
        held: list[str] = []
        async for message in source:
            self.bytes += len(message)
            self.messages += 1
            if self._happens("cuts"):
                source.transport.abort()
                target.transport.abort()
                return
            if self._happens("losses"):
                continue
            if self._happens("delays"):
                await asyncio.sleep(self._rng.random() * self._faults.longest)
            if self._happens("reorders"):
                held.append(message)  # it comes behind the next one
                continue
            for one in (message, *held):
                for _ in range(1 + self._happens("repeats")):
                    await target.send(one)
            held.clear()

    def cut_all(self) -> None:
        """Cut all connections, in the proxy's loop."""
        for connection in self.open:
            connection.transport.abort()


@contextmanager
def faulty(server: str, faults: Faults | None = None, seed: int = 0) -> Iterator[tuple[str, Proxy]]:
    """Listen on the loopback address; gives that address, and the proxy."""
    loop = asyncio.new_event_loop()
    proxy = Proxy(server, faults or Faults(), seed, loop)
    started, ended, port = threading.Event(), asyncio.Event(), 0

    async def listen() -> None:
        nonlocal port
        async with serve(proxy.carry, "127.0.0.1", 0, compression=None, max_size=None) as listening:
            port = next(iter(listening.sockets)).getsockname()[1]
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}", proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
