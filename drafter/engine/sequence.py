"""A request's place in the engine, and what its caller holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter.engine.handle import Handle
from drafter.errors import RequestTimeoutError
from drafter.requests import FinishReason, Generation, Timing, TokenDelta, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.text.detokenizer import Detokenizer, cut_at_stop, safe_length

Ids = npt.NDArray[np.int64]


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
