"""Which prompts the next forward reads, and how much of each; what another sequence has read already is copied."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import Ids
from drafter.engine.batch_state import BatchState
from drafter.engine.sequences.sequence import LEAST_SHARED, Sequence


@dataclass(frozen=True)
class Piece:
    """What the next forward reads of one sequence that enters.

    Args:
        start: First token.
        stop: Token behind the last; as `start` where nothing is left to read.
        donor: Index, among the active sequences, of one whose beginning is copied first.
        shared: Tokens of that beginning; 0 for none.
    """

    start: int
    stop: int
    donor: int = 0
    shared: int = 0

    @property
    def span(self) -> slice:
        """The tokens as a slice."""
        return slice(self.start, self.stop)


def next_pieces(entering: Several[Sequence], active: Several[Sequence], chunk: int) -> list[Piece]:
    """What the next forward reads of the first sequences that enter; an empty piece of one that has been read.

    What an active sequence begins with is copied from there, and a prompt waits for one that has more than half of it.
    A sequence that is streamed has a forward of its own, as its first token comes with it.

    Args:
        entering: Those that enter, in order; at least one.
        active: Those that are decoded.
        chunk: Tokens that the forward reads at most.
    """
    pieces: list[Piece] = []
    room = chunk
    decoded, before = Beginnings(), Beginnings()
    for sequence in active:
        decoded.add(sequence)
    for place, sequence in enumerate(entering):
        donor, shared = (0, 0) if sequence.read or sequence.alone else decoded.longest_shared(sequence)
        start = max(sequence.read, shared)
        rest = sequence.length - start
        if place:
            coming = 0 if sequence.alone else before.longest_shared(sequence)[1]
            watched = sequence.handle.streams or entering[0].handle.streams
            if watched or not room or not rest or coming - start > rest / 2:
                break
        pieces.append(Piece(start, start + min(room, rest), donor, shared))
        before.add(sequence)
        room -= min(room, rest)
        if not rest:
            break
    return pieces


class Beginnings:
    """Sequences by how they begin: there may be hundreds, and most have nothing in common."""

    def __init__(self) -> None:
        self._places: dict[bytes, list[tuple[int, Sequence]]] = {}
        self._count = 0

    def add(self, sequence: Sequence) -> None:
        """Take note of one more."""
        self._places.setdefault(sequence.beginning, []).append((self._count, sequence))
        self._count += 1

    def longest_shared(self, sequence: Sequence) -> tuple[int, int]:
        """Which of them begins with most of what `sequence` does, and how many tokens that is; 0 if hardly any.

        Keys, values and hidden states of a position follow from the tokens up to it alone, in every kind of attention.
        The last token of either is not counted: as long as it is pending, there is nothing of it to copy.
        """
        longest = (0, 0)
        for place, other in self._places.get(sequence.beginning, ()):
            shared = common_prefix(sequence.prefilled[:-1], other.prefilled[:-1])
            if shared > longest[1]:
                longest = place, shared
        return longest if longest[1] >= LEAST_SHARED else (0, 0)


def common_prefix(first: Ids, second: Ids) -> int:
    """How many tokens two texts have in common from the start."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


def read_prompts(base: BaseModel, state: BatchState, first: int, spans: Several[slice]) -> None:
    """Read a piece of each of some prompts in one forward; the first of them is in slot `first`, the others follow.

    An empty piece comes alone, of a sequence of which nothing is left to read.
    """
    if spans[0].start == spans[0].stop:
        return
    prompts = [state.tokens[first + place, span] for place, span in enumerate(spans)]
    starts = [span.start for span in spans]
    hidden = base.prefill(state.cache, first, prompts, starts, state.drafter.spec.hidden_layers)
    for place, part in enumerate(hidden.split([len(prompt) for prompt in prompts])):
        state.store_hidden(first + place, spans[place], part)


def read_prompt_end(base: BaseModel, state: BatchState, slot: int, span: slice) -> tuple[Tensor, Tensor]:
    """Read the last piece of a prompt and its pending token: that one's logits `[1, 1, V]`, and `[1, 1, K · d]`."""
    prompt = state.tokens[slot, span.start : span.stop + 1]
    logits, hidden = base.prefill_last(state.cache, slot, prompt, span.start, state.drafter.spec.hidden_layers)
    state.store_hidden(slot, span, hidden[:-1])
    return logits[None], hidden[None, -1:]
