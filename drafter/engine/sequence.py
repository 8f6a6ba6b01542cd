"""The sequence that the engine decodes for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

import numpy as np

from drafter.acceptance.contract import Verifier
from drafter.acceptance.limits import Limits
from drafter.drafters.contract import Ids
from drafter.engine.handle import Handle
from drafter.errors import NotFiniteError, RequestError, RequestTimeoutError
from drafter.parts.contract import NewTokens, RowPart, Steering
from drafter.prompt import TextKey
from drafter.requests import FinishReason, Generation, Request, SamplingParams, Timing
from drafter.statistics import DecodeCounts
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import Borders, Features
from drafter.text.tokenizers import refuse_long
from drafter.tree.paths import RowDrafts


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
    """A request under way, waiting for a slot or in one. It has passed `refuse_unusable`.

    Args:
        eos: The target model's.
        max_length: Most tokens of prompt and output.
        parts: What rooms add to it.
    """

    def __init__(
        self,
        handle: Handle,
        eos: frozenset[int],
        tokenizer: Any,
        max_length: int,
        parts: Several[RowPart] = (),
    ) -> None:
        prompt, sampling = handle.request.prompt_ids, handle.request.sampling.over()
        self.handle, self.parts = handle, parts
        self.limit = min(sampling.max_new_tokens, max_length - len(prompt))  # most tokens to generate
        self.length = len(prompt) - 1  # committed tokens: all of `text` but the last, which is pending
        self.limits = Limits.of(sampling, eos, tokenizer)
        self.eos = (frozenset() if sampling.ignore_eos else eos) | set(sampling.stop_token_ids)
        self.output: list[int] = []
        self.lenient: list[int] = []  # indices of output that the target model would not have chosen
        self.counts = DecodeCounts()
        self.finish_reason: FinishReason | None = None
        self.status = Status.WAITING
        self.timing = Timing()  # so far
        self.stay = 0  # number of times that it left a slot to wait again: a step of an earlier stay does not count
        # Of its text when it last entered a slot: all but the last token are prefilled.
        self.key = TextKey(handle.request.salt, np.empty(0, dtype=np.int64))
        self.read = 0  # number of these that are read by now
        self.cached = 0  # tokens of the prompt that were copied from other rows instead of read
        self.handling = Handling.ALONE if any(part.alone for part in parts) else Handling.FREE

    @property
    def sampling(self) -> SamplingParams:
        return self.handle.request.sampling

    @property
    def salt(self) -> str:
        return self.handle.request.salt

    @property
    def background(self) -> bool:
        return self.handle.request.background

    @cached_property
    def steering(self) -> Steering | None:
        """Its part that says which tokens may come; None where all may."""
        return next((part for part in self.parts if isinstance(part, Steering)), None)

    @cached_property
    def _waiting(self) -> list[RowPart]:
        return [part for part in self.parts if type(part).waits]

    @property
    def waits(self) -> bool:
        """True if its next draft tree passes through the host; see `RowPart.waits`."""
        return any(part.waits for part in self._waiting)

    def brought(self) -> RowDrafts | None:
        """Take the draft that has come for it from elsewhere, if it may have any."""
        came = next(filter(None, [part.brought(self) for part in self._waiting]), None)
        return None if self.handling is Handling.PLAIN else came

    @property
    def features(self) -> Features | None:
        """What the target model gets of its prompt in place of tokens, while that is read."""
        return next((part.features for part in self.parts if part.features is not None), None)

    @property
    def borders(self) -> Borders | None:
        """Where its prompt may be cut; None if everywhere."""
        return next((part.borders for part in self.parts if part.borders is not None), None)

    @property
    def apart(self) -> bool:
        """True if its prompt has forwards of its own, for its first token or a part of it."""
        return self.handle.streams or any(part.apart for part in self.parts)

    @property
    def alone(self) -> bool:
        """True if nothing is copied for it."""
        return self.handling in (Handling.ALONE, Handling.PLAIN)

    @property
    def proven(self) -> bool:
        """True if a step has shown, since it last entered a slot, that its state there is finite: it has new tokens."""
        return self.length >= len(self.key.ids)

    @property
    def keepable(self) -> bool:
        """True if others may use its state when it has ended: all of it is finite, and the target model's own."""
        return self.proven and not self.lenient and self.handling in (Handling.FREE, Handling.ALONE)

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
        self.key, self.read = self.handle.request.key(self.text), 0
        if not self.output:
            self.cached = 0
        if self.handling is Handling.COPIED:
            self.handling = Handling.FREE
        if self.timing.queued is None:
            self.timing = replace(self.timing, queued=self._age)

    def prepare(self, slot: int, tokens: int) -> bool:
        """Do a piece of what its parts do before its prompt is read in a slot; see `RowPart.enter`."""
        is_read = not self.unread or self.read >= len(self.handle.request.prompt_ids)
        return is_read or all(part.enter(self, slot, tokens) for part in self.parts)

    def leave(self, slot: int | None) -> None:
        """Leave a slot, where its state still is; None if it had none."""
        self.status = Status.WAITING
        for part in self.parts:
            part.leave(self, slot)

    def copied(self, length: int) -> None:
        """Note that its first `length` tokens have been copied from another row."""
        self.handling = Handling.COPIED
        if not self.output:
            self.cached = length

    def cut(self, start: int, stop: int) -> int:
        """Return where a forward from `start` ends, by `stop` if that is possible: features are not read with others,
        and tokens that see each other are read together."""
        features = self.features
        if features is None or start >= features.size:
            return stop
        stop = min(stop, features.size)
        return stop if features.borders is None else min(features.borders.cut(start, stop), self.length)

    def take(self, new: NewTokens, lenient: Iterable[int] = ()) -> int:
        """Add a step's tokens one by one, and stop exactly where plain decoding would; return how many were added.

        There are no tokens if the step's logits are not finite. `lenient` are indices of some; see `Outcome`.
        """
        before, tokens, drafted, logprobs = len(self.output), new.tokens, new.drafted, new.logprobs
        if not tokens:
            self.handling = (_AFTER_DRAFTS if drafted else _AFTER_PLAIN)[self.handling]
        elif self.handling is Handling.COPIED:
            self.handling = Handling.FREE
        if tokens and self.timing.first_token is None:
            self.timing = replace(self.timing, first_token=self._age)
        for token in tokens:
            self.output.append(token)
            verdict = self._judged()
            if verdict == "refused":
                # Where all are forbidden, the choice is none of them.
                self.output.pop()
                self.handling = Handling.STUCK
                break
            if verdict == "stop" or token in self.eos:
                self.finish_reason = "stop"
            if self.finish_reason is None and len(self.output) == self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        emitted = len(self.output) - before
        self.length += len(tokens)
        self.lenient += [before + place for place in lenient if place < emitted]
        accepted = min(emitted, new.accepted)
        self.counts.record_step(emitted=emitted, accepted=accepted, drafted=drafted)
        if logprobs is not None:
            logprobs = logprobs[:emitted]
        if len(self.output) >= self.handle.until:
            self.handle.parked = True  # before anybody hears of the tokens, who may let it go on
        taken = new
        if emitted < len(tokens):
            taken = NewTokens(self.output[before:], accepted, drafted, logprobs, new.version)
        for part in self.parts:
            part.after_step(self, taken)
        return emitted

    def _judged(self) -> str | None:
        """Return what limits and parts say of the newest token of the output; see `RowPart.after_token`."""
        if self.limits is not None and not self.limits.permits(self.output):
            return "refused"
        found = None
        for after_token in self._judges:
            if (said := after_token(self)) is not None:
                found = said
                if said == "refused":
                    break
        return found

    @cached_property
    def _judges(self) -> list[Callable[[Sequence], str | None]]:
        """The parts' `after_token`, of those that have one: it comes for each token of each row."""
        return [part.after_token for part in self.parts if type(part).after_token is not RowPart.after_token]

    def fail_unwanted(self, verifier: Verifier) -> None:
        """End a request with its tokens so far if it was cancelled, otherwise as out of time."""
        if self.handle.cancelled:
            self.finish_reason = "cancelled"
            self.handle.future.set_result(self.generation(verifier))
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
        if self.handling is Handling.STUCK and self.steering is not None:
            error = RequestError(self.steering.problem(tokens))
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

    def generation(self, verifier: Verifier) -> Generation:
        """Return the result; `finish_reason` must be set."""
        assert self.finish_reason is not None
        request, of_parts = self.handle.request, dict[str, Any]()
        for part in self.parts:
            of_parts |= part.result(self)
        return Generation(
            request_id=request.request_id,
            token_ids=self.output,
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=self.cached,
            counts=self.counts,
            timing=replace(self.timing, total=self._age),
            verifier=verifier.name,
            lossless=verifier.lossless,
            lenient=self.lenient,
            **of_parts,
        )

    @property
    def _age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self.handle.submitted


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
    sampling = request.sampling
    named = {name: getattr(sampling, name) for name in ("stop_token_ids", "allowed_token_ids")}
    for name, tokens in {"logit_bias": dict(sampling.logit_bias), **named}.items():
        if (beyond := max(tokens, default=0)) >= base.vocab_size:
            raise RequestError(f"{name} has token {beyond}, outside the vocabulary of {base.vocab_size}")
