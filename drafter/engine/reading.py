"""Reads the prompts of sequences that enter, chunk by chunk."""

from __future__ import annotations

from collections import Counter

from drafter import devices
from drafter.acceptance.contract import Verified
from drafter.engine.batch import BatchState
from drafter.engine.scheduler import Scheduler
from drafter.engine.sequence import Sequence
from drafter.errors import RequestError
from drafter.prompt import Prompt
from drafter.target_model.sight import Features


class PromptReader:
    """Reads into a batch state what a scheduler has admitted; `counts` are the engine's."""

    def __init__(self, scheduler: Scheduler, state: BatchState, counts: Counter[str]) -> None:
        self._scheduler, self._state, self._counts = scheduler, state, counts

    def sees(self, sequence: Sequence) -> bool:
        """Compute the features of a prompt that is read by them; end its sequence, and return False, if that fails."""
        prompt = sequence.handle.request.prompt
        assert isinstance(prompt, Prompt)
        known = sequence.features is not None or not sequence.unread or sequence.read >= len(prompt.ids)
        if known or not sequence.sees:
            return True
        try:
            sequence.look(self._state.see(len(self._scheduler.active), prompt))
        except RequestError as error:
            self._scheduler.take_out(sequence)
            sequence.handle.future.set_exception(error)
            return False
        return True

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
        scored = sequence.handle.request.prompt_logprobs is not None
        # In a step of its own the last token sees its window. Where tokens see later ones, it may see more than that.
        at_end = sequence.handle.streams or (features is not None and bool(features.seen))
        first_comes_with_it = not scored and at_end and sequence.first_token is None
        if scored and span.start < span.stop:
            self._score(sequence, slot, span, features)
        elif first_comes_with_it and span.start < span.stop == sequence.length:
            verified = state.read_end(slot, span, features)
        else:
            state.read(slot, spans, features)
        self._counts.update(shared_tokens=shared, prefilled_tokens=sum(one.stop - one.start for one in spans))
        return spans, verified

    def _score(self, sequence: Sequence, slot: int, span: slice, features: Features | None) -> None:
        """Read a chunk of a prompt, and note the log-probabilities of the tokens that follow there."""
        count = sequence.handle.request.prompt_logprobs
        assert count is not None
        found = self._state.read_scored(slot, span, count, features).to_host()
        devices.synchronise(self._state.base.device)
        following = sequence.prefilled[span.start + 1 : span.stop + 1].tolist()
        sequence.note_prompt(span.start, found.read([following], [count])[0])
