"""A submitted request, as its caller holds it: in a thread, or in an asyncio loop."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

from drafter.requests import Generation, Request, TokenDelta


class Handle:
    """A submitted request: wait for its result, iterate over its tokens, or cancel it.

    From a thread, `result` and `for`; from any asyncio loop, `outcome` and `async for`.

    Args:
        request: What was submitted.
        stream: Whether it will be iterated over.
        on_cancel: Called when it is cancelled.
    """

    def __init__(self, request: Request, *, stream: bool, on_cancel: Callable[[], object] | None = None) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.deadline = math.inf if request.timeout is None else self.submitted + request.timeout
        self.future: Future[Generation] = Future()
        # Only the engine ends it: a task that stops waiting must not cancel the future under the engine's hands.
        self.future.set_running_or_notify_cancel()
        self.cancelled = False
        self._on_cancel = on_cancel
        self._deltas: queue.SimpleQueue[TokenDelta | None] | None = queue.SimpleQueue() if stream else None
        self._wake: Callable[[], object] | None = None
        self.future.add_done_callback(lambda _: self._hand_out(None))

    @property
    def streams(self) -> bool:
        """Whether tokens are handed out as they come."""
        return self._deltas is not None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the generation, for at most `timeout` seconds.

        Raises:
            TimeoutError: It is not done yet.
            RequestTimeoutError: The request's own time was up.
            EngineError: The engine failed.
        """
        return self.future.result(timeout)

    async def outcome(self) -> Generation:
        """The same in an asyncio loop. A task that is cancelled while it waits does not cancel the request.

        Raises:
            RequestTimeoutError: The request's own time was up.
            EngineError: The engine failed.
        """
        return await asyncio.wrap_future(self.future)

    def cancel(self) -> None:
        """Free the request's slot at the next step; its result is what there is by then."""
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()

    def unwanted(self, now: float) -> bool:
        """Whether it is cancelled, or out of time at `now` (monotonic seconds)."""
        return self.cancelled or now >= self.deadline

    def __iter__(self) -> Iterator[TokenDelta]:
        """Tokens step by step, until the request ends; then `result` returns at once, and raises if it failed."""
        deltas = self._streamed()
        while (delta := deltas.get()) is not None:
            yield delta

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """The same in an asyncio loop, which the engine's thread wakes."""
        async for deltas in self.arrivals():
            for delta in deltas:
                yield delta

    async def arrivals(self) -> AsyncIterator[list[TokenDelta]]:
        """What has come since one last asked. Who asks seldom gets more at once, and is not woken in between."""
        deltas, loop, arrived = self._streamed(), asyncio.get_running_loop(), asyncio.Event()
        while True:
            arrived.clear()
            # Before the look at the queue: what comes after that look wakes the loop.
            self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
            some: list[TokenDelta | None] = []
            while not deltas.empty():
                some.append(deltas.get_nowait())
            if not some:
                await arrived.wait()
                continue
            self._wake = None
            if tokens := [delta for delta in some if delta is not None]:
                yield tokens
            if some[-1] is None:
                return

    def push(self, delta: TokenDelta) -> None:
        """Hand out a step's tokens (the engine calls this)."""
        self._hand_out(delta)

    def _streamed(self) -> queue.SimpleQueue[TokenDelta | None]:
        if self._deltas is None:
            raise TypeError("submit the request with stream=True to iterate over its tokens")
        return self._deltas

    def _hand_out(self, delta: TokenDelta | None) -> None:
        if self._deltas is None:
            return
        self._deltas.put(delta)
        if (wake := self._wake) is not None:
            try:
                wake()
            except RuntimeError:  # the loop is closed: nobody listens any more
                self._wake = None
