"""Reads the prompts of sequences that enter, chunk by chunk."""

from __future__ import annotations

from collections import Counter

from drafter import devices
from drafter.acceptance.contract import PathLogprobs, Verified
from drafter.engine.batch import BatchState
from drafter.engine.scheduler import Scheduler
from drafter.engine.sequence import Sequence
from drafter.errors import RequestError
from drafter.target_model.sight import Features
from drafter.target_model.towers import InPieces


class PromptReader:
    """Reads into a batch state what a scheduler has admitted; `counts` are the engine's.

    Attributes:
        looks: Pieces of features that were computed, without the last ones: each is as much work as a chunk of text.
    """

    def __init__(self, scheduler: Scheduler, state: BatchState, counts: Counter[str]) -> None:
        self._scheduler, self._state, self._counts = scheduler, state, counts
        self._looking: tuple[Sequence, InPieces[Features]] | None = None
        self.looks = 0

    def sees(self, sequence: Sequence) -> bool:
        """Compute the next piece of the features of a prompt that is read by them.

        It returns False until all of them are there, and ends the sequence if they cannot be had.
        """
        request = sequence.handle.request
        known = sequence.features is not None or not sequence.unread or sequence.read >= len(request.prompt_ids)
        if known or not sequence.sees:
            return True
        self.leave()
        if self._looking is None:
            self._looking = sequence, self._state.look(request, self._scheduler.chunk)
        work = self._looking[1]
        if not work.go_on():
            self.looks += 1
            return False
        self._looking = None
        try:
            features = work.result()
        except RequestError as error:
            self._scheduler.take_out(sequence)
            sequence.handle.future.set_exception(error)
            return False
        self._state.seen(len(self._scheduler.active), features)
        sequence.look(features)
        return True

    def leave(self) -> None:
        """Leave the features that are being computed, unless their sequence is still the next one to be read."""
        if self._looking is not None and self._scheduler.entering[:1] != [self._looking[0]]:
            self._looking[1].close()
            self._looking = None

    def read(self) -> tuple[list[slice], Verified | None]:
        """Read the next tokens of the sequences that enter, up to the last one, which is the first pending token.

        Returns:
            What was read of each, and the first one's pending token, verified, where it is streamed or its tokens see
            later ones: then its first output token comes from the forward over the prompt's end instead of a step of
            its own.
        """
        scheduler, state = self._scheduler, self._state
        spans, shared = scheduler.next_spans()
        slot, sequence, span, verified = len(scheduler.active), scheduler.entering[0], spans[0], None
        features = sequence.features
        if features is not None and span.start >= features.size:
            features = None
        scored = sequence.handle.request.prompt_logprobs
        # In a step of its own the last token sees its window. Where tokens see later ones, it may see more than that.
        at_end = sequence.handle.streams or (features is not None and bool(features.seen))
        ends = at_end and sequence.first_token is None and span.start < span.stop == sequence.length
        if span.start < span.stop and (ends or scored is not None):
            logprobs, verified = state.read_alone(slot, span, features, scored=scored, ends=ends)
            if logprobs is not None:
                self._note(logprobs, sequence, span)
        else:
            state.read(slot, spans, features)
        self._counts.update(shared_tokens=shared, prefilled_tokens=sum(one.stop - one.start for one in spans))
        return spans, verified

    def _note(self, logprobs: PathLogprobs, sequence: Sequence, span: slice) -> None:
        """Note the log-probabilities of the tokens that follow in a chunk of a prompt."""
        count = sequence.handle.request.prompt_logprobs
        assert count is not None
        found = logprobs.to_host()
        devices.synchronise(self._state.base.device)
        following = sequence.prefilled[span.start + 1 : span.stop + 1].tolist()
        sequence.note_prompt(span.start, found.read([following], [count])[0])
