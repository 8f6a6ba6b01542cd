"""A sequence: a request under way, while it waits for a slot and while it is decoded in one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drafter.drafters.contract import Ids
from drafter.engine.sequences.handle import Handle
from drafter.errors import NotFiniteError, RequestTimeoutError
from drafter.requests import FinishReason, Generation, SamplingParams, Timing, TokenDelta, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.text.detokenizer import Detokenizer
from drafter.text.stop_strings import StopSearch, cut_at_stop
from drafter.text.vocabulary import special_texts
from drafter.verifiers.contract import Verifier

LEAST_SHARED = 8
"""Shorter common beginnings of prompts are computed again: that costs no more than to copy them."""


@dataclass(eq=False)
class Sequence:
    """A request under way.

    Args:
        handle: The caller's end.
        limit: Most tokens to generate, by the request or by the room in a slot.
        length: Committed tokens: all of `text` but the last, which is pending.
        eos: Tokens that end it.
        tokenizer: Decodes its tokens.
        verifier: Decides which of its draft tokens are accepted.
        output: Tokens generated so far.
        lenient: Places of those that the base would not have chosen.
        logprobs: Of these, where the request wants them.
        counts: What its steps have drafted and accepted.
        versions: Numbers of the weights that have drafted for it, in order.
        finish_reason: Why it has ended; None while it has not.
        entered: When it first entered a slot, in monotonic seconds.
        first_token: When it got its first token.
        stay: How often it has left a slot to wait again: what a step says of an earlier stay does not count.
        prefilled: Its tokens when it last entered a slot; all but the last are prefilled.
        beginning: The first `LEAST_SHARED` of these, to be compared at once.
        read: How many of these are prefilled by now.
        proven: Whether a step has shown, since it last entered a slot, that what it holds there is finite.
        borrowed: Whether the beginning of its text was copied from another sequence's slot.
        alone: Whether nothing is to be copied for it: what it borrowed before may not have been finite.
        plain: Whether nothing is to be drafted for it: the numbers of some draft token were not finite.
    """

    handle: Handle
    limit: int
    length: int
    eos: frozenset[int]
    tokenizer: Any
    verifier: Verifier
    output: list[int] = field(default_factory=list)
    lenient: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    counts: DecodeCounts = field(default_factory=DecodeCounts)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    entered: float | None = None
    first_token: float | None = None
    stay: int = 0
    prefilled: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    beginning: bytes = b""
    read: int = 0
    proven: bool = False
    borrowed: bool = False
    alone: bool = False
    plain: bool = False
    _shown: int = 0  # characters that the caller has
    _unshown: str = ""  # and those that came after them
    _detokenizer: Detokenizer | None = None
    _stops: StopSearch = field(init=False)
    _special_texts: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        if self.handle.streams or self.sampling.stop:
            self._detokenizer = Detokenizer(self.tokenizer)
        self._stops = StopSearch(self.sampling.stop)
        self._special_texts = special_texts(self.tokenizer) if self.sampling.stop else {}

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.handle.request.sampling

    @property
    def text(self) -> Ids:
        """Its tokens so far, prompt and output."""
        return np.array([*self.handle.request.prompt_ids, *self.output], dtype=np.int64)

    @property
    def unread(self) -> int:
        """Tokens that are still to be prefilled."""
        return self.length - self.read

    @property
    def ended(self) -> bool:
        """Whether its caller has the result."""
        return self.handle.future.done()

    def enter(self) -> None:
        """Begin in a slot, with what output there is from a slot before."""
        self.prefilled, self.read = self.text, 0
        self.beginning = self.prefilled[:LEAST_SHARED].tobytes()
        self.proven = self.borrowed = False
        if self.entered is None:
            self.entered = time.monotonic()

    def take(
        self,
        tokens: list[int],
        accepted: int,
        drafted: int,
        logprobs: list[TokenLogprob] | None,
        lenient: Iterable[int] = (),
    ) -> int:
        """Add a step's tokens one by one and stop exactly where plain decoding would; return how many were added.

        Args:
            tokens: The accepted draft tokens and the bonus token.
            accepted: How many of them were drafted.
            drafted: Draft tokens verified in the step.
            logprobs: Of `tokens`, where the request asked for them.
            lenient: Places of those of `tokens` that the base would not have chosen.
        """
        before = len(self.output)
        if tokens and self.first_token is None:
            self.first_token = time.monotonic()
        for token in tokens:
            self.output.append(token)
            if self._detokenizer is not None:
                piece = self._detokenizer.push(token)
                self._stops.push(piece)
                if special := self._special_texts.get(token):
                    self._stops.push(special, hidden=True)
                if self._stops.found:
                    self.finish_reason = "stop"
                if self.handle.streams:
                    self._unshown += piece
            if token in self.eos:
                self.finish_reason = "stop"
            if self.finish_reason is None and len(self.output) == self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        emitted = len(self.output) - before
        self.length += len(tokens)
        self.lenient += [before + place for place in lenient if place < emitted]
        accepted = min(emitted, accepted)
        self.counts.record_step(emitted=emitted, accepted=accepted, drafted=drafted)
        if logprobs is not None:
            logprobs = logprobs[:emitted]
            self.logprobs += logprobs
        if emitted and self.handle.streams:
            self.handle.push(TokenDelta(self.output[before:], self._new_text(), accepted, logprobs))
        return emitted

    def note_version(self, version: int) -> None:
        """Note that drafts of these weights were verified in a step."""
        if version not in self.versions[-1:]:
            self.versions.append(version)

    def succeed(self) -> None:
        """Give the caller the result; `finish_reason` must be set."""
        self.handle.future.set_result(self.generation())

    def fail_unwanted(self) -> None:
        """End a request that is unwanted: with what there is if it was cancelled, otherwise as out of time."""
        if self.handle.cancelled:
            self.finish_reason = "cancelled"
            self.succeed()
        else:
            self.handle.future.set_exception(
                RequestTimeoutError(
                    f"the request was not done within its {self.handle.request.timeout:g} seconds "
                    f"({len(self.output)} tokens were): allow more time, or submit less at once"
                )
            )

    def fail_not_finite(self) -> None:
        """End a request for which the base computes numbers that are not finite."""
        self.handle.future.set_exception(
            NotFiniteError(
                f"the base's logits after {len(self.output)} generated tokens are not finite (NaN or infinite): its "
                "activations overflow on this text; load it in a wider dtype (float32, or bfloat16 for float16), or "
                "leave the text out"
            )
        )

    def generation(self) -> Generation:
        """The result for the caller; `finish_reason` must be set."""
        assert self.finish_reason is not None
        request = self.handle.request
        text = self.tokenizer.decode(self.output, skip_special_tokens=True)
        return Generation(
            request_id=request.request_id,
            token_ids=self.output,
            text=cut_at_stop(text[: self._stops.cut], self.sampling.stop),
            finish_reason=self.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            counts=self.counts,
            logprobs=self.logprobs if self.sampling.logprobs is not None else None,
            timing=self._timing(),
            verifier=self.verifier.name,
            lossless=self.verifier.lossless,
            lenient=self.lenient,
            drafter_versions=self.versions,
        )

    def _timing(self) -> Timing:
        since = self.handle.submitted
        return Timing(
            queued=None if self.entered is None else self.entered - since,
            first_token=None if self.first_token is None else self.first_token - since,
            total=time.monotonic() - since,
        )

    def _new_text(self) -> str:
        if self.finish_reason is not None:
            return self.generation().text[self._shown :]
        safe = max(0, len(self._unshown) - self._stops.held_back)
        new, self._unshown = self._unshown[:safe], self._unshown[safe:]
        self._shown += len(new)
        return new
