"""A request's place in the engine, and what its caller holds."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter.text.detokenizer import Detokenizer, cut_at_stop, safe_length
from drafter.errors import RequestTimeoutError
from drafter.requests import FinishReason, Generation, Request, Timing, TokenDelta, TokenLogprob
from drafter.statistics import DecodeCounts

Ids = npt.NDArray[np.int64]


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


@dataclass(eq=False)
class Slot:
    """A request's own state: while it waits for a slot, and while it is decoded in one.

    Args:
        handle: The caller's end.
        limit: Most tokens to generate, by the request or by the room in the slot.
        length: Committed tokens: all of `text` but the last, which is pending.
        eos: Tokens that end it.
        tokenizer: Decodes its tokens.
        entered: When it first entered a slot, in monotonic seconds.
        first_token: When it got its first token.
        prefilled: Its tokens when it last entered a slot; all but the last are prefilled.
        read: How many of these are by now.
    """

    handle: Handle
    limit: int
    length: int
    eos: frozenset[int]
    tokenizer: Any
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    counts: DecodeCounts = field(default_factory=DecodeCounts)
    finish_reason: FinishReason | None = None
    entered: float | None = None
    first_token: float | None = None
    prefilled: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    read: int = 0
    _shown: int = 0
    _detokenizer: Detokenizer | None = None

    def __post_init__(self) -> None:
        if self.handle.streams or self.handle.request.sampling.stop:
            self._detokenizer = Detokenizer(self.tokenizer)

    @property
    def text(self) -> Ids:
        """Its tokens so far, prompt and output."""
        return np.array([*self.handle.request.prompt_ids, *self.output], dtype=np.int64)

    def take(self, tokens: list[int], drafted: int, logprobs: list[TokenLogprob] | None) -> int:
        """Enter a step's tokens one by one and stop exactly where plain decoding would; return how many were entered.

        Args:
            tokens: The accepted draft tokens and the bonus token.
            drafted: Draft tokens verified in the step.
            logprobs: Of `tokens`, where the request asked for them.
        """
        sampling = self.handle.request.sampling
        before = len(self.output)
        if self.first_token is None:
            self.first_token = time.monotonic()
        for token in tokens:
            self.output.append(token)
            if self._detokenizer is not None:
                text = self._detokenizer.push(token)
                if cut_at_stop(text, sampling.stop) is not None:
                    self.finish_reason = "stop"
            if token in self.eos:
                self.finish_reason = "stop"
            if self.finish_reason is None and len(self.output) == self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        emitted = len(self.output) - before
        self.length += len(tokens)
        # The last of `tokens` is the bonus token; where the row ended before it, every emitted token was drafted.
        accepted = min(emitted, len(tokens) - 1)
        self.counts.record_step(emitted=emitted, accepted=accepted, drafted=drafted)
        if logprobs is not None:
            logprobs = logprobs[:emitted]
            self.logprobs += logprobs
        if self.handle.streams:
            self.handle.push(TokenDelta(self.output[before:], self._new_text(), accepted, logprobs))
        return emitted

    def drop(self) -> None:
        """End a request that is unwanted: with what there is if it was cancelled, otherwise as out of time."""
        if self.handle.cancelled:
            self.finish_reason = "cancelled"
            self.handle.future.set_result(self.generation())
        else:
            self.handle.future.set_exception(
                RequestTimeoutError(
                    f"the request was not done within its {self.handle.request.timeout:g} seconds "
                    f"({len(self.output)} tokens were): allow more time, or submit less at once"
                )
            )

    def generation(self) -> Generation:
        """What came of the request; `finish_reason` must be set."""
        assert self.finish_reason is not None
        request = self.handle.request
        text = self.tokenizer.decode(self.output, skip_special_tokens=True)
        cut = cut_at_stop(text, request.sampling.stop)
        return Generation(
            request_id=request.request_id,
            token_ids=self.output,
            text=text if cut is None else cut,
            finish_reason=self.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            counts=self.counts,
            logprobs=self.logprobs if request.sampling.logprobs is not None else None,
            timing=self._timing(),
        )

    def _timing(self) -> Timing:
        since = self.handle.submitted
        return Timing(
            queued=None if self.entered is None else self.entered - since,
            first_token=None if self.first_token is None else self.first_token - since,
            total=time.monotonic() - since,
        )

    def _new_text(self) -> str:
        assert self._detokenizer is not None
        stop = self.handle.request.sampling.stop
        if self.finish_reason is not None:
            text = self.generation().text
            return text[self._shown :]
        text = self._detokenizer.text
        shown, self._shown = self._shown, max(self._shown, safe_length(text, stop))
        return text[shown : self._shown]
