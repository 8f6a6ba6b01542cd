"""The sequence that the engine decodes for a request, and the ended row to learn from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.acceptance.contract import Verifier
from drafter.acceptance.guide import Guide
from drafter.acceptance.limits import Limits
from drafter.drafters.contract import Drafter, Ids
from drafter.engine.handle import Handle
from drafter.errors import NotFiniteError, RequestError, RequestTimeoutError
from drafter.prompt import Prompt, TextKey
from drafter.requests import FinishReason, Generation, Request, SamplingParams, Timing, TokenDelta, TokenLogprob
from drafter.statistics import DecodeCounts
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import Borders, Features
from drafter.text.text_stream import TextStream
from drafter.text.tokenizers import refuse_long


class Status(Enum):
    """Where a sequence is; see `Scheduler`."""

    WAITING = auto()  # in the queue, or not yet there
    READ = auto()  # in a slot, and its prompt is being read
    DECODED = auto()  # in a slot, and in every step
    PARKED = auto()  # in no step, as its handle is parked


class Handling(Enum):
    """How a sequence is decoded, by whether its numbers have been finite so far."""

    FREE = auto()  # it may have drafts, and copy a prefix from another slot
    COPIED = auto()  # it has a copied prefix, which no step has shown yet to be finite
    ALONE = auto()  # nothing is copied for it
    PLAIN = auto()  # nor is anything drafted
    NOT_FINITE = auto()  # its own numbers are not finite: it ends
    STUCK = auto()  # its limits leave no token to choose: it ends


_AFTER_DRAFTS = {
    Handling.FREE: Handling.PLAIN,
    Handling.COPIED: Handling.ALONE,
    Handling.ALONE: Handling.PLAIN,
    Handling.PLAIN: Handling.PLAIN,  # that step was under way before
}
"""What becomes of a sequence by a step with draft tokens whose logits are not finite: these alone may be to blame."""
_AFTER_PLAIN = dict.fromkeys(_AFTER_DRAFTS, Handling.NOT_FINITE) | {Handling.COPIED: Handling.ALONE}
"""The same without draft tokens.

A number that is not finite reaches all positions of its forward. So a slot from which a prefix was copied may have been
spoilt by a part of the other text that this one does not have.
"""


class Sequence:
    """A request under way, waiting for a slot or in one. It has passed `refuse_unusable`."""

    def __init__(
        self,
        handle: Handle,
        eos: frozenset[int],
        tokenizer: Any,
        verifier: Verifier,
        max_length: int,
        guide: Guide | None = None,
        *,
        sees: bool = False,
    ) -> None:
        prompt, sampling = handle.request.prompt_ids, handle.request.sampling.over()
        scored = handle.request.prompt_logprobs is not None
        self.handle, self.verifier, self.guide = handle, verifier, guide
        self.limit = min(sampling.max_new_tokens, max_length - len(prompt))  # most tokens to generate
        self.length = len(prompt) - 1  # committed tokens: all of `text` but the last, which is pending
        self.limits = Limits.of(sampling, eos, tokenizer)
        self.eos = (frozenset() if sampling.ignore_eos else eos) | set(sampling.stop_token_ids)
        self.output: list[int] = []
        self.lenient: list[int] = []  # indices of output that the target model would not have chosen
        self.forced: list[int] = []  # indices of output that the guide left no choice about
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs = [TokenLogprob(token, None, ()) for token in prompt[: len(prompt) * scored]]
        self.counts = DecodeCounts()
        self.versions: list[int] = []  # of the weights that have drafted for it, in order
        self.finish_reason: FinishReason | None = None
        self.status = Status.WAITING
        self.entered: float | None = None  # when it first entered a slot, in monotonic seconds
        self.first_token: float | None = None  # when it got its first token
        self.stay = 0  # number of times that it left a slot to wait again: a step of an earlier stay does not count
        self.prefilled: Ids = np.empty(0, dtype=np.int64)  # when it last entered a slot: all but the last are read
        self.salt = handle.request.salt
        self.key = TextKey(self.salt, self.prefilled)  # of these
        self.read = 0  # number of these that are read by now
        self.cached = 0  # tokens of the prompt that were copied from other rows instead of read
        self.sees = sees  # its prompt is read by features
        self.features: Features | None = None  # of such a prompt, while it is being read
        self.borders: Borders | None = None  # where such a prompt may be cut; None if everywhere
        self.handling = Handling.ALONE if scored else Handling.FREE
        self._said = TextStream(tokenizer, prompt, sampling)  # at its end it has all of the output
        self._heard = 0  # number of tokens that it has
        self._shown = 0  # characters of the answer that the caller has
        self._forced_parts: list[tuple[int, int]] = []  # (start, end) of the forced tokens' characters

    @property
    def sampling(self) -> SamplingParams:
        return self.handle.request.sampling

    @property
    def apart(self) -> bool:
        """True if its prompt has forwards of its own: for its first token, log-probabilities or images."""
        return self.handle.streams or self.handle.request.prompt_logprobs is not None or self.sees

    @property
    def alone(self) -> bool:
        """True if nothing is copied for it."""
        return self.handling in (Handling.ALONE, Handling.PLAIN)

    @property
    def proven(self) -> bool:
        """True if a step has shown, since it last entered a slot, that its state there is finite: it has new tokens."""
        return self.length >= len(self.prefilled)

    @property
    def keepable(self) -> bool:
        """True if others may use its state when it has ended: all of it is finite, and the target model's own."""
        return self.proven and not self.lenient and self.handling in (Handling.FREE, Handling.ALONE)

    @property
    def follows(self) -> bool:
        """True if the host must follow its steps stage by stage."""
        return self.handling is Handling.PLAIN or self.guide is not None or self.sampling.logprobs is not None

    @property
    def text(self) -> Ids:
        return np.array([*self.handle.request.prompt_ids, *self.output], dtype=np.int64)

    @property
    def unread(self) -> int:
        """Tokens still to be prefilled."""
        return self.length - self.read

    @property
    def ended(self) -> bool:
        return self.handle.future.done()

    def enter(self) -> None:
        """Begin in a slot, with the output of earlier stays."""
        self.prefilled, self.read = self.text, 0
        self.features = self.borders = None
        self.key = self.handle.request.key(self.prefilled)
        if not self.output:
            self.cached = 0
        if self.handling is Handling.COPIED:
            self.handling = Handling.FREE
        if self.entered is None:
            self.entered = time.monotonic()

    def look(self, features: Features) -> None:
        """Keep the features of its prompt until that is read."""
        self.features, self.borders = features, features.borders

    def copied(self, length: int) -> None:
        """Note that its first `length` tokens have been copied from another row."""
        self.handling = Handling.COPIED
        if not self.output:
            self.cached = length

    def cut(self, start: int, stop: int) -> int:
        """Return where a forward from `start` ends, by `stop` if that is possible: features are not read with others,
        and tokens that see each other are read together."""
        if self.features is None or start >= self.features.size:
            return stop
        stop = min(stop, self.features.size)
        return stop if self.borders is None else min(self.borders.cut(start, stop), self.length)

    def take(
        self,
        tokens: list[int],
        accepted: int,
        drafted: int,
        logprobs: list[TokenLogprob] | None,
        lenient: Iterable[int] = (),
    ) -> int:
        """Add a step's tokens one by one, and stop exactly where plain decoding would; return how many were added.

        See `Outcome` for the arguments; there are no tokens if the step's logits are not finite.
        """
        before = len(self.output)
        if not tokens:
            self.handling = (_AFTER_DRAFTS if drafted else _AFTER_PLAIN)[self.handling]
        elif self.handling is Handling.COPIED:
            self.handling = Handling.FREE
        if tokens and self.first_token is None:
            self.first_token = time.monotonic()
        for token in tokens:
            self.output.append(token)
            if not self._permits(token):
                # Where all are forbidden, the choice is none of them.
                self.output.pop()
                self.handling = Handling.STUCK
                break
            if self.handle.streams or self._said.searches:
                begin = self._said.length
                self._hear()
                if self._said.found:
                    self.finish_reason = "stop"
                if self.handle.streams and self.forced and self.forced[-1] == len(self.output) - 1:
                    self._forced_parts.append((begin, self._said.length))
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
        if len(self.output) >= self.handle.until:
            self.handle.parked = True  # before anybody hears of the tokens, who may let it go on
        if emitted and self.handle.streams:
            new = self._said.new() if self.finish_reason is None else self._said.rest()
            shown, self._shown = self._shown, self._shown + len(new.text)
            forced, reasoning = self._forced_within(shown, self._shown), new.reasoning or ""
            delta = TokenDelta(self.output[before:], new.text, accepted, logprobs, forced, reasoning, new.marked)
            self.handle.push(delta)
        return emitted

    def _hear(self) -> None:
        """Have the text of all tokens so far."""
        self._said.push(*self.output[self._heard :])
        self._heard = len(self.output)

    def _permits(self, token: int) -> bool:
        """Return whether the newest token of the output may be there; the guide goes on by it."""
        if self.limits is not None and not self.limits.permits(self.output):
            return False
        if self.guide is None:
            return True
        forced = next(iter(self.guide.forced()), None) == token
        if not self.guide.consume(token):
            return False
        if forced:
            self.forced.append(len(self.output) - 1)
            self.counts.num_forced_tokens += 1
        return True

    def note_prompt(self, start: int, found: list[TokenLogprob]) -> None:
        """Keep the log-probabilities of the tokens after `start`, as far as they are the prompt's."""
        for place, one in enumerate(found, start + 1):
            if place < len(self.prompt_logprobs):
                self.prompt_logprobs[place] = one

    def fail_unwanted(self) -> None:
        """End a request with its tokens so far if it was cancelled, otherwise as out of time."""
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

    def fail(self) -> None:
        """End a request whose numbers are not finite, or which is stuck."""
        tokens = len(self.output)
        error: Exception
        if self.handling is Handling.STUCK and self.guide is not None:
            why = self.guide.problem or "its grammar and the other settings allow none there"
            error = RequestError(f"structured_outputs: no token is left to choose after {tokens} generated ones: {why}")
        elif self.handling is Handling.STUCK:
            error = RequestError(
                f"no token is left to choose after {tokens} generated ones: allow more tokens in allowed_token_ids, or "
                "have fewer bad_words"
            )
        else:
            error = NotFiniteError(
                f"the model's logits after {tokens} generated tokens are not finite (NaN or infinite): its activations "
                "overflow on this text; load it in a wider dtype (float32, or bfloat16 for float16), or leave the text "
                "out"
            )
        self.handle.future.set_exception(error)

    def generation(self) -> Generation:
        """Return the result; `finish_reason` must be set."""
        assert self.finish_reason is not None
        request, since = self.handle.request, self.handle.submitted
        self._hear()
        said = self._said.whole()
        return Generation(
            request_id=request.request_id,
            token_ids=self.output,
            text=said.text,
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=self.cached,
            counts=self.counts,
            logprobs=self.logprobs if self.sampling.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs if request.prompt_logprobs is not None else None,
            timing=Timing(
                queued=None if self.entered is None else self.entered - since,
                first_token=None if self.first_token is None else self.first_token - since,
                total=time.monotonic() - since,
            ),
            verifier=self.verifier.name,
            lossless=self.verifier.lossless,
            lenient=self.lenient,
            forced=self.forced,
            valid=None if self.guide is None else self.guide.valid,
            drafter_versions=self.versions,
            reasoning_content=said.reasoning,
            marked=said.marked,
        )

    def _forced_within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return which of the characters from `begin` to `end` were forced, counted from `begin`, and forget these."""
        parts = [(max(start, begin), min(stop, end)) for start, stop in self._forced_parts]
        self._forced_parts = [part for part in self._forced_parts if part[1] > end]
        return [(start - begin, stop - begin) for start, stop in parts if start < stop]


def refuse_unusable(request: Request, base: BaseModel, verifier: Verifier, max_length: int) -> None:
    """Raise `RequestError` for a request that cannot be decoded within `max_length` tokens of prompt and output."""
    verifier.refuse(request.sampling)
    ids = request.prompt_ids
    if len(ids) == 0:
        raise RequestError("the prompt is empty: give at least one token")
    refuse_long(len(ids), max_length)
    if not all(isinstance(one, int) for one in ids):
        raise RequestError("the prompt must be token ids: integers")
    if min(ids) < 0 or max(ids) >= base.vocab_size:
        raise RequestError(f"the prompt has token ids outside the vocabulary of {base.vocab_size}")
    assert isinstance(request.prompt, Prompt)
    if base.sight is not None:
        base.sight.refuse(request.prompt)
    elif request.prompt.inputs:
        raise RequestError(f"the prompt has images, and {base.blind}: leave them out, or use a model that sees")
    sampling = request.sampling
    named = {name: getattr(sampling, name) for name in ("stop_token_ids", "allowed_token_ids")}
    for name, tokens in {"logit_bias": dict(sampling.logit_bias), **named}.items():
        if (beyond := max(tokens, default=0)) >= base.vocab_size:
            raise RequestError(f"{name} has token {beyond}, outside the vocabulary of {base.vocab_size}")


@dataclass(frozen=True)
class EndedRow:
    """A row that has just ended, to learn from."""

    request_id: str
    prompt: Several[int]
    output: Several[int]

    @property
    def length(self) -> int:
        """T, tokens of prompt and output."""
        return len(self.prompt) + len(self.output)


class RowTap(Protocol):
    """Receives an engine's ended rows. Both methods are called on the engine's thread and must not wait."""

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        """Return whether to hand out a row whose hidden states take `nbytes` bytes; if not, nothing is copied."""

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        """Take a wanted row, with its hidden states `[T, K · d]` on the CPU; None if the drafter reads none.

        `arrived` happens when they are there; None where they are.
        """


class LearningStart(Protocol):
    """Initial state of a drafter that learns from rows while it drafts."""

    def drafter(self, name: str, base: BaseModel, nodes: int, *, isolated: bool = False) -> Drafter:
        """Return a drafter that can learn, by the name that users give; raise `LoadError` if there is none."""

    def tap(self) -> RowTap:
        """Return what collects the rows to learn from."""
