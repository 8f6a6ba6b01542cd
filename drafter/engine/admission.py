"""Lets sequences that wait enter free slots, and reads their prompts."""

from __future__ import annotations

from collections.abc import Callable

from drafter.engine.scheduler import Scheduler, next_pieces, read_prompt_end, read_prompts
from drafter.engine.step import DeviceStep, StepOutcome
from drafter.statistics import StageTimes

CHUNK, GPU_CHUNK = 512, 2048
"""Prompt tokens of one forward, and about as many as a step takes on while a sequence's tokens are streamed.
A GPU needs more of them to be busy."""


class Admission:
    """Fills free slots.

    Args:
        scheduler: Who waits, and who is in which slot.
        device_step: Does the plain step that comes with the end of a prompt which is streamed.
        times: Where the time of prefills is noted.
        packs: Whether several prompts may be read in one forward.
        on_outcome: Takes the outcome of such a plain step, and its slot.
        on_progress: Called after each forward: many long prompts take long, and yet nothing hangs.

    Attributes:
        prefilled_tokens: Tokens of prompts that the base has read.
        shared_tokens: Tokens of prompts that were copied instead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device_step: DeviceStep,
        times: StageTimes,
        *,
        packs: bool,
        on_outcome: Callable[[StepOutcome, int], object],
        on_progress: Callable[[], object],
    ) -> None:
        self._scheduler, self._step, self._times = scheduler, device_step, times
        self._packs, self._on_outcome, self._on_progress = packs, on_outcome, on_progress
        self._chunk = GPU_CHUNK if device_step.base.device.type == "cuda" else CHUNK
        self.prefilled_tokens = self.shared_tokens = 0
        self._read_before = 0

    def begin_step(self) -> None:
        """Note that a step begins, which may take on a chunk of its own."""
        self._read_before = self.prefilled_tokens

    def admit(self) -> None:
        """Let sequences enter, and read their prompts.

        They enter all at once if nobody watches, as full batches are fastest. Otherwise a step takes on only so much,
        so that the sequences that are watched do not stand still for as long as a long prompt takes.
        """
        scheduler = self._scheduler
        while self._may_read() and (scheduler.entering or scheduler.enter()):
            unread = sum(sequence.unread for sequence in scheduler.entering)
            while self._packs and unread < self._chunk and scheduler.enter():
                unread += scheduler.entering[-1].unread
            self._times.mark("host")
            self._prefill()
            self._on_progress()

    def _may_read(self) -> bool:
        """Return whether the step may take on more of the prompts that wait."""
        watched = any(sequence.handle.streams for sequence in self._scheduler.active)
        return not watched or self.prefilled_tokens - self._read_before < self._chunk

    def _prefill(self) -> None:
        """Read the next tokens of the sequences that enter; after all but its last one a sequence is active.

        That last one is the first pending token, and the first output token comes from a decode step. Where somebody
        watches, that step is part of the forward over the prompt's end: a plain one.
        """
        scheduler, state, base = self._scheduler, self._step.state, self._step.base
        pieces = next_pieces(scheduler.entering, scheduler.active, self._chunk)
        self.shared_tokens += scheduler.copy_shared(pieces)
        slot, sequence, span, answer = len(scheduler.active), scheduler.entering[0], pieces[0].span, None
        first_comes_with_it = sequence.handle.streams and sequence.first_token is None
        if first_comes_with_it and span.start < span.stop == sequence.length:
            answer = read_prompt_end(base, state, slot, span)
        else:
            read_prompts(base, state, slot, [piece.span for piece in pieces])
        self.prefilled_tokens += sum(piece.stop - piece.start for piece in pieces)
        self._times.mark("prefill")
        scheduler.activate(pieces)
        if answer is not None:
            pending = state.tokens[slot, span.stop : span.stop + 1]
            outcome = self._step.accept_prompt_end(slot, pending, *answer)
            self._times.mark("verify")
            self._on_outcome(outcome, slot)
