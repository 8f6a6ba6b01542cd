"""The caller's side of a submitted request."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from drafter.requests import Generation, Request, TokenDelta


class Handle:
    """A submitted request: wait for its result, iterate over its tokens if it is to `stream`, or cancel it.

    From a thread, `result` and `for`; from any asyncio loop, `outcome` and `async for`. A stream that is left before
    its end, by `break`, an exception or a cancelled task, cancels its request.
    """

    def __init__(
        self,
        request: Request,
        *,
        stream: bool,
        on_change: Callable[[], object] | None = None,
    ) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.deadline = math.inf if request.timeout is None else self.submitted + request.timeout
        self.future: Future[Generation] = Future()
        # Only the engine ends it: a task that stops waiting must not cancel the future under the engine's hands.
        self.future.set_running_or_notify_cancel()
        self.cancelled = self.parked = False
        self.until = math.inf  # output tokens with which it parks by itself
        self._on_change = on_change
        self.on_draft: Callable[[Several[int], Several[int], int], object] | None = None  # takes what `draft` brings
        self._deltas: queue.SimpleQueue[TokenDelta | None] | None = queue.SimpleQueue() if stream else None
        self._wake: Callable[[], object] | None = None
        self.future.add_done_callback(lambda _: self.push(None))

    @property
    def streams(self) -> bool:
        return self._deltas is not None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the generation, for at most `timeout` seconds; then raise `TimeoutError`.

        Raises:
            RequestTimeoutError: The request's own time was up.
            EngineError: The engine failed.
        """
        return self._judged(self.future.result(timeout))

    async def outcome(self) -> Generation:
        """Wait in an asyncio loop; see `result`. A task that is cancelled meanwhile cancels only a streamed request."""
        try:
            return self._judged(await asyncio.wrap_future(self.future))
        finally:
            self._leave()

    def __await__(self) -> Generator[Any, None, Generation]:
        return self.outcome().__await__()

    def _judged(self, found: Generation) -> Generation:
        """Return a result that is valid only if the type of its record accepts it, too: in the caller's thread."""
        asked = self.request.sampling.structured_outputs
        if asked is None:
            return found
        accepted = asked.record_type is None or not found.valid or asked.record_type.accepts(found.text)
        return replace(found, asked=asked, valid=found.valid and accepted)

    def cancel(self) -> None:
        """Free the request's slot at the next step; its result is the tokens until then."""
        self.cancelled = True
        self._changed()

    def park(self) -> None:
        """Stop decoding from the next step on, and keep the KV in its slot for as long as no other request needs it.

        The tokens are the same as without. A request that waits still enters a slot before.
        """
        self.parked = True
        self._changed()

    def unpark(self, until: float = math.inf) -> None:
        """Go on from where it was parked, to the step after which there are `until` output tokens or more."""
        self.until = until  # first: the engine's thread may look at any time
        self.parked = False
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def draft(self, tokens: Several[int], parents: Several[int], at: int) -> None:
        """Bring a draft made elsewhere, from any thread, to an engine that takes such.

        The next step verifies what of it continues the text by then; a draft that does not is dropped.

        Args:
            tokens: Draft tokens.
            parents: Index of each one's parent among them, which comes before it; -1 for those after the text's end.
            at: Output tokens of that text.

        Raises:
            RequestError: The parents make no tree, or a token is not in the vocabulary.
        """
        if self.on_draft is not None and not self.future.done():
            self.on_draft(tokens, parents, at)

    def _leave(self) -> None:
        if self.streams and not self.future.done():
            self.cancel()

    def unwanted(self, now: float) -> bool:
        """Return whether it is cancelled, or out of time at `now` (monotonic seconds)."""
        return self.cancelled or now >= self.deadline

    def __iter__(self) -> Iterator[TokenDelta]:
        """Yield tokens step by step until the request ends; then `result` returns at once, and raises if it failed."""
        deltas = self._streamed()
        try:
            while (delta := deltas.get()) is not None:
                yield delta
        finally:
            self._leave()
        deltas.put(None)  # who iterates once more ends at once

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """Yield the same in an asyncio loop, which the engine's thread wakes."""
        try:
            async for deltas in self.arrivals():
                for delta in deltas:
                    yield delta
        finally:
            self._leave()

    async def arrivals(self) -> AsyncIterator[list[TokenDelta]]:
        """Yield new tokens in batches. A slow consumer gets larger batches, not more wake-ups."""
        deltas, loop, arrived = self._streamed(), asyncio.get_running_loop(), asyncio.Event()
        try:
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
                    deltas.put(None)
                    return
        finally:
            self._leave()

    def _streamed(self) -> queue.SimpleQueue[TokenDelta | None]:
        if self._deltas is None:
            raise TypeError("submit the request with stream=True to iterate over its tokens")
        return self._deltas

    def push(self, delta: TokenDelta | None) -> None:
        """Hand out a step's tokens; None after the last ones."""
        if self._deltas is None:
            return
        self._deltas.put(delta)
        if (wake := self._wake) is not None:
            try:
                wake()
            except RuntimeError:  # the loop is closed
                self._wake = None
