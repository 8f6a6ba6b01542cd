"""A request's place in the engine, and what its caller holds."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from drafter.detokenizer import Detokenizer, cut_at_stop, safe_length
from drafter.requests import FinishReason, Generation, Request, TokenDelta, TokenLogprob
from drafter.statistics import DecodeCounts


class Handle:
    """A submitted request: wait for its result, iterate over its tokens, or cancel it."""

    def __init__(self, request: Request, *, stream: bool) -> None:
        self.request = request
        self.future: Future[Generation] = Future()
        self.cancelled = False
        self._deltas: queue.SimpleQueue[TokenDelta | None] | None = queue.SimpleQueue() if stream else None
        self.future.add_done_callback(lambda _: self._end())

    @property
    def streams(self) -> bool:
        """Whether tokens are handed out as they come."""
        return self._deltas is not None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the generation, for at most `timeout` seconds.

        Raises:
            TimeoutError: It is not done yet.
            EngineError: The engine failed.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Free the request's slot at the next step; its result is what there is by then."""
        self.cancelled = True

    def __iter__(self) -> Iterator[TokenDelta]:
        """Tokens step by step, until the request ends; then `result` returns at once, and raises if it failed."""
        if self._deltas is None:
            raise TypeError("submit the request with stream=True to iterate over its tokens")
        while (delta := self._deltas.get()) is not None:
            yield delta

    def push(self, delta: TokenDelta) -> None:
        """Hand out a step's tokens (the engine calls this)."""
        if self._deltas is not None:
            self._deltas.put(delta)

    def _end(self) -> None:
        if self._deltas is not None:
            self._deltas.put(None)


@dataclass
class Slot:
    """A request while it is being decoded.

    Args:
        handle: The caller's end.
        limit: Most tokens to generate, by the request or by the room in the slot.
        length: Committed tokens.
        eos: Tokens that end it.
        tokenizer: Decodes its tokens.
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
    _shown: int = 0
    _detokenizer: Detokenizer | None = None

    def __post_init__(self) -> None:
        if self.handle.streams or self.handle.request.sampling.stop:
            self._detokenizer = Detokenizer(self.tokenizer)

    def take(self, tokens: list[int], drafted: int, logprobs: list[TokenLogprob] | None) -> None:
        """Enter a step's tokens one by one and stop exactly where plain decoding would.

        Args:
            tokens: The accepted draft tokens and the bonus token.
            drafted: Draft tokens verified in the step.
            logprobs: Of `tokens`, where the request asked for them.
        """
        sampling = self.handle.request.sampling
        before = len(self.output)
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
        self.counts.record_step(emitted=emitted, accepted=min(emitted, len(tokens) - 1), drafted=drafted)
        if logprobs is not None:
            logprobs = logprobs[:emitted]
            self.logprobs += logprobs
        if self.handle.streams:
            self.handle.push(TokenDelta(self.output[before:], self._new_text(), logprobs))

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
