"""Limits on the work that clients cause: turns at a limited rate, and large work one piece at a time, with rests."""

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
"""Rest of a client after large work, for each second of processor time that it took: it has a quarter of one core."""


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
    """Does large work in a thread, one piece after the other. Clients take turns, and rest after a piece of theirs.

    Work whose caller has gone is not begun, and stopped where it can be.

    Args:
        spent: Seconds of processor time so far of the thread that asks, and of what works for it.
        stop: Ends the work that is being done, if possible.
    """

    def __init__(
        self, spent: Callable[[], float] = time.thread_time, stop: Callable[[], object] = lambda: None
    ) -> None:
        self._thread = ThreadPoolExecutor(1, "large-work")
        self._spent, self._stop = spent, stop
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # of each client; the one served last comes last
        self._rested: dict[str, float] = {}  # when the rest of a client ends, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, client: str, work: Callable[[], Result]) -> Result:
        """Do `work` at the client's turn, and return its result."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has gone at its turn
                self._end(client, 0.0)
            raise
        seconds = 0.0

        def measured() -> Result:
            nonlocal seconds
            begun = self._spent()
            try:
                return work()
            finally:
                seconds = self._spent() - begun

        def ended(done: asyncio.Future[Result]) -> None:
            done.exception()  # nobody may be left to hear of it
            self._end(client, seconds)

        done = loop.run_in_executor(self._thread, measured)
        done.add_done_callback(ended)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not done.done():
                self._stop()
            raise

    def _end(self, client: str, seconds: float) -> None:
        self._busy = False
        self._rested[client] = asyncio.get_running_loop().time() + _REST * seconds
        self._give()

    def _give(self) -> None:
        """Give the turn to the first client that has rested."""
        now = asyncio.get_running_loop().time()
        self._rested = {client: end for client, end in self._rested.items() if end > now}
        while not self._busy and (rested := [one for one in self._waiting if one not in self._rested]):
            client = rested[0]
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                self._busy = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and not self._busy:
            first = min(self._rested[client] for client in self._waiting)
            self._timer = asyncio.get_running_loop().call_later(first - now, self._give)
