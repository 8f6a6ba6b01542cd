"""Limits the active sequences after memory has run out: additive increase, multiplicative decrease (Chiu and Jain
1989).

The limit is halved, then raised one by one: later texts may be shorter, or sample in another way. Each failure doubles
the wait before the next try, because a failed try costs the prompts of half of the sequences.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from torch import Tensor

from drafter.drafters.contract import Ids
from drafter.engine.batch import BatchState
from drafter.engine.sequence import LEAST_SHARED, Sequence
from drafter.engine.step import Flights
from drafter.errors import EngineError, QueueFullError
from drafter.target.model import BaseModel

_PAUSE = 256
"""Steps without trouble until one more sequence is let in."""
_LONGEST_PAUSE = 1 << 16


class RowLimit:
    """Sequences that may be in slots together.

    Args:
        slots: All slots.

    Attributes:
        most: The limit of now.
    """

    def __init__(self, slots: int) -> None:
        self._slots = self.most = slots
        self._pause, self._left = _PAUSE // 2, 0

    def ran_out(self, rows: int) -> None:
        """Memory did not reach for so many sequences: allow half of them."""
        self.most = (rows + 1) // 2
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._left = self._pause

    def reached(self) -> None:
        """Memory has reached for a step: after a pause of such steps, allow one more."""
        if self.most == self._slots:
            return
        self._left -= 1
        if not self._left:
            self.most += 1
            self._left = self._pause


# ---- The requests that wait for a slot: first come, first served.


class WaitingQueue:
    """Any thread may put requests in; the engine's takes them out.

    Args:
        limit: Most requests that may wait.

    Attributes:
        closed: Why later requests are refused; None while they are not.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Sequence] = deque()
        self._lock = threading.Lock()
        self.closed: EngineError | None = None
        # Nobody becomes unwanted before this (monotonic seconds): most steps need not look at all who wait.
        self._check_at = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sequence: Sequence) -> None:
        """Put a request at the end.

        Raises:
            QueueFullError: Too many wait already.
            EngineError: The queue is closed.
        """
        with self._lock:
            if self.closed is not None:
                raise self.closed
            if len(self._waiting) >= self._limit:
                raise QueueFullError(f"{self._limit} requests are waiting already: submit again later")
            self._waiting.append(sequence)
            self._check_at = min(self._check_at, sequence.handle.deadline)

    def put_back(self, sequences: Several[Sequence]) -> None:
        """Put requests at the front, in their order; they had been taken before, so the limit does not count."""
        with self._lock:
            self._waiting.extendleft(reversed(sequences))
            self._check_at = -math.inf

    def take(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The request that has waited longest, or None; also if that one does not fit, so that none overtakes it."""
        with self._lock:
            return self._waiting.popleft() if self._waiting and fits(self._waiting[0]) else None

    def look_again(self) -> None:
        """A request has been cancelled; it may be one that waits."""
        with self._lock:
            self._check_at = -math.inf

    def take_unwanted(self, now: float) -> list[Sequence]:
        """The requests that need no slot any more: cancelled, or out of time at `now` (monotonic seconds)."""
        if now < self._check_at:
            return []
        with self._lock:
            unwanted = [sequence for sequence in self._waiting if sequence.handle.unwanted(now)]
            for sequence in unwanted:
                self._waiting.remove(sequence)
            self._check_at = min((sequence.handle.deadline for sequence in self._waiting), default=math.inf)
        return unwanted

    def close(self, error: EngineError) -> list[Sequence]:
        """Refuse later requests with `error`; return those that wait."""
        with self._lock:
            self.closed = error
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting


# Chunks of prompts for the next forward; a prefix that an active sequence shares is copied.


@dataclass(frozen=True)
class Piece:
    """Tokens of one entering sequence that the next forward reads.

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
    """Return the chunks of the first entering sequences for the next forward; empty for a sequence that has been read.

    A prefix shared with an active sequence is copied from there, and a prompt waits for one that has more than half of
    it. A streamed sequence has a forward of its own, as its first token comes with it.

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
        """Return the sequence with the longest common prefix, and its length in tokens; 0 if it is too short.

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
    """Return the length of the longest common prefix."""
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


# Assigns sequences to slots. Nothing else changes the assignment.


class Scheduler:
    """Keeps the batch state in step with the lists of sequences.

    Args:
        state: What the device holds of them.
        flights: Tell how far the device may be ahead of the host.
        max_queue: Sequences that may wait.

    Attributes:
        active: Sequence of each slot that is decoded, in the slots' order.
        entering: Those whose prompts are being read, in the slots behind.
        waiting: Those without a slot.
        limit: Sequences that may be in slots together: all slots, or fewer for a while after memory ran out.
    """

    def __init__(self, state: BatchState, flights: Flights, max_queue: int) -> None:
        self._state, self._flights = state, flights
        self.active: list[Sequence] = []
        self.entering: list[Sequence] = []
        self.waiting = WaitingQueue(max_queue)
        self.limit = RowLimit(state.slots)

    @property
    def in_slots(self) -> list[Sequence]:
        """All that have a slot."""
        return [*self.active, *self.entering]

    def slots_of(self, sequences: Several[Sequence]) -> list[int]:
        """The slots of active sequences."""
        slots = {id(sequence): slot for slot, sequence in enumerate(self.active)}
        return [slots[id(sequence)] for sequence in sequences]

    def enter(self) -> bool:
        """Give the next sequence that waits the slot behind all others; False if there is none, no slot or no memory.

        A sequence that has been in a slot before comes with its output.
        """
        slot = len(self.active) + len(self.entering)

        def fits(sequence: Sequence) -> bool:
            return self._state.has_room(sequence.length + 1, slot)

        sequence = self.waiting.take(fits) if slot < self.limit.most else None
        if sequence is None:
            return False
        # It is in a list before anything can fail, so that a failure finds it.
        self.entering.append(sequence)
        sequence.enter()
        self._state.reserve(slot, sequence.length + 1)
        prompt = len(sequence.handle.request.prompt_ids)
        self._state.enter(slot, sequence.prefilled, sequence.sampling, prompt)
        return True

    def copy_shared(self, pieces: Several[Piece]) -> int:
        """Copy the beginnings that pieces share with active sequences; return how many tokens that saves."""
        for place, piece in enumerate(pieces):
            if piece.shared:
                self._state.copy(piece.donor, len(self.active) + place, piece.shared)
                self.entering[place].borrowed = True
        return sum(piece.shared for piece in pieces)

    def activate(self, pieces: Several[Piece]) -> None:
        """Note that `pieces` of the first sequences that enter are read: what has been read as a whole is decoded."""
        for sequence, piece in zip(self.entering[: len(pieces)], pieces, strict=True):
            sequence.read = piece.stop
            if not sequence.unread:
                self._state.begin(len(self.active), sequence.length)
                self.active.append(sequence)
                self.entering.remove(sequence)
        self._update_settings()

    def grow(self) -> bool:
        """Reserve memory for the next step of all active sequences, in order; False if it does not reach for all."""
        ahead = self._flights.ahead
        return all(self._state.reserve(slot, one.length + ahead + 1) for slot, one in enumerate(self.active))

    def put_youngest_back(self) -> None:
        """Put the sequence that has come last back to wait. No flight may be under way."""
        youngest = max(self.in_slots, key=lambda sequence: sequence.entered or 0.0)
        if youngest in self.entering:
            self._leave(youngest)
        else:
            self.retire(youngest)
        self.waiting.put_back([youngest])

    def retire(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Take an active sequence out: the last active one takes its slot, and those that enter move up.

        Args:
            sequence: The one that leaves.
            poisoned: Whether its slot holds numbers that are not finite.
        """
        slot, last = self.active.index(sequence), len(self.active) - 1
        if poisoned or not sequence.proven:
            self._state.clear(slot)
        if slot != last:
            self._move(self.active[last], last, slot)
        self._move_up(0)
        # Last, so that a failure finds all of them if a move fails.
        self.active[slot] = self.active[last]
        self.active.pop()
        self._state.end(last + len(self.entering))
        self._update_settings()

    def read_again(self, sequence: Sequence) -> None:
        """Put a sequence back to wait, and read its text again with nothing copied from others.

        A number that is not finite reaches all positions that are read in the same forward, so the slot that it copied
        from may have been spoilt by a part of the other text that this one does not have.
        """
        self.retire(sequence, poisoned=True)
        sequence.alone = True
        sequence.stay += 1
        self.waiting.put_back([sequence])

    def take_unwanted(self, now: float) -> list[Sequence]:
        """Take out all that are cancelled, or out of time at `now` (monotonic seconds)."""
        unwanted = [sequence for sequence in self.active if sequence.handle.unwanted(now)]
        for sequence in reversed(unwanted):
            self.retire(sequence)
        for sequence in reversed(self.entering):
            if sequence.handle.unwanted(now):
                self._leave(sequence)
                unwanted.append(sequence)
        return [*unwanted, *self.waiting.take_unwanted(now)]

    def preempt(self) -> int:
        """Put half of the sequences back to wait, and let no more be in slots for now; return how many went back.

        No flight may be under way. A sequence whose prompt is being read is not in its slot as a whole: it goes back.
        """
        self.limit.ran_out(len(self.in_slots))
        most = self.limit.most
        back = self.in_slots[min(most, len(self.active)) :]
        for slot in range(len(self.in_slots) - len(back), len(self.in_slots)):
            self._state.clear(slot)
        self.active, self.entering = self.active[:most], []
        self._update_settings()
        self._state.restore([sequence.text for sequence in self.active])
        self.waiting.put_back(back)
        return len(back)

    def clear(self) -> list[Sequence]:
        """Give up all slots; return who had one."""
        gone, self.active, self.entering = self.in_slots, [], []
        return gone

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence that enters out: those behind it move up."""
        place = self.entering.index(sequence)
        self._state.clear(len(self.active) + place)
        self._move_up(place + 1)
        self._state.end(len(self.in_slots) - 1)
        self.entering.remove(sequence)

    def _move_up(self, place: int) -> None:
        """Let the sequences that enter, from this one of them on, each take the slot before theirs."""
        for slot, sequence in enumerate(self.entering[place:], len(self.active) + place):
            self._move(sequence, slot, slot - 1)

    def _move(self, sequence: Sequence, source: int, target: int) -> None:
        self._state.move(source, target, sequence.length + 1 + self._flights.ahead)
        if not sequence.proven:
            self._state.clear(source)

    def _update_settings(self) -> None:
        self._state.expect(sequence.sampling for sequence in self.active)
