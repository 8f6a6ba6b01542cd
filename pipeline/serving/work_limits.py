"""Limits on the work that clients cause: turns at a limited rate, and large work one piece at a time with rests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Holder = TypeVar("Holder")
Result = TypeVar("Result")

_REST = 3.0
"""Rest after large work, for each second that it took: it has a quarter of one core at most."""


class Turns(Generic[Holder]):
    """Gives turns, `per_second` and at most as many at once, in order. A holder waits for one at a time."""

    def __init__(self, per_second: float) -> None:
        self._rate = self._left = per_second
        self._filled = time.monotonic()
        self._waiting: dict[Holder, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def last(self) -> Holder | None:
        return next(reversed(self._waiting), None)

    def take(self, holder: Holder) -> asyncio.Future[bool]:
        """Return a future that is done at the holder's turn: true, or false if it was forgotten before."""
        self.forget(holder)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[holder] = turn
        self._give()
        return turn

    def forget(self, holder: Holder) -> None:
        turn = self._waiting.pop(holder, None)
        if turn is not None and not turn.done():
            turn.set_result(False)

    def _give(self) -> None:
        now = time.monotonic()
        self._left = min(self._rate, self._left + (now - self._filled) * self._rate)
        self._filled = now
        while self._waiting and self._left >= 1:
            turn = self._waiting.pop(next(iter(self._waiting)))
            if not turn.done():
                turn.set_result(True)
                self._left -= 1
        if self._waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later((1 - self._left) / self._rate, self._next)

    def _next(self) -> None:
        self._timer = None
        self._give()


class LargeWork:
    """Does large work in a thread, one piece after the other, each followed by a rest. Clients take turns.

    Work whose caller has gone is not begun; once begun it is done, and the next waits for it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-work")
        self._rested = 0.0
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # of each client; the one served last comes last

    async def run(self, client: str, work: Callable[[], Result]) -> Result:
        """Do `work` at the client's turn, and return its result."""

        def rested() -> Result:
            time.sleep(max(self._rested - time.monotonic(), 0))
            begun = time.monotonic()
            try:
                return work()
            finally:
                now = time.monotonic()
                self._rested = now + _REST * (now - begun)

        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._give()
        try:
            await turn
            return await loop.run_in_executor(self._thread, rested)
        finally:
            if not turn.cancelled():
                self._busy = False
                self._give()

    def _give(self) -> None:
        while self._waiting and not self._busy:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                self._busy = True
