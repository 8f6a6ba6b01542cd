"""Reads the prompts of sequences that enter, chunk by chunk."""

from __future__ import annotations

from collections import Counter

from drafter import devices
from drafter.acceptance.contract import PathLogprobs, Verified
from drafter.engine.batch import BatchState
from drafter.engine.scheduler import Scheduler
from drafter.engine.sequence import Sequence


class PromptReader:
    """Reads into a batch state what a scheduler has admitted; `counts` are the engine's."""

    def __init__(self, scheduler: Scheduler, state: BatchState, counts: Counter[str]) -> None:
        self._scheduler, self._state, self._counts = scheduler, state, counts

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
        ends = at_end and sequence.timing.first_token is None and span.start < span.stop == sequence.length
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
        following = sequence.text[span.start + 1 : span.stop + 1].tolist()
        for part in sequence.parts:
            part.after_reading(span.start, found.read([following], [count])[0])
