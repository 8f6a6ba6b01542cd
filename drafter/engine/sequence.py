"""A submitted request, as its caller holds it: in a thread, or in an asyncio loop."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drafter.acceptance.contract import Verifier
from drafter.drafters.contract import Ids
from drafter.errors import NotFiniteError, RequestError, RequestTimeoutError
from drafter.requests import FinishReason, Generation, Request, SamplingParams, Timing, TokenDelta, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.target.model import BaseModel
from drafter.text.tokenizers import Detokenizer, StopSearch, cut_at_stop, refuse_long, special_texts


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
        """True if tokens are handed out as they come."""
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

    def __await__(self) -> Generator[Any, None, Generation]:
        """As `outcome`."""
        return self.outcome().__await__()

    def cancel(self) -> None:
        """Free the request's slot at the next step; its result is what there is by then."""
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()

    def unwanted(self, now: float) -> bool:
        """Return whether it is cancelled, or out of time at `now` (monotonic seconds)."""
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
        """Yield new tokens in batches. A slow consumer gets larger batches, not more wake-ups."""
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


# ---- A sequence: a request under way, while it waits for a slot and while it is decoded in one.

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
        """Its sampling settings."""
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
        """True if its caller has the result."""
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
                f"the model's logits after {len(self.output)} generated tokens are not finite (NaN or infinite): its "
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
            num_prompt_tokens=len(request.prompt_ids),
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


# ---- A request becomes a sequence, if the base can decode it.


def refuse_unusable(request: Request, base: BaseModel, verifier: Verifier, max_length: int) -> None:
    """Refuse a request that cannot be decoded.

    Args:
        request: What was submitted.
        base: Says which tokens there are.
        verifier: Says which settings it defines.
        max_length: Tokens that prompt and output may have together.

    Raises:
        RequestError: The prompt is empty, too long, or not of token ids in the vocabulary; a bias or a stop token is
            not; or the verifier does not define what the settings ask for.
    """
    verifier.refuse(request.sampling)
    ids = request.prompt_ids
    if len(ids) == 0:
        raise RequestError("the prompt is empty: give at least one token")
    refuse_long(len(ids), max_length)
    if not all(isinstance(one, int) for one in ids):
        raise RequestError("the prompt must be token ids: integers")
    if min(ids) < 0 or max(ids) >= base.vocab_size:
        raise RequestError(f"the prompt has token ids outside the vocabulary of {base.vocab_size}")
    if (beyond := max(dict(request.sampling.logit_bias), default=0)) >= base.vocab_size:
        raise RequestError(f"logit_bias has token {beyond}, outside the vocabulary of {base.vocab_size}")
    if (beyond := max(request.sampling.stop_token_ids, default=0)) >= base.vocab_size:
        raise RequestError(f"stop_token_ids has token {beyond}, outside the vocabulary of {base.vocab_size}")


def new_sequence(handle: Handle, base: BaseModel, tokenizer: Any, verifier: Verifier, max_length: int) -> Sequence:
    """The sequence of a request that `refuse_unusable` has let pass.

    Args:
        handle: The caller's end.
        base: Says which tokens end a sequence.
        tokenizer: Decodes its tokens.
        verifier: Decides which of its draft tokens are accepted.
        max_length: Tokens that prompt and output may have together.
    """
    prompt, sampling = len(handle.request.prompt_ids), handle.request.sampling.over()
    ends = frozenset() if sampling.ignore_eos else base.eos_token_ids
    return Sequence(
        handle,
        limit=min(sampling.max_new_tokens, max_length - prompt),
        length=prompt - 1,
        eos=ends | set(sampling.stop_token_ids),
        tokenizer=tokenizer,
        verifier=verifier,
    )
